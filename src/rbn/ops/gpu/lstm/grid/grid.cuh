// Kernels for layers too wide for a block's part of W_h to fit into shared memory: shared by forward and backward.
//
// A thread block owns UNITS = 16 hidden units for all rows of the batch, or of its split (grid_splits.cuh). TEAM blocks
// compute the product for the units of the whole team: each multiplies its own slice of the columns of h (forward) or
// d(W_h h) (backward) by the weights of all the team's units, and they exchange the partial sums (grid_team.cuh). So a
// block reads 1 / TEAM of the other blocks' data, while it has as many weights as without teams, SIDE columns for
// each block of the team. Reading all data would be too slow: L2 delivers 5120 bytes per cycle, 41 per block.
//
// A warp owns 16 rows. A warpgroup's tensor core instruction multiplies 64 rows and 16 columns: one gate, or h, of
// the 16 units of a block. For batches of up to 64 rows (MT = 4) the first warpgroup owns all rows. The second one
// does not multiply then; it handles statistics and loads weights.
//
// Blocks exchange data in the instruction's operand layout. The 16 bytes of a thread (a "piece") are two rows, 8 apart,
// of four neighbouring units, which is exactly what a thread owns. So a thread writes one piece, and the same thread of
// every other block loads it from L2 directly into the operand registers.
//
// The weights are in shared memory, in groups for two pieces' columns, in processing order:
//
//   FIRST groups     loaded in each step while waiting for the other blocks, into slots
//   RESIDENT groups  stay in shared memory
//   SECOND groups    loaded in each step while the resident ones are used, into the same slots
//
// Teams start at different positions of their slices, so that they do not all read the same L2 lines at once.
//
// Between passing on its data and the next product, a block issues no memory operation that could stall, not even a
// prefetch: updating and polling the counter would queue behind it. Stores of saved tensors and prefetches for the next
// step are interleaved with the product.
//
// In float32 the operands are float16, as in cluster.cuh: 11 significant bits like tf32, scaled into range by powers of
// two. W_h has one scale per block. h is at most 1 and passed on times ONE_SCALED; h0 may be larger and has a scale per
// warp, whose rows are the same in all blocks. d(W_h h) has a scale per warp, block and step, whose exponent is passed
// on with it; the reader rescales all pieces to the largest.
//
// Macros besides those of common.cuh: MT (8 or 4 here), TEAM, FIRST, RESIDENT, SECOND, DEPTH (groups prefetched),
// SPLITS, ZONE_C and ZONE_H (zoneout of the cell and of h: 0 none, 1 by a mask, 2 by a rate). For tests: ALL_WAIT, LATE.
// The including file defines SIDE, and PASSED, the pieces that a thread passes on in a step.
#define UNITS 16
#define MW MT
#define KS (8 / MT)  // 8 warps in total
#define CHUNK 1
#define REGISTERS 0
#define BARRIER 1
#define FAST  // the approximate tanh: its error is that of the products
#include "common.cuh"
#include "arguments.cuh"
#include "barriers.cuh"

#ifndef ZONE_C
#define ZONE_C 0
#endif
#ifndef ZONE_H
#define ZONE_H 0
#endif
#define MASKS ((ZONE_C == 1) + (ZONE_H == 1))

#define STAGGER (MT == WARPS ? 4 : 0)
// Groups that are loaded and multiplied together. The hardware tracks loads with few scoreboards, and waiting for one
// waits for all of its loads. With batches there is a scoreboard for each.
#define BATCH 2

// ALL_WAIT: warps that only need to arrive at a barrier wait there, too. Slower, but racecheck understands nothing else.
#ifndef ALL_WAIT
#define ALL_WAIT 0
#endif

// The first warpgroup must let the second one start before it needs the second groups, which are loaded when the second
// warpgroup has left the first groups. With ALL_WAIT, it must do so before it waits for that itself.
#define LATEST (ALL_WAIT && SECOND ? FIRST : FIRST + RESIDENT - BATCH)
#define AHEAD (STAGGER <= LATEST ? STAGGER : LATEST)

static_assert(RESIDENT >= 2 * BATCH - 1 && SECOND <= FIRST, "the second groups are loaded while a resident one is used");

typedef unsigned long long u64;

#define GRID ((H + UNITS * TEAM - 1) / (UNITS * TEAM) * TEAM)  // blocks of a recurrence
#define COLUMNS (SIDE * TEAM)           // columns of the product
#define TILES (COLUMNS / 8)                // accumulator tiles; a thread has 4 sums of each
#define SLICE (FIRST + RESIDENT + SECOND)  // groups that a block multiplies
#define GROUP_WORDS (COLUMNS * 4)          // words of 16 bytes
#define BUFFERS 2  // double buffering of the exchanged data
#define ROW_THREADS (32 * MT)  // threads that own rows and multiply
#define STEP_PIECES (2 * SLICE * TEAM * ROW_THREADS)  // pieces exchanged in a step, including padding of zeros
#define SCALED (TYPE == 0 && PASSED > 1)  // exchanged data have their own powers of two
#define SOURCES (2 * SLICE / PASSED)      // blocks whose pieces make up a slice
#define STEP_WORDS (STEP_PIECES + (SCALED ? MT * TEAM * SOURCES / 4 : 0))  // words of 16 bytes: pieces, then exponents
#define SUBS ((H + 7) / 8)  // groups of 8 units in the saved tensors

// Tests -------------------------------------------------------------------------------------------

// LATE delays block LATE / 4 of the first split at place LATE % 4 of each step, by more than the other blocks need for a
// step.
__device__ __forceinline__ void maybe_late(u32 place) {
#ifdef LATE
  if (blockIdx.x == LATE / 4 && blockIdx.y == 0 && place == LATE % 4) asm volatile("nanosleep.u32 50000;" ::: "memory");
#endif
}

// Forces values to be computed before a wait. The compiler would move their computation behind it, where they are used,
// so the wait is made to depend on them through a number that is zero, which the compiler cannot know.
struct Held {
  u32 mixed = 0;
  __device__ __forceinline__ void hold(float v) {
    mixed ^= __float_as_uint(v);
  }
  __device__ __forceinline__ u32 zero(u32 always_zero) const { return mixed & always_zero; }
};

// Makes values opaque to the compiler, so that it keeps them in registers instead of values computed from them.
__device__ __forceinline__ void anew(uint2& v) { asm volatile("" : "+r"(v.x), "+r"(v.y)); }
__device__ __forceinline__ void anew(float4& v) { asm volatile("" : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w)); }

// The same for one number: values derived from it are not computed earlier and kept in registers.
__device__ __forceinline__ u32 anew(u32 v) {
  asm volatile("" : "+r"(v));
  return v;
}

// Four neighbouring units -------------------------------------------------------------------------

// Raw4: the format in memory. as_factors: converts to 16-bit operands, in float32 times `up`.
#if TYPE == 0
typedef float4 Raw4;

__device__ __forceinline__ void widen4(float (&v)[4], float4 p) { v[0] = p.x, v[1] = p.y, v[2] = p.z, v[3] = p.w; }
__device__ __forceinline__ float4 narrow4(const float (&v)[4]) { return make_float4(v[0], v[1], v[2], v[3]); }
__device__ __forceinline__ uint2 as_factors(float4 v, float up) {
  return make_uint2(pack(v.x * up, v.y * up), pack(v.z * up, v.w * up));
}
__device__ __forceinline__ float4 from_factors(uint2 p, float down) {
  const float2 a = unpack(p.x), b = unpack(p.y);
  return make_float4(a.x * down, a.y * down, b.x * down, b.y * down);
}
#else
typedef uint2 Raw4;

__device__ __forceinline__ void widen4(float (&v)[4], uint2 p) {
  const float2 a = widen(p.x), b = widen(p.y);
  v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y;
}
__device__ __forceinline__ uint2 narrow4(const float (&v)[4]) {
  return make_uint2(narrow(make_float2(v[0], v[1])), narrow(make_float2(v[2], v[3])));
}
__device__ __forceinline__ uint2 as_factors(uint2 v, float) { return v; }
#endif

__device__ __forceinline__ Raw4 load_raw4(const Element* p) { return *reinterpret_cast<const Raw4*>(p); }

__device__ __forceinline__ void load4(float (&v)[4], const float* p) {
  const float4 four = *reinterpret_cast<const float4*>(p);
  v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}

__device__ __forceinline__ void store4(float* p, const float (&v)[4]) {
  *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
}

// Stores 16 bytes for other blocks.
__device__ __forceinline__ void pass_word(uint4* p, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Whether the thread owns rows; the same for all of its warpgroup.
__device__ __forceinline__ bool has_rows() { return ROW_THREADS == THREADS || threadIdx.x < ROW_THREADS; }

// Stores this thread's piece number `i` of a step, from two rows of four units. Blocks without units, which fill up the
// last team, and threads without rows have none.
__device__ __forceinline__ void pass_on(uint4* step, int i, uint2 low, uint2 high) {
  if (blockIdx.x * UNITS >= H || !has_rows()) return;
  pass_word(step + (blockIdx.x * PASSED + i) * ROW_THREADS + threadIdx.x, make_uint4(low.x, high.x, low.y, high.y));
}

__device__ __forceinline__ u32 rank_in_team() { return blockIdx.x % TEAM; }

// Synchronization between blocks ------------------------------------------------------------------

// A block waits for the blocks whose pieces make up its slice, at the slice's counter: [TEAM], 128 bytes apart, initially
// zero. The team's sums depend on all slices. So a block that has them knows that all blocks have passed on their data and
// finished reading those of the step before, whose buffer may be overwritten. The buffer of the sums is overwritten
// earlier; therefore a block also waits for the rest of its team, at the counters of the slices that get the team's pieces.
//
// One warp of a block arrives and polls, preferably one without rows: the release fence stalls the warp until the block's
// stores are visible, and the other warps have work to do meanwhile.
#define SYNC_WARP (MT == WARPS ? 0 : 6)
#define PIECES (2 * SLICE)  // pieces of a slice
#define OWNERS ((H + UNITS - 1) / UNITS)  // blocks that own units and pass on pieces

__device__ __forceinline__ u32 counter_of(u32 slice) { return slice * 32; }

__device__ __forceinline__ void arrive_at_slices(u32* counters) {
  __syncthreads();
  if (threadIdx.x == SYNC_WARP * 32 && blockIdx.x < OWNERS) {
    const u32 first = blockIdx.x * PASSED / PIECES, last = (blockIdx.x * PASSED + PASSED - 1) / PIECES;
    announce(counters + counter_of(first));
    if (PIECES % PASSED && last != first) announce(counters + counter_of(last));
  }
  __syncwarp();
}

// Waits until all blocks of those slices have arrived `times` times.
__device__ __forceinline__ void wait_for_slices(const u32* counters, u32 times) {
  const u32 slice = threadIdx.x - SYNC_WARP * 32, rank = rank_in_team(), team = blockIdx.x - rank;
  const bool of_team = slice >= team * PASSED / PIECES && slice <= ((team + TEAM) * PASSED - 1) / PIECES;
  if (slice < TEAM && (slice == rank || of_team)) {
    const u32 first = slice * PIECES / PASSED, end = (slice * PIECES + PIECES - 1) / PASSED + 1;
    const u32 blocks = first < OWNERS ? min(end, u32(OWNERS)) - first : 0;
    wait_until(counters + counter_of(slice), blocks * times);
  }
  __syncthreads();
}

// Barriers ----------------------------------------------------------------------------------------

// Named barriers of a block at which some warps only arrive.
#define SUMS_READY 1
#define TOTALS_READY 2
#define FIRST_USED 3
#define UNDER_WAY 4
template <int WHICH>
__device__ __forceinline__ void await() {
  asm volatile("bar.sync %0, %1;" ::"n"(WHICH), "n"(THREADS) : "memory");
}
template <int WHICH>
__device__ __forceinline__ void done() {
  if (ALL_WAIT) await<WHICH>();
  else asm volatile("bar.arrive %0, %1;" ::"n"(WHICH), "n"(THREADS) : "memory");
}

#include "grid_splits.cuh"
#include "grid_product.cuh"

// Sums over the batch, tables ------------------------------------------------------------------------

// A number per column of the block, [4 threads][4 gates][4 units]; the threads' parts start at different banks.
#define LINE 20
#define TABLE (4 * LINE)

// Compares the shared memory: weights, `numbers` floats, and what the splits exchange in each step, `sums` floats.
#define CHECK_GRID(numbers, sums) \
  CHECK_SHARED(16 * (FIRST + RESIDENT) * GROUP_WORDS + 4 * ((numbers) + (SPLITS > 1 ? 8 + 2 * SPLITS * (sums) : 0)))

__device__ __forceinline__ int table_index(int gate, int unit) { return unit / 4 * LINE + gate * 4 + unit % 4; }

__device__ __forceinline__ void read_table(float (&v)[4][4], const float* table) {
#pragma unroll
  for (int q = 0; q < 4; q++) load4(v[q], table + (threadIdx.x & 3) * LINE + 4 * q);
}

// Sums over the rows of a warp: in v[i] a thread gets the sum of value NV / 8 * (lane / 4) + i of its units.
template <int NV>
__device__ __forceinline__ void fold_rows(float (&v)[NV]) {
  int n = NV;
#pragma unroll
  for (int mask = 16; mask >= 4; mask >>= 1) {
    n /= 2;
    const bool upper = threadIdx.x & mask;
#pragma unroll
    for (int i = 0; i < NV / 2; i++)
      if (i < n) {
        const float keep = upper ? v[i + n] : v[i], send = upper ? v[i] : v[i + n];
        v[i] = keep + __shfl_xor_sync(~0u, send, mask);
      }
  }
}

// Of 16 values a thread then holds two and stores them at 2 * lane. Gate and unit of element i of the warp's 64:
__device__ __forceinline__ int gate_at(int i) { return i >> 4 & 3; }
__device__ __forceinline__ int unit_at(int i) { return 4 * (i >> 1 & 3) + 2 * (i >> 3 & 1) + (i & 1); }
// Of 8 values (two for each of 4 units) it holds one and stores it at lane. The unit of element i of the warp's 32:
__device__ __forceinline__ int cell_at(int i) { return 4 * (i & 3) + (i >> 2 & 3); }

// Sums one number of each warp that owns rows, in a fixed order.
__device__ __forceinline__ float over_warps(const float* from, int pitch) {
  float v[MT];
#pragma unroll
  for (int w = 0; w < MT; w++) v[w] = from[w * pitch];
#pragma unroll
  for (int n = MT / 2; n > 0; n /= 2)
#pragma unroll
    for (int w = 0; w < n; w++) v[w] += v[w + n];
  return v[0];
}

// Gates -------------------------------------------------------------------------------------------

// The factor of a gate's pre-activation: a sigmoid is computed from the tanh of half its argument.
__device__ __forceinline__ float pre(int gate) { return gate == 2 ? 1.0f : 0.5f; }
__device__ __forceinline__ float gate_of(int gate, float v) {
  const float y = tanh_(v);
  return gate == 2 ? y : 0.5f * y + 0.5f;
}

// Zoneout: by a mask (`mask` has the bytes of four neighbouring units) the old or the new value; by a rate the expected
// value. To compute the gradient of one of the two, pass the result's gradient in its place and 0 for the other.
template <int ZONE>
__device__ __forceinline__ float zoned(u32 mask, int e, float rate, float old, float fresh) {
  if (ZONE == 1) return mask >> 8 * e & 0xff ? old : fresh;
  return ZONE == 2 ? rate * old + (1.0f - rate) * fresh : fresh;
}

// Zero where a row does not count.
__device__ __forceinline__ Raw4 masked(Raw4 v, bool counts) { return counts ? v : Raw4{}; }
