/* The step of kernel.c for one instruction set. Included once for each set; NAME(x) names its functions,
 * LANES is the number of float32 numbers in a vector register. */

typedef float NAME(floats) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(ints) __attribute__((vector_size(4 * LANES)));
typedef uint32_t NAME(bits) __attribute__((vector_size(4 * LANES)));
#define V NAME(floats)
#define I NAME(ints)

INLINE int64_t NAME(stat_row)(int64_t mode, int64_t rows, int64_t t) {
    return mode == GIVEN && t >= rows ? rows - 1 : t;
}

INLINE float *NAME(at)(float *base, int64_t offset) { return base ? base + offset : 0; }

INLINE V NAME(splat)(float x) {
    V zero = {0};
    return zero + x;
}

/* w is the constant LANES, except for the last 1 to 3 units of a layer, where lanes beyond w are zero.
 * Those are copied one by one: a memcpy with a size that is not constant would be a function call. */
INLINE V NAME(load)(const float *p, int w) {
    V v = {0};
    if (w == LANES) __builtin_memcpy(&v, p, sizeof v);
    else
        for (int k = 0; k < 3; k++)
            if (k < w) v[k] = p[k];
    return v;
}

INLINE void NAME(store)(float *p, V v, int w) {
    if (w == LANES) __builtin_memcpy(p, &v, sizeof v);
    else
        for (int k = 0; k < 3; k++)
            if (k < w) p[k] = v[k];
}

/* Like load and store, for any w. */
INLINE V NAME(load_columns)(const float *p, int w) {
    if (w == LANES) return NAME(load)(p, LANES);
#if LANES == 16
    return __builtin_ia32_loadups512_mask(p, (V){0}, (uint16_t)((1 << w) - 1));
#elif LANES == 8
    I mask;
    __builtin_memcpy(&mask, first_of_8 + 8 - w, sizeof mask);
    return __builtin_ia32_maskloadps256((const V *)p, mask);
#else
    return NAME(load)(p, w);
#endif
}

INLINE void NAME(store_columns)(float *p, V v, int w) {
    if (w == LANES) {
        NAME(store)(p, v, LANES);
        return;
    }
#if LANES == 16
    __builtin_ia32_storeups512_mask(p, v, (uint16_t)((1 << w) - 1));
#elif LANES == 8
    I mask;
    __builtin_memcpy(&mask, first_of_8 + 8 - w, sizeof mask);
    __builtin_ia32_maskstoreps256((V *)p, mask, v);
#else
    NAME(store)(p, v, w);
#endif
}

INLINE V NAME(get)(Columns x, int64_t r, int w) { return NAME(load)(x.p + r * x.stride, w); }

INLINE void NAME(put)(Columns x, int64_t r, V v, int w) { NAME(store)(x.p + r * x.stride, v, w); }

/* Prefetches the next columns of a row, to be read or written next. Rows are too far apart for the
 * hardware prefetcher. */
#if LANES > 4
#define AHEAD(x, r) __builtin_prefetch((x).p + (r) * (x).stride + LANES, 0, 2)
#define AHEAD_TO_WRITE(x, r) __builtin_prefetch((x).p + (r) * (x).stride + LANES, 1, 2)
#else
#define AHEAD(x, r) (void)0
#define AHEAD_TO_WRITE(x, r) (void)0
#endif

/* Where to process columns: in the buffer if they fit, else in place. With a power of two between the rows
 * of a matrix, all its rows share a few sets of the L1 cache, which hold 8 or 12 lines; every pass over the
 * columns would miss. In the buffer the rows are contiguous. */
INLINE Columns NAME(near)(Columns x, float *buffer, int64_t n) {
    return n <= ROWS ? (Columns){buffer, LANES} : x;
}

/* Lane by lane: `yes` where the mask is set, else `no`. A comparison with NaN sets nothing. */
INLINE V NAME(select)(I mask, V yes, V no) { return (V)((mask & (I)yes) | (~mask & (I)no)); }

/* The smaller of both, or x if it is NaN. */
INLINE V NAME(at_most)(V x, float limit) {
#if LANES == 16
    return __builtin_ia32_minps512_mask(NAME(splat)(limit), x, x, (uint16_t)-1, 4);
#elif LANES == 8
    return __builtin_ia32_minps256(NAME(splat)(limit), x);
#else
    return NAME(select)(x > limit, NAME(splat)(limit), x);
#endif
}

/* exp(x) = 2^k exp(r), |r| <= ln(2) / 2, by a polynomial of relative error 1e-8, for x >= -87. */
INLINE V NAME(exp)(V x) {
    x = NAME(at_most)(x, 87.0f);
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    V shifted = x * 1.44269504f + magic;
    V k = shifted - magic;
    V r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    V q = r * 0.00139336579f + 0.00836318173f;
    q = q * r + 0.0416664630f;
    q = q * r + 0.166665763f;
    q = q * r + 0.5f;
    V p = q * (r * r) + r + 1.0f;
    NAME(bits) power = ((NAME(bits))shifted << 23) + 0x3f800000u; /* arbitrary for NaN */
    return p * (V)power;
}

INLINE V NAME(sigmoid)(V x) { return 1.0f / (1.0f + NAME(exp)(-NAME(at_most)(x, 87.0f))); }

/* Near zero an odd polynomial with relative error 2e-8, elsewhere through exp. */
INLINE V NAME(tanh)(V x) {
    const I sign = (I)x & (int32_t)0x80000000;
    V ax = (V)((I)x & 0x7fffffff);
    V z = x * x;
    V q = z * -0.00610496104f + 0.0210036524f;
    q = q * z - 0.0538525023f;
    q = q * z + 0.133327827f;
    q = q * z - 0.333333284f;
    V small = x + x * z * q;
    V big = 1.0f - 2.0f / (NAME(exp)(2.0f * ax) + 1.0f);
    big = (V)((I)big | sign);
    return NAME(select)(ax < 0.625f, small, big);
}

INLINE void NAME(accumulate)(double *total, V part) {
    for (int k = 0; k < LANES; k++) total[k] += (double)part[k];
}

/* Mean and 1 / sqrt(var + eps) of w columns over n rows, in two passes: mean first. The first pass copies
 * the columns to where the second one processes them. */
INLINE void NAME(moments)(Columns x, Columns copy, int64_t n, int w, double eps, float *mean,
                          float *rstd) {
    const int copying = copy.p != x.p;
    double total[LANES] = {0}, squares[LANES] = {0};
    for (int64_t r0 = 0; r0 < n; r0 += CHUNK) {
        const int64_t r1 = r0 + CHUNK < n ? r0 + CHUNK : n;
        V part[CHAINS] = {{0}};
        for (int64_t r = r0; r < r1; r += CHAINS)
            for (int k = 0; k < CHAINS && r + k < r1; k++) {
                V v = NAME(get)(x, r + k, w);
                AHEAD(x, r + k);
                if (copying) NAME(put)(copy, r + k, v, w);
                part[k] += v;
            }
        NAME(accumulate)(total, (part[0] + part[1]) + (part[2] + part[3]));
    }
    V m = {0}, s = {0};
    for (int k = 0; k < LANES; k++) m[k] = (float)(total[k] / (double)n);
    for (int64_t r0 = 0; r0 < n; r0 += CHUNK) {
        const int64_t r1 = r0 + CHUNK < n ? r0 + CHUNK : n;
        V part[CHAINS] = {{0}};
        for (int64_t r = r0; r < r1; r += CHAINS)
            for (int k = 0; k < CHAINS && r + k < r1; k++) {
                V d = NAME(get)(copy, r + k, w) - m;
                part[k] += d * d;
            }
        NAME(accumulate)(squares, (part[0] + part[1]) + (part[2] + part[3]));
    }
    for (int k = 0; k < LANES; k++)
        s[k] = (float)(1.0 / __builtin_sqrt(squares[k] / (double)n + eps));
    NAME(store)(mean, m, w);
    NAME(store)(rstd, s, w);
}

/* (x - m) * s is the normalized term: computes m and s of w columns, and writes new statistics. Afterwards
 * x is where its columns are fastest to read. */
INLINE void NAME(term)(int64_t mode, Columns *x, float *buffer, int64_t n, int w, double eps,
                       const float *gamma, float *mean, float *rstd, V *m, V *s) {
    *m = NAME(splat)(0.0f), *s = NAME(splat)(1.0f);
    if (mode == BATCH) {
        const Columns copy = NAME(near)(*x, buffer, n);
        NAME(moments)(*x, copy, n, w, eps, mean, rstd);
        *x = copy;
    }
    if (mode != NONE) *m = NAME(load)(mean, w), *s = NAME(load)(gamma, w) * NAME(load)(rstd, w);
}

/* A gate before its nonlinearity: its normalized terms and the bias. */
typedef struct {
    Columns wh, wx;
    const float *x; /* instead of wx: the input term is x[r] * sx */
    V mh, sh, mx, sx, bias;
} NAME(Gate);

INLINE V NAME(before)(NAME(Gate) g, int64_t r, int w) {
    V v = (NAME(get)(g.wh, r, w) - g.mh) * g.sh + g.bias;
    if (g.x) v += g.x[r] * g.sx;
    else if (g.wx.p) v += (NAME(get)(g.wx, r, w) - g.mx) * g.sx;
    return v;
}

INLINE void NAME(forward_units)(const Step *step, int64_t j, int w) {
    const Args *a = step->a;
    const int64_t H = a->hidden, G = 4 * H, n = step->n, t = step->t;
    const int64_t kept = a->keep ? step->row : 0;
    const int64_t tx = NAME(stat_row)(a->mode_x, a->rows_x, t), th = NAME(stat_row)(a->mode_h, a->rows_h, t);
    const int64_t tc = NAME(stat_row)(a->mode_c, a->rows_c, t);
    const Columns cand = {a->cand + kept * H + j, H}, tanh_c = {a->tanh_c + kept * H + j, H};
    const Columns c_prev = {step->prev < 0 ? a->c0 + j : a->cand + (a->keep ? step->prev : 0) * H + j, H};
    const Columns h = {a->hidden_states + step->row * H + j, H};
    float buffer_h[ROWS * LANES] ALIGNED, buffer_x[ROWS * LANES] ALIGNED, buffer_c[ROWS * LANES] ALIGNED;
    /* i and then i * g are stored here; not in cand, which may be c_prev. */
    const Columns product = NAME(near)(tanh_c, buffer_c, n);
    Columns cell = NAME(near)(cand, buffer_c, n);

    /* In the order i, g, f, o: each gate is used as soon as it is computed, and the cell is ready before o. */
    for (int k = 0; k < 4; k++) {
        const int q = k == 1 ? 2 : k == 2 ? 1 : k;
        const int64_t col = q * H + j;
        const Columns out = {a->gates + kept * G + col, G};
        NAME(Gate) gate = {.wh = {a->wh + kept * G + col, G},
                           .wx = {NAME(at)(a->wx, step->row * G + col), G},
                           .x = a->x ? a->x + step->row : 0};
        NAME(term)(a->mode_h, &gate.wh, buffer_h, n, w, a->eps, NAME(at)(a->gamma_h, col),
                   NAME(at)(a->mean_h, th * G + col), NAME(at)(a->rstd_h, th * G + col), &gate.mh, &gate.sh);
        if (gate.x) gate.sx = NAME(load)(a->scale_x + row_at(a->rows_x, t) * G + col, w);
        else if (gate.wx.p)
            NAME(term)(a->mode_x, &gate.wx, buffer_x, n, w, a->eps, NAME(at)(a->gamma_x, col),
                       NAME(at)(a->mean_x, tx * G + col), NAME(at)(a->rstd_x, tx * G + col), &gate.mx,
                       &gate.sx);
        if (a->bias) gate.bias = NAME(load)(a->bias + col, w);
        if (q == 0) {
            for (int64_t r = 0; r < n; r++) {
                V i = NAME(sigmoid)(NAME(before)(gate, r, w));
                AHEAD_TO_WRITE(out, r);
                NAME(put)(out, r, i, w);
                NAME(put)(product, r, i, w);
            }
        } else if (q == 2) {
            for (int64_t r = 0; r < n; r++) {
                V g = NAME(tanh)(NAME(before)(gate, r, w));
                AHEAD_TO_WRITE(out, r);
                NAME(put)(out, r, g, w);
                NAME(put)(product, r, g * NAME(get)(product, r, w), w);
            }
        } else if (q == 1) {
            for (int64_t r = 0; r < n; r++) {
                V f = NAME(sigmoid)(NAME(before)(gate, r, w));
                AHEAD_TO_WRITE(out, r);
                AHEAD_TO_WRITE(cand, r);
                AHEAD(c_prev, r);
                NAME(put)(out, r, f, w);
                V c = f * NAME(get)(c_prev, r, w) + NAME(get)(product, r, w);
                NAME(put)(cand, r, c, w);
                NAME(put)(cell, r, c, w);
            }
        } else {
            V m, s, beta = {0};
            NAME(term)(a->mode_c, &cell, cell.p, n, w, a->eps, NAME(at)(a->gamma_c, j),
                       NAME(at)(a->mean_c, tc * H + j), NAME(at)(a->rstd_c, tc * H + j), &m, &s);
            if (a->beta_c) beta = NAME(load)(a->beta_c + j, w);
            for (int64_t r = 0; r < n; r++) {
                V o = NAME(sigmoid)(NAME(before)(gate, r, w));
                V y = NAME(tanh)((NAME(get)(cell, r, w) - m) * s + beta);
                AHEAD_TO_WRITE(out, r);
                AHEAD_TO_WRITE(tanh_c, r);
                AHEAD_TO_WRITE(h, r);
                NAME(put)(out, r, o, w);
                NAME(put)(tanh_c, r, y, w);
                NAME(put)(h, r, o * y, w);
            }
        }
    }
}

/* Adds w column sums, kept in double, to a gradient. */
INLINE void NAME(add)(float *to, const double *sums, int w) {
    V v = {0};
    for (int k = 0; k < LANES; k++) v[k] = (float)sums[k];
    if (to) NAME(store)(to, NAME(load)(to, w) + v, w);
}

/* The gradient through one term: dx = s (dy - c0 - (x - m) c1) for BATCH, where c0 and c1 are the means of
 * dy and of dy * x_hat / sqrt(var + eps), and s is 0 if x is constant compared to an eps that is not 0;
 * else dx = s dy. */
typedef struct {
    V s, m, c0, c1;
    int batch;
} NAME(Back);

INLINE NAME(Back) NAME(back)(int64_t mode, int64_t n, int w, double eps, const float *mean,
                             const float *rstd, const float *gamma, const double *sum, const double *sum_hat) {
    NAME(Back) b = {NAME(splat)(1.0f), {0}, {0}, {0}, mode == BATCH};
    if (mode != NONE) b.s = NAME(load)(gamma, w) * NAME(load)(rstd, w);
    if (mode != BATCH) return b;
    b.m = NAME(load)(mean, w);
    V r = NAME(load)(rstd, w);
    b.s = NAME(select)(r * r * (float)eps <= 1.0f - CONSTANT, b.s, NAME(splat)(0.0f));
    for (int k = 0; k < LANES; k++) {
        b.c0[k] = (float)(sum[k] / (double)n);
        b.c1[k] = (float)(sum_hat[k] / (double)n);
    }
    b.c1 *= NAME(load)(rstd, w);
    return b;
}

INLINE V NAME(through)(NAME(Back) b, V dy, Columns x, int64_t r, int w) {
    if (b.batch) dy = dy - b.c0 - (NAME(get)(x, r, w) - b.m) * b.c1;
    return b.s * dy;
}

INLINE void NAME(backward_units)(const Step *step, int64_t j, int w) {
    const Args *a = step->a;
    const int64_t H = a->hidden, G = 4 * H, n = step->n, row = step->row, t = step->t;
    const int64_t tx = NAME(stat_row)(a->mode_x, a->rows_x, t), th = NAME(stat_row)(a->mode_h, a->rows_h, t);
    const int64_t tc = NAME(stat_row)(a->mode_c, a->rows_c, t);
    const int has_x = a->dwx && a->mode_x != NONE, has_h = a->mode_h != NONE, has_c = a->mode_c != NONE;
    const float *x = a->x ? a->x + row : 0;
    const Columns dy = {NAME(at)(a->dy, row * H + j), H}, dh = {a->dh + j, H}, dc = {a->dc + j, H};
    const Columns cand = {a->cand + row * H + j, H}, tanh_c = {a->tanh_c + row * H + j, H};
    const Columns c_prev = {step->prev < 0 ? a->c0 + j : a->cand + step->prev * H + j, H};
    Columns gate[4], d[4]; /* d: the gradients before the nonlinearities */
    float buffer_d[4][ROWS * LANES] ALIGNED, buffer_h[ROWS * LANES] ALIGNED, buffer_x[ROWS * LANES] ALIGNED;
    for (int q = 0; q < 4; q++) {
        gate[q] = (Columns){a->gates + row * G + q * H + j, G};
        d[q] = NAME(near)((Columns){a->dwh + row * G + q * H + j, G}, buffer_d[q], n);
    }
    const Columns i = gate[0], f = gate[1], g = gate[2], o = gate[3];
    const Columns di = d[0], df = d[1], dg = d[2], d_o = d[3];

    /* The output: the gradients of o and of the cell that it reads, and the sums of the latter. */
    const Columns dcell = NAME(near)(dh, buffer_h, n), cell = NAME(near)(cand, buffer_x, n);
    const int apart = n <= ROWS;
    const float *mean_c = NAME(at)(a->mean_c, tc * H + j), *rstd_c = NAME(at)(a->rstd_c, tc * H + j);
    double sum[LANES] = {0}, sum_c[LANES] = {0};
    V mc = {0}, sc = {0};
    if (has_c) mc = NAME(load)(mean_c, w), sc = NAME(load)(rstd_c, w);
    for (int64_t r0 = 0; r0 < n; r0 += CHUNK) {
        const int64_t r1 = r0 + CHUNK < n ? r0 + CHUNK : n;
        V part = {0}, part_c = {0};
        for (int64_t r = r0; r < r1; r++) {
            V e = NAME(get)(dh, r, w);
            if (dy.p) e += NAME(get)(dy, r, w);
            V y = NAME(get)(tanh_c, r, w), s = NAME(get)(o, r, w);
            AHEAD(dy, r);
            AHEAD(tanh_c, r);
            AHEAD(o, r);
            AHEAD(cand, r);
            NAME(put)(d_o, r, e * y * s * (1.0f - s), w);
            e = e * s * (1.0f - y * y);
            NAME(put)(dcell, r, e, w);
            part += e;
            if (has_c) {
                V c = NAME(get)(cand, r, w);
                if (apart) NAME(put)(cell, r, c, w);
                part_c += e * ((c - mc) * sc);
            }
        }
        NAME(accumulate)(sum, part);
        NAME(accumulate)(sum_c, part_c);
    }
    NAME(add)(NAME(at)(a->dbeta_c, j), sum, w);
    NAME(add)(NAME(at)(a->dgamma_c, j), sum_c, w);

    /* The cell: the gradients from the output and from the next step. */
    const NAME(Back) back_c =
        NAME(back)(a->mode_c, n, w, a->eps, mean_c, rstd_c, NAME(at)(a->gamma_c, j), sum, sum_c);
    for (int64_t r = 0; r < n; r++) {
        V e = NAME(through)(back_c, NAME(get)(dcell, r, w), cell, r, w) + NAME(get)(dc, r, w);
        V iv = NAME(get)(i, r, w), fv = NAME(get)(f, r, w), gv = NAME(get)(g, r, w);
        AHEAD(i, r);
        AHEAD(f, r);
        AHEAD(g, r);
        AHEAD(c_prev, r);
        NAME(put)(di, r, e * gv * iv * (1.0f - iv), w);
        NAME(put)(df, r, e * NAME(get)(c_prev, r, w) * fv * (1.0f - fv), w);
        NAME(put)(dg, r, e * iv * (1.0f - gv * gv), w);
        NAME(put)(dc, r, e * fv, w);
    }

    /* The gates, through both normalizations: one pass sums for both, one writes both. */
    for (int q = 0; q < 4; q++) {
        const int64_t col = q * H + j;
        const float *mean_h = NAME(at)(a->mean_h, th * G + col), *rstd_h = NAME(at)(a->rstd_h, th * G + col);
        const float *mean_x = NAME(at)(a->mean_x, tx * G + col), *rstd_x = NAME(at)(a->rstd_x, tx * G + col);
        const Columns wh = {NAME(at)(a->wh, row * G + col), G}, near_h = NAME(near)(wh, buffer_h, n);
        const Columns wx = {NAME(at)(a->wx, row * G + col), G}, near_x = NAME(near)(wx, buffer_x, n);
        const Columns dq = d[q];
        const Columns dwh = {a->dwh + row * G + col, G}, dwx = {NAME(at)(a->dwx, row * G + col), G};
        double sum_h[LANES] = {0}, sum_x[LANES] = {0};
        V mh = {0}, sh = {0}, mx = {0}, sx = {0};
        if (has_h) mh = NAME(load)(mean_h, w), sh = NAME(load)(rstd_h, w);
        if (has_x) mx = NAME(load)(mean_x, w), sx = NAME(load)(rstd_x, w);
        for (int k = 0; k < LANES; k++) sum[k] = 0;
        for (int64_t r0 = 0; r0 < n; r0 += CHUNK) {
            const int64_t r1 = r0 + CHUNK < n ? r0 + CHUNK : n;
            V part = {0}, part_h = {0}, part_x = {0};
            for (int64_t r = r0; r < r1; r++) {
                V e = NAME(get)(dq, r, w);
                part += e;
                if (has_h) {
                    V v = NAME(get)(wh, r, w);
                    AHEAD(wh, r);
                    if (apart) NAME(put)(near_h, r, v, w);
                    part_h += e * ((v - mh) * sh);
                }
                if (x) part_x += e * x[r];
                else if (has_x) {
                    V v = NAME(get)(wx, r, w);
                    AHEAD(wx, r);
                    if (apart) NAME(put)(near_x, r, v, w);
                    part_x += e * ((v - mx) * sx);
                }
            }
            NAME(accumulate)(sum, part);
            NAME(accumulate)(sum_h, part_h);
            NAME(accumulate)(sum_x, part_x);
        }
        NAME(add)(NAME(at)(a->dbias, col), sum, w);
        NAME(add)(NAME(at)(a->dgamma_h, col), sum_h, w);
        if (x) NAME(add)(a->dscale_x + row_at(a->rows_x, t) * G + col, sum_x, w);
        else NAME(add)(NAME(at)(a->dgamma_x, col), sum_x, w);
        const NAME(Back) back_h =
            NAME(back)(a->mode_h, n, w, a->eps, mean_h, rstd_h, NAME(at)(a->gamma_h, col), sum, sum_h);
        const NAME(Back) back_x =
            NAME(back)(a->mode_x, n, w, 0.0, mean_x, rstd_x, NAME(at)(a->gamma_x, col), sum, sum_x);
        for (int64_t r = 0; r < n; r++) {
            V e = NAME(get)(dq, r, w);
            AHEAD_TO_WRITE(dwh, r);
            AHEAD_TO_WRITE(dwx, r);
            if (dwx.p) NAME(put)(dwx, r, NAME(through)(back_x, e, near_x, r, w), w);
            NAME(put)(dwh, r, NAME(through)(back_h, e, near_h, r, w), w);
        }
    }
}

static void NAME(block)(const Step *step, int64_t j, int w) {
    if (w == LANES && step->backward) NAME(backward_units)(step, j, LANES);
    else if (w == LANES) NAME(forward_units)(step, j, LANES);
#if LANES == 4
    else if (step->backward) NAME(backward_units)(step, j, w);
    else NAME(forward_units)(step, j, w);
#endif
}

static void NAME(elementary)(const float *x, int64_t n, float *sigmoid, float *tanh) {
    for (int64_t k = 0; k < n; k += LANES) {
        const size_t size = (size_t)(n - k < LANES ? n - k : LANES) * sizeof(float);
        V v = {0};
        __builtin_memcpy(&v, x + k, size);
        const V s = NAME(sigmoid)(v), t = NAME(tanh)(v);
        __builtin_memcpy(sigmoid + k, &s, size);
        __builtin_memcpy(tanh + k, &t, size);
    }
}

#include "kernel_inference.h"
#include "kernel_cell.h"
#if LANES > 4
#include "kernel_product.h"
#include "kernel_layer.h"
#endif

#undef AHEAD
#undef AHEAD_TO_WRITE
#undef V
#undef I
#undef LANES
#undef NAME
