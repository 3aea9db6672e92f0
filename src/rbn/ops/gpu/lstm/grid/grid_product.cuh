// The product of a step: resident weights, weights that are loaded in each step, and tensor core instructions.

// Weights -----------------------------------------------------------------------------------------

// Makes the thread's writes visible to tensor cores and bulk copies (the async proxy), after the next barrier.
__device__ __forceinline__ void for_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

// The group at which this block starts in its slice: the first of one of PARTS parts. So the pieces' addresses are the
// parts' pointers, which stay in registers, plus constants. If addresses were computed for each group, they would occupy
// the few scoreboards, a single one would be left for the loaded data, and waiting for a group would wait for all loads.
#define PARTS (TEAM > 2 ? 2 : 4)
#define PART_GROUPS (SLICE / PARTS)
static_assert(SLICE % PARTS == 0, "all parts have as many groups");
__device__ __forceinline__ int start_group() {
  const u32 team = blockIdx.x / TEAM, teams = GRID / TEAM;
  return int(team * PARTS / teams * PART_GROUPS);
}

// The first of the two pieces of group i, in processing order.
__device__ __forceinline__ int piece_of(int i) {
  const int at = i + start_group();
  return 2 * (rank_in_team() * SLICE + (at < SLICE ? at : at - SLICE));
}

// Whether group i, in processing order, is resident; and its index among the resident or the other groups.
__device__ __forceinline__ bool is_resident(int i) { return i >= FIRST && i < FIRST + RESIDENT; }
__device__ __forceinline__ int index_of(int i) { return i < FIRST ? i : is_resident(i) ? i - FIRST : i - RESIDENT; }

// Asynchronous bulk copy of a multiple of 16 bytes to shared memory; the barrier counts the bytes.
__device__ __forceinline__ void copy_bulk(u32 to, const uint4* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
               ::"r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

// Prefetch to L2: a contiguous range, a multiple of 16 bytes, by one asynchronous bulk operation; and a single sector.
__device__ __forceinline__ void bring_row(const void* from, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bring(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from) : "memory"); }

// Predicated loads (zero if not `on`) and stores that the compiler leaves in place, interleaved with the product. They
// avoid branches, because the compiler divides the hardware's few scoreboards among branches.
__device__ __forceinline__ u32 load_mask(const unsigned char* p, bool on) {
  u32 v;
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\tmov.u32 %0, 0;\n\t@p ld.global.u32 %0, [%1];\n\t}"
               : "=&r"(v) : "l"(p), "r"(u32(on)) : "memory");
  return v;
}
__device__ __forceinline__ void load_here4(float (&v)[4], const float* p, bool on) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\tmov.f32 %0, 0f00000000;\n\tmov.f32 %1, 0f00000000;\n\t"
               "mov.f32 %2, 0f00000000;\n\tmov.f32 %3, 0f00000000;\n\t@p ld.global.v4.f32 {%0, %1, %2, %3}, [%4];\n\t}"
               : "=&f"(v[0]), "=&f"(v[1]), "=&f"(v[2]), "=&f"(v[3]) : "l"(p), "r"(u32(on)) : "memory");
}
__device__ __forceinline__ void store_here4(float* p, const float (&v)[4], bool on) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %5, 0;\n\t@p st.global.v4.f32 [%0], {%1, %2, %3, %4};\n\t}"
               ::"l"(p), "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(u32(on)) : "memory");
}
#if TYPE == 0
__device__ __forceinline__ float4 load_here(const float* p, bool on) {
  float v[4];
  load_here4(v, p, on);
  return narrow4(v);
}
__device__ __forceinline__ void store_here(float* p, float4 v, bool on) {
  const float four[4] = {v.x, v.y, v.z, v.w};
  store_here4(p, four, on);
}
#else
__device__ __forceinline__ uint2 load_here(const Element* p, bool on) {
  uint2 v;
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\tmov.u32 %0, 0;\n\tmov.u32 %1, 0;\n\t@p ld.global.v2.u32 {%0, %1}, [%2];\n\t}"
               : "=&r"(v.x), "=&r"(v.y) : "l"(p), "r"(u32(on)) : "memory");
  return v;
}
__device__ __forceinline__ void store_here(Element* p, uint2 v, bool on) {
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %3, 0;\n\t@p st.global.v2.u32 [%0], {%1, %2};\n\t}"
               ::"l"(p), "r"(v.x), "r"(v.y), "r"(u32(on)) : "memory");
}
#endif

// Packs this block's weights into the tensor cores' layout (8 columns of 16 bytes are contiguous): the resident ones
// into shared memory, the others into `spilled`. four(n, piece, u): the weights of column n of the product for units u to
// u + 3 of a piece, by loads that need not wait for earlier stores. Returns the factor that undoes the weights' scale: 1
// except in float32, which needs `scratch` for a word per warp.
template <class Four>
__device__ __forceinline__ float pack_weights(uint4* resident, uint4* spilled, float* scratch, Four four) {
  float up = 1.0f, down = 1.0f;
#if TYPE == 0
  u32 top = 0;
#pragma unroll 2
  for (int i = threadIdx.x; i < SLICE * COLUMNS; i += THREADS) {
    float4 v[8];  // all loads in flight at once
#pragma unroll
    for (int k = 0; k < 8; k++) v[k] = four(i % COLUMNS, piece_of(i / COLUMNS) + k / 4, 4 * (k % 4));
#pragma unroll
    for (int k = 0; k < 8; k++) {
      top = max(max(top, finite_magnitude(v[k].x)), finite_magnitude(v[k].y));
      top = max(max(top, finite_magnitude(v[k].z)), finite_magnitude(v[k].w));
    }
  }
  top = __reduce_max_sync(~0u, top);
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = __uint_as_float(top);
  __syncthreads();
  top = __reduce_max_sync(~0u, __float_as_uint(scratch[threadIdx.x % WARPS]));
  up = scale_up(top), down = scale_down(top);
#endif
#pragma unroll 2
  for (int i = threadIdx.x; i < SLICE * COLUMNS; i += THREADS) {
    const int group = i / COLUMNS, n = i % COLUMNS, piece = piece_of(group);
    uint4* to = (is_resident(group) ? resident : spilled) + index_of(group) * GROUP_WORDS;
#pragma unroll
    for (int s = 0; s < 2; s++) {
      uint2 v[4];
#pragma unroll
      for (int t = 0; t < 4; t++) v[t] = as_factors(four(n, piece + s, 4 * t), up);
      to[2 * s * COLUMNS + n] = make_uint4(v[0].x, v[1].x, v[2].x, v[3].x);
      to[(2 * s + 1) * COLUMNS + n] = make_uint4(v[0].y, v[1].y, v[2].y, v[3].y);
    }
  }
  for_copies();
  __syncthreads();
  return down;
}

// Non-resident weights are loaded by bulk copies: one thread issues them, and the multiplying warps wait at a barrier.
// Copies by the threads themselves would need a fence, which waits for all outstanding loads, in the middle of a product.
#define COPY_WARP 6  // the issuing warp, which has little other work

struct Refill {
  uint4* slots;
  const uint4* spilled;
  u32 barriers;  // two: for the first groups, for the second ones

  __device__ __forceinline__ void copy(const uint4* from, int groups, u32 barrier) const {
    expect(barrier, groups * GROUP_WORDS * 16);
    for (int i = 0; i < groups; i++)
      copy_bulk(address_of(slots + i * GROUP_WORDS), from + i * GROUP_WORDS, GROUP_WORDS * 16, barrier);
  }
  // To be called after a barrier that all threads reach when they no longer use the slots.
  __device__ __forceinline__ void load_first() const {
    if (FIRST && threadIdx.x == COPY_WARP * 32) copy(spilled, FIRST, barriers);
    __syncwarp();
  }
  __device__ __forceinline__ void load_second() const {
    if (threadIdx.x / 32 == COPY_WARP) {
      await<FIRST_USED>();
      if (threadIdx.x % 32 == 0) copy(spilled + FIRST * GROUP_WORDS, SECOND, barriers + 8);
    } else {
      done<FIRST_USED>();
    }
    __syncwarp();
  }
  // `step`: steps so far.
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

// c = the threads' pieces times the weights of 16 of h's or d(W_h h)'s columns, plus c if `more`. Asynchronous: c and a
// must not be touched until it has been waited for.
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

// Loads a piece at an offset in bytes.
template <int OFFSET>
__device__ __forceinline__ uint4 fetch_piece(const uint4* p) {
  uint4 v;
  asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4 + %5];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p), "n"(OFFSET) : "memory");
  return v;
}

// Calls run(Number<i>()) for each i from I to END - 1: i is a compile-time constant.
template <int I> struct Number { static constexpr int value = I; };
template <int I, int END, class Run>
__device__ __forceinline__ void for_each(const Run& run) {
  if constexpr (I < END) {
    run(Number<I>());
    for_each<I + 1, END>(run);
  }
}

// The lower half of the instruction's matrix descriptor: column stride and address. An address has 18 bits; the bits
// above are the block's rank in its cluster and would change the stride.
__device__ __forceinline__ u32 descriptor_half(const uint4* weights) {
  return COLUMNS << 16 | (address_of(weights) & 0x3ffff) >> 4;
}
__device__ __forceinline__ u64 descriptor(u32 description) { return u64(128 / 16) << 32 | description; }

// This thread's first piece of its block's slice, in the exchange buffer of a step.
__device__ __forceinline__ const uint4* slice_of(const uint4* passed) {
  const uint4* slice = passed + rank_in_team() * 2 * SLICE * ROW_THREADS + threadIdx.x;
  asm volatile("" : "+l"(slice));  // one register, not a sum of several in each address
  return slice;
}

// Scaling of a step's pieces before their use: none in half precision and in the forward pass.
struct AsPassed {
  __device__ __forceinline__ void find() const {}
  __device__ __forceinline__ void scale(int, uint4 (&)[2], uint4 (&)[2]) const {}
  __device__ __forceinline__ float back(float) const { return 1.0f; }
};

#if SCALED
static_assert(BATCH == 2 && PASSED == 4 && PART_GROUPS % 2 == 0, "a batch has the pieces of one block");

__device__ __forceinline__ u32 look_at_exponent(const u32* p, bool on) {
  u32 v;
  asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.u32 p, %2, 0;\n\tmov.u32 %0, 0;\n\t@p ld.global.cg.u32 %0, [%1];\n\t}"
               : "=&r"(v) : "l"(p), "r"(u32(on)) : "memory");
  return v;
}
__device__ __forceinline__ void pass_exponent(u32* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ void multiply_halves(u32& v, u32 factor) { asm volatile("mul.f16x2 %0, %0, %1;" : "+r"(v) : "r"(factor)); }
__device__ __forceinline__ void multiply_piece(uint4& v, u32 factor) {
  multiply_halves(v.x, factor), multiply_halves(v.y, factor), multiply_halves(v.z, factor), multiply_halves(v.w, factor);
}

// The magnitude (float bits) of a warp's largest finite number.
template <int N>
__device__ __forceinline__ u32 largest(const float (&v)[N]) {
  float most[4] = {};  // fmaxf ignores NaN
#pragma unroll
  for (int i = 0; i < N; i++) most[i % 4] = fmaxf(most[i % 4], fabsf(v[i]));
  u32 top = __reduce_max_sync(~0u, __float_as_uint(fmaxf(fmaxf(most[0], most[1]), fmaxf(most[2], most[3]))));
  if (top >= 0x7f800000u) {  // ignore infinities, too
    top = 0;
#pragma unroll
    for (int i = 0; i < N; i++) top = max(top, finite_magnitude(v[i]));
    top = __reduce_max_sync(~0u, top);
  }
  return top;
}

// Keeps a factor finite, so that zero times it is zero.
__device__ __forceinline__ float bounded(float power) { return fminf(power, 1.7e38f); }

// A step's exponents passed on by the warps with the same rows, in the order of the blocks.
__device__ __forceinline__ u32* exponents_of(uint4* step) {
  return reinterpret_cast<u32*>(step + STEP_PIECES) + threadIdx.x / 32 * TEAM * SOURCES;
}

// The exponents of the slice's blocks, in processing order: lane i has those of blocks i and i + 32. `find` replaces them
// by the factors that rescale pieces to the largest power of two, as two float16. Below 2^-24 a factor is 0.
struct Powers {
  u32 of[(SOURCES + 31) / 32], most;

  __device__ __forceinline__ void prefetch(const u32* exponents) {
#pragma unroll
    for (int k = 0; k < (SOURCES + 31) / 32; k++) {
      const u32 i = threadIdx.x % 32 + 32 * k, at = i + start_group() / 2;
      of[k] = look_at_exponent(exponents + rank_in_team() * SOURCES + (at < SOURCES ? at : at - SOURCES), i < SOURCES);
    }
  }
  __device__ __forceinline__ void find() {
    most = exponent(0);
#pragma unroll
    for (u32 own : of) most = max(most, own);
    most = __reduce_max_sync(~0u, most);
#pragma unroll
    for (u32& own : of) {
      const u32 less = most - own, half = less < 15 ? (15 - less) << 10 : less < 25 ? 1u << (24 - less) : 0;
      own = half << 16 | half;
    }
  }
  // The pieces of the two groups from `group` on.
  __device__ __forceinline__ void scale(int group, uint4 (&a)[2], uint4 (&b)[2]) const {
    const u32 factor = __shfl_sync(~0u, of[group / 64], group / 2 % 32);
    multiply_piece(a[0], factor), multiply_piece(a[1], factor);
    multiply_piece(b[0], factor), multiply_piece(b[1], factor);
  }
  // The factor that undoes the scale of products; undo: that of the weights.
  __device__ __forceinline__ float back(float undo) const { return bounded(scale_down(most << 23) * undo); }
};
#endif

// sums = this block's slice of a step's exchanged data times its weights. The FIRST groups are already being loaded.
// begin: offset of the group to start with in the slice. step: steps so far. powers: scales of the pieces, determined
// while the first loads are in flight. other(i): other work to interleave with group i.
//
// The first warpgroup is STAGGER groups ahead of the second one. So it hands over its sums and continues while the tensor
// cores work for the second one.
static_assert(DEPTH % BATCH == 0 && SLICE % BATCH == 0 && DEPTH > BATCH, "whole batches");
template <class Scales, class Other>
__device__ __forceinline__ void product(float (&sums)[COLUMNS / 2], const uint4* slice, u32 begin, const uint4* resident,
                                        const Refill& refill, u32 step, Scales& powers, Other other) {
  const u32 at_resident = descriptor_half(resident), at_slots = descriptor_half(refill.slots);
  uint4 a[DEPTH][2];
  auto weights_of = [&](int i) {
    const int second = i < FIRST || is_resident(i) ? 0 : FIRST;  // the second groups start at the first slot again
    return descriptor(anew(is_resident(i) ? at_resident : at_slots) + (index_of(i) - second) * GROUP_WORDS);
  };
  const uint4* parts[PARTS];  // the starts of the slice's parts, in processing order
#pragma unroll
  for (int k = 0; k < PARTS; k++) {
    const u32 place = begin + k * PART_GROUPS * 2 * ROW_THREADS;
    parts[k] = slice + (place < SLICE * 2 * ROW_THREADS ? place : place - SLICE * 2 * ROW_THREADS);
    asm volatile("" : "+l"(parts[k]));
  }
  auto prefetch = [&](auto number) {
    constexpr int i = decltype(number)::value;
    if constexpr (i >= SLICE) {
      return;
    } else {
      constexpr int offset = i % PART_GROUPS * 2 * ROW_THREADS * 16;
      a[i % DEPTH][0] = fetch_piece<offset>(parts[i / PART_GROUPS]);
      a[i % DEPTH][1] = fetch_piece<offset + ROW_THREADS * 16>(parts[i / PART_GROUPS]);
    }
    __syncwarp();  // keeps the compiler from moving the loads down
  };
  for_each<0, DEPTH - BATCH>(prefetch);
  powers.find();
  for_each<0, SLICE / BATCH>([&](auto number) {
    constexpr int first = decltype(number)::value * BATCH, next = first + BATCH;
    if (first == 0) refill.await_first(step);
    if (AHEAD && first == 0 && threadIdx.x >= 128) await<UNDER_WAY>();
    if (SECOND && first <= FIRST + RESIDENT && FIRST + RESIDENT < next) refill.await_second(step);
    powers.scale(first, a[first % DEPTH], a[(first + 1) % DEPTH]);
    begin_products();
#pragma unroll
    for (int i = first; i < next; i++) {
      const u64 b = weights_of(i);
      multiply_wide(sums, a[i % DEPTH][0], b, i > 0);
      multiply_wide(sums, a[i % DEPTH][1], b + 2 * COLUMNS, 1);
    }
    commit_products();
    await_products<1>();  // all but this batch's products
    for_each<first + DEPTH - BATCH, next + DEPTH - BATCH>(prefetch);
    if (AHEAD && first <= AHEAD && AHEAD < next && threadIdx.x < 128) done<UNDER_WAY>();
    if (SECOND && first >= FIRST && first < FIRST + BATCH) refill.load_second();
#pragma unroll
    for (int i = first; i < next; i++) other(i);
  });
  await_products<0>();
#pragma unroll
  for (int k = 0; k < PARTS; k++) asm volatile("" ::"l"(parts[k]));  // keeps the pointers in registers until here
}

// The unit of column n of the product. A thread owns columns 2 t and 2 t + 1 of each tile; this order makes its units
// neighbours.
__device__ __forceinline__ int unit_of(int n) {
  const int owner = (rank_in_team() + n / SIDE) % TEAM, block = blockIdx.x - rank_in_team() + owner;
  return block * UNITS + n % 8 / 2 * 4 + n / 8 % 2 * 2 + n % 2;
}
