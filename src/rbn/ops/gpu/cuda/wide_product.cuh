// The product of a step: weights that stay and weights that come again, and the tensor cores' instructions.

// Weights -----------------------------------------------------------------------------------------

// What threads wrote is for the tensor cores and the copies below to read, after the next barrier.
__device__ __forceinline__ void for_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

// The place in the slice at which this block begins, in groups.
__device__ __forceinline__ int beginning() { return int(blockIdx.x / TEAM * SLICE / (GRID / TEAM)); }

// The first of the two pieces of group i, in the order of processing.
__device__ __forceinline__ int piece_of(int i) {
  const int at = i + beginning();
  return 2 * (rank_in_team() * SLICE + (at < SLICE ? at : at - SLICE));
}

// Whether group i, in the order of processing, is resident; and which one of those, or of the others, it is.
__device__ __forceinline__ bool stays(int i) { return i >= FIRST && i < FIRST + RESIDENT; }
__device__ __forceinline__ int place_of(int i) { return i < FIRST ? i : stays(i) ? i - FIRST : i - RESIDENT; }

// 16 bytes times something, by nobody's hand. The barrier counts them as they come.
__device__ __forceinline__ void copy_bulk(u32 to, const uint4* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// This block's weights: the resident ones into shared memory, the others into `spilled`, as the tensor
// cores take them (8 columns of 16 bytes are 128 bytes in a row). four(n, piece, u): the weights of
// column n of the product for units u to u + 3 of a piece, by loads that need not wait for stores before them.
template <class Four>
__device__ __forceinline__ void pack(uint4* resident, uint4* spilled, Four four) {
#pragma unroll 2
  for (int i = threadIdx.x; i < SLICE * COLUMNS; i += THREADS) {
    const int group = i / COLUMNS, n = i % COLUMNS, piece = piece_of(group);
    uint4* to = (stays(group) ? resident : spilled) + place_of(group) * GROUP_WORDS;
#pragma unroll
    for (int s = 0; s < 2; s++) {
      uint2 v[4];
#pragma unroll
      for (int t = 0; t < 4; t++) v[t] = four(n, piece + s, 4 * t);
      to[2 * s * COLUMNS + n] = make_uint4(v[0].x, v[1].x, v[2].x, v[3].x);
      to[(2 * s + 1) * COLUMNS + n] = make_uint4(v[0].y, v[1].y, v[2].y, v[3].y);
    }
  }
  for_copies();
  __syncthreads();
}

// The weights that do not stay come by copies that need no thread: one asks, those who multiply wait for the
// barrier. Through threads they would need a fence, which waits for all that was asked for, in the midst of a product.
#define ASKING 6  // a warp that has little else to do

struct Refill {
  uint4* slots;
  const uint4* spilled;
  u32 barriers;  // for the first groups, for the second ones

  __device__ __forceinline__ void copy(const uint4* from, int groups, u32 barrier) const {
    expect(barrier, groups * GROUP_WORDS * 16);
    for (int i = 0; i < groups; i++)
      copy_bulk(shared_address(slots + i * GROUP_WORDS), from + i * GROUP_WORDS, GROUP_WORDS * 16, barrier);
  }
  // All threads left the slots, and a barrier was passed.
  __device__ __forceinline__ void ask_first() const {
    if (FIRST && threadIdx.x == ASKING * 32) copy(spilled, FIRST, barriers);
    __syncwarp();
  }
  __device__ __forceinline__ void ask_second() const {
    if (threadIdx.x / 32 == ASKING) {
      await<FIRST_USED>();
      if (threadIdx.x % 32 == 0) copy(spilled + FIRST * GROUP_WORDS, SECOND, barriers + 8);
    } else {
      done<FIRST_USED>();
    }
    __syncwarp();
  }
  // `step`: counted from 0.
  __device__ __forceinline__ void await_first(u32 step) const {
    if (FIRST) await_phase(barriers, step);
  }
  __device__ __forceinline__ void await_second(u32 step) const { await_phase(barriers + 8, step); }
};

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

__device__ __forceinline__ uint4 fetch_piece(const uint4* p) {
#ifdef NO_FETCH
  return make_uint4(0, 0, 0, 0);
#endif
  return fetch(reinterpret_cast<const Element*>(p));
}

// Where weights lie, and how, as the instruction takes it.
__device__ __forceinline__ u64 described(const uint4* weights) {
  return u64(COLUMNS) << 16 | u64(128 / 16) << 32 | shared_address(weights) >> 4;
}

// Where this thread's first piece of its block's slice lies, in what is passed on in a step.
__device__ __forceinline__ const uint4* slice_of(const uint4* passed) {
  const uint4* slice = passed + rank_in_team() * 2 * SLICE * THREADS + threadIdx.x;
  asm volatile("" : "+l"(slice));  // one register, not a sum of several in each address
  return slice;
}

// sums = this block's slice of what was passed on in a step, times its weights. The FIRST groups were asked for.
// begin: of the group to begin with, in the slice. step: counted from 0.
// other(i): something else to do, beside group i.
//
// The first warpgroup is STAGGER groups ahead of the second one, so that it hands over its sums, and does what
// follows, while the tensor cores work for the second.
//
// nothing: zero, which the compiler cannot know. It would make all addresses before the first product, one after
// the other; so each depends on what the group before it was given.
template <class Other>
__device__ __forceinline__ void product(float (&sums)[COLUMNS / 2], const uint4* slice, u32 begin, const uint4* resident,
                                        const Refill& refill, u32 step, u32 nothing, Other other) {
  const u64 at_resident = described(resident), at_slots = described(refill.slots);
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
  refill.await_first(step);
#pragma unroll
  for (int i = 0; i < COLUMNS / 2; i++) sums[i] = 0.0f;
#pragma unroll
  for (int i = 0; i < SLICE; i++) other(i);
  return;
#endif
#pragma unroll
  for (int i = 0; i < DEPTH - 1 && i < SLICE; i++) ask(i);
#pragma unroll
  for (int i = 0; i < SLICE; i++) {
    if (i == 0) refill.await_first(step);
    if (AHEAD && i == 0 && threadIdx.x >= 128) await<UNDER_WAY>();
    if (SECOND && i == FIRST + RESIDENT) refill.await_second(step);
    const int second = i < FIRST || stays(i) ? 0 : FIRST;  // they begin at the first slot again
    const u64 b = (stays(i) ? at_resident : at_slots) + (place_of(i) - second) * GROUP_WORDS;
    at |= a[i % DEPTH][0].x & nothing;
    begin_products();
    multiply_wide(sums, a[i % DEPTH][0], b, i > 0);
    multiply_wide(sums, a[i % DEPTH][1], b + 2 * COLUMNS, 1);
    commit_products();
    await_products<1>();  // all but this group's
    if (i + DEPTH - 1 < SLICE) ask(i + DEPTH - 1);
    if (AHEAD && i == AHEAD && threadIdx.x < 128) done<UNDER_WAY>();
    if (SECOND && i == FIRST) refill.ask_second();
    other(i);
  }
  await_products<0>();
}

// The unit of column n of the product, where a thread has columns 2 t and 2 t + 1 of each tile: so that
// its units are neighbours.
__device__ __forceinline__ int unit_of(int n) {
  const int owner = (rank_in_team() + n / SIDE) % TEAM, block = blockIdx.x - rank_in_team() + owner;
  return block * UNITS + n % 8 / 2 * 4 + n / 8 % 2 * 2 + n % 2;
}
