// Shared by all kernels; the product is that of the `portable` and RNN kernels, forward and backward.
//
// A thread block owns UNITS = 8 hidden units for all rows of the batch. Its warps form MW groups over the
// rows and KS groups over the columns of the product; partial sums over KS are added through shared memory.
// After the product a thread owns two neighbouring units (PAIR = tid % 4) of the rows tid / 4, tid / 4 + STEP, ...
// With FEW (at most 16 rows) a warp owns all rows of two pairs instead, so it reduces over the batch alone;
// warps beyond the second only multiply.
//
// Macros defined at compile time: TYPE (0 float as tf32, 1 bfloat16, 2 float16), H, MT (tiles of 16 rows), MW, KS,
// CHUNK (column blocks loaded at once), REGISTERS (weights in registers instead of shared memory),
// BARRIER (blocks synchronize at a counter instead of polling the data), SHARED_BYTES, MODE_X, MODE_H, MODE_C (statistics of a
// term: 0 none, 1 minibatch, 2 given), LENGTHS, SAVE, BIAS, BETA, DOUTPUT.

typedef unsigned int u32;
typedef long long i64;

#if TYPE == 0
typedef float Element;
typedef float2 Pair;
#define VEC 4
#else
typedef unsigned short Element;
typedef u32 Pair;
#define VEC 8
#endif

#ifndef UNITS
#define UNITS 8
#endif
#define OWN (UNITS / 4)  // units per thread
#define GATES (4 * H)
#define HS ((H + 7) / 8 * 8)
#define ROWS (16 * MT)
#define MPW (MT / MW)
#define WARPS (MW * KS)
#define THREADS (32 * WARPS)
#define STEP (THREADS / 4)
#define RPT ((ROWS + STEP - 1) / STEP)
#define BLOCK (4 * VEC)
#define BLOCKS ((H + UNITS - 1) / UNITS)
#define PADDED (WARPS | 1)
#define EMPTY 0xffffffffu
#ifndef FEW
#define FEW 0
#endif
#define PAIR_OF(tid) (FEW ? (tid) >> 4 & 3 : (tid) & 3)
#define ROW_OF(tid) (FEW ? ((tid) & 15) + ((tid) >> 6) * 16 : (tid) >> 2)
#define HAS_ROWS (!FEW || threadIdx.x < 64)

// The host computes a launch's shared memory, SHARED_BYTES, before it compiles the kernel. Each kernel compares this with
// its layout.
#define CHECK_SHARED(...) static_assert(SHARED_BYTES == (__VA_ARGS__), "the host computed another size of shared memory")

// Values ------------------------------------------------------------------------------------------

// Packs two 16-bit numbers, the first in the lower half: bfloat16 with TYPE 1, else float16.
__device__ __forceinline__ u32 pack(float x, float y) {
  u32 p;
#if TYPE == 1
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(p) : "f"(y), "f"(x));
#else
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(p) : "f"(y), "f"(x));
#endif
  return p;
}

__device__ __forceinline__ float2 unpack(u32 p) {
  float2 v;
#if TYPE == 1
  v = make_float2(__uint_as_float(p << 16), __uint_as_float(p & 0xffff0000u));
#else
  asm("{.reg .b16 a, b; mov.b32 {a, b}, %2; cvt.f32.f16 %0, a; cvt.f32.f16 %1, b;}" : "=f"(v.x), "=f"(v.y) : "r"(p));
#endif
  return v;
}

__device__ __forceinline__ float2 widen(Pair p) {
#if TYPE == 0
  return p;
#else
  return unpack(p);
#endif
}

__device__ __forceinline__ Pair narrow(float2 v) {
#if TYPE == 0
  return v;
#else
  return pack(v.x, v.y);
#endif
}

__device__ __forceinline__ void store_pair(Element* p, float2 v) {
  *reinterpret_cast<Pair*>(p) = narrow(v);
}

__device__ __forceinline__ float2 load2(const float* p) {
  return *reinterpret_cast<const float2*>(p);
}

__device__ __forceinline__ void store2(float* p, float x, float y) {
  *reinterpret_cast<float2*>(p) = make_float2(x, y);
}

// The power of two that scales magnitudes up to `top` (float bits) to below 2^15, and its inverse.
__device__ __forceinline__ u32 exponent(u32 top) { return max(top >> 23, 15u); }
__device__ __forceinline__ float scale_up(u32 top) { return __uint_as_float((268 - exponent(top)) << 23); }
__device__ __forceinline__ float scale_down(u32 top) { return __uint_as_float((exponent(top) - 14) << 23); }

__device__ __forceinline__ u32 magnitude(float v) { return __float_as_uint(v) & 0x7fffffffu; }

// 0 for numbers that are not finite: they must not determine the scale of the others.
__device__ __forceinline__ u32 finite_magnitude(float v) {
  const u32 bits = magnitude(v);
  return bits < 0x7f800000u ? bits : 0;
}

// Stores a value for the other blocks. No word of it may be EMPTY, a NaN pattern that arithmetic never
// produces; if an input contains it, it is replaced here.
__device__ __forceinline__ void publish(Element* p, float2 v) {
#if TYPE == 0
  u32 x = __float_as_uint(v.x), y = __float_as_uint(v.y);
  if (x == EMPTY) x = 0x7fffffffu;
  if (y == EMPTY) y = 0x7fffffffu;
  asm volatile("st.relaxed.gpu.global.v2.u32 [%0], {%1, %2};" ::"l"(p), "r"(x), "r"(y) : "memory");
#else
  u32 x = narrow(v);
  if (x == EMPTY) x = 0x7fff7fffu;
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(x) : "memory");
#endif
}

__device__ __forceinline__ uint4 peek(const Element* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

__device__ __forceinline__ bool missing(uint4 v) {
  return v.x == EMPTY || v.y == EMPTY || v.z == EMPTY || v.w == EMPTY;
}

__device__ __forceinline__ uint4 fetch(const Element* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

// A split barrier across all blocks of a recurrence: arrive, then wait.
__device__ __forceinline__ void announce(u32* counter) {
  asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(counter) : "memory");
}

__device__ __forceinline__ void wait_until(const u32* counter, u32 arrivals) {
  u32 seen;
  do {
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(seen) : "l"(counter) : "memory");
  } while (seen < arrivals);
}

__device__ __forceinline__ void arrive(u32* counter) {
  __syncthreads();
  if (threadIdx.x == 0) announce(counter);
}

__device__ __forceinline__ void wait_for(const u32* counter, u32 arrivals) {
  if (threadIdx.x == 0) wait_until(counter, arrivals);
  __syncthreads();
}

// The approximate tanh has a relative error of 2^-11, no more than rounding to half precision. FAST: use it in float32, too.
#if TYPE == 0 && !defined(FAST)
__device__ __forceinline__ float exp2_(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float inverse(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float sigmoid(float x) { return inverse(1.0f + exp2_(-1.44269504f * x)); }

// The quotient has an absolute error of 1e-7, but batch normalization magnifies small states. So small x use an odd
// polynomial with a relative error of 2e-7. Both are computed, which avoids a branch.
__device__ __forceinline__ float tanh_(float x) {
  const float s = x * x, far = fmaf(-2.0f, inverse(1.0f + exp2_(2.88539008f * x)), 1.0f);
  const float near = fmaf(x * s, fmaf(fmaf(-0.0477942191f, s, 0.132776290f), s, -0.333318830f), x);
  return fabsf(x) < 0.4f ? near : far;  // NaN propagates
}
#else
__device__ __forceinline__ float tanh_(float x) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float sigmoid(float x) { return 0.5f * tanh_(0.5f * x) + 0.5f; }
#endif

// Normalization -----------------------------------------------------------------------------------

// The variance from the mean square and the mean of values shifted by a constant. Results below a
// fraction of the subtracted square are rounding errors and become 0; NaN propagates.
__device__ __forceinline__ float variance(float square, float off) {
  const float var = square - off * off;
  return var <= 2e-6f * off * off ? 0.0f : var;
}

// Mean and variance of a column over all rows of several steps. Steps with too few rows (inv_n 0) are normalized with
// these, see rbn.ops.few_rows.
struct Pool {
  float rows = 0.0f, mean = 0.0f, var = 0.0f;
  __device__ __forceinline__ void add(float inv, float m, float v) {
    const float n = 1.0f / inv, share = n / (rows + n), off = m - mean;
    mean += share * off;
    var += share * (v - var + (1.0f - share) * off * off);
    rows += n;
  }
  __device__ __forceinline__ float scale(float eps) const { return var > CONSTANT * eps ? var : NO_SCALE; }
};

// The mean and variance that replace those of step t, pooled over the earlier steps. mean, var: pointers to step 0;
// `step`: stride between steps.
__device__ __forceinline__ float2 constants(const float* mean, const float* var, i64 step, const float* inv_n, i64 t, float eps) {
  if (t > 0 && !(inv_n[t - 1] > 0.0f)) return make_float2(mean[(t - 1) * step], var[(t - 1) * step]);
  Pool pool;
#pragma unroll 4
  for (i64 s = 0; s < t; s++) pool.add(inv_n[s], mean[s * step], var[s * step]);
  return make_float2(pool.mean, pool.scale(eps));
}

// The factor of a gradient on its way back through a term. With minibatch statistics (MODE 1) it is 0 for
// a constant term, see CONSTANT in rbn.ops.types.
template <int MODE>
__device__ __forceinline__ float slope(float rstd, float gamma, float eps) {
  return MODE == 1 && !(rstd * rstd * eps <= 1.0f - CONSTANT) ? 0.0f : rstd * gamma;
}

// Products ----------------------------------------------------------------------------------------

__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if TYPE == 0
#define SHAPE "m16n8k8.row.col.f32.tf32.tf32.f32"
#elif TYPE == 1
#define SHAPE "m16n8k16.row.col.f32.bf16.bf16.f32"
#else
#define SHAPE "m16n8k16.row.col.f32.f16.f16.f32"
#endif
  asm volatile("mma.sync.aligned." SHAPE " {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

__device__ __forceinline__ uint4 rounded(uint4 v) {
#if TYPE == 0
  asm("cvt.rna.tf32.f32 %0, %0;" : "+r"(v.x));
  asm("cvt.rna.tf32.f32 %0, %0;" : "+r"(v.y));
  asm("cvt.rna.tf32.f32 %0, %0;" : "+r"(v.z));
  asm("cvt.rna.tf32.f32 %0, %0;" : "+r"(v.w));
#endif
  return v;
}

// Both MMAs of a block of columns. A thread's 16 bytes of a row hold other columns than the instruction
// assigns to it, but the same ones in a (rows g and g + 8) and in b, so the sum is the same.
__device__ __forceinline__ void multiply_block(float (&c)[4], uint4 low, uint4 high, uint4 b) {
  multiply(c, low.x, high.x, low.y, high.y, b.x, b.y);
  multiply(c, low.z, high.z, low.w, high.w, b.z, b.w);
}

// 16 bytes of row `row` of a matrix [rows, columns], from column `k` on; zero-filled beyond the row's end.
__device__ __forceinline__ uint4 weight_at(const Element* w, i64 row, int columns, int k) {
  Element v[VEC];
#pragma unroll
  for (int i = 0; i < VEC; i++) v[i] = k + i < columns ? w[row * columns + k + i] : Element(0);
  return *reinterpret_cast<uint4*>(v);
}

// Fragments of W: NT tiles of 8 columns, for the column blocks of this warp.
template <int NT, int KBW>
struct Weights {
  static constexpr int SHARED = REGISTERS ? 0 : 16 * KS * KBW * NT * 32;  // bytes
#if REGISTERS
  uint4 kept[KBW][NT];
#else
  const uint4* shared;
#endif
  // row(n): the row of the matrix for tile n, or a negative number if it does not exist.
  template <class Row>
  __device__ __forceinline__ void load(const Element* w, int columns, int ks, int mw, int lane, uint4* scratch, Row row) {
#if !REGISTERS
    shared = scratch + ks * KBW * NT * 32 + lane;
#endif
#pragma unroll
    for (int i = 0; i < KBW; i++)
#pragma unroll
      for (int n = 0; n < NT; n++) {
        i64 r = row(n);
        int k = (ks * KBW + i) * BLOCK + (lane & 3) * VEC;
        uint4 v = r < 0 ? make_uint4(0, 0, 0, 0) : rounded(weight_at(w, r, columns, k));
#if REGISTERS
        kept[i][n] = v;
#else
        if (mw == 0) scratch[(ks * KBW + i) * NT * 32 + n * 32 + lane] = v;
#endif
      }
  }
  __device__ __forceinline__ uint4 at(int i, int n) const {
#if REGISTERS
    return kept[i][n];
#else
    return shared[(i * NT + n) * 32];
#endif
  }
};

// sums[m][n] += rows of this warp times W. The rows [ROWS, width] (stride `stride`) are written by the other
// blocks; 16-byte pieces that have not arrived are polled. ks: which of SLICES parts of the columns.
template <int NT, int KBW, int SLICES = KS>
__device__ __forceinline__ void gather_multiply(float (&sums)[MPW][NT][4], const Weights<NT, KBW>& w,
                                                const Element* rows, int stride, int width, int B,
                                                int ks, int mw, int lane, bool wait) {
  constexpr int PIECES = (KBW + CHUNK - 1) / CHUNK;
  uint4 a[PIECES > 1 ? 2 : 1][MPW][CHUNK][2];
  const int g = lane >> 2;
  const int row = mw * MPW * 16 + g, column = ks * KBW * BLOCK + (lane & 3) * VEC;
  const Element* first = rows + i64(row) * stride + column;
  const bool in_bounds = width >= SLICES * KBW * BLOCK;  // known at compile time: no column check is needed
  auto address = [&](int m, int i, int half) { return first + (m * 16 + 8 * half) * stride + i * BLOCK; };
  auto there = [&](int m, int i, int half) {
    return i < KBW && row + m * 16 + 8 * half < B && (in_bounds || column + i * BLOCK < width);
  };
  auto load_piece = [&](int piece) {
#pragma unroll
    for (int m = 0; m < MPW; m++)
#pragma unroll
      for (int i = 0; i < CHUNK; i++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          const int k = piece * CHUNK + i;
          a[piece % 2][m][i][half] = !there(m, k, half) ? make_uint4(0, 0, 0, 0)
                                     : BARRIER          ? fetch(address(m, k, half))
                                                        : peek(address(m, k, half));
        }
  };
  // Poll a single piece until the other blocks are about done, because polling all pieces is too much traffic, except
  // for few rows.
  constexpr bool EAGER = BARRIER || FEW || (PIECES == 1 && MPW * CHUNK <= 8);
  if (EAGER) load_piece(0);
  if (!BARRIER && !FEW && wait && there(0, 0, 0)) {
    uint4 probe = EAGER ? a[0][0][0][0] : peek(address(0, 0, 0));
    while (missing(probe)) probe = peek(address(0, 0, 0));
  }
  if (!EAGER) load_piece(0);
#pragma unroll
  for (int piece = 0; piece < PIECES; piece++) {
    if (piece + 1 < PIECES) load_piece(piece + 1);
    if (!BARRIER && wait) {
      bool again;
      do {
        again = false;
#pragma unroll
        for (int m = 0; m < MPW; m++)
#pragma unroll
          for (int i = 0; i < CHUNK; i++)
#pragma unroll
            for (int half = 0; half < 2; half++)
              if (missing(a[piece % 2][m][i][half])) {
                a[piece % 2][m][i][half] = peek(address(m, piece * CHUNK + i, half));
                again = true;
              }
      } while (again);
    }
    __syncwarp();
#pragma unroll
    for (int i = 0; i < CHUNK; i++) {
      if (piece * CHUNK + i >= KBW) continue;
#pragma unroll
      for (int n = 0; n < NT; n++) {
        uint4 b = w.at(piece * CHUNK + i, n);
#pragma unroll
        for (int m = 0; m < MPW; m++)
          multiply_block(sums[m][n], rounded(a[piece % 2][m][i][0]), rounded(a[piece % 2][m][i][1]), b);
      }
    }
  }
}

// Offset of a row's and column's sum in shared memory, [KS][ROWS][PITCH], free of bank conflicts for writing and reading.
template <int NT, int PITCH>
__device__ __forceinline__ int sum_offset(int row, int column) {
  if (!FEW) return row * PITCH + column;
  const int turned = NT > 1 ? row >> 2 & 3 | (row & 3) << 2 : row >> 2 & 3;
  return row * 8 * NT + 2 * (column / 2 ^ turned);
}

// Writes the tiles' sums to shared memory.
template <int NT, int PITCH>
__device__ __forceinline__ void put_sums(float* part, float (&sums)[MPW][NT][4], int ks, int mw, int lane) {
  const int g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int m = 0; m < MPW; m++)
#pragma unroll
    for (int n = 0; n < NT; n++) {
      float* p = part + ks * ROWS * PITCH;
      const int row = (mw * MPW + m) * 16 + g, column = n * 8 + 2 * t;
      store2(p + sum_offset<NT, PITCH>(row, column), sums[m][n][0], sums[m][n][1]);
      store2(p + sum_offset<NT, PITCH>(row + 8, column), sums[m][n][2], sums[m][n][3]);
    }
}

// Sums over the batch ------------------------------------------------------------------------------

// Sums each v[i] over the lanes of a warp that own the same pair of units. Each shuffle halves the number of values
// per lane as long as it is even: a lane ends up with the sums from the returned index on, in v[0] and, for more than 8
// values (16 with FEW), the next NV / 8 - 1.
template <int NV>
__device__ __forceinline__ int sum_over_lanes(float (&v)[NV], int lane) {
  int n = NV, index = 0;
#pragma unroll
  for (int mask = FEW ? 8 : 16; mask >= (FEW ? 1 : 4); mask >>= 1) {
    if (n % 2 == 0) {
      n /= 2;
      const bool upper = lane & mask;
#pragma unroll
      for (int i = 0; i < NV / 2; i++)
        if (i < n) {
          const float keep = upper ? v[i + n] : v[i], send = upper ? v[i] : v[i + n];
          v[i] = keep + __shfl_xor_sync(~0u, send, mask);
        }
      index += upper ? n : 0;
    } else {
#pragma unroll
      for (int i = 0; i < NV / 8 + 1; i++)
        if (i < n) v[i] += __shfl_xor_sync(~0u, v[i], mask);
    }
  }
  return index;
}

// Sums each v[i] over all threads with the same pair of units, in a fixed order, and returns the sums to all of them.
// `running` accumulates over all calls: thread 4 i + pair v[i]; with FEW, the thread of the i-th row v[i] and v[16 + i].
template <int NV>
__device__ __forceinline__ void sum_rows(float (&v)[NV], float* scratch, float* total, float2& running) {
  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, pair = PAIR_OF(tid);
  if (!HAS_ROWS) return;
  const int index = sum_over_lanes(v, lane);
  constexpr int LEFT = NV > (FEW ? 16 : 8) ? NV / 8 : 1;
#if FEW
  float* own = total + pair * NV;
#pragma unroll
  for (int i = 0; i < LEFT; i++) own[index + i] = v[i];
  __syncwarp();
  running.x += own[(tid & 15) % NV];
  if (NV > 16) running.y += own[16 + tid % 8];
#else
#pragma unroll
  for (int i = 0; i < LEFT; i++) scratch[((index + i) * 4 + pair) * PADDED + warp] = v[i];
  __syncthreads();
  if (tid < 4 * NV) {
    float sum = 0.0f;
#pragma unroll
    for (int w = 0; w < WARPS; w++) sum += scratch[tid * PADDED + w];
    total[(tid & 3) * NV + (tid >> 2)] = sum;
    running.x += sum;
  }
  __syncthreads();
#endif
#pragma unroll
  for (int i = 0; i < NV / 4; i++) {
    const float4 four = reinterpret_cast<const float4*>(total + pair * NV)[i];
    v[4 * i] = four.x, v[4 * i + 1] = four.y, v[4 * i + 2] = four.z, v[4 * i + 3] = four.w;
  }
}

template <int NV>
__device__ __forceinline__ void sum_rows(float (&v)[NV], float* scratch, float* total) {
  float2 unused = make_float2(0.0f, 0.0f);
  sum_rows(v, scratch, total, unused);
}

// Parameters and statistics ------------------------------------------------------------------------

// In shared memory, [4 threads][4 gates][OWN]: they are read once per step, and registers are scarce.
__device__ __forceinline__ int column_of(int i) {  // of the whole layer, or -1
  const int thread = i / (4 * OWN) % 4, q = i / OWN % 4, unit = blockIdx.x * UNITS + OWN * thread + i % OWN;
  return unit < H ? q * H + unit : -1;
}

__device__ __forceinline__ void read_gates(float (&v)[4][OWN], const float* from) {
  const float4* p = reinterpret_cast<const float4*>(from + PAIR_OF(threadIdx.x) * 4 * OWN);
  float flat[4 * OWN];
#pragma unroll
  for (int i = 0; i < OWN; i++) {
    const float4 four = p[i];
    flat[4 * i] = four.x, flat[4 * i + 1] = four.y, flat[4 * i + 2] = four.z, flat[4 * i + 3] = four.w;
  }
#pragma unroll
  for (int i = 0; i < 4 * OWN; i++) v[i / OWN][i % OWN] = flat[i];
}

#define PARAMETERS (12 * UNITS)  // bias, gamma_x, gamma_h

__device__ __forceinline__ void load_parameters(float* to, const float* bias, const float* gamma_x,
                                                const float* gamma_h, i64 recurrence) {
  for (int i = threadIdx.x; i < PARAMETERS; i += THREADS) {
    const int kind = i / (4 * UNITS), column = column_of(i);
    const bool present = kind == 0 ? BIAS : kind == 1 ? MODE_X : MODE_H;
    const float* from = kind == 0 ? bias : kind == 1 ? gamma_x : gamma_h;
    to[i] = present && column >= 0 ? from[recurrence * GATES + column] : 0.0f;
  }
}

// Given statistics, N values per step, prefetched one step ahead.
template <int N>
struct Staged {
  static constexpr int PER_THREAD = (N + THREADS - 1) / THREADS;
  float next[PER_THREAD > 0 ? PER_THREAD : 1];

  template <class Value>
  __device__ __forceinline__ void load(Value value) {
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
      const int i = threadIdx.x + k * THREADS;
      if (i < N) next[k] = value(i);
    }
  }
  // is_var(i): whether value i is a variance, which becomes 1 / sqrt(var + eps).
  template <class IsVar>
  __device__ __forceinline__ void put(float* to, float eps, IsVar is_var) const {
#pragma unroll
    for (int k = 0; k < PER_THREAD; k++) {
      const int i = threadIdx.x + k * THREADS;
      if (i < N) to[i] = is_var(i) ? rsqrtf(next[k] + eps) : next[k];
    }
  }
};
