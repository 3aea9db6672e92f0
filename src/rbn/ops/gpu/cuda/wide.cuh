// For layers too wide for W_h's share of a block to stay in shared memory: what both kernels share.
//
// A block owns UNITS = 16 hidden units for all rows of the batch. TEAM blocks make the product for the
// units of all of them together: each multiplies its own slice of the columns of h, or of d(W_h h),
// with the weights of all the team's units, and they hand each other the sums through L2. So a block
// reads a TEAM-th of what comes from the others, and its weights, SIDE columns for each block of the
// team, are as many as if it read all.
//
// A warp takes 16 rows, a warpgroup's tensor core instruction 64 rows and 16 columns: one gate, or h, of
// the 16 units of a block. What blocks pass to each other lies as the instruction wants it, 16 bytes for
// each thread ("piece"): two rows, 8 apart, and four neighbouring units, which is what a thread owns. So
// it writes one piece, and the same thread of every other block reads it, straight from L2 into the
// registers of the instruction.
//
// The weights lie in shared memory, in groups of two pieces' columns, in the order of processing:
//
//   FIRST groups     read again in each step, while the others are waited for, into slots
//   RESIDENT groups  stay
//   SECOND groups    read again in each step, while the resident ones are used, into the same slots
//
// Each team begins at another place of its slice: all at the same would be after the same lines.
//
// Named from outside besides those of common.cuh: TEAM, FIRST, RESIDENT, SECOND, DEPTH (groups asked
// for ahead). For trials: TAGGED (a team does not meet at a counter), WARPWISE (all blocks meet warp by warp),
// SPREAD (counters at which they meet), NO_HOLD, CLOCK. The including file defines SIDE and PASSED, the
// pieces that a thread passes on in a step.
#define UNITS 16
#define MT 8
#define MW 8
#define KS 1
#define CHUNK 1
#define REGISTERS 0
#define BARRIER 1
#include "common.cuh"

#if TYPE == 0
#error "the weights in float32 would not fit"
#endif

static_assert(RESIDENT > 0 && SECOND <= FIRST, "the second groups come while a resident one is used");

#ifndef TAGGED
#define TAGGED 0
#endif

#ifndef WARPWISE
#define WARPWISE 0
#endif
#ifndef SPREAD
#define SPREAD 1
#endif

typedef unsigned long long u64;

#define GRID ((H + UNITS * TEAM - 1) / (UNITS * TEAM) * TEAM)  // blocks of a recurrence
#define COLUMNS (SIDE * TEAM)           // of the product
#define TILES (COLUMNS / 8)                // a thread has 4 sums of each
#define SLICE (FIRST + RESIDENT + SECOND)  // groups that a block multiplies
#define GROUP_WORDS (COLUMNS * 4)          // of 16 bytes
#define SLOTS (FIRST > SECOND ? FIRST : SECOND)
#define SENT (SIDE / 8 * THREADS)  // words of 16 bytes to each other block of the team
#define STEP_PIECES (2 * SLICE * TEAM * THREADS)  // of what is passed in a step, with some that are zero
#define SUBS ((H + 7) / 8)  // what is saved lies in groups of 8 units

// Trials ------------------------------------------------------------------------------------------

// With CLOCK warps of blocks 0 and 60 write down when they pass the stages of the 32 steps from number
// CLOCK on, [2][32][WARPS][16], 256 bytes beyond the counter of the only recurrence.
#ifdef CLOCK
struct Marks {
  volatile u32* at;
  __device__ __forceinline__ void begin(u32* counter, int step) {
    const bool here = (blockIdx.x == 0 || blockIdx.x == 60) && threadIdx.x % 32 == 0;
    const bool now = here && step >= CLOCK && step < CLOCK + 32;
    at = now ? counter + 64 + (((blockIdx.x != 0) * 32 + step - CLOCK) * WARPS + threadIdx.x / 32) * 16 : nullptr;
  }
  __device__ __forceinline__ void pass(int stage) const {
    u32 when;
    asm volatile("mov.u32 %0, %%clock;" : "=r"(when)::"memory");
    if (at) at[stage] = when;
  }
};
#define MARKS(counter, step) Marks marks; marks.begin(counter, step)
#define MARK(stage) marks.pass(stage)
#else
#define MARKS(counter, step)
#define MARK(stage)
#endif

// What is computed before a wait although it is needed after it: the compiler would move it there. So the
// wait depends on it, by a number that is zero, which the compiler cannot know.
struct Held {
  u32 mixed = 0;
  __device__ __forceinline__ void hold(float v) {
#ifndef NO_HOLD
    mixed ^= __float_as_uint(v);
#endif
  }
  __device__ __forceinline__ u32 zero(u32 nothing) const { return mixed & nothing; }
};

// From here on the compiler takes these for numbers it has not seen: it keeps them, not what it made of them.
__device__ __forceinline__ void anew(uint2& v) { asm volatile("" : "+r"(v.x), "+r"(v.y)); }

// Four neighbouring units -------------------------------------------------------------------------

__device__ __forceinline__ void widen4(float (&v)[4], uint2 p) {
  const float2 a = widen(p.x), b = widen(p.y);
  v[0] = a.x, v[1] = a.y, v[2] = b.x, v[3] = b.y;
}

__device__ __forceinline__ uint2 narrow4(const float (&v)[4]) {
  return make_uint2(narrow(make_float2(v[0], v[1])), narrow(make_float2(v[2], v[3])));
}

__device__ __forceinline__ uint2 load_raw4(const Element* p) { return *reinterpret_cast<const uint2*>(p); }

__device__ __forceinline__ void store_raw4(Element* p, uint2 v) { *reinterpret_cast<uint2*>(p) = v; }

__device__ __forceinline__ void store_narrow4(Element* p, const float (&v)[4]) { store_raw4(p, narrow4(v)); }

__device__ __forceinline__ void load4(float (&v)[4], const float* p) {
  const float4 four = *reinterpret_cast<const float4*>(p);
  v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}

__device__ __forceinline__ void store4(float* p, const float (&v)[4]) {
  *reinterpret_cast<float4*>(p) = make_float4(v[0], v[1], v[2], v[3]);
}

// 16 bytes for another block, and from one.
__device__ __forceinline__ void pass_word(uint4* p, uint4 v) {
  asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ __forceinline__ uint4 peek_word(const uint4* p) { return peek(reinterpret_cast<const Element*>(p)); }

// This thread's piece number `i` of a step, from two rows of four units. Blocks without a unit, which
// fill up the last team, have none.
__device__ __forceinline__ void pass_on(uint4* step, int i, uint2 low, uint2 high) {
  if (blockIdx.x * UNITS >= H) return;
  pass_word(step + (blockIdx.x * PASSED + i) * THREADS + threadIdx.x, make_uint4(low.x, high.x, low.y, high.y));
}

__device__ __forceinline__ u32 rank_in_team() { return blockIdx.x % TEAM; }

__device__ __forceinline__ u32 shared_address(const void* p) { return u32(__cvta_generic_to_shared(p)); }

// A meeting of all blocks of a recurrence. What a warp passes on is read by the same warp of the others, so that
// each could meet those by itself (WARPWISE); then some other barrier of the block must keep its warps together.
// counters: [WARPS][SPREAD], 128 bytes apart, zero.
struct Meeting {
  u32* counters;
  __device__ __forceinline__ void arrive() const {
    if (WARPWISE) __syncwarp();
    else __syncthreads();
    if (threadIdx.x % (WARPWISE ? 32 : THREADS) == 0)
      announce(counters + ((WARPWISE ? threadIdx.x / 32 : 0) * SPREAD + blockIdx.x % SPREAD) * 32);
  }
  // Until all have arrived `times` times. Before it a barrier of the block was passed (WARPWISE).
  __device__ __forceinline__ void wait(u32 times) const {
    const u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32, blocks = (GRID + SPREAD - 1 - lane) / SPREAD;
    if ((WARPWISE || warp == 0) && lane < SPREAD)
      wait_until(counters + ((WARPWISE ? warp : 0) * SPREAD + lane) * 32, blocks * times);
    if (WARPWISE) __syncwarp();
    else __syncthreads();
  }
};

// Weights -----------------------------------------------------------------------------------------

// What threads wrote to shared memory is for the tensor cores to read, after the next barrier.
__device__ __forceinline__ void for_tensor_cores() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The place in the slice at which this block begins, in groups.
__device__ __forceinline__ int beginning() { return int(blockIdx.x / TEAM * SLICE / (GRID / TEAM)); }

// The first of the two pieces of group i, in the order of processing.
__device__ __forceinline__ int piece_of(int i) {
  const int at = i + beginning();
  return 2 * (rank_in_team() * SLICE + (at < SLICE ? at : at - SLICE));
}

// This block's weights: the resident ones into shared memory, the others into `spilled`, as the tensor
// cores take them (8 columns of 16 bytes are 128 bytes in a row). four(n, piece, u): the weights of
// column n of the product for units u to u + 3 of a piece.
template <class Four>
__device__ __forceinline__ void pack(uint4* resident, uint4* spilled, Four four) {
  for (int i = threadIdx.x; i < SLICE * COLUMNS; i += THREADS) {
    const int group = i / COLUMNS, n = i % COLUMNS, piece = piece_of(group);
    uint4* to = group < FIRST              ? spilled + group * GROUP_WORDS
                : group < FIRST + RESIDENT ? resident + (group - FIRST) * GROUP_WORDS
                                           : spilled + (group - RESIDENT) * GROUP_WORDS;
#pragma unroll
    for (int s = 0; s < 2; s++) {
      uint2 v[4];
#pragma unroll
      for (int t = 0; t < 4; t++) v[t] = four(n, piece + s, 4 * t);
      to[2 * s * COLUMNS + n] = make_uint4(v[0].x, v[1].x, v[2].x, v[3].x);
      to[(2 * s + 1) * COLUMNS + n] = make_uint4(v[0].y, v[1].y, v[2].y, v[3].y);
    }
  }
  for_tensor_cores();
  __syncthreads();
}

// Asks for COUNT groups of the spilled weights.
template <int COUNT>
__device__ __forceinline__ void refill(uint4* slots, const uint4* spilled) {
  const u32 to = shared_address(slots);
#pragma unroll
  for (int k = 0; k < (COUNT * GROUP_WORDS + THREADS - 1) / THREADS; k++) {
    const int i = k * THREADS + threadIdx.x;
    if (GROUP_WORDS % THREADS == 0 || i < COUNT * GROUP_WORDS)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to + 16 * i), "l"(spilled + i) : "memory");
  }
}

// They are there, once a barrier was passed.
__device__ __forceinline__ void refilled() {
  asm volatile("cp.async.wait_all;" ::: "memory");
  for_tensor_cores();
}

// Products ----------------------------------------------------------------------------------------

#if TYPE == 1
#define KIND "f32.bf16.bf16 "
#else
#define KIND "f32.f16.f16 "
#endif
#define F4(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define F16(i) F4(i), F4(i + 4), F4(i + 8), F4(i + 12)
#define N0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define N1 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define N2 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define N3 ",%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63"

// c = a piece of each thread times 16 columns of the weights, plus c unless it is the first. Runs on by
// itself: until it was waited for, c and a must be left alone.
__device__ __forceinline__ void multiply_wide(float (&c)[COLUMNS / 2], const uint4& a, u64 b, int more) {
#define OPERANDS "r"(a.x), "r"(a.y), "r"(a.z), "r"(a.w), "l"(b), "r"(more)
#if TILES == 8
  asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\nwgmma.mma_async.sync.aligned.m64n64k16." KIND
               "{" N0 N1 "}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;}"
               : F16(0), F16(16) : OPERANDS);
#elif TILES == 16
  asm volatile("{.reg .pred p; setp.ne.b32 p, %69, 0;\nwgmma.mma_async.sync.aligned.m64n128k16." KIND
               "{" N0 N1 N2 N3 "}, {%64,%65,%66,%67}, %68, p, 1, 1, 0;}"
               : F16(0), F16(16), F16(32), F16(48) : OPERANDS);
#else
#error "no instruction for so many columns"
#endif
}

__device__ __forceinline__ void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int LEFT>
__device__ __forceinline__ void await_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LEFT) : "memory");
}

__device__ __forceinline__ uint4 fetch_piece(const uint4* p) { return fetch(reinterpret_cast<const Element*>(p)); }

// Where this thread's first piece of its block's slice lies, in what is passed on in a step.
__device__ __forceinline__ const uint4* slice_of(const uint4* passed) {
  const uint4* slice = passed + rank_in_team() * 2 * SLICE * THREADS + threadIdx.x;
  asm volatile("" : "+l"(slice));  // one register, not a sum of several in each address
  return slice;
}

// sums = this block's slice of what was passed on in a step, times its weights. The slots hold the FIRST
// groups, and a barrier was passed since refilled(). begin: of the group to begin with, in the slice.
//
// nothing: zero, which the compiler cannot know. It would make all addresses before the first product, one after
// the other; so each depends on what the group before it was given.
__device__ __forceinline__ void product(float (&sums)[COLUMNS / 2], const uint4* slice, u32 begin,
                                        const uint4* resident, uint4* slots, const uint4* spilled, u32 nothing) {
  const u64 layout = u64(COLUMNS) << 16 | u64(128 / 16) << 32;
  const u64 at_resident = layout | shared_address(resident) >> 4, at_slots = layout | shared_address(slots) >> 4;
  u32 at = begin;
  uint4 a[DEPTH][2];
  auto ask = [&](int i) {
    const uint4* p = slice + at;
    a[i % DEPTH][0] = fetch_piece(p);
    a[i % DEPTH][1] = fetch_piece(p + THREADS);
    at = at == (SLICE - 1) * 2 * THREADS ? 0 : at + 2 * THREADS;
    asm volatile("" : "+r"(at));  // as a known sequence it would take a register for each member
    __syncwarp();  // or the compiler would ask later, when it thinks that is early enough
  };
#ifdef NO_GATHER
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) sums[i] = 0.0f;
  return;
#endif
#pragma unroll
  for (int i = 0; i < DEPTH - 1 && i < SLICE; i++) ask(i);
#pragma unroll
  for (int i = 0; i < SLICE; i++) {
    if (SECOND && i == FIRST + RESIDENT) {
      refilled();
      __syncthreads();
    }
    const bool stays = i >= FIRST && i < FIRST + RESIDENT;
    const int group = i < FIRST ? i : stays ? i - FIRST : i - FIRST - RESIDENT;
    const u64 b = (stays ? at_resident : at_slots) + group * GROUP_WORDS;
    at |= a[i % DEPTH][0].x & nothing;
    begin_products();
    multiply_wide(sums, a[i % DEPTH][0], b, i > 0);
    multiply_wide(sums, a[i % DEPTH][1], b + 2 * COLUMNS, 1);
    commit_products();
    await_products<1>();  // all but this group's
    if (i + DEPTH - 1 < SLICE) ask(i + DEPTH - 1);
    if (SECOND && i == FIRST) {
      __syncthreads();  // the first groups were used
      refill<SECOND>(slots, spilled + FIRST * GROUP_WORDS);
    }
  }
  await_products<0>();
}

// The sums of a team, by way of `handed` [GRID, TEAM - 1, SENT]. Columns are ordered from the block's own
// on: part s is for the block s ranks further, and for the thread that has the same number there. The team
// has met `times` times before.
//
// TAGGED: that thread looks at the sums themselves. The least significant bit of each says whether it is this
// meeting's or the one's before, which was read by then, since all blocks have met meanwhile. `handed` is
// zero at first. It spares a meeting, but takes more registers than there are.
#define PART (SIDE / 2)

// One instruction for a word, which the compiler would not find.
__device__ __forceinline__ u32 tagged(u32 word, u32 tag) {  // (word & ~1) | tag
  asm("lop3.b32 %0, %0, %1, %2, 0xea;" : "+r"(word) : "n"(~1), "r"(tag));
  return word;
}
__device__ __forceinline__ void differs(u32& wrong, const uint4& v, u32 tag) {  // wrong |= each ^ tag
  asm("lop3.b32 %0, %0, %1, %5, 0xf6;\n"
      "lop3.b32 %0, %0, %2, %5, 0xf6;\n"
      "lop3.b32 %0, %0, %3, %5, 0xf6;\n"
      "lop3.b32 %0, %0, %4, %5, 0xf6;"
      : "+r"(wrong) : "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(tag));
}

__device__ __forceinline__ void hand_over(const float (&sums)[COLUMNS / 2], uint4* handed, u32* counters, u32 times) {
#ifdef NO_EXCHANGE
  return;
#endif
  if (TEAM == 1) return;
  const u32 rank = rank_in_team(), first = blockIdx.x - rank, tag = ~times & 1;
#pragma unroll
  for (int s = 1; s < TEAM; s++) {
    uint4* to = handed + i64((first + (rank + s) % TEAM) * (TEAM - 1) + s - 1) * SENT + threadIdx.x;
#pragma unroll
    for (int i = 0; i < PART / 4; i++) {
      u32 v[4];
#pragma unroll
      for (int k = 0; k < 4; k++) {
        v[k] = __float_as_uint(sums[s * PART + 4 * i + k]);
        if (TAGGED) v[k] = tagged(v[k], tag);
      }
      pass_word(to + i * THREADS, make_uint4(v[0], v[1], v[2], v[3]));
    }
  }
  if (!TAGGED) arrive(counters + first);
}

// Adds what the others handed over, in the order of the ranks, to sums[0 .. PART). nothing: zero.
__device__ __forceinline__ void take_over(float (&sums)[COLUMNS / 2], const uint4* handed, const u32* counters,
                                          u32 times, u32 nothing) {
#ifdef NO_EXCHANGE
  return;
#endif
  if (TEAM == 1) return;
  const u32 tag = ~times & 1;
  const uint4* come = handed + i64(blockIdx.x) * (TEAM - 1) * SENT + threadIdx.x + nothing;
  if (!TAGGED) wait_for(counters + blockIdx.x - rank_in_team(), TEAM * (times + 1) + nothing);
  uint4 v[TEAM][PART / 4];
  u32 wrong;
#ifdef GUARD
  const i64 since = clock64();
#endif
  do {
#pragma unroll
    for (int s = 1; s < TEAM; s++)
#pragma unroll
      for (int i = 0; i < PART / 4; i++) v[s][i] = peek_word(come + (s - 1) * SENT + i * THREADS);
    wrong = 0;
#ifndef NO_WAIT
    if (TAGGED)
#pragma unroll
      for (int s = 1; s < TEAM; s++)
#pragma unroll
        for (int i = 0; i < PART / 4; i++)
          differs(wrong, v[s][i], tag);
#endif
#ifdef GUARD
    if (clock64() - since > (1ll << 32)) break;
#endif
  } while (wrong & 1);
  __syncwarp();
#pragma unroll
  for (int s = 1; s < TEAM; s++)
#pragma unroll
    for (int i = 0; i < PART / 4; i++) {
      sums[4 * i] += __uint_as_float(v[s][i].x), sums[4 * i + 1] += __uint_as_float(v[s][i].y);
      sums[4 * i + 2] += __uint_as_float(v[s][i].z), sums[4 * i + 3] += __uint_as_float(v[s][i].w);
    }
}

// The unit of column n of the product, where a thread has columns 2 t and 2 t + 1 of each tile: so that
// its units are neighbours.
__device__ __forceinline__ int unit_of(int n) {
  const int owner = (rank_in_team() + n / SIDE) % TEAM, block = blockIdx.x - rank_in_team() + owner;
  return block * UNITS + n % 8 / 2 * 4 + n / 8 % 2 * 2 + n % 2;
}

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
#ifdef NO_SUM
  return;
#endif
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

// One number of each warp, in a fixed order.
__device__ __forceinline__ float over_warps(const float* from, int pitch) {
  float v[WARPS];
#pragma unroll
  for (int w = 0; w < WARPS; w++) v[w] = from[w * pitch];
#pragma unroll
  for (int n = WARPS / 2; n > 0; n /= 2)
#pragma unroll
    for (int w = 0; w < n; w++) v[w] += v[w + n];
  return v[0];
}

// Meetings of a block in two halves: some are only waited for, some only wait.
#define SUMS_READY 1
#define TOTALS_READY 2
template <int WHICH>
__device__ __forceinline__ void done() {
  asm volatile("bar.arrive %0, %1;" ::"n"(WHICH), "n"(THREADS) : "memory");
}
template <int WHICH>
__device__ __forceinline__ void await() {
  asm volatile("bar.sync %0, %1;" ::"n"(WHICH), "n"(THREADS) : "memory");
}

// Gates -------------------------------------------------------------------------------------------

// What a gate's nonlinearity is given times this: a sigmoid is a tanh of half of it.
__device__ __forceinline__ float pre(int gate) { return gate == 2 ? 1.0f : 0.5f; }
__device__ __forceinline__ float gate_of(int gate, float v) {
  const float y = tanh_(v);
  return gate == 2 ? y : 0.5f * y + 0.5f;
}

// Zero where a row does not count.
__device__ __forceinline__ uint2 masked(uint2 v, bool counts) { return counts ? v : make_uint2(0, 0); }
