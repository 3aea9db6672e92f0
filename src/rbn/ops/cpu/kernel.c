/* One time step of the LSTM, forward and backward, for float32 on the CPU.
 *
 * The batch statistics of a hidden unit are over the rows of the minibatch. So each thread takes a
 * few units, all four gates of them, for all rows: every mean and variance, forward and backward, is
 * its own, and a step is one parallel region between two matrix products.
 *
 * C with the vector types of GCC and Clang and no dependency. kernel_step.h works on as many units at
 * a time as a vector register holds; on x86 it is compiled for three instruction sets, of which the
 * processor chooses. Nothing here may hide a NaN.
 */

#include <stddef.h>
#include <stdint.h>

#define LINE 16  /* units in a cache line: threads do not share one */
#define CHUNK 64 /* rows whose sum is kept in float32 before it goes into a double */

#define EXPORT __attribute__((visibility("default")))

#define INLINE static inline __attribute__((always_inline))

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

#define NAME(x) x##_base
#define LANES 4
#include "kernel_step.h"

typedef void (*block_fn)(const Step *, int64_t, int);
typedef void (*elementary_fn)(const float *, int64_t, float *, float *);
static block_fn block = block_base;
static elementary_fn elementary = elementary_base;
static int lanes = 4;

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC push_options
#pragma GCC target("arch=haswell")
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
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bw")) {
        lanes = 16;
        block = block_avx512;
        elementary = elementary_avx512;
    } else if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) {
        lanes = 8;
        block = block_avx2;
        elementary = elementary_avx2;
    }
}
#endif

static void run(const Step *step, int thread, int threads) {
    const int64_t H = step->a->hidden, lines = (H + LINE - 1) / LINE;
    const int64_t last = LINE * (lines * (thread + 1) / threads), stop = last < H ? last : H;
    for (int64_t j = LINE * (lines * thread / threads); j < stop; j += lanes)
        block(step, j, (int)(stop - j < lanes ? stop - j : lanes));
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
EXPORT void rbn_elementary(const float *x, int64_t n, float *sigmoid, float *tanh) {
    elementary(x, n, sigmoid, tanh);
}

EXPORT int64_t rbn_args_size(void) { return (int64_t)sizeof(Args); }
