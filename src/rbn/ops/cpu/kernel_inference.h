/* Inference of the LSTM for one instruction set: part of kernel_step.h, which includes it. */

/* out = weight x, rows of n numbers one after the other: one stream is what memory reads fastest. */
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

INLINE void NAME(inference)(const Inference *a, int64_t t, int64_t j, int w) {
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
    for (int64_t r = 0; r < a->batch; r++) {
        const int64_t row = t * a->batch + r;
        const float *h = (t ? a->output + (row - a->batch) * H : a->h + r * H);
        V gate[4];
        for (int q = 0; q < 4; q++) {
            const int64_t col = q * H + j;
            __builtin_prefetch(a->wx + (row + 6) * G + col);
            const V wx = NAME(load)(a->wx + row * G + col, w), wh = NAME(load)(a->wh + r * G + col, w);
            if (a->joint) gate[q] = (wh + wx - mh[q]) * sh[q] + shift[q];
            else gate[q] = (wh - mh[q]) * sh[q] + (wx - mx[q]) * sx[q] + shift[q];
        }
        const V c = NAME(load)((t ? a->c_n : a->c) + r * H + j, w);
        V new_c = NAME(sigmoid)(gate[1]) * c + NAME(sigmoid)(gate[0]) * NAME(tanh)(gate[2]);
        const V read = (new_c - mc) * sc + shift_c;
        V new_h = NAME(sigmoid)(gate[3]) * NAME(tanh)(read);
        if (a->pass_normalized_cell) new_c = read;
        if (zc != 0.0f) new_c = zc * c + (1.0f - zc) * new_c;
        if (zh != 0.0f) new_h = zh * NAME(load)(h + j, w) + (1.0f - zh) * new_h;
        NAME(store)(a->c_n + r * H + j, new_c, w);
        NAME(store)(a->output + row * H + j, new_h, w);
    }
}

static void NAME(inference_block)(const Inference *a, int64_t t, int64_t j, int w) {
    if (w == LANES) NAME(inference)(a, t, j, LANES);
#if LANES == 4
    else NAME(inference)(a, t, j, w);
#endif
}
