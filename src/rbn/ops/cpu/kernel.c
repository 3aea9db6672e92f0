/* One time step of the LSTM, forward and backward, for float32 on the CPU.
 *
 * The batch statistics of a hidden unit are over the rows of the minibatch. So each thread takes a
 * few units, all four gates of them, for all rows: every mean and variance, forward and backward, is
 * its own, and a step is one parallel region between two matrix products.
 *
 * Plain C with no dependency. Loops run over BLOCK neighbouring units, which compilers turn into
 * vector instructions. Nothing here may hide a NaN: comparisons are written so that one passes on.
 */

#include <stdint.h>
#include <string.h>

#define BLOCK 16 /* units a thread works on at a time */
#define CHUNK 64 /* rows whose sum is kept in float32 before it goes into a double */

#if defined(_WIN32)
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define CLONES __attribute__((target_clones("arch=skylake-avx512", "arch=haswell", "default")))
#else
#define CLONES
#endif

#if defined(__GNUC__)
#define INLINE static inline __attribute__((always_inline))
#else
#define INLINE static __forceinline
#endif

/* The units of a block are independent, also where a buffer is read and written in place. */
#if defined(__clang__)
#define UNITS _Pragma("clang loop vectorize(assume_safety)") for (int k = 0; k < w; k++)
#elif defined(__GNUC__)
#define UNITS _Pragma("GCC ivdep") for (int k = 0; k < w; k++)
#else
#define UNITS for (int k = 0; k < w; k++)
#endif

/* How a term is normalized. */
enum { NONE = 0, BATCH = 1, GIVEN = 2 };

/* All that stays the same over the steps of one call. Row-major, see compiled_lstm.py. */
typedef struct {
    int64_t hidden;            /* H */
    int64_t keep;              /* 1: buffers hold all steps; 0: one step, used again */
    int64_t mode_x, mode_h, mode_c;
    int64_t rows_x, rows_h, rows_c; /* rows of given statistics; the last serves all beyond */
    double eps;
    float *wx, *wh;            /* [N, 4H]; wx may be null */
    float *gates;              /* [N, 4H], out: after their nonlinearities */
    float *cand, *tanh_c;      /* [N, H], out: the cell and its tanh */
    float *hidden_states;      /* [N, H], out */
    float *c0;                 /* [B, H] */
    float *bias, *gamma_x, *gamma_h, *gamma_c, *beta_c; /* any may be null */
    float *mean_x, *rstd_x, *mean_h, *rstd_h, *mean_c, *rstd_c;
    /* The backward pass. */
    float *dy;                 /* [N, H], may be null */
    float *dh, *dc;            /* [B, H], in and out */
    float *dwh, *dwx;          /* [N, 4H], out; dwx may be null */
    float *dbias, *dgamma_x, *dgamma_h, *dgamma_c, *dbeta_c; /* added to; any may be null */
} Args;

typedef struct {
    const Args *a;
    int64_t t, row, n, prev; /* prev: first row of the previous step, or -1 for c0 */
    int backward;
} Step;

/* exp(x) = 2^k exp(r), |r| <= ln(2) / 2, by a polynomial of relative error 1e-8. */
INLINE float exp_(float x) {
    x = x > 87.0f ? 87.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    float shifted = x * 1.44269504f + magic;
    float k = shifted - magic;
    float r = (x - k * 0.693359375f) + k * 2.12194440e-4f;
    float q = 0.00139336579f;
    q = q * r + 0.00836318173f;
    q = q * r + 0.0416664630f;
    q = q * r + 0.166665763f;
    q = q * r + 0.5f;
    float p = q * r * r + r + 1.0f;
    int32_t bits;
    memcpy(&bits, &shifted, 4);
    bits = (int32_t)((uint32_t)bits << 23) + 0x3f800000;
    float scale;
    memcpy(&scale, &bits, 4);
    return p * scale;
}

INLINE float sigmoid_(float x) { return 1.0f / (1.0f + exp_(-x)); }

/* Near zero by an odd polynomial of relative error 2e-8, elsewhere through exp. */
INLINE float tanh_(float x) {
    float ax = x < 0.0f ? -x : x;
    float z = x * x;
    float q = -0.00610496104f;
    q = q * z + 0.0210036524f;
    q = q * z - 0.0538525023f;
    q = q * z + 0.133327827f;
    q = q * z - 0.333333284f;
    float small = x + x * z * q;
    float e = exp_(2.0f * ax);
    float big = 1.0f - 2.0f / (e + 1.0f);
    big = x < 0.0f ? -big : big;
    return ax < 0.625f ? small : big;
}

/* Mean and 1 / sqrt(var + eps) of w neighbouring columns over n rows, in two passes. */
INLINE void moments(const float *x, int64_t stride, int64_t n, int w, double eps, float *mean,
                    float *rstd) {
    double total[BLOCK] = {0};
    for (int64_t r0 = 0; r0 < n; r0 += CHUNK) {
        int64_t r1 = r0 + CHUNK < n ? r0 + CHUNK : n;
        float part[BLOCK] = {0};
        for (int64_t r = r0; r < r1; r++)
            UNITS part[k] += x[r * stride + k];
        UNITS total[k] += part[k];
    }
    UNITS mean[k] = (float)(total[k] / (double)n);
    UNITS total[k] = 0;
    for (int64_t r0 = 0; r0 < n; r0 += CHUNK) {
        int64_t r1 = r0 + CHUNK < n ? r0 + CHUNK : n;
        float part[BLOCK] = {0};
        for (int64_t r = r0; r < r1; r++)
            UNITS {
                float d = x[r * stride + k] - mean[k];
                part[k] += d * d;
            }
        UNITS total[k] += part[k];
    }
    UNITS {
        double v = total[k] / (double)n + eps;
        rstd[k] = (float)(1.0 / __builtin_sqrt(v));
    }
}

/* (x - m) * s is the normalized term: finds m and s of w columns, and writes new statistics. */
INLINE void term(int64_t mode, const float *x, int64_t stride, int64_t n, int w, double eps,
                 const float *gamma, float *mean, float *rstd, float *m, float *s) {
    if (mode == NONE) {
        UNITS m[k] = 0.0f, s[k] = 1.0f;
        return;
    }
    if (mode == BATCH) moments(x, stride, n, w, eps, mean, rstd);
    UNITS m[k] = mean[k], s[k] = gamma[k] * rstd[k];
}

INLINE int64_t stat_row(int64_t mode, int64_t rows, int64_t t) {
    return mode == GIVEN && t >= rows ? rows - 1 : t;
}

INLINE float *at(float *base, int64_t offset) { return base ? base + offset : 0; }

INLINE void forward_units(const Step *step, int64_t j, int w) {
    const Args *a = step->a;
    const int64_t H = a->hidden, G = 4 * H, n = step->n, t = step->t;
    const int64_t kept = a->keep ? step->row : 0;
    const int64_t tx = stat_row(a->mode_x, a->rows_x, t), th = stat_row(a->mode_h, a->rows_h, t);
    const int64_t tc = stat_row(a->mode_c, a->rows_c, t);
    float *gates = a->gates + kept * G;
    const float *wx = at(a->wx, step->row * G), *wh = a->wh + kept * G;

    for (int q = 0; q < 4; q++) {
        const int64_t col = q * H + j;
        float mx[BLOCK] = {0}, sx[BLOCK] = {0}, mh[BLOCK], sh[BLOCK], b[BLOCK];
        term(a->mode_h, wh + col, G, n, w, a->eps, at(a->gamma_h, col),
             at(a->mean_h, th * G + col), at(a->rstd_h, th * G + col), mh, sh);
        if (wx)
            term(a->mode_x, wx + col, G, n, w, a->eps, at(a->gamma_x, col),
                 at(a->mean_x, tx * G + col), at(a->rstd_x, tx * G + col), mx, sx);
        UNITS b[k] = a->bias ? a->bias[col + k] : 0.0f;
        for (int64_t r = 0; r < n; r++) {
            float pre[BLOCK];
            UNITS pre[k] = (wh[r * G + col + k] - mh[k]) * sh[k] + b[k];
            if (wx)
                UNITS pre[k] += (wx[r * G + col + k] - mx[k]) * sx[k];
            if (q == 2)
                UNITS gates[r * G + col + k] = tanh_(pre[k]);
            else
                UNITS gates[r * G + col + k] = sigmoid_(pre[k]);
        }
    }

    float *cand = a->cand + kept * H + j, *tanh_c = a->tanh_c + kept * H + j;
    float *h = a->hidden_states + step->row * H + j;
    const float *c_prev =
        step->prev < 0 ? a->c0 + j : a->cand + (a->keep ? step->prev : 0) * H + j;
    const float *i = gates + j, *f = gates + H + j, *g = gates + 2 * H + j, *o = gates + 3 * H + j;
    for (int64_t r = 0; r < n; r++)
        UNITS
            cand[r * H + k] = f[r * G + k] * c_prev[r * H + k] + i[r * G + k] * g[r * G + k];
    float m[BLOCK], s[BLOCK], beta[BLOCK];
    term(a->mode_c, cand, H, n, w, a->eps, at(a->gamma_c, j), at(a->mean_c, tc * H + j),
         at(a->rstd_c, tc * H + j), m, s);
    UNITS beta[k] = a->beta_c ? a->beta_c[j + k] : 0.0f;
    for (int64_t r = 0; r < n; r++)
        UNITS {
            float y = tanh_((cand[r * H + k] - m[k]) * s[k] + beta[k]);
            tanh_c[r * H + k] = y;
            h[r * H + k] = o[r * G + k] * y;
        }
}

/* Adds w column sums, kept in double, to a gradient. */
INLINE void add(float *to, const double *sums, int w) {
    if (to)
        UNITS to[k] += (float)sums[k];
}

/* dx of one term from dy: BATCH: s (dy - mean(dy) - x_hat mean(dy x_hat)), else s dy. */
INLINE void term_backward(int64_t mode, const float *dy, const float *x, float *dx, int64_t stride,
                          int64_t n, int w, const float *mean, const float *rstd,
                          const float *gamma, const double *sum, const double *sum_hat) {
    float s[BLOCK], c0[BLOCK], c1[BLOCK], m[BLOCK];
    UNITS {
        s[k] = mode == NONE ? 1.0f : gamma[k] * rstd[k];
        m[k] = mode == BATCH ? mean[k] : 0.0f;
        c0[k] = mode == BATCH ? (float)(sum[k] / (double)n) : 0.0f;
        c1[k] = mode == BATCH ? (float)(sum_hat[k] / (double)n) * rstd[k] : 0.0f;
    }
    if (mode == BATCH)
        for (int64_t r = 0; r < n; r++)
            UNITS
                dx[r * stride + k] =
                    s[k] * (dy[r * stride + k] - c0[k] - (x[r * stride + k] - m[k]) * c1[k]);
    else
        for (int64_t r = 0; r < n; r++)
            UNITS dx[r * stride + k] = s[k] * dy[r * stride + k];
}

/* Column sums of dy and of dy * x_hat over n rows. */
INLINE void sums(const float *dy, const float *x, int64_t stride, int64_t n, int w,
                 const float *mean, const float *rstd, double *sum, double *sum_hat) {
    UNITS sum[k] = sum_hat[k] = 0;
    for (int64_t r0 = 0; r0 < n; r0 += CHUNK) {
        int64_t r1 = r0 + CHUNK < n ? r0 + CHUNK : n;
        float part[BLOCK] = {0}, part_hat[BLOCK] = {0};
        for (int64_t r = r0; r < r1; r++) {
            UNITS part[k] += dy[r * stride + k];
            if (x)
                UNITS part_hat[k] +=
                    dy[r * stride + k] * ((x[r * stride + k] - mean[k]) * rstd[k]);
        }
        UNITS sum[k] += part[k], sum_hat[k] += part_hat[k];
    }
}

INLINE void backward_units(const Step *step, int64_t j, int w) {
    const Args *a = step->a;
    const int64_t H = a->hidden, G = 4 * H, n = step->n, row = step->row, t = step->t;
    const int64_t tx = stat_row(a->mode_x, a->rows_x, t), th = stat_row(a->mode_h, a->rows_h, t);
    const int64_t tc = stat_row(a->mode_c, a->rows_c, t);
    const float *gates = a->gates + row * G;
    const float *i = gates + j, *f = gates + H + j, *g = gates + 2 * H + j, *o = gates + 3 * H + j;
    const float *cand = a->cand + row * H + j, *tanh_c = a->tanh_c + row * H + j;
    const float *c_prev = step->prev < 0 ? a->c0 + j : a->cand + step->prev * H + j;
    const float *dy = at(a->dy, row * H + j);
    float *dh = a->dh + j, *dc = a->dc + j, *dwh = a->dwh + row * G;
    double sum[BLOCK], sum_hat[BLOCK];

    /* The output: the gradients of o and of the cell it reads; that one goes into dh. */
    for (int64_t r = 0; r < n; r++)
        UNITS {
            float d = dh[r * H + k] + (dy ? dy[r * H + k] : 0.0f);
            float y = tanh_c[r * H + k], s = o[r * G + k];
            dwh[r * G + 3 * H + j + k] = d * y * s * (1.0f - s);
            dh[r * H + k] = d * s * (1.0f - y * y);
        }
    const float *mean_c = at(a->mean_c, tc * H + j), *rstd_c = at(a->rstd_c, tc * H + j);
    sums(dh, a->mode_c == NONE ? 0 : cand, H, n, w, mean_c, rstd_c, sum, sum_hat);
    add(at(a->dbeta_c, j), sum, w);
    add(at(a->dgamma_c, j), sum_hat, w);
    term_backward(a->mode_c, dh, cand, dh, H, n, w, mean_c, rstd_c, at(a->gamma_c, j), sum,
                  sum_hat);

    /* The cell: what came from the output and what came from the next step. */
    for (int64_t r = 0; r < n; r++)
        UNITS {
            float d = dh[r * H + k] + dc[r * H + k];
            float iv = i[r * G + k], fv = f[r * G + k], gv = g[r * G + k];
            float *out = dwh + r * G + j + k;
            out[0] = d * gv * iv * (1.0f - iv);
            out[H] = d * c_prev[r * H + k] * fv * (1.0f - fv);
            out[2 * H] = d * iv * (1.0f - gv * gv);
            dc[r * H + k] = d * fv;
        }

    /* The gates: through both normalizations. */
    const float *wx = at(a->wx, row * G), *wh = at(a->wh, row * G);
    for (int q = 0; q < 4; q++) {
        const int64_t col = q * H + j;
        const float *mean_h = at(a->mean_h, th * G + col), *rstd_h = at(a->rstd_h, th * G + col);
        float *d = dwh + col;
        if (a->dwx) {
            const float *mean_x = at(a->mean_x, tx * G + col);
            const float *rstd_x = at(a->rstd_x, tx * G + col);
            const float *x = wx + col;
            sums(d, a->mode_x == NONE ? 0 : x, G, n, w, mean_x, rstd_x, sum, sum_hat);
            add(at(a->dgamma_x, col), sum_hat, w);
            term_backward(a->mode_x, d, x, a->dwx + row * G + col, G, n, w, mean_x, rstd_x,
                          at(a->gamma_x, col), sum, sum_hat);
        }
        const float *x = a->mode_h == NONE ? 0 : wh + col;
        sums(d, x, G, n, w, mean_h, rstd_h, sum, sum_hat);
        add(at(a->dbias, col), sum, w);
        add(at(a->dgamma_h, col), sum_hat, w);
        if (a->mode_h != NONE)
            term_backward(a->mode_h, d, x, d, G, n, w, mean_h, rstd_h, at(a->gamma_h, col), sum,
                          sum_hat);
    }
}

/* The width is a constant where it can be, so that the inner loops become vectors. */
CLONES static void forward_block(const Step *step, int64_t j, int w) {
    if (w == BLOCK) forward_units(step, j, BLOCK);
    else forward_units(step, j, w);
}

CLONES static void backward_block(const Step *step, int64_t j, int w) {
    if (w == BLOCK) backward_units(step, j, BLOCK);
    else backward_units(step, j, w);
}

static void run(const Step *step, int thread, int threads) {
    const int64_t H = step->a->hidden, blocks = (H + BLOCK - 1) / BLOCK;
    const int64_t first = blocks * thread / threads, last = blocks * (thread + 1) / threads;
    for (int64_t b = first; b < last; b++) {
        const int64_t j = b * BLOCK;
        const int w = (int)(H - j < BLOCK ? H - j : BLOCK);
        if (step->backward) backward_block(step, j, w);
        else forward_block(step, j, w);
    }
}

/* Threads: those of the OpenMP library that PyTorch has loaded, whose functions it is given. A pool
 * of its own would fight with PyTorch's for the cores. */
typedef void (*parallel_fn)(void (*)(void *), void *, unsigned, unsigned);
typedef int (*number_fn)(void);
static parallel_fn parallel;
static number_fn thread_num, num_threads;

EXPORT void rbn_use_openmp(void *p, void *number, void *count) {
    parallel = (parallel_fn)p;
    thread_num = (number_fn)number;
    num_threads = (number_fn)count;
}

static void in_thread(void *step) { run((const Step *)step, thread_num(), num_threads()); }

static void launch(Step *step, int64_t threads) {
    if (parallel && threads > 1) parallel(in_thread, step, (unsigned)threads, 0);
    else run(step, 0, 1);
}

EXPORT void rbn_lstm_forward(const Args *a, int64_t t, int64_t row, int64_t n, int64_t prev,
                             int64_t threads) {
    Step step = {a, t, row, n, prev, 0};
    launch(&step, threads);
}

EXPORT void rbn_lstm_backward(const Args *a, int64_t t, int64_t row, int64_t n, int64_t prev,
                              int64_t threads) {
    Step step = {a, t, row, n, prev, 1};
    launch(&step, threads);
}

/* For tests: the elementary functions themselves. */
CLONES EXPORT void rbn_elementary(const float *x, int64_t n, float *sigmoid, float *tanh) {
    for (int64_t k = 0; k < n; k++) sigmoid[k] = sigmoid_(x[k]), tanh[k] = tanh_(x[k]);
}

EXPORT int64_t rbn_args_size(void) { return (int64_t)sizeof(Args); }
