// The exchange of partial sums between the blocks of a team. A block's columns start with its own: part s is for the block
// s ranks further, and there for the thread with the same index.
//
// The sums go through L2, `handed` [GRID, TEAM - 1, ROW_THREADS], without a barrier. All that a thread sends to another one
// is a word of 16 bytes, eight 16-bit sums, stored and loaded as a single 128-bit access, so it never arrives in parts.
// The lowest bit of the word marks the step: it is set in the first step and every other one after it (`handed` starts
// as zero). A thread polls until all its words have the step's bit, and adds them in the order of the senders' distance.
//
// In float32 each warp's sums have a power of two, stored behind all words, [GRID / TEAM, MT, TEAM], with the same step
// bit; lane s polls that of the block s ranks before.
#define PART (SIDE / 2)  // sums that a thread sends to each block
#define HANDED_WORDS (GRID * (TEAM - 1) * ROW_THREADS + (SCALED ? GRID * MT / 4 : 0))  // of 16 bytes

static_assert(PART == 8, "a word for each other block");

#if TYPE == 0
__device__ __forceinline__ u32 in_16_bits(const float* v, float up) { return pack(v[0] * up, v[1] * up); }
__device__ __forceinline__ float2 of_16_bits(u32 p, float down) {
  const float2 v = unpack(p);
  return make_float2(v.x * down, v.y * down);
}
#else
__device__ __forceinline__ u32 in_16_bits(const float* v, float) { return narrow(make_float2(v[0], v[1])); }
__device__ __forceinline__ float2 of_16_bits(u32 p, float) { return widen(p); }
#endif

__device__ __forceinline__ uint4 word_of(const float* v, float up, u32 times) {
  const u32 first = in_16_bits(v, up);
  return make_uint4(first & ~1u | ~times & 1, in_16_bits(v + 2, up), in_16_bits(v + 4, up), in_16_bits(v + 6, up));
}

__device__ __forceinline__ bool is_of_step(u32 first, u32 times) {
  return ((first ^ times) & 1) != 0;
}

__device__ __forceinline__ void add_word(float* to, uint4 v, float down) {
  const u32 first = TYPE == 0 ? v.x & ~1u : v.x;  // clears the step bit, so that zero stays zero
  const float2 a = of_16_bits(first, down), b = of_16_bits(v.y, down), c = of_16_bits(v.z, down), d = of_16_bits(v.w, down);
  to[0] += a.x, to[1] += a.y, to[2] += b.x, to[3] += b.y;
  to[4] += c.x, to[5] += c.y, to[6] += d.x, to[7] += d.y;
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

#if SCALED
__device__ __forceinline__ void hand_power(u32* p, u32 v) {
  asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}
__device__ __forceinline__ u32 look_at_power(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
// The team's powers of two for this warp's rows.
__device__ __forceinline__ u32* powers_in(uint4* handed) {
  u32* all = reinterpret_cast<u32*>(handed + GRID * (TEAM - 1) * ROW_THREADS);
  return all + (blockIdx.x / TEAM * MT + threadIdx.x / 32) * TEAM;
}
#endif

// Sends the sums to the other blocks. times: calls so far. back: the factor that undoes their scale, only in float32; the
// block's own sums are multiplied by it here.
__device__ __forceinline__ void send_sums(float (&sums)[COLUMNS / 2], uint4* handed, u32 times, float back) {
  float up = 1.0f;
#if SCALED
  const u32 top = largest(sums);
  up = scale_up(top);
  const u32 power = __float_as_uint(bounded(back * scale_down(top)));
  if (threadIdx.x % 32 == 0) hand_power(powers_in(handed) + rank_in_team(), power & ~1u | ~times & 1);
  __syncwarp();
#endif
  uint4* to = handed + i64(blockIdx.x) * (TEAM - 1) * ROW_THREADS + threadIdx.x;
#pragma unroll
  for (int s = 1; s < TEAM; s++) hand_word(to + (s - 1) * ROW_THREADS, word_of(sums + s * PART, up, times));
#if SCALED
#pragma unroll
  for (int i = 0; i < PART; i++) sums[i] *= back;
#endif
}

// Adds the sums from the other blocks to sums[0 .. PART). always_zero: see `Held`. Blocks without units must not poll: no
// block waits for them before overwriting the words, so a late one would miss them and deadlock.
__device__ __forceinline__ void receive_sums(float (&sums)[COLUMNS / 2], uint4* handed, u32 times, u32 always_zero) {
  if (OWNERS % TEAM && blockIdx.x >= OWNERS) return;
  const u32 rank = rank_in_team(), first = blockIdx.x - rank;
  const uint4* received = handed + threadIdx.x + always_zero;
  auto at = [&](int s) {
    const u32 block = first + (rank + TEAM - s) % TEAM;
    return received + (block * (TEAM - 1) + s - 1) * ROW_THREADS;
  };
  uint4 v[TEAM];
#pragma unroll
  for (int s = 1; s < TEAM; s++) v[s] = look_at_word(at(s));
#if SCALED
  const u32 before = threadIdx.x % 32 % TEAM;  // ranks
  const u32* at_power = powers_in(handed) + (rank + TEAM - before) % TEAM;
  u32 power = look_at_power(at_power);
#endif
  // Poll all missing words at once.
  for (bool again = true; again;) {
    again = false;
#pragma unroll
    for (int s = 1; s < TEAM; s++)
      if (!is_of_step(v[s].x, times)) v[s] = look_at_word(at(s)), again = true;
#if SCALED
    if (!is_of_step(power, times)) power = look_at_power(at_power), again = true;
#endif
  }
  __syncwarp();
#pragma unroll
  for (int s = 1; s < TEAM; s++) {
    float down = 1.0f;
#if SCALED
    down = __uint_as_float(__shfl_sync(~0u, power & ~1u, s));
#endif
    add_word(sums, v[s], down);
  }
}
