/* LSTM inference for one instruction set. Included by kernel_step.h. */

/* out = weight x, rows of n numbers one after another: memory reads a single stream fastest. */
static void NAME(product)(const float *weight, const float *x, int64_t n, int64_t rows, float *out) {
    for (int64_t r = 0; r < rows; r++, weight += n) {
        V sum[4] = {{0}};
        int64_t i = 0;
        for (; i + 4 * LANES <= n; i += 4 * LANES)
            for (int k = 0; k < 4; k++)
                sum[k] += NAME(load)(weight + i + k * LANES, LANES) * NAME(load)(x + i + k * LANES, LANES);
        for (; i + LANES <= n; i += LANES) sum[0] += NAME(load)(weight + i, LANES) * NAME(load)(x + i, LANES);
        const V all = (sum[0] + sum[1]) + (sum[2] + sum[3]);
        float part[LANES];
        __builtin_memcpy(part, &all, sizeof part);
        for (int half = LANES / 2; half; half /= 2)
            for (int k = 0; k < half; k++) part[k] += part[k + half];
        float total = part[0];
        for (; i < n; i++) total += weight[i] * x[i];
        out[r] = total;
    }
}

/* A normalized term is (x - m) * s. */
INLINE void NAME(scale)(const float *scale, const float *mean, const float *var, int64_t at, float eps,
                        int w, V *m, V *s) {
    *m = mean ? NAME(load)(mean + at, w) : NAME(splat)(0.0f);
    *s = scale ? NAME(load)(scale + at, w) : NAME(splat)(1.0f);
    if (var) {
        V v = NAME(load)(var + at, w) + eps;
        for (int k = 0; k < LANES; k++) v[k] = __builtin_sqrtf(v[k]);
        *s /= v;
    }
}

/* Rows `first` to `first` + n of a step for w units. The terms are those of these rows and units;
 * overwrites h. */
INLINE void NAME(inference)(const Inference *a, int64_t t, int64_t j, int w, int64_t first, int64_t n,
                            Terms x, Terms h) {
    const int64_t H = a->hidden, G = 4 * H;
    const int64_t tx = row_at(a->rows_x, a->start + t), th = row_at(a->rows_h, a->start + t);
    const int64_t tb = row_at(a->rows_shift, a->start + t), tc = row_at(a->rows_c, a->start + t);
    const float eps = (float)a->eps, zc = (float)a->zoneout_c, zh = (float)a->zoneout_h;
    V mx[4], sx[4], mh[4], sh[4], shift[4], mc, sc, shift_c = {0};
    for (int q = 0; q < 4; q++) {
        const int64_t col = q * H + j;
        NAME(scale)(a->scale_x, a->mean_x, a->var_x, tx * G + col, eps, w, &mx[q], &sx[q]);
        NAME(scale)(a->scale_h, a->mean_h, a->var_h, th * G + col, eps, w, &mh[q], &sh[q]);
        shift[q] = a->shift ? NAME(load)(a->shift + tb * G + col, w) : NAME(splat)(0.0f);
    }
    NAME(scale)(a->scale_c, a->mean_c, a->var_c, tc * H + j, eps, w, &mc, &sc);
    if (a->shift_c) shift_c = NAME(load)(a->shift_c + tc * H + j, w);
    for (int64_t r = 0; r < n; r++, x.p += x.stride, h.p += h.stride) {
        const int64_t b = first + r, row = t * a->batch + b;
        V gate[4];
        for (int q = 0; q < 4; q++) {
            __builtin_prefetch(x.p + 6 * x.stride + q * x.apart);
            const V wx = NAME(load)(x.p + q * x.apart, w), wh = NAME(load)(h.p + q * h.apart, w);
            if (a->joint) gate[q] = (wh + wx - mh[q]) * sh[q] + shift[q];
            else gate[q] = (wh - mh[q]) * sh[q] + (wx - mx[q]) * sx[q] + shift[q];
        }
        const V c = NAME(load)((t ? a->c_n : a->c) + b * H + j, w);
        V new_c = NAME(sigmoid)(gate[1]) * c + NAME(sigmoid)(gate[0]) * NAME(tanh)(gate[2]);
        const V read = (new_c - mc) * sc + shift_c;
        if (a->pass_normalized_cell) new_c = read;
        if (zc != 0.0f) new_c = zc * c + (1.0f - zc) * new_c;
        NAME(store)(a->c_n + b * H + j, new_c, w);
        NAME(store)(h.p, read, w);
        NAME(store)(h.p + h.apart, NAME(sigmoid)(gate[3]), w);
    }
    /* In a separate loop, so that a row need not wait for the tanh of the previous one. */
    h.p -= n * h.stride;
    for (int64_t r = first; r < first + n; r++, h.p += h.stride) {
        float *out = a->output + (t * a->batch + r) * H + j;
        V new_h = NAME(load)(h.p + h.apart, w) * NAME(tanh)(NAME(load)(h.p, w));
        if (zh != 0.0f)
            new_h = zh * NAME(load)(t ? out - a->batch * H : a->h + r * H + j, w) + (1.0f - zh) * new_h;
        NAME(store)(out, new_h, w);
    }
}

static void NAME(inference_block)(const Inference *a, int64_t t, int64_t j, int w, int64_t first, int64_t n,
                                  Terms x, Terms h) {
    if (w == LANES) NAME(inference)(a, t, j, LANES, first, n, x, h);
#if LANES == 4
    else NAME(inference)(a, t, j, w, first, n, x, h);
#endif
}
