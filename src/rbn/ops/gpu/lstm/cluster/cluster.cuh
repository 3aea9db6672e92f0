// For small layers, whose blocks form one thread-block cluster: what both kernels share.
//
// A block owns UNITS = 8 hidden units for all rows of the batch, a warp RT tiles of 8 rows of them, a thread
// one unit (`own` = lane / 4) of two neighbouring rows of each tile (2 * `quad` = 2 * (lane % 4) and the
// next). That is how the tensor core instruction leaves its sums if W_h is its left side (m16) and the rows
// are its right side (n8): of the 16 rows of a sum a thread has two, which are two gates of its unit.
// Of UNITS = 16 a warp has one half: MW warps have the first 8 units, MW more the others, each all rows.
//
// One warp more, the last, owns no rows but the sums over the batch: it adds up those of the others,
// makes what they multiply and add with, and reads and writes statistics. Its lane owns gate `quad` of unit
// `own`. The others meet only it.
//
// The blocks exchange h, and shares of dh, through distributed shared memory, by stores that count
// themselves at a barrier of the receiver (st.async, mbarrier), of which each of two buffers has one. A buffer is
// written again only after what the others made of it has come. What comes from block rank - i lies at place i,
// and is the i-th that it sends. A warp needs only its own rows, so what a block of 8 units has for itself no
// barrier need count: the warp that made it uses it.
//
// What leaves the block is held up by what left before it, and so is all that a warp reads after that, be it
// from the block's own memory. So what a step leaves behind is written in the next one, in parts,
// where the warps wait for the sums over the batch or compute.
//
// Products have 16-bit operands, also of a layer in float32: float16 has the 11 significant bits of
// tf32, and what is multiplied is brought to float16's range by powers of two, which are exact.
//
// Named from outside besides those of common.cuh: MW (warps that together own all rows), RT, UNITS (8 or 16).
// STAGGERED: half of the warps send first what the other blocks need and do then what is left of the step, the others
// the other way round, so that stores to other blocks, of which there are enough for both, do not hold up all of them.
// SCALAR: the input has one feature, so that the input term is x times a vector w. What is read of it in a step is a number
// for each row, float32, less its mean where statistics are the minibatch's (MODE_X = 1, also those of all steps together).
// Its variance is w^2 times that of x. If v is the latter and r = 1 / sqrt(w^2 v + eps), the term becomes gamma w r x, and
// d(w) of a step is gamma eps r^3 sum(x d(.)): all but the share of eps goes with the normalization. So no d(W_x x) is kept.
// ALL_WAIT: nobody only arrives at a barrier, and all lanes of a warp arrive at those in shared memory, which is what
// racecheck understands.
#ifndef UNITS
#define UNITS 8
#endif
#ifndef SCALAR
#define SCALAR 0
#endif
#ifndef ALL_WAIT
#define ALL_WAIT 0
#endif
#ifndef STAGGERED
#define STAGGERED 0
#endif
#define HALVES (UNITS / 8)
#define FIRST(half) (HALVES > 1 ? 8 * (half) : 0)  // unit of a half, in the block
// For the last warp, which has units of both. Where there is one, s is a constant from the beginning: then blocks of 8
// units are compiled as if there were no others.
#if HALVES > 1
#define EACH_HALF _Pragma("unroll") for (int s = 0; s < HALVES; s++)
#else
#define EACH_HALF if (constexpr int s = 0; true)
#endif
#define EIGHTS ((H + 7) / 8)  // of the layer's units, in what is saved for the backward pass
#define MT MW
#define KS HALVES
#define CHUNK 1
#define REGISTERS 0
#define BARRIER 1
#include "common.cuh"
#include "exchange.cuh"
#undef THREADS
#define WORKERS (32 * WARPS)  // threads that own rows
#define THREADS (WORKERS + 32)
// A multiprocessor's registers are those of four parts, each with every fourth warp. Blocks of 16 units have 8 warps with
// rows, which take most of them; that they may, the last warp and three more, which only that is for, give theirs away.
// WORKER_REGISTERS is named by each kernel.
#define LAUNCHED (HALVES > 1 ? WORKERS + 128 : THREADS)
#define SERVER_REGISTERS (3 * 168 - 2 * WORKER_REGISTERS)
#ifndef RT
#define RT 2
#endif
#define ROW_TILES (MW * RT)
#define X_ROWS (8 * ROW_TILES)  // of x in a step, if SCALAR: those beyond the batch, and padded ones, are zeros
#if SCALAR
typedef float Input;
#else
typedef Element Input;
#endif

// Whether sums over the batch are made in each step.
#define SUM_H (MODE_H == 1)
#define SUM_C (MODE_C == 1)
#define PAIRS ((B + 1) / 2)  // of rows, in what is saved for the backward pass

// One of two numbers, without a branch: those that the compiler would make keep the rows of a thread
// from being computed side by side.
__device__ __forceinline__ float pick(bool first, float x, float y) {
  float v;
  asm("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\tselp.f32 %0, %1, %2, p;\n\t}" : "=f"(v) : "f"(x), "f"(y), "r"(u32(first)));
  return v;
}

// Operands of products ------------------------------------------------------------------------------

// The same with half the columns.
__device__ __forceinline__ void multiply8(float (&c)[4], u32 a0, u32 a1, u32 b) {
#if TYPE == 1
#define SHAPE8 "m16n8k8.row.col.f32.bf16.bf16.f32"
#else
#define SHAPE8 "m16n8k8.row.col.f32.f16.f16.f32"
#endif
  asm("mma.sync.aligned." SHAPE8 " {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(b));
}

// An 8 x 8 matrix of 16-bit numbers, two neighbours of row lane / 4 in each thread, transposed.
__device__ __forceinline__ u32 turn(u32 v) {
  u32 out;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(out) : "r"(v));
  return out;
}

// Two neighbours of a row of W as an operand.
__device__ __forceinline__ u32 operand(const Element* p, float scale) {
#if TYPE == 0
  const float2 v = load2(p);
  return pack(v.x * scale, v.y * scale);
#else
  return *reinterpret_cast<const u32*>(p);
#endif
}

// Nonlinearities ------------------------------------------------------------------------------------

// Of a number that has been multiplied with pre(gate), which costs nothing where that is part of a factor.
// The approximate tanh is right to 2^-11 of its value: as the numbers in half precision are, and the
// products of a layer in float32.
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

// The rows of a warp by its eight units ---------------------------------------------------------------

struct Place {
  int lane, warp, own, quad, tile;  // tile: the warp's first
  int half, unit, within;           // of the block's units; the thread's unit, and which of the block's it is
  bool mine;                        // whether the unit exists
  int B;

  __device__ __forceinline__ int row(int n, int e) const { return 8 * (tile + n) + 2 * quad + e; }
  __device__ __forceinline__ bool in(int n, int e) const { return row(n, e) < B && mine; }
  // For the last warp: whether the unit of this half exists.
  __device__ __forceinline__ bool has(int s) const { return s ? unit + 8 * s < H : mine; }
};

__device__ __forceinline__ Place place_of(int B) {
  Place at;
  at.B = B;
  at.lane = threadIdx.x & 31, at.warp = threadIdx.x >> 5;
  at.half = HALVES > 1 && at.warp < WARPS ? at.warp / MW : 0, at.tile = HALVES > 1 ? at.warp % MW * RT : at.warp * RT;
  at.own = at.lane >> 2, at.quad = at.lane & 3, at.within = FIRST(at.half) + at.own;
  at.unit = blockIdx.x * UNITS + at.within;
  at.mine = at.unit < H;
  return at;
}

// Two units of a row in 16 bits, of the whole warp, to two rows of a unit.
__device__ __forceinline__ float2 turned(u32 v) { return unpack(turn(v)); }

// The cluster ---------------------------------------------------------------------------------------

// The i-th block that this one sends to, and the i-th that it hears from; both begin with itself.
__device__ __forceinline__ u32 receiver(u32 i) { return blockIdx.x + i < BLOCKS ? blockIdx.x + i : blockIdx.x + i - BLOCKS; }
__device__ __forceinline__ u32 sender(u32 i) { return blockIdx.x >= i ? blockIdx.x - i : blockIdx.x - i + BLOCKS; }

// Who says what a barrier expects, and how much: one thread, or with ALL_WAIT all lanes of its warp.
#define ARRIVALS (ALL_WAIT ? 32 : 1)
#define EXPECTS (ALL_WAIT ? threadIdx.x < 32 : threadIdx.x == 0)
#define EXPECTED(bytes) (ALL_WAIT && threadIdx.x ? 0 : (bytes))

// Registers of the warps with rows, and of the others. Four warps each do it together.
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

// Of N numbers for each gate, summed over the four threads of a unit: thread `quad` gets those of gate `quad`.
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

// Two numbers of a unit over its four threads, into `scratch` [WARPS][8][2].
__device__ __forceinline__ void sum_cells(float* scratch, float first, float second, const Place& at) {
  const bool upper = at.quad & 2;
  float sum = pick(upper, second, first) + __shfl_xor_sync(~0u, pick(upper, first, second), 2);
  sum += __shfl_xor_sync(~0u, sum, 1);
  if (!(at.quad & 1)) scratch[at.warp * 16 + 2 * at.own + (at.quad >> 1)] = sum;
}

// scratch[index] of all warps of a half, `pitch` apart, in a fixed order.
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

// The warps with rows and the one that serves them. They bring it sums, arrive at one of these barriers and go on;
// it waits there. What it makes of the sums they get after a meeting of all threads (__syncthreads): that it waits
// there, too, costs nothing, since it has nothing to do until the next sums come.
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

// Those with rows meet, where a warp needs what that of the other half has.
__device__ __forceinline__ void meet_workers() { await<3, ALL_WAIT ? THREADS : WORKERS>(); }
__device__ __forceinline__ void let_workers_meet() {
  if (ALL_WAIT) meet_workers();
}

// Where two numbers of a gate of a unit lie, so that all four gates are two reads of 16 bytes, which the
// units of a warp make without conflicts.
__device__ __forceinline__ int slot(int unit, int gate) { return ((gate >> 1) * UNITS + unit) * 2 + (gate & 1); }

__device__ __forceinline__ void read_slots(float2 (&v)[4], const float2* from, int unit) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const float4 two = *reinterpret_cast<const float4*>(from + slot(unit, 2 * half));
    v[2 * half] = make_float2(two.x, two.y), v[2 * half + 1] = make_float2(two.z, two.w);
  }
}

// What a step keeps, and reads ------------------------------------------------------------------------

// For the backward pass: eight numbers of a thread, 16 bytes side by side. In float32 those of two gates
// of all units of a pair of rows come first, so that sectors are written whole.
#define EIGHTH (TYPE == 0 ? 2 : 1)  // 16 bytes each
#define EIGHT_STEP 32               // numbers from the first to the second

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

// Where the eight of a pair of rows begin for unit `own`; pair: the number of the pair.
__device__ __forceinline__ i64 eight_at(i64 pair, int own) { return pair * 64 + own * (8 / EIGHTH); }

// Rows of a warp by its units, as they lie in memory: in shared memory each row begins `row_at` words
// from the first, in float32 such that neither rows nor units conflict. Lanes move pieces as large as memory's
// order allows, several to a row, and another lane may read them.
#define PIECE_BYTES (TYPE == 0 ? (H % 4 ? 8 : 16) : H % 4 ? 4 : H % 8 ? 8 : 16)
#define PIECE_WORDS (PIECE_BYTES / 4)
#define PIECE_UNITS (PIECE_BYTES / (TYPE == 0 ? 4 : 2))
#define ROW_PIECES (8 / PIECE_UNITS)
#define SHEET (RT * (TYPE == 0 ? 80 : 32))  // words

__device__ __forceinline__ int row_at(int row) { return TYPE == 0 ? 8 * (row + row / 4) : 4 * row; }

// For each piece that the lane moves: where it lies in a sheet, its row and first unit, whether there is such a one.
template <class Move>
__device__ __forceinline__ void each_piece(const Place& at, Move move) {
#pragma unroll
  for (int first = 0; first < 8 * RT * ROW_PIECES; first += 32) {
    const int i = first + at.lane, row = i / ROW_PIECES, piece = i % ROW_PIECES;
    const bool there = row < 8 * RT && 8 * at.tile + row < at.B && int(blockIdx.x) * UNITS + piece * PIECE_UNITS < H - FIRST(at.half);
    if (8 * RT * ROW_PIECES >= 32 || row < 8 * RT) move(row_at(row) + piece * PIECE_WORDS, row, piece * PIECE_UNITS, there);
  }
}

// Two rows of the thread's unit.
__device__ __forceinline__ float2 from_sheet(const u32* sheet, int n, const Place& at) {
#if TYPE == 0
  const int row = 8 * n + 2 * at.quad;
  return make_float2(__uint_as_float(sheet[row_at(row) + at.own]), __uint_as_float(sheet[row_at(row + 1) + at.own]));
#else
  return turned(sheet[32 * n + at.lane]);
#endif
}

__device__ __forceinline__ void to_sheet(u32* sheet, int n, const Place& at, float x, float y) {
#if TYPE == 0
  const int row = 8 * n + 2 * at.quad;
  sheet[row_at(row) + at.own] = __float_as_uint(x), sheet[row_at(row + 1) + at.own] = __float_as_uint(y);
#else
  sheet[32 * n + at.lane] = turn(pack(x, y));
#endif
}

// Nothing is read from where there is nothing: zeros come instead.
template <int BYTES>
__device__ __forceinline__ void fetch_async(u32 to, const void* from, bool there) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2, %3;"
               ::"r"(to), "l"(from), "n"(BYTES), "r"(there ? BYTES : 0) : "memory");
}

// What the warp asked for is there, for all its lanes.
__device__ __forceinline__ void fetched() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  __syncwarp();
}

// From memory to a sheet and back; p: the warp's first row at its first unit. The lanes of the warp meet
// before either.
__device__ __forceinline__ void ask_sheet(u32* sheet, const Element* p, int stride, const Place& at) {
  each_piece(at, [&](int word, int row, int unit, bool there) {
    fetch_async<PIECE_BYTES>(address_of(sheet + word), there ? p + row * stride + unit : p, there);
  });
}

__device__ __forceinline__ void keep_sheet(Element* p, int stride, const u32* sheet, const Place& at) {
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
