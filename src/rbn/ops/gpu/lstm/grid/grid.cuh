// For layers too wide for W_h's share of a block to stay in shared memory: what both kernels share.
//
// A block owns UNITS = 16 hidden units for all rows of the batch, or of its share of it (grid_splits.cuh). TEAM blocks make
// the product for the units of all of them together: each multiplies its own slice of the columns of h, or of d(W_h h),
// with the weights of all the team's units, and they hand each other the sums (grid_team.cuh). So a block
// reads a TEAM-th of what comes from the others, and its weights, SIDE columns for each block of the
// team, are as many as if it read all. It has to: L2 gives all blocks together 5120 bytes a cycle, 41 each.
//
// A warp takes 16 rows, a warpgroup's tensor core instruction 64 rows and 16 columns: one gate, or h, of
// the 16 units of a block. Of batches up to 64 rows (MT = 4) the first warpgroup takes all. The second one then
// has no rows: it does not multiply, and is there for statistics and for the weights that come again.
//
// What blocks pass to each other lies as the instruction wants it, 16 bytes for each thread ("piece"): two
// rows, 8 apart, and four neighbouring units, which is what a thread owns. So it writes one piece, and the
// same thread of every other block reads it, straight from L2 into the registers of the instruction.
//
// The weights lie in shared memory, in groups of two pieces' columns, in the order of processing:
//
//   FIRST groups     read again in each step, while the others are waited for, into slots
//   RESIDENT groups  stay
//   SECOND groups    read again in each step, while the resident ones are used, into the same slots
//
// Each team begins at another place of its slice: all at the same would be after the same lines.
//
// Nothing leaves a block between passing on and the next product that could wait, be it a request: the counter and
// the looks at it would queue behind it. What is saved, and the next step's data, go beside the product.
//
// In float32 the factors of products are float16, as in cluster.cuh: 11 significant bits, like tf32, and powers of two
// that bring them into its range. W_h has one power for each block. h is within 1 and passed on times ONE_SCALED; h0, which
// need not be, has a power for each warp, whose rows are the same in all blocks. d(W_h h) has one for each warp, block and
// step, which is passed on beside it ("exponents"): who multiplies brings all to the largest.
//
// Named from outside besides those of common.cuh: MT (8 or 4 here), TEAM, FIRST, RESIDENT, SECOND, DEPTH (groups asked
// for ahead), SPLITS, ZONE_C and ZONE_H (zoneout of the cell and of h: 0 none, 1 by a mask, 2 by a rate). For trials: STAGGER,
// MEETING, ALL_WAIT, LATE. The including file defines SIDE and PASSED, the pieces that a thread passes on in a step.
#define UNITS 16
#ifndef MT
#define MT 8
#endif
#define MW MT
#define KS (8 / MT)  // only so that there are 8 warps
#define CHUNK 1
#define REGISTERS 0
#define BARRIER 1
#define FAST  // as large as the errors of products
#include "common.cuh"
#include "barriers.cuh"

#ifndef ZONE_C
#define ZONE_C 0
#endif
#ifndef ZONE_H
#define ZONE_H 0
#endif
#define MASKS ((ZONE_C == 1) + (ZONE_H == 1))

#ifndef STAGGER
#define STAGGER (MT == WARPS ? 4 : 0)
#endif
// Groups that are asked for, and multiplied, together: the hardware has few counters for loads, and waiting for one
// is waiting for all that were given it. So there is one for each of a few batches.
#define BATCH 2

// At barriers all wait, also who is only waited for: slower, but racecheck takes nothing else for an order.
#ifndef ALL_WAIT
#define ALL_WAIT 0
#endif

// Before the first warpgroup needs the second groups, which come when the other has left the first ones. Where all
// wait, it must let the other begin before it waits until that has left them.
#define LATEST (ALL_WAIT && SECOND ? FIRST : FIRST + RESIDENT - BATCH)
#define AHEAD (STAGGER <= LATEST ? STAGGER : LATEST)

static_assert(RESIDENT >= 2 * BATCH - 1 && SECOND <= FIRST, "the second groups come while a resident one is used");

typedef unsigned long long u64;

#define GRID ((H + UNITS * TEAM - 1) / (UNITS * TEAM) * TEAM)  // blocks of a recurrence
#define COLUMNS (SIDE * TEAM)           // of the product
#define TILES (COLUMNS / 8)                // a thread has 4 sums of each
#define SLICE (FIRST + RESIDENT + SECOND)  // groups that a block multiplies
#define GROUP_WORDS (COLUMNS * 4)          // of 16 bytes
#define BUFFERS 2  // of what is passed on
#define HOLDERS (32 * MT)  // threads that have rows, and multiply
#define STEP_PIECES (2 * SLICE * TEAM * HOLDERS)  // of what is passed in a step, with some that are zero
#define SCALED (TYPE == 0 && PASSED > 1)  // what is passed on has powers of two of its own
#define SOURCES (2 * SLICE / PASSED)      // blocks whose pieces are a slice
#define STEP_WORDS (STEP_PIECES + (SCALED ? MT * TEAM * SOURCES / 4 : 0))  // of 16 bytes: the pieces, the exponents
#define SUBS ((H + 7) / 8)  // what is saved lies in groups of 8 units

// Trials ------------------------------------------------------------------------------------------

// With LATE one block, LATE / 4 of the first split, is late at one place of each step, LATE % 4: by more than the others
// need for a step.
__device__ __forceinline__ void maybe_late(u32 place) {
#ifdef LATE
  if (blockIdx.x == LATE / 4 && blockIdx.y == 0 && place == LATE % 4) asm volatile("nanosleep.u32 50000;" ::: "memory");
#endif
}

// What is computed before a wait although it is needed after it: the compiler would move it there. So the
// wait depends on it, by a number that is zero, which the compiler cannot know.
struct Held {
  u32 mixed = 0;
  __device__ __forceinline__ void hold(float v) {
    mixed ^= __float_as_uint(v);
  }
  __device__ __forceinline__ u32 zero(u32 nothing) const { return mixed & nothing; }
};

// From here on the compiler takes these for numbers it has not seen: it keeps them, not what it made of them.
__device__ __forceinline__ void anew(uint2& v) { asm volatile("" : "+r"(v.x), "+r"(v.y)); }
__device__ __forceinline__ void anew(float4& v) { asm volatile("" : "+f"(v.x), "+f"(v.y), "+f"(v.z), "+f"(v.w)); }

// The same number, from here on: what is made of it is not made before, to lie in a register.
__device__ __forceinline__ u32 anew(u32 v) {
  asm volatile("" : "+r"(v));
  return v;
}

// Four neighbouring units -------------------------------------------------------------------------

// Raw4: as they are in memory. as_factors: as they are multiplied, in 16 bits; only in float32 `up` is looked at.
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

// 16 bytes for other blocks.
__device__ __forceinline__ void pass_word(uint4* p, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

// Whether a thread has rows: its warpgroup does or does not.
__device__ __forceinline__ bool has_rows() { return HOLDERS == THREADS || threadIdx.x < HOLDERS; }

// This thread's piece number `i` of a step, from two rows of four units. Blocks without a unit, which
// fill up the last team, and threads without rows have none.
__device__ __forceinline__ void pass_on(uint4* step, int i, uint2 low, uint2 high) {
  if (blockIdx.x * UNITS >= H || !has_rows()) return;
  pass_word(step + (blockIdx.x * PASSED + i) * HOLDERS + threadIdx.x, make_uint4(low.x, high.x, low.y, high.y));
}

__device__ __forceinline__ u32 rank_in_team() { return blockIdx.x % TEAM; }

// Meetings ----------------------------------------------------------------------------------------

// Who multiplies a slice waits for the blocks whose pieces it is made of, at a counter of the slice:
// [TEAM], 128 bytes apart, zero. The sums of a team come from all slices. So whoever has them knows that all blocks have
// passed on, and are done with what they read before: it may be written over. The sums themselves are written over
// before that, so a block also waits for the rest of its team: for the slices it passes on to.
//
// One warp announces and looks for its block, where there is one without rows that one: a fence keeps a warp waiting
// until all that it stored is there, and the others have something to do meanwhile.
#ifndef MEETING
#define MEETING (MT == WARPS ? 0 : 6)
#endif
#define PIECES (2 * SLICE)  // of a slice
#define OWNERS ((H + UNITS - 1) / UNITS)  // blocks that have units, and pass on pieces of theirs

__device__ __forceinline__ u32 counter_of(u32 slice) { return slice * 32; }

__device__ __forceinline__ void arrive_at_slices(u32* counters) {
  __syncthreads();
  if (threadIdx.x == MEETING * 32 && blockIdx.x < OWNERS) {
    const u32 first = blockIdx.x * PASSED / PIECES, last = (blockIdx.x * PASSED + PASSED - 1) / PIECES;
    announce(counters + counter_of(first));
    if (PIECES % PASSED && last != first) announce(counters + counter_of(last));
  }
  __syncwarp();
}

// Until all blocks of those slices have arrived `times` times.
__device__ __forceinline__ void wait_for_slices(const u32* counters, u32 times) {
  const u32 slice = threadIdx.x - MEETING * 32, rank = rank_in_team(), team = blockIdx.x - rank;
  const bool of_team = slice >= team * PASSED / PIECES && slice <= ((team + TEAM) * PASSED - 1) / PIECES;
  if (slice < TEAM && (slice == rank || of_team)) {
    const u32 first = slice * PIECES / PASSED, end = (slice * PIECES + PIECES - 1) / PASSED + 1;
    const u32 blocks = first < OWNERS ? min(end, u32(OWNERS)) - first : 0;
    wait_until(counters + counter_of(slice), blocks * times);
  }
  __syncthreads();
}

// Barriers ----------------------------------------------------------------------------------------

// Meetings of a block in two halves: some are only waited for, some only wait.
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

// A number for each column of the block, [4 threads][4 gates][4 units]; each thread's part begins at another bank.
#define LINE 20
#define TABLE (4 * LINE)

__device__ __forceinline__ int place_in_table(int gate, int unit) { return unit / 4 * LINE + gate * 4 + unit % 4; }

__device__ __forceinline__ void read_table(float (&v)[4][4], const float* table) {
#pragma unroll
  for (int q = 0; q < 4; q++) load4(v[q], table + (threadIdx.x & 3) * LINE + 4 * q);
}

// Sums over the rows of a warp: a thread gets those of numbers NV / 8 * (lane / 4) + i of its units.
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

// So a thread has two of 16 numbers, and puts them where its number is. Of the 64 that a warp has then:
__device__ __forceinline__ int gate_at(int i) { return i >> 4 & 3; }
__device__ __forceinline__ int unit_at(int i) { return 4 * (i >> 1 & 3) + 2 * (i >> 3 & 1) + (i & 1); }
// And one of 8 numbers, 4 units twice:
__device__ __forceinline__ int cell_at(int i) { return 4 * (i & 3) + (i >> 2 & 3); }

// One number of each warp that has rows, in a fixed order.
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

// What a gate's nonlinearity is given times this: a sigmoid is a tanh of half of it.
__device__ __forceinline__ float pre(int gate) { return gate == 2 ? 1.0f : 0.5f; }
__device__ __forceinline__ float gate_of(int gate, float v) {
  const float y = tanh_(v);
  return gate == 2 ? y : 0.5f * y + 0.5f;
}

// Zoneout: the old number where the mask says so, whose bytes for four neighbouring units are `mask`, else the new one;
// by a rate, what is to be expected of it. The result's gradient in the place of the one, and 0 in that of the other,
// gives the gradient of the one.
template <int ZONE>
__device__ __forceinline__ float zoned(u32 mask, int e, float rate, float old, float fresh) {
  if (ZONE == 1) return mask >> 8 * e & 0xff ? old : fresh;
  return ZONE == 2 ? rate * old + (1.0f - rate) * fresh : fresh;
}

// Zero where a row does not count.
__device__ __forceinline__ Raw4 masked(Raw4 v, bool counts) { return counts ? v : Raw4{}; }
