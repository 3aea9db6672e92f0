// Kernels for small layers, whose thread blocks form one cluster: shared by forward and backward.
//
// A block owns UNITS = 8 hidden units for all rows of the batch, a warp RT tiles of 8 of these rows, and a thread
// one unit (`own` = lane / 4) of two neighbouring rows of each tile (2 * `quad` = 2 * (lane % 4) and the
// next). This is the accumulator layout of the tensor core instruction with W_h as its left operand (m16) and the
// rows as its right operand (n8): a thread has two of the 16 accumulator rows, which are two gates of its unit.
// With UNITS = 16 a warp owns one half of the units: MW warps the first 8, MW more the others, each for all rows.
//
// One more warp, the last, owns no rows. It reduces the workers' partial sums over the batch, computes the shifts and
// scales of the normalizations, and reads and writes statistics. Each of its lanes owns gate `quad` of unit
// `own`. The worker warps synchronize only with this warp.
//
// The blocks exchange h, and partial sums ("shares") of dh, through distributed shared memory. Each of two buffers
// (double buffering) has an mbarrier in the receiver that counts the stored bytes (st.async). A buffer is reused only
// after results that depend on its contents have come back. Data from block rank - i is stored in place i and is the
// i-th that the sender sends. A warp reads only its own rows, so in blocks of 8 units a block's data for itself need no
// barrier: the same warp writes and reads it.
//
// Stores to other blocks and to global memory are issued in order, and later loads of the same warp queue behind them,
// even loads from its own block's shared memory. So the outputs of a step are written in parts during the next step,
// while the warps wait for sums over the batch or compute.
//
// In blocks of 16 units half of the warps first send what the other blocks need and then finish the step; the other half
// does it in the opposite order. So stores to other blocks, which take long enough for both halves, do not stall all warps
// at once. Blocks of 8 units gain nothing from that.
//
// Products have 16-bit operands, in float32 layers too: float16 has the 11 significant bits of tf32, and the factors
// are scaled into its range by powers of two, which are exact.
//
// Macros besides those of common.cuh: MW (warps that together own all rows), RT, UNITS (8 or 16).
// SCALAR: the input has one feature, so the input term is x times a vector w. A step reads one float32 per row, centered
// with minibatch statistics (MODE_X = 1, also for sequencewise ones). The term's variance is w^2 v, where v is that of x.
// With r = 1 / sqrt(w^2 v + eps) the normalized term is gamma w r x, and a step's d(w) is gamma eps r^3 sum(x d(.)):
// without eps, the normalization would cancel the scale of w. So d(W_x x) is not stored.
// ALL_WAIT: every barrier arrival also waits, and all lanes of a warp arrive at mbarriers; racecheck understands nothing
// else.
#ifndef UNITS
#define UNITS 8
#endif
#ifndef SCALAR
#define SCALAR 0
#endif
#ifndef ALL_WAIT
#define ALL_WAIT 0
#endif
#define HALVES (UNITS / 8)
#define FIRST(half) (HALVES > 1 ? 8 * (half) : 0)  // a half's first unit in the block
// Loops over the halves in the last warp, which serves both. With one half s is a constant expression, so that blocks of
// 8 units compile to the same code as without the loop.
#if HALVES > 1
#define EACH_HALF _Pragma("unroll") for (int s = 0; s < HALVES; s++)
#else
#define EACH_HALF if (constexpr int s = 0; true)
#endif
#define EIGHTS ((H + 7) / 8)  // groups of 8 units in the tensors saved for the backward pass
#define MT MW
#define KS HALVES
#define CHUNK 1
#define REGISTERS 0
#define BARRIER 1
#include "common.cuh"
#include "arguments.cuh"
#include "exchange.cuh"
#undef THREADS
#define WORKERS (32 * WARPS)  // threads that own rows
#define THREADS (WORKERS + 32)
// A multiprocessor's register file has four partitions, each for every fourth warp. In blocks of 16 units the 8 worker
// warps need most registers. The last warp and three further warps, which exist only for this, release theirs to them.
// Each kernel defines WORKER_REGISTERS.
#define LAUNCHED (HALVES > 1 ? WORKERS + 128 : THREADS)
#define SERVER_REGISTERS (3 * 168 - 2 * WORKER_REGISTERS)
#define ROW_TILES (MW * RT)
#define X_ROWS (8 * ROW_TILES)  // rows of x per step, if SCALAR; zeros beyond the batch and in padding

// Whether each step needs sums over the batch.
#define SUM_H (MODE_H == 1)
#define SUM_C (MODE_C == 1)
#define PAIRS ((B + 1) / 2)  // row pairs in the tensors saved for the backward pass

// Selects one of two numbers without a branch. The compiler's branches would keep a thread's rows from being
// computed in parallel.
__device__ __forceinline__ float pick(bool first, float x, float y) {
  float v;
  asm("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\tselp.f32 %0, %1, %2, p;\n\t}" : "=f"(v) : "f"(x), "f"(y), "r"(u32(first)));
  return v;
}

// Operands of products ------------------------------------------------------------------------------

// `multiply16` for half the columns.
__device__ __forceinline__ void multiply8(float (&c)[4], u32 a0, u32 a1, u32 b) {
#if TYPE == 1
#define SHAPE8 "m16n8k8.row.col.f32.bf16.bf16.f32"
#else
#define SHAPE8 "m16n8k8.row.col.f32.f16.f16.f32"
#endif
  asm("mma.sync.aligned." SHAPE8 " {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b));
}

// Transposes an 8 x 8 matrix of 16-bit numbers; each lane holds two neighbours of row lane / 4.
__device__ __forceinline__ u32 turn(u32 v) {
  u32 out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
  return out;
}

// Two neighbouring weights of a row of W as an operand.
__device__ __forceinline__ u32 operand(const Element* p, float scale) {
#if TYPE == 0
  const float2 v = load2(p);
  return pack(v.x * scale, v.y * scale);
#else
  return *reinterpret_cast<const u32*>(p);
#endif
}

// Nonlinearities ------------------------------------------------------------------------------------

// They take pre-activations already multiplied by pre(gate), which is free if it is folded into another factor.
// The approximate tanh has a relative error of 2^-11, like values in half precision and the products of
// float32 layers.
__device__ __forceinline__ float pre(int gate) { return gate == 2 ? 1.0f : 0.5f; }
__device__ __forceinline__ float tanh_of(float v) {
  float y;
  asm("tanh.approx.f32 %0, %1;" : "=f"(y) : "f"(v));
  return y;
}
__device__ __forceinline__ float sigmoid_of(float v) { return fmaf(0.5f, tanh_of(v), 0.5f); }

__device__ __forceinline__ float gate_of(int gate, float v) { return gate == 2 ? tanh_of(v) : sigmoid_of(v); }

__device__ __forceinline__ float rsqrt_(float x) {
  float y;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Rows and units of a thread --------------------------------------------------------------------------

struct Position {
  int lane, warp, own, quad, tile;  // tile: the warp's first row tile
  int half, unit, within;           // half of the block's units; the thread's unit in the layer, and in the block
  bool mine;                        // whether the unit exists
  int B;

  __device__ __forceinline__ int row(int n, int e) const { return 8 * (tile + n) + 2 * quad + e; }
  __device__ __forceinline__ bool in(int n, int e) const { return row(n, e) < B && mine; }
  // For the last warp: whether its unit in half s exists.
  __device__ __forceinline__ bool has(int s) const { return s ? unit + 8 * s < H : mine; }
};

__device__ __forceinline__ Position thread_position(int B) {
  Position at;
  at.B = B;
  at.lane = threadIdx.x & 31, at.warp = threadIdx.x >> 5;
  at.half = HALVES > 1 && at.warp < WARPS ? at.warp / MW : 0, at.tile = HALVES > 1 ? at.warp % MW * RT : at.warp * RT;
  at.own = at.lane >> 2, at.quad = at.lane & 3, at.within = FIRST(at.half) + at.own;
  at.unit = blockIdx.x * UNITS + at.within;
  at.mine = at.unit < H;
  return at;
}

// From two units of a row to two rows of a unit: a 16-bit transpose across the warp.
__device__ __forceinline__ float2 transposed(u32 v) { return unpack(turn(v)); }

// The cluster ---------------------------------------------------------------------------------------

// The i-th block that this block sends to, and the i-th that it receives from; i = 0 is the block itself.
__device__ __forceinline__ u32 receiver(u32 i) { return blockIdx.x + i < BLOCKS ? blockIdx.x + i : blockIdx.x + i - BLOCKS; }
__device__ __forceinline__ u32 sender(u32 i) { return blockIdx.x >= i ? blockIdx.x - i : blockIdx.x - i + BLOCKS; }

// Which threads arrive with the expected bytes at a barrier: one, or with ALL_WAIT all lanes of its warp, the first of
// which passes the number of bytes.
#define ARRIVALS (ALL_WAIT ? 32 : 1)
#define EXPECTS (ALL_WAIT ? threadIdx.x < 32 : threadIdx.x == 0)
#define EXPECTED(bytes) (ALL_WAIT && threadIdx.x ? 0 : (bytes))

// Reallocate registers from the other warps to the workers. Works on warpgroups of four warps.
__device__ __forceinline__ void take_registers() {
#if HALVES > 1
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(WORKER_REGISTERS));
#endif
}
__device__ __forceinline__ void give_registers() {
#if HALVES > 1
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(SERVER_REGISTERS));
#endif
}

// Sums over the batch --------------------------------------------------------------------------------

// Sums N values per gate over the four threads of a unit; thread `quad` gets the sums of gate `quad`.
template <int N>
__device__ __forceinline__ void sum_gates(float (&out)[N], const float (&v)[N][4], int quad) {
  const bool upper = quad & 2, odd = quad & 1;
  float x[N], y[N];
#pragma unroll
  for (int n = 0; n < N; n++) {
    x[n] = pick(upper, v[n][2], v[n][0]) + __shfl_xor_sync(~0u, pick(upper, v[n][0], v[n][2]), 2);
    y[n] = pick(upper, v[n][3], v[n][1]) + __shfl_xor_sync(~0u, pick(upper, v[n][1], v[n][3]), 2);
  }
#pragma unroll
  for (int n = 0; n < N; n++) out[n] = pick(odd, y[n], x[n]) + __shfl_xor_sync(~0u, pick(odd, x[n], y[n]), 1);
}

// Sums two values of a unit over its four threads, into `scratch` [WARPS][8][2].
__device__ __forceinline__ void sum_cells(float* scratch, float first, float second, const Position& at) {
  const bool upper = at.quad & 2;
  float sum = pick(upper, second, first) + __shfl_xor_sync(~0u, pick(upper, first, second), 2);
  sum += __shfl_xor_sync(~0u, sum, 1);
  if (!(at.quad & 1)) scratch[at.warp * 16 + 2 * at.own + (at.quad >> 1)] = sum;
}

// Sums a value over all warps of a half, `pitch` apart, in a fixed order.
__device__ __forceinline__ float2 add_warps2(const float2* scratch, int pitch) {
  float2 sum[4] = {};
#pragma unroll
  for (int w = 0; w < MW; w++) {
    const float2 v = scratch[w * pitch];
    sum[w % 4].x += v.x, sum[w % 4].y += v.y;
  }
  return make_float2((sum[0].x + sum[1].x) + (sum[2].x + sum[3].x), (sum[0].y + sum[1].y) + (sum[2].y + sum[3].y));
}

__device__ __forceinline__ float add_warps(const float* scratch, int pitch) {
  float sum[4] = {};
#pragma unroll
  for (int w = 0; w < MW; w++) sum[w % 4] += scratch[w * pitch];
  return (sum[0] + sum[1]) + (sum[2] + sum[3]);
}

// Named barriers between the workers and the last warp. The workers write their partial sums, arrive, and continue;
// the last warp waits. Its results are handed over at a __syncthreads of all warps: waiting there costs the last warp
// nothing, because it has no work until the next sums.
#define SUMS_1 1
#define SUMS_2 2

template <int NUMBER, int COUNT = THREADS>
__device__ __forceinline__ void await() {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"n"(NUMBER), "n"(COUNT) : "memory");
}

template <int NUMBER>
__device__ __forceinline__ void done() {
#if ALL_WAIT
  await<NUMBER>();
#else
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"n"(NUMBER), "n"(THREADS) : "memory");
#endif
}

// Barrier for the worker warps only, where a warp needs results of the other half's warp. With ALL_WAIT the last warp
// takes part, too.
__device__ __forceinline__ void meet_workers() { await<3, ALL_WAIT ? THREADS : WORKERS>(); }
__device__ __forceinline__ void let_workers_meet() {
  if (ALL_WAIT) meet_workers();
}

// Offset of a unit's and gate's pair of values: the four gates are two reads of 16 bytes, free of bank conflicts
// between the units of a warp.
__device__ __forceinline__ int slot(int unit, int gate) { return ((gate >> 1) * UNITS + unit) * 2 + (gate & 1); }

__device__ __forceinline__ void read_slots(float2 (&v)[4], const float2* from, int unit) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float4 two = *reinterpret_cast<const float4*>(from + slot(unit, 2 * half));
    v[2 * half] = make_float2(two.x, two.y), v[2 * half + 1] = make_float2(two.z, two.w);
  }
}

// Global memory ---------------------------------------------------------------------------------------

// Eight values of a thread (four gates, two rows) saved for the backward pass, in words of 16 bytes. In float32 there
// are two words; the first words of all units of a row pair come before the second ones, so that full sectors are
// written.
#define EIGHTH (TYPE == 0 ? 2 : 1)  // words
#define EIGHT_STEP 32               // elements between the first and the second word

struct Eight {
  uint4 part[EIGHTH];

  __device__ __forceinline__ void take(const float (&v)[4][2]) {
#if TYPE == 0
#pragma unroll
    for (int i = 0; i < 2; i++)
      part[i] = make_uint4(__float_as_uint(v[2 * i][0]), __float_as_uint(v[2 * i][1]), __float_as_uint(v[2 * i + 1][0]),
                           __float_as_uint(v[2 * i + 1][1]));
#else
    part[0] = make_uint4(pack(v[0][0], v[0][1]), pack(v[1][0], v[1][1]), pack(v[2][0], v[2][1]), pack(v[3][0], v[3][1]));
#endif
  }
  __device__ __forceinline__ void give(float (&v)[4][2]) const {
#pragma unroll
    for (int q = 0; q < 4; q++) {
#if TYPE == 0
      const uint4 four = part[q / 2];
      v[q][0] = __uint_as_float(q % 2 ? four.z : four.x), v[q][1] = __uint_as_float(q % 2 ? four.w : four.y);
#else
      const uint4 four = part[0];
      const float2 two = widen(q == 0 ? four.x : q == 1 ? four.y : q == 2 ? four.z : four.w);
      v[q][0] = two.x, v[q][1] = two.y;
#endif
    }
  }
  __device__ __forceinline__ void store(Element* p) const {
#pragma unroll
    for (int i = 0; i < EIGHTH; i++) *reinterpret_cast<uint4*>(p + i * EIGHT_STEP) = part[i];
  }
};

// Offset of the eight values of unit `own` in row pair `pair`.
__device__ __forceinline__ i64 eight_at(i64 pair, int own) { return pair * 64 + own * (8 / EIGHTH); }

// A sheet is a tile in shared memory, a warp's rows by its 8 units, that is copied from and to row-major global memory.
// Row r starts at word `row_at(r)`, which in float32 avoids bank conflicts between rows and between units. Each lane
// copies pieces as large as the alignment allows; other lanes may read them.
#define PIECE_BYTES (TYPE == 0 ? (H % 4 ? 8 : 16) : H % 4 ? 4 : H % 8 ? 8 : 16)
#define PIECE_WORDS (PIECE_BYTES / 4)
#define PIECE_UNITS (PIECE_BYTES / (TYPE == 0 ? 4 : 2))
#define ROW_PIECES (8 / PIECE_UNITS)
#define SHEET (RT * (TYPE == 0 ? 80 : 32))  // words

__device__ __forceinline__ int row_at(int row) { return TYPE == 0 ? 8 * (row + row / 4) : 4 * row; }

// Calls move(word in the sheet, row, first unit, whether it exists) for each piece that the lane copies.
template <class Move>
__device__ __forceinline__ void each_piece(const Position& at, Move move) {
#pragma unroll
  for (int first = 0; first < 8 * RT * ROW_PIECES; first += 32) {
    const int i = first + at.lane, row = i / ROW_PIECES, piece = i % ROW_PIECES;
    const bool there = row < 8 * RT && 8 * at.tile + row < at.B && int(blockIdx.x) * UNITS + piece * PIECE_UNITS < H - FIRST(at.half);
    if (8 * RT * ROW_PIECES >= 32 || row < 8 * RT) move(row_at(row) + piece * PIECE_WORDS, row, piece * PIECE_UNITS, there);
  }
}

// Reads two rows of the thread's unit.
__device__ __forceinline__ float2 from_sheet(const u32* sheet, int n, const Position& at) {
#if TYPE == 0
  const int row = 8 * n + 2 * at.quad;
  return make_float2(__uint_as_float(sheet[row_at(row) + at.own]), __uint_as_float(sheet[row_at(row + 1) + at.own]));
#else
  return transposed(sheet[32 * n + at.lane]);
#endif
}

__device__ __forceinline__ void to_sheet(u32* sheet, int n, const Position& at, float x, float y) {
#if TYPE == 0
  const int row = 8 * n + 2 * at.quad;
  sheet[row_at(row) + at.own] = __float_as_uint(x), sheet[row_at(row + 1) + at.own] = __float_as_uint(y);
#else
  sheet[32 * n + at.lane] = turn(pack(x, y));
#endif
}

// Copies to shared memory asynchronously; zero-fills if not `there`.
template <int BYTES>
__device__ __forceinline__ void fetch_async(u32 to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
               ::"r"(to), "l"(from), "n"(BYTES), "r"(there ? BYTES : 0) : "memory");
}

// Waits for all asynchronous copies of the warp.
__device__ __forceinline__ void fetched() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
}

// Prefetch a sheet from global memory, and write it back; p: the warp's first row at its first unit. Both need a
// __syncwarp before.
__device__ __forceinline__ void prefetch_sheet(u32* sheet, const Element* p, int stride, const Position& at) {
  each_piece(at, [&](int word, int row, int unit, bool there) {
    fetch_async<PIECE_BYTES>(address_of(sheet + word), there ? p + row * stride + unit : p, there);
  });
}

__device__ __forceinline__ void write_sheet(Element* p, int stride, const u32* sheet, const Position& at) {
  each_piece(at, [&](int word, int row, int unit, bool there) {
    Element* to = p + row * stride + unit;
    if (!there) return;
    if (PIECE_BYTES == 16)
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(sheet + word);
    else if (PIECE_BYTES == 8)
      *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(sheet + word);
    else
      *reinterpret_cast<u32*>(to) = sheet[word];
  });
}
