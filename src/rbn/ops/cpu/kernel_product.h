/* Products of rows with packed weights, for one instruction set: part of kernel_step.h, which includes
 * it. `rbn_pack` of kernel.c divides the columns of a weight [K, N] into panels of LANES columns, each
 * contiguous in memory. A tile of rows and panels keeps its sums in registers. */

#define TILE 6   /* rows of a tile: with 4 panels, 24 of 32 registers */
#define PANELS 4

#if LANES < 16
#undef TILE
#define TILE 3 /* 12 of 16 registers */
#endif

/* out[r, p] = start[r, p] + x[r] W[p] for R rows and P panels. A panel has w columns that are stored;
 * where w is smaller than LANES the last columns of the panel are zero. start may be null. */
INLINE void NAME(tile)(int R, int P, const float *const *panel, const float *x, int64_t K, int64_t stride_x,
                       const float *const *start, float *const *out, int64_t stride, int w) {
    V sum[TILE][PANELS];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            __builtin_prefetch(out[p] + r * stride, 1);
            sum[r][p] = start ? NAME(load_columns)(start[p] + r * stride, w) : (V){0};
        }
    for (int64_t k = 0; k < K; k++) {
        V weight[PANELS];
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) weight[p] = NAME(load)(panel[p] + k * LANES, LANES);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) {
            const V factor = x[r * stride_x + k] - (V){0};
#pragma GCC unroll 8
            for (int p = 0; p < P; p++) sum[r][p] += weight[p] * factor;
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) NAME(store_columns)(out[p] + r * stride, sum[r][p], w);
}

/* The same for n rows. start and out have the same row stride. */
INLINE void NAME(tiles)(int P, const float *const *panel, const float *x, int64_t n, int64_t K,
                        int64_t stride_x, const float *const *start, float *const *out, int64_t stride,
                        int w) {
    const float *from[PANELS];
    float *to[PANELS];
    for (int64_t r = 0; r < n;) {
        const int64_t left = n - r;
        for (int p = 0; p < P; p++) {
            to[p] = out[p] + r * stride;
            if (start) from[p] = start[p] + r * stride;
        }
        const float *const *first = start ? from : 0;
        const float *rows = x + r * stride_x;
#define ROWS_OF_TILE(R) NAME(tile)(R, P, panel, rows, K, stride_x, first, to, stride, w), r += R
        if (left >= TILE) ROWS_OF_TILE(TILE);
#if TILE > 4
        else if (left >= 4) ROWS_OF_TILE(4);
#endif
        else if (left >= 2) ROWS_OF_TILE(2);
        else ROWS_OF_TILE(1);
#undef ROWS_OF_TILE
    }
}

/* W_h h of units j to j + w, all four gates: out[r, q H + j] = start[r, q H + j] + h[r] W_h[q H + j]. */
static void NAME(gates)(const float *packed, int64_t H, int64_t j, int w, const float *h, int64_t n,
                        const float *start, float *out) {
    const int64_t panels = (H + LANES - 1) / LANES;
    const float *panel[4], *from[4];
    float *to[4];
    for (int q = 0; q < 4; q++) {
        panel[q] = packed + (q * panels * LANES + j) * H;
        to[q] = out + q * H + j;
        from[q] = start ? start + q * H + j : 0;
    }
    if (start) NAME(tiles)(4, panel, h, n, H, H, from, to, 4 * H, w);
    else NAME(tiles)(4, panel, h, n, H, H, 0, to, 4 * H, w);
}

/* Columns first to stop of out = x W: x [n, K], out [n, N]. first is a multiple of LANES. */
static void NAME(multiply)(const float *packed, const float *x, int64_t n, int64_t K, int64_t first,
                           int64_t stop, float *out, int64_t N) {
    for (int64_t j = first; j < stop;) {
        const float *panel[4];
        float *to[4];
        for (int p = 0; p < 4; p++) panel[p] = packed + (j + p * LANES) * K, to[p] = out + j + p * LANES;
        const int64_t whole = (stop - j) / LANES;
        if (whole >= 4) NAME(tiles)(4, panel, x, n, K, K, 0, to, N, LANES), j += 4 * LANES;
        else if (whole >= 2) NAME(tiles)(2, panel, x, n, K, K, 0, to, N, LANES), j += 2 * LANES;
        else if (whole) NAME(tiles)(1, panel, x, n, K, K, 0, to, N, LANES), j += LANES;
        else NAME(tiles)(1, panel, x, n, K, K, 0, to, N, (int)(stop - j)), j = stop;
    }
}

#undef TILE
#undef PANELS
