/* The layer-normalized LSTM for one instruction set. Included by kernel_step.h.
 *
 * Statistics are over the features of a row, so a thread takes its own rows through all time steps and
 * never waits for another. It processes a few rows at a time: they share what is loaded for a column, and
 * their sums do not wait for each other. */

#define BLOCK (LANES < 16 ? 2 : 4)

/* v in the first w lanes, 0 in the others. */
INLINE V NAME(first_lanes)(V v, int w) {
    I lane = {0};
    if (w == LANES) return v;
    for (int k = 0; k < LANES; k++) lane[k] = k;
    return NAME(select)(lane < w, v, (V){0});
}

INLINE float NAME(sum_of_lanes)(V v) {
#pragma GCC unroll 4
    for (int half = LANES / 2; half; half /= 2) {
        I other = {0};
        for (int k = 0; k < LANES; k++) other[k] = k ^ half;
        v += __builtin_shuffle(v, other);
    }
    return v[0];
}

/* Runs a body for each column k of F. w is LANES, except for the last columns. */
#define EACH_COLUMN(k, F, ...)                             \
    do {                                                   \
        int64_t k = 0;                                     \
        for (; k + LANES <= (F); k += LANES) {             \
            const int w = LANES;                           \
            __VA_ARGS__                                    \
        }                                                  \
        if (k < (F)) {                                     \
            const int w = (int)((F)-k);                    \
            __VA_ARGS__                                    \
        }                                                  \
    } while (0)
#define EACH_ROW                \
    _Pragma("GCC unroll 4") \
    for (int r = 0; r < R; r++)

/* Mean and 1 / sqrt(var + eps) of R rows of F numbers each, in two passes. */
INLINE void NAME(row_moments)(int R, const float *x, int64_t F, double eps, float *mean, float *rstd) {
    V part[BLOCK] = {{0}}, odd[BLOCK] = {{0}};
    int64_t pairs = F / (2 * LANES) * 2 * LANES;
    for (int64_t k = 0; k < pairs; k += 2 * LANES) EACH_ROW {
        part[r] += NAME(load)(x + r * F + k, LANES);
        odd[r] += NAME(load)(x + r * F + k + LANES, LANES);
    }
    EACH_COLUMN(k, F - pairs, EACH_ROW part[r] += NAME(load_columns)(x + r * F + pairs + k, w););
    EACH_ROW {
        mean[r] = (float)((double)NAME(sum_of_lanes)(part[r] + odd[r]) / (double)F);
        part[r] = odd[r] = (V){0};
    }
    for (int64_t k = 0; k < pairs; k += 2 * LANES) EACH_ROW {
        const V d = NAME(load)(x + r * F + k, LANES) - mean[r];
        const V e = NAME(load)(x + r * F + k + LANES, LANES) - mean[r];
        part[r] += d * d, odd[r] += e * e;
    }
    EACH_COLUMN(k, F - pairs, EACH_ROW {
        const V d = NAME(first_lanes)(NAME(load_columns)(x + r * F + pairs + k, w) - mean[r], w);
        part[r] += d * d;
    });
    EACH_ROW {
        const double squares = (double)NAME(sum_of_lanes)(part[r] + odd[r]);
        rstd[r] = (float)(1.0 / __builtin_sqrt(squares / (double)F + eps));
    }
}

/* One step of R rows, whose products are in wh. row: the first of them among all steps; kept: its position
 * in buffers that may have only one step. */
INLINE void NAME(layer_forward_rows)(int R, const Args *a, int64_t row, int64_t kept, const float *c_prev) {
    const int64_t H = a->hidden, G = 4 * H;
    const float *wh = a->wh + kept * G, *wx = a->wx + row * G;
    float *gates = a->gates + kept * G, *cand = a->cand + kept * H, *tanh_c = a->tanh_c + kept * H;
    float *h = a->hidden_states + row * H;
    float *mx = a->mean_x + row, *sx = a->rstd_x + row, *mh = a->mean_h + row, *sh = a->rstd_h + row;
    float *mc = a->mean_c + row, *sc = a->rstd_c + row;
    NAME(row_moments)(R, wh, G, a->eps, mh, sh);
    NAME(row_moments)(R, wx, G, a->eps, mx, sx);
    EACH_COLUMN(j, H, {
        V product[BLOCK];
#pragma GCC unroll 4
        for (int n = 0; n < 4; n++) {
            const int q = n == 1 ? 2 : n == 2 ? 1 : n; /* a gate is used as soon as it is computed */
            const int64_t col = q * H + j;
            const V gamma_h = NAME(load_columns)(a->gamma_h + col, w);
            const V gamma_x = NAME(load_columns)(a->gamma_x + col, w), bias = NAME(load_columns)(a->bias + col, w);
            EACH_ROW {
                const V of_h = (NAME(load_columns)(wh + r * G + col, w) - mh[r]) * sh[r];
                const V of_x = (NAME(load_columns)(wx + r * G + col, w) - mx[r]) * sx[r];
                V v = of_h * gamma_h + (of_x * gamma_x + bias);
                v = q == 2 ? NAME(tanh)(v) : NAME(sigmoid)(v);
                NAME(store_columns)(gates + r * G + col, v, w);
                if (q == 0) product[r] = v;
                if (q == 2) product[r] *= v;
                if (q == 1)
                    NAME(store_columns)(cand + r * H + j, v * NAME(load_columns)(c_prev + r * H + j, w) + product[r], w);
            }
        }
    });
    NAME(row_moments)(R, cand, H, a->eps, mc, sc);
    EACH_COLUMN(j, H, {
        const V gamma = NAME(load_columns)(a->gamma_c + j, w), beta = NAME(load_columns)(a->beta_c + j, w);
        EACH_ROW {
            const V c = (NAME(load_columns)(cand + r * H + j, w) - mc[r]) * sc[r];
            const V y = NAME(tanh)(c * gamma + beta);
            NAME(store_columns)(tanh_c + r * H + j, y, w);
            NAME(store_columns)(h + r * H + j, y * NAME(load_columns)(gates + r * G + 3 * H + j, w), w);
        }
    });
}

/* The gradient through the normalization of a row: dx = a s + (x - m) slope + shift, a = dy gamma. */
INLINE void NAME(layer_back)(V sum, V sum_centred, float s, int64_t F, float *slope, float *shift) {
    *shift = -s * NAME(sum_of_lanes)(sum) / (float)F;
    *slope = -s * s * s * NAME(sum_of_lanes)(sum_centred) / (float)F;
}

INLINE void NAME(add_columns)(float *to, V v, int w) {
    NAME(store_columns)(to, NAME(load_columns)(to, w) + v, w);
}

/* The backward pass of one step of R rows, except for the product. batch_row: their first row in dh and dc. */
INLINE void NAME(layer_backward_rows)(int R, const Args *a, int64_t row, int64_t batch_row, const float *c_prev,
                                      float *sums) {
    const int64_t H = a->hidden, G = 4 * H;
    const float *wh = a->wh + row * G, *wx = a->wx + row * G, *gates = a->gates + row * G;
    const float *cand = a->cand + row * H, *tanh_c = a->tanh_c + row * H;
    const float *dy = a->dy ? a->dy + row * H : 0, *dh = a->dh + batch_row * H;
    const float *mx = a->mean_x + row, *sx = a->rstd_x + row, *mh = a->mean_h + row, *sh = a->rstd_h + row;
    const float *mc = a->mean_c + row, *sc = a->rstd_c + row;
    float *dc = a->dc + batch_row * H, *dwh = a->dwh + row * G, *dwx = a->dwx + row * G;
    float *dbias = sums, *dgamma_x = sums + G, *dgamma_h = sums + 2 * G, *dgamma_c = sums + 3 * G;
    float *dbeta_c = dgamma_c + H;
    float slope_h[BLOCK], shift_h[BLOCK], slope_x[BLOCK], shift_x[BLOCK];
    V sum_h[BLOCK] = {{0}}, centred_h[BLOCK] = {{0}}, sum_x[BLOCK] = {{0}}, centred_x[BLOCK] = {{0}};

    /* The output. Until the normalizations of both terms, dwh holds gradients before the nonlinearities;
     * at first the cell's, in place of the input gate's. */
    EACH_COLUMN(j, H, {
        const V gamma = NAME(load_columns)(a->gamma_c + j, w);
        V all = {0}, all_c = {0};
        EACH_ROW {
            V e = NAME(load_columns)(dh + r * H + j, w);
            if (dy) e += NAME(load_columns)(dy + r * H + j, w);
            const V y = NAME(load_columns)(tanh_c + r * H + j, w);
            const V o = NAME(load_columns)(gates + r * G + 3 * H + j, w);
            const V c = NAME(first_lanes)(NAME(load_columns)(cand + r * H + j, w) - mc[r], w);
            NAME(store_columns)(dwh + r * G + 3 * H + j, e * y * o * (1.0f - o), w);
            e = e * o * (1.0f - y * y);
            all += e, all_c += e * (c * sc[r]);
            e *= gamma;
            NAME(store_columns)(dwh + r * G + j, e, w);
            sum_h[r] += e, centred_h[r] += e * c;
        }
        NAME(add_columns)(dbeta_c + j, all, w);
        NAME(add_columns)(dgamma_c + j, all_c, w);
    });
    EACH_ROW {
        NAME(layer_back)(sum_h[r], centred_h[r], sc[r], H, slope_h + r, shift_h + r);
        sum_h[r] = centred_h[r] = (V){0};
    }

    /* The cell. */
    EACH_COLUMN(j, H, EACH_ROW {
        float *d = dwh + r * G + j;
        const float *gate = gates + r * G + j;
        const V c = NAME(load_columns)(cand + r * H + j, w) - mc[r];
        const V e = NAME(load_columns)(d, w) * sc[r] + (c * slope_h[r] + shift_h[r]) +
                    NAME(load_columns)(dc + r * H + j, w);
        const V i = NAME(load_columns)(gate, w), f = NAME(load_columns)(gate + H, w);
        const V g = NAME(load_columns)(gate + 2 * H, w);
        NAME(store_columns)(d, e * g * i * (1.0f - i), w);
        NAME(store_columns)(d + H, e * NAME(load_columns)(c_prev + r * H + j, w) * f * (1.0f - f), w);
        NAME(store_columns)(d + 2 * H, e * i * (1.0f - g * g), w);
        NAME(store_columns)(dc + r * H + j, e * f, w);
    });

    /* The gates, through both normalizations: one pass sums for both, one writes both. */
    EACH_COLUMN(k, G, {
        const V gamma_h = NAME(load_columns)(a->gamma_h + k, w), gamma_x = NAME(load_columns)(a->gamma_x + k, w);
        V all = {0}, all_h = {0}, all_x = {0};
        EACH_ROW {
            const V e = NAME(load_columns)(dwh + r * G + k, w), e_h = e * gamma_h, e_x = e * gamma_x;
            const V of_h = NAME(load_columns)(wh + r * G + k, w) - mh[r];
            const V of_x = NAME(load_columns)(wx + r * G + k, w) - mx[r];
            all += e, all_h += e * (of_h * sh[r]), all_x += e * (of_x * sx[r]);
            sum_h[r] += e_h, centred_h[r] += e_h * of_h;
            sum_x[r] += e_x, centred_x[r] += e_x * of_x;
        }
        NAME(add_columns)(dbias + k, all, w);
        NAME(add_columns)(dgamma_h + k, all_h, w);
        NAME(add_columns)(dgamma_x + k, all_x, w);
    });
    EACH_ROW {
        NAME(layer_back)(sum_h[r], centred_h[r], sh[r], G, slope_h + r, shift_h + r);
        NAME(layer_back)(sum_x[r], centred_x[r], sx[r], G, slope_x + r, shift_x + r);
    }
    EACH_COLUMN(k, G, {
        const V gamma_h = NAME(load_columns)(a->gamma_h + k, w), gamma_x = NAME(load_columns)(a->gamma_x + k, w);
        EACH_ROW {
            const V e = NAME(load_columns)(dwh + r * G + k, w);
            const V of_h = NAME(load_columns)(wh + r * G + k, w) - mh[r];
            const V of_x = NAME(load_columns)(wx + r * G + k, w) - mx[r];
            NAME(store_columns)(dwh + r * G + k, e * gamma_h * sh[r] + (of_h * slope_h[r] + shift_h[r]), w);
            NAME(store_columns)(dwx + r * G + k, e * gamma_x * sx[r] + (of_x * slope_x[r] + shift_x[r]), w);
        }
    });
}

/* Rows first to stop of the minibatch, forward through all steps. */
static void NAME(layer_forward)(const LayerPass *p, int64_t first, int64_t stop) {
    const Args *a = p->a;
    const int64_t H = a->hidden, G = 4 * H, width = 4 * LANES;
    const float *h = a->h0 + first * H, *c = a->c0 + first * H;
    for (int64_t t = 0, start = 0; t < p->steps; start += p->sizes[t++]) {
        const int64_t row = start + first, kept = a->keep ? row : first;
        const int64_t n = (stop < p->sizes[t] ? stop : p->sizes[t]) - first;
        if (n <= 0) break;
        for (int64_t j = 0; j < H; j += LANES) {
            const float *panel = a->packed + j * 4 * H, *next = j + LANES < H ? panel + width * H : a->packed;
            NAME(gates)(panel, next, ahead(width, LANES, n), h, n, H, 0, (Terms){a->wh + kept * G + j, G, H},
                        (int)(H - j < LANES ? H - j : LANES));
        }
        int64_t r = 0;
        for (; r + BLOCK <= n; r += BLOCK) NAME(layer_forward_rows)(BLOCK, a, row + r, kept + r, c + r * H);
        for (; r < n; r++) NAME(layer_forward_rows)(1, a, row + r, kept + r, c + r * H);
        h = a->hidden_states + row * H, c = a->cand + kept * H;
    }
}

/* Rows first to stop of the minibatch, backward through all steps. sums: two sets of the gradients of the
 * vectors, one of the current step and one of all steps. */
static void NAME(layer_backward)(const LayerPass *p, int64_t first, int64_t stop, float *sums) {
    const Args *a = p->a;
    const int64_t H = a->hidden, G = 4 * H, numbers = 3 * G + 2 * H;
    float *total = sums + p->size;
    int64_t start = 0;
    for (int64_t t = 0; t < p->steps; t++) start += p->sizes[t];
    for (int64_t t = p->steps - 1; t >= 0; t--) {
        start -= p->sizes[t];
        const int64_t row = start + first, n = (stop < p->sizes[t] ? stop : p->sizes[t]) - first;
        const float *c = t ? a->cand + (row - p->sizes[t - 1]) * H : a->c0 + first * H;
        int64_t r = 0;
        if (n <= 0) continue;
        for (; r + BLOCK <= n; r += BLOCK)
            NAME(layer_backward_rows)(BLOCK, a, row + r, first + r, c + r * H, sums);
        for (; r < n; r++) NAME(layer_backward_rows)(1, a, row + r, first + r, c + r * H, sums);
        EACH_COLUMN(k, numbers, {
            NAME(add_columns)(total + k, NAME(load_columns)(sums + k, w), w);
            NAME(store_columns)(sums + k, (V){0}, w);
        });
        NAME(multiply)(a->packed, a->dwh + row * G, n, G, 0, H, a->dh + first * H, H);
    }
}

#undef EACH_COLUMN
#undef EACH_ROW
#undef BLOCK
