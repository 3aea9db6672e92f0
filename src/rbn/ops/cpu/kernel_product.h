/* Products of rows with packed weights, for one instruction set. Included by kernel_step.h. The panels are
 * made by `rbn_pack_weights` in kernel.c. A tile of rows and panels keeps its sums in registers. */

#define TILE TILE_ROWS(LANES)
#define PANELS 4

/* Where panels lie: number k of panel p is at p * across + k * down. During the product, `ahead` numbers
 * from `next` on are prefetched for each k. */
typedef struct {
    const float *p, *next;
    int64_t across, down, ahead;
} NAME(Panels);

/* out[r, p] = start[r, p] + x[r] W[p] for R rows and P panels. w columns of each panel are stored; if w is
 * smaller than LANES, the last columns of the panel are zero. start may be null; it has the strides of
 * out. */
INLINE void NAME(tile)(int R, int P, NAME(Panels) panel, const float *x, int64_t K, int64_t stride_x,
                       const float *start, Terms out, int w) {
    V sum[TILE][PANELS];
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            const int64_t at = r * out.stride + p * out.apart;
            __builtin_prefetch(out.p + at, 1);
            sum[r][p] = start ? NAME(load_columns)(start + at, w) : (V){0};
        }
#pragma GCC unroll 4
    for (int64_t k = 0; k < K; k++) {
        V factor[TILE];
        if (R > 2) __builtin_prefetch(panel.next + k * panel.ahead, 0, 2);
#pragma GCC unroll 8
        for (int r = 0; r < R; r++) factor[r] = x[r * stride_x + k] - (V){0};
#pragma GCC unroll 8
        for (int p = 0; p < P; p++) {
            const float *from = panel.p + p * panel.across + k * panel.down;
            const V weight = NAME(load)(from, LANES);
            /* A panel is larger than the L1 cache. */
            if (R > 2 && LANES == LINE) __builtin_prefetch(from + 8 * panel.down, 0, 3);
#pragma GCC unroll 8
            for (int r = 0; r < R; r++) sum[r][p] += weight * factor[r];
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; r++)
#pragma GCC unroll 8
        for (int p = 0; p < P; p++)
            NAME(store_columns)(out.p + r * out.stride + p * out.apart, sum[r][p], w);
}

/* Like tile, for n rows. */
INLINE void NAME(tiles)(int P, NAME(Panels) panel, const float *x, int64_t n, int64_t K, int64_t stride_x,
                        const float *start, Terms out, int w) {
    for (int64_t r = 0; r < n;) {
        const int64_t left = n - r;
#define ROWS_OF_TILE(R)                                            \
    NAME(tile)(R, P, panel, x, K, stride_x, start, out, w), r += R; \
    x += R * stride_x, out.p += R * out.stride;                    \
    if (start) start += R * out.stride;                            \
    panel.next += K * panel.ahead
        if (left >= TILE) {
            ROWS_OF_TILE(TILE);
        }
#if TILE > 4
        else if (left >= 4) {
            ROWS_OF_TILE(4);
        }
#endif
        else if (left >= 2) {
            ROWS_OF_TILE(2);
        } else {
            ROWS_OF_TILE(1);
        }
#undef ROWS_OF_TILE
    }
}

/* The products of n rows with the panels of some units' four gates, see Panels and tile. */
static void NAME(gates)(const float *panel, const float *next, int64_t ahead, const float *x, int64_t n,
                        int64_t K, const float *start, Terms out, int w) {
    const NAME(Panels) panels = {panel, next, LANES, 4 * LANES, ahead};
    if (start) NAME(tiles)(4, panels, x, n, K, K, start, out, w);
    else NAME(tiles)(4, panels, x, n, K, K, 0, out, w);
}

/* Columns first to stop of out = x W: x [n, K], out [n, N]. first is a multiple of LANES. */
static void NAME(multiply)(const float *packed, const float *x, int64_t n, int64_t K, int64_t first,
                           int64_t stop, float *out, int64_t N) {
    for (int64_t j = first; j < stop;) {
        const Terms to = {out + j, N, LANES};
        const float *p = packed + j * K;
        const int64_t full = (stop - j) / LANES;
        const int P = full >= 4 ? 4 : full >= 2 ? 2 : 1;
        const NAME(Panels) panels = {p, p + P * LANES * K, LANES * K, LANES, ahead(P * LANES, LANES, n)};
        if (P == 4) NAME(tiles)(4, panels, x, n, K, K, 0, to, LANES);
        else if (P == 2) NAME(tiles)(2, panels, x, n, K, K, 0, to, LANES);
        else if (full) NAME(tiles)(1, panels, x, n, K, K, 0, to, LANES);
        else NAME(tiles)(1, panels, x, n, K, K, 0, to, (int)(stop - j));
        j += P * LANES;
    }
}

/* Transposes a block of LANES times LANES numbers. */
INLINE void NAME(transpose)(V *v) {
#pragma GCC unroll 4
    for (int s = 1; s < LANES; s *= 2) {
        I low, high; /* indices from LANES on refer to the second vector */
        for (int k = 0; k < LANES; k++) low[k] = k & s ? k - s + LANES : k, high[k] = k & s ? k + LANES : k + s;
#pragma GCC unroll 16
        for (int r = 0; r < LANES; r++) {
            if (r & s) continue;
            const V first = v[r], second = v[r + s];
            v[r] = __builtin_shuffle(first, second, low);
            v[r + s] = __builtin_shuffle(first, second, high);
        }
    }
}

/* Packs columns of some rows of a weight into a panel: LANES rows and columns, except at the borders. */
INLINE void NAME(pack_block)(const float *from, int64_t row, int rows, int columns, float *to, int64_t down) {
    V block[LANES];
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++) block[r] = r < rows ? NAME(load_columns)(from + r * row, columns) : (V){0};
    NAME(transpose)(block);
#pragma GCC unroll 16
    for (int r = 0; r < LANES; r++)
        if (r < columns) NAME(store)(to + r * down, block[r], LANES);
}

/* Packs panels first to stop, see Packing. Reads the weight's rows sequentially if possible. */
static void NAME(pack)(const Packing *p, int64_t first, int64_t stop) {
    const int64_t down = p->parts * LANES;
    if (p->row == 1) {
        for (int64_t k0 = 0; k0 < p->K; k0 += LINE)
            for (int64_t part = 0; part < p->parts; part++)
                for (int64_t panel = first; panel < stop; panel++) {
                    const int64_t n = panel * LANES, rows = p->N - n < LANES ? p->N - n : LANES;
                    const float *from = p->weight + part * p->N + n;
                    float *to = p->packed + panel * p->panel + part * LANES;
                    for (int64_t k = k0; k < k0 + LINE && k < p->K; k++)
                        NAME(store)(to + k * down, NAME(load_columns)(from + k * p->column, (int)rows), LANES);
                }
        return;
    }
    for (int64_t panel = first; panel < stop; panel++)
        for (int64_t part = 0; part < p->parts; part++) {
            const int64_t n = panel * LANES, rows = p->N - n < LANES ? p->N - n : LANES;
            const float *from = p->weight + (part * p->N + n) * p->row;
            float *to = p->packed + panel * p->panel + part * LANES;
            int64_t k = 0;
            if (rows == LANES)
                for (; k + LANES <= p->K; k += LANES)
                    NAME(pack_block)(from + k, p->row, LANES, LANES, to + k * down, down);
            for (; k < p->K; k += LANES)
                NAME(pack_block)(from + k, p->row, (int)rows, (int)(p->K - k < LANES ? p->K - k : LANES), to + k * down, down);
        }
}

#undef TILE
#undef PANELS
