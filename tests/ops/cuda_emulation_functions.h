// The functions of common.cuh that are written in PTX, for the CPU.
// Types: float (TYPE 0) and bfloat16 (TYPE 1).
inline float from_half(unsigned short bits) { return __uint_as_float(unsigned(bits) << 16); }

inline unsigned short to_half(float v) {
  const unsigned u = __float_as_uint(v);
  return v != v ? 0x7fff : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}

#if TYPE == 0
inline float2 widen(Pair p) { return p; }
inline Pair narrow(float2 v) { return v; }
inline u32 rounded_word(u32 v) { return (v + 0x1000) & ~0x1fffu; }
inline float exp2_(float x) { return std::exp2(x); }
inline float inverse(float x) { return 1.0f / x; }
#else
inline float2 widen(Pair p) { return make_float2(from_half(p), from_half(p >> 16)); }
inline Pair narrow(float2 v) { return to_half(v.x) | u32(to_half(v.y)) << 16; }
inline u32 rounded_word(u32 v) { return v; }
inline float tanh_(float x) { return std::tanh(x); }
#endif
inline uint4 rounded(uint4 v) {
  return {rounded_word(v.x), rounded_word(v.y), rounded_word(v.z), rounded_word(v.w)};
}

inline void publish(Element* p, float2 v) {
  progress = true;
  Pair two = narrow(v);
  memcpy(p, &two, sizeof two);
}
inline uint4 fetch(const Element* p) { return *reinterpret_cast<const uint4*>(p); }
inline uint4 peek(const Element* p) {
  yield();
  return fetch(p);
}
inline void announce(u32* counter) {
  progress = true;
  ++*counter;
}
inline void wait_until(const u32* counter, u32 arrivals) {
  while (*counter < arrivals) yield();
}

inline float dot(u32 a, u32 b) {
#if TYPE == 0
  return __uint_as_float(a) * __uint_as_float(b);
#else
  return from_half(a) * from_half(b) + from_half(a >> 16) * from_half(b >> 16);
#endif
}

// m16n8k16, or m16n8k8 in tf32: which lane holds which part is the same.
inline void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  Warp& w = this_warp();
  const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const u32 own[6] = {a0, a1, a2, a3, b0, b1};
  memcpy(w.words[lane], own, sizeof own);
  __syncwarp();
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 4; k++) {
      const u32 *a = w.words[g * 4 + k], *b = w.words[(2 * t + i % 2) * 4 + k];
      c[i] += dot(a[i / 2], b[4]) + dot(a[2 + i / 2], b[5]);
    }
  __syncwarp();
}
