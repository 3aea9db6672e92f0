// How the blocks of a team hand each other their sums. Columns are ordered from the block's own on: part s is
// for the block s ranks further, and for the thread that has the same number there.
//
// They go through L2, `handed` [GRID, TEAM - 1, WORDS, HOLDERS], and nobody meets for it. All that a thread has for
// another one is a word of 16 bytes, in 16 bits each (in float32 two words), stored and loaded as one number: its parts
// do not come one by one. A word's last bit says whether it is this step's: it is set in every other one, from the first
// on, `handed` being zero before. A thread looks until all its words say so, and adds them in the order of the ranks
// before its own.
#define PART (SIDE / 2)  // sums of a thread for each block
#define WORDS (TYPE == 0 ? 2 : 1)

static_assert(PART == 8, "a word for each other block");

#if TYPE == 0
__device__ __forceinline__ uint4 word_of(const float* v, u32 times) {
  return make_uint4(__float_as_uint(v[0]) & ~1u | ~times & 1, __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
}

__device__ __forceinline__ void add_word(float* to, uint4 v) {
  to[0] += __uint_as_float(v.x & ~1u), to[1] += __uint_as_float(v.y);
  to[2] += __uint_as_float(v.z), to[3] += __uint_as_float(v.w);
}
#else
__device__ __forceinline__ uint4 word_of(const float* v, u32 times) {
  const u32 first = narrow(make_float2(v[0], v[1]));
  return make_uint4(first & ~1u | ~times & 1, narrow(make_float2(v[2], v[3])), narrow(make_float2(v[4], v[5])),
                    narrow(make_float2(v[6], v[7])));
}

__device__ __forceinline__ void add_word(float* to, uint4 v) {
  const float2 a = widen(v.x), b = widen(v.y), c = widen(v.z), d = widen(v.w);
  to[0] += a.x, to[1] += a.y, to[2] += b.x, to[3] += b.y;
  to[4] += c.x, to[5] += c.y, to[6] += d.x, to[7] += d.y;
}
#endif

__device__ __forceinline__ bool of_step(uint4 v, u32 times) {
#ifdef NO_WAIT
  return true;
#endif
  return ((v.x ^ times) & 1) != 0;
}

__device__ __forceinline__ void hand_word(uint4* p, uint4 v) {
  asm volatile("{\n\t.reg .b64 low, high;\n\t.reg .b128 all;\n\tmov.b64 low, {%1, %2};\n\tmov.b64 high, {%3, %4};\n\t"
               "mov.b128 all, {low, high};\n\tst.relaxed.gpu.global.b128 [%0], all;\n\t}"
               ::"l"(p), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w) : "memory");
}

__device__ __forceinline__ uint4 look_at_word(const uint4* p) {
  uint4 v;
  asm volatile("{\n\t.reg .b64 low, high;\n\t.reg .b128 all;\n\tld.relaxed.gpu.global.b128 all, [%4];\n\t"
               "mov.b128 {low, high}, all;\n\tmov.b64 {%0, %1}, low;\n\tmov.b64 {%2, %3}, high;\n\t}"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}

// times: that sums were handed over before.
__device__ __forceinline__ void hand_over(const float (&sums)[COLUMNS / 2], uint4* handed, u32 times) {
#ifdef NO_EXCHANGE
  return;
#endif
  uint4* to = handed + i64(blockIdx.x) * (TEAM - 1) * WORDS * HOLDERS + threadIdx.x;
#pragma unroll
  for (int i = WORDS; i < WORDS * TEAM; i++)
    hand_word(to + (i - WORDS) * HOLDERS, word_of(sums + i * (PART / WORDS), times));
}

// Adds what the others handed over to sums[0 .. PART). nothing: zero. Nobody waits for a block without a unit before the
// next sums are written over these, so it must not look for them: if it is late they are gone, and it would wait for
// ever, and all others for it.
__device__ __forceinline__ void take_over(float (&sums)[COLUMNS / 2], const uint4* handed, u32 times, u32 nothing) {
#ifdef NO_EXCHANGE
  return;
#endif
  if (OWNERS % TEAM && blockIdx.x >= OWNERS) return;
  const u32 rank = rank_in_team(), first = blockIdx.x - rank;
  const uint4* come = handed + threadIdx.x + nothing;
  auto at = [&](int s, int k) {
    const u32 block = first + (rank + TEAM - s) % TEAM;
    return come + ((block * (TEAM - 1) + s - 1) * WORDS + k) * HOLDERS;
  };
  // In float32, one half of them after the other: all at once they would need too many registers.
#pragma unroll
  for (int k = 0; k < WORDS; k++) {
    uint4 v[TEAM];
#pragma unroll
    for (int s = 1; s < TEAM; s++) v[s] = look_at_word(at(s, k));
    // Those that are not there yet are asked for again, all at once.
#ifdef GUARD
    const i64 since = clock64();
#endif
    for (bool again = true; again;) {
      again = false;
#ifdef GUARD
      if (clock64() - since > (1ll << 22)) break;
#endif
#pragma unroll
      for (int s = 1; s < TEAM; s++)
        if (!of_step(v[s], times)) v[s] = look_at_word(at(s, k)), again = true;
    }
    __syncwarp();
#pragma unroll
    for (int s = 1; s < TEAM; s++) add_word(sums + k * (PART / WORDS), v[s]);
  }
}
