// How the blocks of a team hand each other their sums. Columns are ordered from the block's own on: part s is
// for the block s ranks further, and for the thread that has the same number there.
//
// They go through L2, `handed` [GRID, TEAM - 1, SENT], and nobody meets for it. The last bit of a sum says whether it
// is this step's: it is set in every other one, from the first on, `handed` being zero before. A thread looks until
// all its sums say so, and adds them in the order of the ranks before its own.
#define PART (SIDE / 2)
#define SENT (SIDE / 8 * THREADS)  // words of 16 bytes to each other block of the team

// Words of sums that say of which step they are, and whether they are of this one.
__device__ __forceinline__ uint4 tagged(uint4 v, u32 times) {
  const u32 tag = ~times & 1;
  return make_uint4(v.x & ~1u | tag, v.y & ~1u | tag, v.z & ~1u | tag, v.w & ~1u | tag);
}
__device__ __forceinline__ bool of_step(uint4 v, u32 times) {
#ifdef NO_WAIT
  return true;
#endif
  return (times & 1 ? v.x | v.y | v.z | v.w : ~(v.x & v.y & v.z & v.w)) % 2 == 0;
}

// times: that sums were handed over before.
__device__ __forceinline__ void hand_over(const float (&sums)[COLUMNS / 2], uint4* handed, u32 times) {
#ifdef NO_EXCHANGE
  return;
#endif
  const u32 rank = rank_in_team(), first = blockIdx.x - rank;
#pragma unroll
  for (int s = 1; s < TEAM; s++) {
    const u32 other = (rank + s) % TEAM;
    uint4* to = handed + i64((first + other) * (TEAM - 1) + s - 1) * SENT + threadIdx.x;
#pragma unroll
    for (int i = 0; i < PART / 4; i++) {
      const float* v = sums + s * PART + 4 * i;
      const uint4 word = make_uint4(__float_as_uint(v[0]), __float_as_uint(v[1]), __float_as_uint(v[2]), __float_as_uint(v[3]));
      pass_word(to + i * THREADS, tagged(word, times));
    }
  }
}

// Adds what the others handed over to sums[0 .. PART). nothing: zero.
__device__ __forceinline__ void take_over(float (&sums)[COLUMNS / 2], const uint4* handed, u32 times, u32 nothing) {
#ifdef NO_EXCHANGE
  return;
#endif
  const uint4* come = handed + i64(blockIdx.x) * (TEAM - 1) * SENT + threadIdx.x + nothing;
  constexpr int WORDS = (TEAM - 1) * PART / 4;
  auto at = [&](int k) { return come + k / (PART / 4) * SENT + k % (PART / 4) * THREADS; };
  uint4 v[WORDS];
#pragma unroll
  for (int k = 0; k < WORDS; k++) v[k] = peek_word(at(k));
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
    for (int k = 0; k < WORDS; k++)
      if (!of_step(v[k], times)) v[k] = peek_word(at(k)), again = true;
  }
  __syncwarp();
#pragma unroll
  for (int k = 0; k < WORDS; k++) {
    float* to = sums + k % (PART / 4) * 4;
    to[0] += __uint_as_float(v[k].x), to[1] += __uint_as_float(v[k].y);
    to[2] += __uint_as_float(v[k].z), to[3] += __uint_as_float(v[k].w);
  }
}
