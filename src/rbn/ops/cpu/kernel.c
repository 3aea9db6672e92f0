/* One time step of the LSTM, forward and backward, for float32 on the CPU.
 *
 * Batch statistics of a hidden unit are over the rows of the minibatch. So each thread takes a few
 * units, with all four gates, for all rows: it computes every mean and variance of these, forward and
 * backward, on its own, and a step is one parallel region. On x86 that includes the product with W_h,
 * whose columns are packed once per call; elsewhere PyTorch multiplies between the steps.
 *
 * C with the vector types of GCC and Clang, without dependencies. kernel_step.h processes as many units
 * at a time as a vector register holds. On x86 it is compiled for three instruction sets, and the best
 * one is chosen at load time; units that do not fill a register of the widest set use a narrower one.
 * Nothing here may hide a NaN.
 */

#include <stddef.h>
#include <stdint.h>

#define LINE 16  /* units in a cache line */
#define CHUNK 64 /* rows to sum in float32 before adding to a double */
#define CHAINS 4 /* independent sums within a chunk, so that an addition need not wait for the last one */
#define ROWS 256 /* rows for which a thread has a buffer on its stack */

#ifndef CONSTANT
#error "CONSTANT comes from rbn/ops/types.py: build with hatch_build.py"
#endif

#define EXPORT __attribute__((visibility("default")))

#define INLINE static inline __attribute__((always_inline))
#define ALIGNED __attribute__((aligned(64)))

/* How a term is normalized. */
enum { NONE = 0, BATCH = 1, GIVEN = 2 };

/* Everything that stays the same over the steps of one call. Row-major, see compiled_lstm.py. */
typedef struct {
    int64_t hidden;            /* H */
    int64_t keep;              /* 1: buffers hold all steps; 0: one step, reused */
    int64_t mode_x, mode_h, mode_c;
    int64_t rows_x, rows_h, rows_c; /* rows of given statistics; the last serves all later steps */
    double eps;
    float *wx, *wh;            /* [N, 4H]; wx may be null */
    /* An input term of one feature, instead of wx: x[r] * scale_x. Step t uses row min(t, rows_x - 1). */
    const float *x, *scale_x;  /* [N] and [rows_x, 4H], null otherwise */
    float *gates;              /* [N, 4H], out: after their nonlinearities */
    float *cand, *tanh_c;      /* [N, H], out: the cell and its tanh */
    float *hidden_states;      /* [N, H], out */
    float *c0, *h0;            /* [B, H] */
    /* W_h for the products of both passes, see rbn_pack_weights; null if PyTorch multiplies. */
    const float *packed;
    const float *start;        /* [N, 4H], may be null: added to the forward product */
    float *bias, *gamma_x, *gamma_h, *gamma_c, *beta_c; /* any may be null */
    float *mean_x, *rstd_x, *mean_h, *rstd_h, *mean_c, *rstd_c;
    /* The backward pass. */
    float *dy;                 /* [N, H], may be null */
    float *dh, *dc;            /* [B, H], in and out */
    float *dwh, *dwx;          /* [N, 4H], out; dwx may be null */
    float *dscale_x;           /* [rows_x, 4H], added to; only with x */
    float *dbias, *dgamma_x, *dgamma_h, *dgamma_c, *dbeta_c; /* added to; any may be null */
} Args;

typedef struct {
    const Args *a;
    int64_t t, row, n, prev; /* prev: first row of the previous step, or -1 for c0 */
    int backward; /* 0, UNITS or PRODUCT */
} Step;

/* The two parts of a backward step: all units, and then the gradient of the previous h. */
enum { UNITS = 1, PRODUCT = 2 };

/* Inference over all steps of a call, without anything that only a backward pass needs. A term is
 * normalized as (term - mean) / sqrt(var + eps) * scale; a null mean means 0, a null divisor or scale 1.
 * Step t uses row min(start + t, rows - 1) of each table. */
typedef struct {
    int64_t hidden, inputs, batch, start; /* H, I, B, the first time step */
    int64_t joint;                        /* 1: one normalization of W_h h + W_x x */
    int64_t pass_normalized_cell;         /* 1: the next step continues from the normalized cell */
    int64_t rows_x, rows_h, rows_shift, rows_c;
    double eps, zoneout_c, zoneout_h;
    const float *x, *weight_x, *weight_h; /* [T, B, I], [4H, I], [4H, H] */
    const float *packed; /* W_x (if inputs > 0) and W_h from rbn_pack_weights, instead of the others; may be null */
    float *wx, *wh;      /* [T, B, 4H], [B, 4H]: computed if the weight is not null */
    const float *scale_x, *scale_h, *shift, *scale_c, *shift_c;
    const float *mean_x, *var_x, *mean_h, *var_h, *mean_c, *var_c;
    const float *h, *c;                   /* [B, H], the states before the first step */
    float *output, *c_n;                  /* [T, B, H] and [B, H], out */
} Inference;

enum { TANH = 0, RELU = 1, GRU = 2, LAYER_LSTM = 3 };

/* One inference step of one sequence: the batch-normalized RNN (TANH, RELU) or GRU, or the layer-normalized
 * LSTM. G = H, 3H or 4H. */
typedef struct {
    int64_t kind, hidden, features, inputs; /* H, G, I */
    double eps, zoneout_c, zoneout_h;
    const float *x, *weight_x, *weight_h;              /* [I], [G, I], [G, H] */
    const float *bias, *gamma_x, *gamma_h, *gamma_c;   /* [G] and [H]; bias may be null, gamma_c is the LSTM's */
    const float *beta;                                 /* [H], may be null: of the cell, or of the GRU's candidate */
    const float *h, *c;                                /* [H]; c is the LSTM's */
    const float *mean_x, *var_x, *mean_h, *var_h;      /* [G], if batch-normalized */
    float *wx, *wh;                                    /* [G], overwritten */
    float *new_h, *new_c;                              /* [H], out */
} Cell;

/* All steps of the layer-normalized LSTM, forward or backward. Its statistics are [N], one per row. */
typedef struct {
    const Args *a;
    const int64_t *sizes; /* [steps]: the rows of each step, which do not increase */
    int64_t steps;
    float *sums;  /* backward: two sets of `size` numbers per thread, initially zero, see layer_backward */
    int64_t size; /* 0: forward */
} LayerPass;

/* `parts` weights [N, K], stacked (number k of row n is at n * row + k * column, one of which is 1), to be
 * packed as panels of `lanes` rows of each part: panel p starts at p * panel, its columns are contiguous. */
typedef struct {
    const float *weight;
    int64_t N, K, row, column, parts;
    float *packed;
    int64_t panel;
} Packing;

static int64_t row_at(int64_t rows, int64_t t) { return t < rows ? t : rows ? rows - 1 : 0; }

/* A few neighbouring columns of a matrix, with rows `stride` numbers apart. */
typedef struct {
    float *p;
    int64_t stride;
} Columns;

/* The four gates of some units: row r of gate q starts at r * stride + q * apart. */
typedef struct {
    float *p;
    int64_t stride, apart;
} Terms;

#define TILE_ROWS(lanes) ((lanes) < 16 ? 3 : 6) /* with 4 panels, 12 of 16 registers, or 24 of 32 */

/* How many numbers of the next panels to prefetch at each k, so that n rows prefetch all of them. One
 * prefetch loads a cache line, so a few rows cannot. */
static int64_t ahead(int64_t columns, int64_t lanes, int64_t n) {
    const int64_t numbers = (columns * TILE_ROWS(lanes) + n - 1) / n;
    return numbers <= LINE ? numbers : 0;
}

#define NAME(x) x##_base
#define LANES 4
#include "kernel_step.h"

typedef void (*block_fn)(const Step *, int64_t, int);
typedef void (*inference_fn)(const Inference *, int64_t, int64_t, int, int64_t, int64_t, Terms, Terms);
typedef void (*product_fn)(const float *, const float *, int64_t, int64_t, float *);
typedef void (*elementary_fn)(const float *, int64_t, float *, float *);
typedef void (*gates_fn)(const float *, const float *, int64_t, const float *, int64_t, int64_t, const float *, Terms,
                         int);
typedef void (*multiply_fn)(const float *, const float *, int64_t, int64_t, int64_t, int64_t, float *, int64_t);
typedef void (*pack_fn)(const Packing *, int64_t, int64_t);
typedef void (*cell_fn)(const Cell *);
typedef void (*layer_forward_fn)(const LayerPass *, int64_t, int64_t);
typedef void (*layer_backward_fn)(const LayerPass *, int64_t, int64_t, float *);

/* The versions that this processor supports, widest first. The last has 4 lanes and accepts fewer, too. */
typedef struct {
    int lanes;
    block_fn block;
    inference_fn inference;
    product_fn product;
    elementary_fn elementary;
    cell_fn cell;
    /* Products with packed weights, and what needs them: null in the base version, which was not measured. */
    gates_fn gates;
    multiply_fn multiply;
    pack_fn pack;
    layer_forward_fn layer_forward;
    layer_backward_fn layer_backward;
} Version;
#define NARROW(name, lanes) \
    {lanes, block_##name, inference_block_##name, product_##name, elementary_##name, cell_##name, 0, 0, 0, 0, 0}
#define WIDE(name, lanes)                                                                                    \
    {lanes,       block_##name, inference_block_##name, product_##name, elementary_##name,    \
     cell_##name, gates_##name, multiply_##name,        pack_##name,    layer_forward_##name, \
     layer_backward_##name}
static Version known[3] = {NARROW(base, 4)};
static const Version *versions = known; /* the version in use, followed by narrower ones */

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
static const int32_t first_of_8[16] = {-1, -1, -1, -1, -1, -1, -1, -1}; /* masks: w lanes from 8 - w on */
#pragma GCC push_options
#pragma GCC target("arch=haswell")
#define NAME(x) x##_avx2_half
#define LANES 4
#include "kernel_step.h"
#define NAME(x) x##_avx2
#define LANES 8
#include "kernel_step.h"
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("arch=skylake-avx512,prefer-vector-width=512")
#define NAME(x) x##_avx512
#define LANES 16
#include "kernel_step.h"
#pragma GCC pop_options

__attribute__((constructor)) static void choose(void) {
    const Version half = NARROW(avx2_half, 4), avx2 = WIDE(avx2, 8), avx512 = WIDE(avx512, 16);
    Version *next = known;
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw"))
        *next++ = avx512;
    *next++ = avx2;
    *next = half;
}
#endif

/* What the threads of one step share: the one pointer that is set says what to do. */
typedef struct {
    const Step *step;
    const Inference *inference;
    int64_t hidden, t;
    const Packing *packing;
    const LayerPass *layer;
    const Cell *cell;
} Work;

/* The products of units first to stop, for all four gates. */
static void products(const Inference *a, int64_t t, int64_t first, int64_t stop) {
    const int64_t H = a->hidden, G = 4 * H, B = a->batch, I = a->inputs;
    for (int64_t r = 0; r < B; r++) {
        const int64_t row = t * B + r;
        const float *h = t ? a->output + (row - B) * H : a->h + r * H;
        for (int64_t col = first; col < G; col += H) {
            if (a->weight_x)
                versions->product(a->weight_x + col * I, a->x + row * I, I, stop - first, a->wx + row * G + col);
            if (a->weight_h)
                versions->product(a->weight_h + col * H, h, H, stop - first, a->wh + r * G + col);
        }
    }
}

/* W_h h of units j to j + w of a training step. */
static void recurrent_products(const Step *step, int64_t j, int w) {
    const Args *a = step->a;
    const int64_t H = a->hidden, n = step->n, lanes = versions->lanes;
    const float *panel = a->packed + j * 4 * H, *next = panel + 4 * lanes * H;
    const float *h = step->prev < 0 ? a->h0 : a->hidden_states + step->prev * H;
    const Terms out = {a->wh + (a->keep ? step->row * 4 * H : 0) + j, 4 * H, H};
    versions->gates(panel, next, ahead(4 * lanes, lanes, n), h, n, H,
                    a->start ? a->start + step->row * 4 * H + j : 0, out, w);
}

/* The rest of an inference step for units j to stop. The last version takes those that do not fill a register. */
static void inference_units(const Inference *a, int64_t t, int64_t j, int64_t stop, int64_t row, int64_t n,
                            Terms wx, Terms wh) {
    for (const Version *v = versions; j < stop;) {
        while (v->lanes > stop - j && v->lanes > 4) v++;
        const int w = (int)(stop - j < v->lanes ? stop - j : v->lanes);
        v->inference(a, t, j, w, row, n, wx, wh);
        j += w, wx.p += w, wh.p += w;
    }
}

/* An inference step for units j to stop, which one panel covers. Both terms stay in the L1 cache, a few
 * rows at a time, and are not written to memory. */
static void packed_inference(const Inference *a, int64_t t, int64_t j, int64_t stop) {
    const int64_t B = a->batch, H = a->hidden, I = a->inputs, lanes = versions->lanes, width = 4 * lanes;
    const int64_t rows = 4 * TILE_ROWS(lanes), step = ahead(width, lanes, B);
    const float *panel = a->packed + j * 4 * (I + H), *next = panel + width * (I + H);
    float buffer_x[24 * 64] ALIGNED, buffer_h[24 * 64] ALIGNED;
    for (int64_t r = 0; r < B; r += rows) {
        const int64_t n = B - r < rows ? B - r : rows, row = t * B + r;
        const float *h = t ? a->output + (row - B) * H : a->h + r * H;
        const Terms wh = {buffer_h, width, lanes};
        Terms wx = {buffer_x, width, lanes};
        if (I) versions->gates(panel, next, step, a->x + row * I, n, I, 0, wx, (int)lanes);
        else wx = (Terms){a->wx + row * 4 * H + j, 4 * H, H};
        versions->gates(panel + width * I, next + I * step, step, h, n, H, 0, wh, (int)lanes);
        next += (n + TILE_ROWS(lanes) - 1) / TILE_ROWS(lanes) * (I + H) * step;
        inference_units(a, t, j, stop, r, n, wx, wh);
    }
}

/* The first row of part `part` of the minibatch, such that all parts have equally many unpadded positions. */
static int64_t first_row(const LayerPass *p, int part, int parts) {
    int64_t all = 0, before = 0, row = 0, steps = p->steps; /* steps: the length of the row */
    for (int64_t t = 0; t < steps; t++) all += p->sizes[t];
    for (;; row++) {
        while (steps && p->sizes[steps - 1] <= row) steps--;
        if (before * parts >= all * part) return row;
        before += steps;
    }
}

/* The rows of one thread, through all time steps. */
static void layer_rows(const LayerPass *p, int thread, int threads) {
    const int64_t first = first_row(p, thread, threads), stop = first_row(p, thread + 1, threads);
    if (p->size) versions->layer_backward(p, first, stop, p->sums + 2 * thread * p->size);
    else versions->layer_forward(p, first, stop);
}

/* The units of one thread. If rows consist of full cache lines, threads share none of them. Otherwise they
 * share some at the borders anyway, and full registers divide the work more evenly. */
static void run(const Work *work, int thread, int threads) {
    const Version *v = versions;
    if (work->layer) {
        layer_rows(work->layer, thread, threads);
        return;
    }
    const int64_t H = work->hidden, size = H % LINE ? v->lanes : LINE, parts = (H + size - 1) / size;
    const int64_t last = size * (parts * (thread + 1) / threads), stop = last < H ? last : H;
    const int64_t first = size * (parts * thread / threads);
    if (work->cell) {
        const Cell *a = work->cell;
        v->product(a->weight_x + first * a->inputs, a->x, a->inputs, stop - first, a->wx + first);
        v->product(a->weight_h + first * a->hidden, a->h, a->hidden, stop - first, a->wh + first);
        return;
    }
    if (work->packing) {
        v->pack(work->packing, first / v->lanes, (stop + v->lanes - 1) / v->lanes);
        return;
    }
    if (!work->inference && work->step->backward == PRODUCT) {
        const Step *step = work->step;
        const Args *a = step->a;
        v->multiply(a->packed, a->dwh + step->row * 4 * H, step->n, 4 * H, first, stop, a->dh, H);
        return;
    }
    const Inference *a = work->inference;
    if (a && !a->packed) {
        const int64_t t = work->t, G = 4 * H;
        products(a, t, first, stop);
        inference_units(a, t, first, stop, 0, a->batch, (Terms){a->wx + t * a->batch * G + first, G, H},
                        (Terms){a->wh + first, G, H});
        return;
    }
    for (int64_t j = first; j < stop;) {
        const int64_t end = j + versions->lanes < stop ? j + versions->lanes : stop;
        if (a) {
            packed_inference(a, work->t, j, end);
            j = end;
            continue;
        }
        if (!work->step->backward && work->step->a->packed) recurrent_products(work->step, j, (int)(end - j));
        for (; j < end; j += v->lanes) {
            while (v->lanes > end - j && v->lanes > 4) v++;
            v->block(work->step, j, (int)(end - j < v->lanes ? end - j : v->lanes));
        }
        j = end;
    }
}

/* Threads of the OpenMP library that PyTorch has loaded; we get its functions. A pool of our own would
 * compete with PyTorch's for the cores. */
typedef void (*parallel_fn)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*number_fn)(void);
static parallel_fn parallel;
static number_fn thread_num, num_threads;

EXPORT void rbn_use_openmp(void *p, void *number, void *count) {
    parallel = (parallel_fn)p;
    thread_num = (number_fn)number;
    num_threads = (number_fn)count;
}

static void in_thread(void *work) { run((const Work *)work, thread_num(), num_threads()); }

static void launch(Work work, int64_t threads) {
    if (parallel && threads > 1) parallel(in_thread, &work, (unsigned)threads, 0);
    else run(&work, 0, 1);
}

/* Runs steps first to stop. starts: the first row of each step, then the number of rows. */
EXPORT void rbn_lstm_forward_steps(const Args *a, const int64_t *starts, int64_t first, int64_t stop,
                                   int64_t threads) {
    for (int64_t t = first; t < stop; t++) {
        const Step step = {a, t, starts[t], starts[t + 1] - starts[t], t ? starts[t - 1] : -1, 0};
        launch((Work){.step = &step, .hidden = a->hidden, .t = t}, threads);
    }
}

EXPORT void rbn_lstm_backward_steps(const Args *a, const int64_t *starts, int64_t first, int64_t stop,
                                    int64_t threads) {
    for (int64_t t = stop - 1; t >= first; t--) {
        Step step = {a, t, starts[t], starts[t + 1] - starts[t], t ? starts[t - 1] : -1, UNITS};
        launch((Work){.step = &step, .hidden = a->hidden, .t = t}, threads);
        step.backward = PRODUCT;
        if (a->packed) launch((Work){.step = &step, .hidden = a->hidden, .t = t}, threads);
    }
}

/* The layer-normalized LSTM, see LayerPass; only if rbn_panel_lanes is not 0. */
EXPORT void rbn_layer_lstm(const Args *a, const int64_t *sizes, int64_t steps, float *sums, int64_t size,
                           int64_t threads) {
    const LayerPass pass = {a, sizes, steps, sums, size};
    launch((Work){.layer = &pass, .hidden = a->hidden}, threads);
}

/* The lanes of a panel, or 0 if PyTorch's products are used instead. */
EXPORT int64_t rbn_panel_lanes(void) { return versions->gates ? versions->lanes : 0; }

/* Packs weights for products x weight^T, see Packing; only if rbn_panel_lanes is not 0. */
EXPORT void rbn_pack_weights(const float *weight, int64_t N, int64_t K, int64_t row, int64_t column, int64_t parts,
                     float *packed, int64_t panel, int64_t threads) {
    const Packing packing = {weight, N, K, row, column, parts, packed, panel};
    launch((Work){.packing = &packing, .hidden = N}, threads);
}

EXPORT void rbn_lstm_inference(const Inference *a, int64_t steps, int64_t threads) {
    for (int64_t t = 0; t < steps; t++) launch((Work){.inference = a, .hidden = a->hidden, .t = t}, threads);
}

EXPORT void rbn_cell_step(const Cell *a, int64_t threads) {
    launch((Work){.cell = a, .hidden = a->features}, threads);
    versions->cell(a);
}

/* For tests: use the version with this index, 0 being the widest. Returns its lanes, or 0 if it does not exist. */
EXPORT int64_t rbn_use_version(int64_t index) {
    if (index > 2 || !known[index].lanes || (index && known[index - 1].lanes == 4)) return 0;
    versions = known + index;
    return versions->lanes;
}

/* For tests: the elementary functions. */
EXPORT void rbn_elementary(const float *x, int64_t n, float *sigmoid, float *tanh) {
    versions->elementary(x, n, sigmoid, tanh);
}

EXPORT int64_t rbn_args_size(void) { return (int64_t)sizeof(Args); }
EXPORT int64_t rbn_cell_size(void) { return (int64_t)sizeof(Cell); }
EXPORT int64_t rbn_inference_size(void) { return (int64_t)sizeof(Inference); }
