/* The step of kernel.c for one instruction set. Included once for each, with NAME(x) naming its
 * functions and LANES the float32 numbers in a vector register. */

typedef float NAME(floats) __attribute__((vector_size(4 * LANES)));
typedef int32_t NAME(ints) __attribute__((vector_size(4 * LANES)));
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

/* w is the constant LANES but for the last units of a layer, where lanes beyond w are zero. */
INLINE V NAME(load)(const float *p, int w) {
    V v = {0};
    if (w == LANES) __builtin_memcpy(&v, p, sizeof v);
    else __builtin_memcpy(&v, p, (size_t)w * sizeof(float));
    return v;
}

INLINE void NAME(store)(float *p, V v, int w) {
    if (w == LANES) __builtin_memcpy(p, &v, sizeof v);
    else __builtin_memcpy(p, &v, (size_t)w * sizeof(float));
}

/* Lane by lane: yes where the mask is set, else no. A comparison with NaN sets nothing. */
INLINE V NAME(select)(I mask, V yes, V no) { return (V)((mask & (I)yes) | (~mask & (I)no)); }

/* exp(x) = 2^k exp(r), |r| <= ln(2) / 2, by a polynomial of relative error 1e-8. */
INLINE V NAME(exp)(V x) {
    x = NAME(select)(x > 87.0f, NAME(splat)(87.0f), x);
    x = NAME(select)(x < -87.0f, NAME(splat)(-87.0f), x);
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    V shifted = x * 1.44269504f + magic;
    V k = shifted - magic;
    V r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    V q = r * 0.00139336579f + 0.00836318173f;
    q = q * r + 0.0416664630f;
    q = q * r + 0.166665763f;
    q = q * r + 0.5f;
    V p = q * (r * r) + r + 1.0f;
    I bits = ((I)shifted << 23) + 0x3f800000;
    return p * (V)bits;
}

INLINE V NAME(sigmoid)(V x) { return 1.0f / (1.0f + NAME(exp)(-x)); }

/* Near zero by an odd polynomial of relative error 2e-8, elsewhere through exp. */
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

/* Mean and 1 / sqrt(var + eps) of w neighbouring columns over n rows, in two passes. */
INLINE void NAME(moments)(const float *x, int64_t stride, int64_t n, int w, double eps,
                          float *mean, float *rstd) {
    double total[LANES] = {0}, squares[LANES] = {0};
    for (int64_t r0 = 0; r0 < n; r0 += CHUNK) {
        const int64_t r1 = r0 + CHUNK < n ? r0 + CHUNK : n;
        V part = {0};
        for (int64_t r = r0; r < r1; r++) part += NAME(load)(x + r * stride, w);
        NAME(accumulate)(total, part);
    }
    V m = {0}, s = {0};
    for (int k = 0; k < LANES; k++) m[k] = (float)(total[k] / (double)n);
    for (int64_t r0 = 0; r0 < n; r0 += CHUNK) {
        const int64_t r1 = r0 + CHUNK < n ? r0 + CHUNK : n;
        V part = {0};
        for (int64_t r = r0; r < r1; r++) {
            V d = NAME(load)(x + r * stride, w) - m;
            part += d * d;
        }
        NAME(accumulate)(squares, part);
    }
    for (int k = 0; k < LANES; k++)
        s[k] = (float)(1.0 / __builtin_sqrt(squares[k] / (double)n + eps));
    NAME(store)(mean, m, w);
    NAME(store)(rstd, s, w);
}

/* (x - m) * s is the normalized term: finds m and s of w columns, and writes new statistics. */
INLINE void NAME(term)(int64_t mode, const float *x, int64_t stride, int64_t n, int w, double eps,
                       const float *gamma, float *mean, float *rstd, V *m, V *s) {
    *m = NAME(splat)(0.0f), *s = NAME(splat)(1.0f);
    if (mode == BATCH) NAME(moments)(x, stride, n, w, eps, mean, rstd);
    if (mode != NONE) *m = NAME(load)(mean, w), *s = NAME(load)(gamma, w) * NAME(load)(rstd, w);
}

INLINE void NAME(forward_units)(const Step *step, int64_t j, int w) {
    const Args *a = step->a;
    const int64_t H = a->hidden, G = 4 * H, n = step->n, t = step->t;
    const int64_t kept = a->keep ? step->row : 0;
    const int64_t tx = NAME(stat_row)(a->mode_x, a->rows_x, t), th = NAME(stat_row)(a->mode_h, a->rows_h, t);
    const int64_t tc = NAME(stat_row)(a->mode_c, a->rows_c, t);
    float *gates = a->gates + kept * G;
    const float *wx = NAME(at)(a->wx, step->row * G), *wh = a->wh + kept * G;

    for (int q = 0; q < 4; q++) {
        const int64_t col = q * H + j;
        V mx = {0}, sx = {0}, mh, sh, b = {0};
        NAME(term)(a->mode_h, wh + col, G, n, w, a->eps, NAME(at)(a->gamma_h, col),
                   NAME(at)(a->mean_h, th * G + col), NAME(at)(a->rstd_h, th * G + col), &mh, &sh);
        if (wx)
            NAME(term)(a->mode_x, wx + col, G, n, w, a->eps, NAME(at)(a->gamma_x, col),
                       NAME(at)(a->mean_x, tx * G + col), NAME(at)(a->rstd_x, tx * G + col), &mx, &sx);
        if (a->bias) b = NAME(load)(a->bias + col, w);
        for (int64_t r = 0; r < n; r++) {
            V pre = (NAME(load)(wh + r * G + col, w) - mh) * sh + b;
            if (wx) pre += (NAME(load)(wx + r * G + col, w) - mx) * sx;
            pre = q == 2 ? NAME(tanh)(pre) : NAME(sigmoid)(pre);
            NAME(store)(gates + r * G + col, pre, w);
        }
    }

    float *cand = a->cand + kept * H + j, *tanh_c = a->tanh_c + kept * H + j;
    float *h = a->hidden_states + step->row * H + j;
    const float *c_prev =
        step->prev < 0 ? a->c0 + j : a->cand + (a->keep ? step->prev : 0) * H + j;
    const float *i = gates + j, *f = gates + H + j, *g = gates + 2 * H + j, *o = gates + 3 * H + j;
    for (int64_t r = 0; r < n; r++) {
        V c = NAME(load)(f + r * G, w) * NAME(load)(c_prev + r * H, w);
        c += NAME(load)(i + r * G, w) * NAME(load)(g + r * G, w);
        NAME(store)(cand + r * H, c, w);
    }
    V m, s, beta = {0};
    NAME(term)(a->mode_c, cand, H, n, w, a->eps, NAME(at)(a->gamma_c, j), NAME(at)(a->mean_c, tc * H + j),
               NAME(at)(a->rstd_c, tc * H + j), &m, &s);
    if (a->beta_c) beta = NAME(load)(a->beta_c + j, w);
    for (int64_t r = 0; r < n; r++) {
        V y = NAME(tanh)((NAME(load)(cand + r * H, w) - m) * s + beta);
        NAME(store)(tanh_c + r * H, y, w);
        NAME(store)(h + r * H, NAME(load)(o + r * G, w) * y, w);
    }
}

/* Adds w column sums, kept in double, to a gradient. */
INLINE void NAME(add)(float *to, const double *sums, int w) {
    if (to)
        for (int k = 0; k < w; k++) to[k] += (float)sums[k];
}

/* Column sums of dy, and of dy * x_hat where there is an x, over n rows. */
INLINE void NAME(sums)(const float *dy, const float *x, int64_t stride, int64_t n, int w,
                       const float *mean, const float *rstd, double *sum, double *sum_hat) {
    V m = {0}, s = {0};
    if (x) m = NAME(load)(mean, w), s = NAME(load)(rstd, w);
    for (int k = 0; k < LANES; k++) sum[k] = sum_hat[k] = 0;
    for (int64_t r0 = 0; r0 < n; r0 += CHUNK) {
        const int64_t r1 = r0 + CHUNK < n ? r0 + CHUNK : n;
        V part = {0}, part_hat = {0};
        for (int64_t r = r0; r < r1; r++) {
            V d = NAME(load)(dy + r * stride, w);
            part += d;
            if (x) part_hat += d * ((NAME(load)(x + r * stride, w) - m) * s);
        }
        NAME(accumulate)(sum, part);
        NAME(accumulate)(sum_hat, part_hat);
    }
}

/* dx of one term from dy: BATCH: s (dy - mean(dy) - x_hat mean(dy x_hat)), else s dy. */
INLINE void NAME(term_backward)(int64_t mode, const float *dy, const float *x, float *dx,
                                int64_t stride, int64_t n, int w, const float *mean,
                                const float *rstd, const float *gamma, const double *sum,
                                const double *sum_hat) {
    V s = NAME(splat)(1.0f), m = {0}, c0 = {0}, c1 = {0};
    if (mode != NONE) s = NAME(load)(gamma, w) * NAME(load)(rstd, w);
    if (mode != BATCH) {
        for (int64_t r = 0; r < n; r++)
            NAME(store)(dx + r * stride, s * NAME(load)(dy + r * stride, w), w);
        return;
    }
    m = NAME(load)(mean, w);
    for (int k = 0; k < LANES; k++) {
        c0[k] = (float)(sum[k] / (double)n);
        c1[k] = (float)(sum_hat[k] / (double)n);
    }
    c1 *= NAME(load)(rstd, w);
    for (int64_t r = 0; r < n; r++) {
        V d = NAME(load)(dy + r * stride, w) - c0;
        d -= (NAME(load)(x + r * stride, w) - m) * c1;
        NAME(store)(dx + r * stride, s * d, w);
    }
}

INLINE void NAME(backward_units)(const Step *step, int64_t j, int w) {
    const Args *a = step->a;
    const int64_t H = a->hidden, G = 4 * H, n = step->n, row = step->row, t = step->t;
    const int64_t tx = NAME(stat_row)(a->mode_x, a->rows_x, t), th = NAME(stat_row)(a->mode_h, a->rows_h, t);
    const int64_t tc = NAME(stat_row)(a->mode_c, a->rows_c, t);
    const float *gates = a->gates + row * G;
    const float *i = gates + j, *f = gates + H + j, *g = gates + 2 * H + j, *o = gates + 3 * H + j;
    const float *cand = a->cand + row * H + j, *tanh_c = a->tanh_c + row * H + j;
    const float *c_prev = step->prev < 0 ? a->c0 + j : a->cand + step->prev * H + j;
    const float *dy = NAME(at)(a->dy, row * H + j);
    float *dh = a->dh + j, *dc = a->dc + j, *dwh = a->dwh + row * G;
    double sum[LANES], sum_hat[LANES];

    /* The output: the gradients of o and of the cell it reads; that one goes into dh. */
    for (int64_t r = 0; r < n; r++) {
        V d = NAME(load)(dh + r * H, w);
        if (dy) d += NAME(load)(dy + r * H, w);
        V y = NAME(load)(tanh_c + r * H, w), s = NAME(load)(o + r * G, w);
        NAME(store)(dwh + r * G + 3 * H + j, d * y * s * (1.0f - s), w);
        NAME(store)(dh + r * H, d * s * (1.0f - y * y), w);
    }
    const float *mean_c = NAME(at)(a->mean_c, tc * H + j), *rstd_c = NAME(at)(a->rstd_c, tc * H + j);
    NAME(sums)(dh, a->mode_c == NONE ? 0 : cand, H, n, w, mean_c, rstd_c, sum, sum_hat);
    NAME(add)(NAME(at)(a->dbeta_c, j), sum, w);
    NAME(add)(NAME(at)(a->dgamma_c, j), sum_hat, w);
    if (a->mode_c != NONE)
        NAME(term_backward)(a->mode_c, dh, cand, dh, H, n, w, mean_c, rstd_c, NAME(at)(a->gamma_c, j),
                            sum, sum_hat);

    /* The cell: what came from the output and what came from the next step. */
    for (int64_t r = 0; r < n; r++) {
        V d = NAME(load)(dh + r * H, w) + NAME(load)(dc + r * H, w);
        V iv = NAME(load)(i + r * G, w), fv = NAME(load)(f + r * G, w);
        V gv = NAME(load)(g + r * G, w), cv = NAME(load)(c_prev + r * H, w);
        float *out = dwh + r * G + j;
        NAME(store)(out, d * gv * iv * (1.0f - iv), w);
        NAME(store)(out + H, d * cv * fv * (1.0f - fv), w);
        NAME(store)(out + 2 * H, d * iv * (1.0f - gv * gv), w);
        NAME(store)(dc + r * H, d * fv, w);
    }

    /* The gates: through both normalizations. */
    const float *wx = NAME(at)(a->wx, row * G), *wh = NAME(at)(a->wh, row * G);
    for (int q = 0; q < 4; q++) {
        const int64_t col = q * H + j;
        const float *mean_h = NAME(at)(a->mean_h, th * G + col), *rstd_h = NAME(at)(a->rstd_h, th * G + col);
        float *d = dwh + col;
        if (a->dwx) {
            const float *mean_x = NAME(at)(a->mean_x, tx * G + col);
            const float *rstd_x = NAME(at)(a->rstd_x, tx * G + col);
            const float *x = wx + col;
            NAME(sums)(d, a->mode_x == NONE ? 0 : x, G, n, w, mean_x, rstd_x, sum, sum_hat);
            NAME(add)(NAME(at)(a->dgamma_x, col), sum_hat, w);
            NAME(term_backward)(a->mode_x, d, x, a->dwx + row * G + col, G, n, w, mean_x, rstd_x,
                                NAME(at)(a->gamma_x, col), sum, sum_hat);
        }
        const float *x = a->mode_h == NONE ? 0 : wh + col;
        NAME(sums)(d, x, G, n, w, mean_h, rstd_h, sum, sum_hat);
        NAME(add)(NAME(at)(a->dbias, col), sum, w);
        NAME(add)(NAME(at)(a->dgamma_h, col), sum_hat, w);
        if (a->mode_h != NONE)
            NAME(term_backward)(a->mode_h, d, x, d, G, n, w, mean_h, rstd_h, NAME(at)(a->gamma_h, col),
                                sum, sum_hat);
    }
}

static void NAME(block)(const Step *step, int64_t j, int w) {
    if (step->backward) {
        if (w == LANES) NAME(backward_units)(step, j, LANES);
        else NAME(backward_units)(step, j, w);
    } else {
        if (w == LANES) NAME(forward_units)(step, j, LANES);
        else NAME(forward_units)(step, j, w);
    }
}

static void NAME(elementary)(const float *x, int64_t n, float *sigmoid, float *tanh) {
    for (int64_t k = 0; k < n; k += LANES) {
        const int w = (int)(n - k < LANES ? n - k : LANES);
        V v = NAME(load)(x + k, w);
        NAME(store)(sigmoid + k, NAME(sigmoid)(v), w);
        NAME(store)(tanh + k, NAME(tanh)(v), w);
    }
}

#undef V
#undef I
#undef LANES
#undef NAME
