/* Single steps of one sequence for one instruction set, see Cell. Included by kernel_step.h. */

/* Units j to j + w of a row of H numbers. w is LANES except for the last ones. */
#define EACH_UNIT for (int64_t j = 0, w = H < LANES ? H : LANES; j < H; j += LANES, w = H - j < LANES ? H - j : LANES)

/* Numbers at to at + w of a term, normalized with (x - m) / sqrt(var + eps), times gamma. */
INLINE V NAME(normalized)(const float *x, const float *gamma, const float *mean, const float *var, float eps,
                          int64_t at, int w) {
    V v = NAME(load_columns)(var + at, w) + eps;
    for (int k = 0; k < LANES; k++) v[k] = __builtin_sqrtf(v[k]);
    const V d = NAME(load_columns)(x + at, w) - NAME(load_columns)(mean + at, w);
    return d * (NAME(load_columns)(gamma + at, w) / v);
}

INLINE V NAME(or_zero)(const float *x, int64_t at, int w) { return x ? NAME(load_columns)(x + at, w) : (V){0}; }

INLINE V NAME(mix)(float rate, V previous, V new) { return rate == 0.0f ? new : rate * previous + (1.0f - rate) * new; }

/* Both normalized terms and the bias. */
INLINE V NAME(sum_of_terms)(const Cell *a, int64_t at, int w) {
    const float eps = (float)a->eps;
    return NAME(normalized)(a->wh, a->gamma_h, a->mean_h, a->var_h, eps, at, w) +
           NAME(normalized)(a->wx, a->gamma_x, a->mean_x, a->var_x, eps, at, w) + NAME(or_zero)(a->bias, at, w);
}

INLINE void NAME(rnn_cell)(const Cell *a) {
    const int64_t H = a->hidden;
    EACH_UNIT {
        const V sum = NAME(sum_of_terms)(a, j, (int)w);
        /* A comparison with NaN sets nothing. */
        const V new = a->kind == RELU ? NAME(select)(sum <= 0.0f, (V){0}, sum) : NAME(tanh)(sum);
        const V h = NAME(load_columns)(a->h + j, (int)w);
        NAME(store_columns)(a->new_h + j, NAME(mix)((float)a->zoneout_h, h, new), (int)w);
    }
}

INLINE void NAME(gru_cell)(const Cell *a) {
    const int64_t H = a->hidden;
    const float eps = (float)a->eps;
    EACH_UNIT {
        const int lanes = (int)w;
        const V r = NAME(sigmoid)(NAME(sum_of_terms)(a, j, lanes));
        const V z = NAME(sigmoid)(NAME(sum_of_terms)(a, H + j, lanes));
        const int64_t at = 2 * H + j;
        const V of_x = NAME(normalized)(a->wx, a->gamma_x, a->mean_x, a->var_x, eps, at, lanes);
        const V of_h = NAME(normalized)(a->wh, a->gamma_h, a->mean_h, a->var_h, eps, at, lanes);
        const V shifted = of_h + NAME(or_zero)(a->beta, j, lanes);
        const V n = NAME(tanh)(of_x + NAME(or_zero)(a->bias, at, lanes) + r * shifted);
        const V h = NAME(load_columns)(a->h + j, lanes);
        NAME(store_columns)(a->new_h + j, NAME(mix)((float)a->zoneout_h, h, n + z * (h - n)), lanes);
    }
}

/* Mean and 1 / sqrt(var + eps) of n numbers, in two passes. */
INLINE void NAME(moments_of_row)(const float *x, int64_t n, double eps, float *mean, float *rstd) {
    const int64_t full = n / LANES * LANES;
    double total[LANES] = {0}, sum = 0, squares = 0;
    V part = {0};
    for (int64_t k = 0; k < full; k += LANES) part += NAME(load)(x + k, LANES);
    NAME(accumulate)(total, part);
    for (int k = 0; k < LANES; k++) sum += total[k], total[k] = 0;
    for (int64_t k = full; k < n; k++) sum += (double)x[k];
    const float m = (float)(sum / (double)n);
    part = (V){0};
    for (int64_t k = 0; k < full; k += LANES) {
        const V d = NAME(load)(x + k, LANES) - m;
        part += d * d;
    }
    NAME(accumulate)(total, part);
    for (int k = 0; k < LANES; k++) squares += total[k];
    for (int64_t k = full; k < n; k++) squares += (double)((x[k] - m) * (x[k] - m));
    *mean = m;
    *rstd = (float)(1.0 / __builtin_sqrt(squares / (double)n + eps));
}

INLINE void NAME(layer_lstm_cell)(const Cell *a) {
    const int64_t H = a->hidden;
    float mx, sx, mh, sh, mc, sc;
    NAME(moments_of_row)(a->wx, 4 * H, a->eps, &mx, &sx);
    NAME(moments_of_row)(a->wh, 4 * H, a->eps, &mh, &sh);
    EACH_UNIT {
        V gate[4];
        for (int q = 0; q < 4; q++) {
            const int64_t at = q * H + j;
            const V x = NAME(load_columns)(a->wx + at, (int)w), h = NAME(load_columns)(a->wh + at, (int)w);
            gate[q] = (x - mx) * (sx * NAME(load_columns)(a->gamma_x + at, (int)w)) +
                      (h - mh) * (sh * NAME(load_columns)(a->gamma_h + at, (int)w)) + NAME(or_zero)(a->bias, at, (int)w);
        }
        const V c = NAME(load_columns)(a->c + j, (int)w);
        const V new_c = NAME(sigmoid)(gate[1]) * c + NAME(sigmoid)(gate[0]) * NAME(tanh)(gate[2]);
        NAME(store_columns)(a->new_c + j, new_c, (int)w);
        NAME(store_columns)(a->wh + j, NAME(sigmoid)(gate[3]), (int)w); /* no longer needed there */
    }
    NAME(moments_of_row)(a->new_c, H, a->eps, &mc, &sc);
    EACH_UNIT {
        const V new_c = NAME(load_columns)(a->new_c + j, (int)w), o = NAME(load_columns)(a->wh + j, (int)w);
        const V gamma = NAME(load_columns)(a->gamma_c + j, (int)w);
        const V new_h = o * NAME(tanh)((new_c - mc) * (sc * gamma) + NAME(or_zero)(a->beta, j, (int)w));
        const V c = NAME(load_columns)(a->c + j, (int)w), h = NAME(load_columns)(a->h + j, (int)w);
        NAME(store_columns)(a->new_c + j, NAME(mix)((float)a->zoneout_c, c, new_c), (int)w);
        NAME(store_columns)(a->new_h + j, NAME(mix)((float)a->zoneout_h, h, new_h), (int)w);
    }
}

/* Everything but the products. */
static void NAME(cell)(const Cell *a) {
    if (a->kind == LAYER_LSTM) NAME(layer_lstm_cell)(a);
    else if (a->kind == GRU) NAME(gru_cell)(a);
    else NAME(rnn_cell)(a);
}

#undef EACH_UNIT
