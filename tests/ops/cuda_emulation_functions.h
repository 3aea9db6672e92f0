// The functions of common.cuh that are written in PTX, for the CPU.
// Types: float (TYPE 0) and bfloat16 (TYPE 1).
inline float from_half(unsigned short bits) { return __uint_as_float(unsigned(bits) << 16); }

inline unsigned short to_half(float v) {
  const unsigned u = __float_as_uint(v);
  return v != v ? 0x7fff : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}

// In float32 operands are float16.
#if TYPE == 0
inline unsigned short to_operand(float v) {
  const unsigned u = __float_as_uint(v), sign = u >> 16 & 0x8000, size = u & 0x7fffffff;
  if (size > 0x7f800000) return 0x7fff;
  if (size >= 0x477ff000) return sign | 0x7c00;
  if (size < 0x38800000) return sign | unsigned(std::nearbyint(std::ldexp(__uint_as_float(size), 24)));
  return sign | (((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10));
}
inline float from_operand(unsigned short bits) {
  const unsigned exponent = bits >> 10 & 31, fraction = bits & 1023;
  const float size = exponent == 31 ? (fraction ? NAN : INFINITY)
                     : exponent ? std::ldexp(1024.0f + fraction, int(exponent) - 25) : std::ldexp(float(fraction), -24);
  return bits & 0x8000 ? -size : size;
}
#else
inline unsigned short to_operand(float v) { return to_half(v); }
inline float from_operand(unsigned short bits) { return from_half(bits); }
#endif
inline float2 unpack(u32 p) { return make_float2(from_operand(p), from_operand(p >> 16)); }
inline u32 pack(float x, float y) { return to_operand(x) | u32(to_operand(y)) << 16; }

inline Pair narrow(float2 v);
#if TYPE == 0
inline u32 rounded_word(u32 v) { return (v + 0x1000) & ~0x1fffu; }
inline float exp2_(float x) { return std::exp2(x); }
inline float inverse(float x) { return 1.0f / x; }
#else
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

#ifdef CLUSTER
// The functions of exchange.cuh.
inline void multiply16(float (&c)[4], uint4 a, u32 b0, u32 b1) {
  Warp& w = this_warp();
  const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  const u32 own[6] = {a.x, a.y, a.z, a.w, b0, b1};
  memcpy(w.words[lane], own, sizeof own);
  __syncwarp();
  auto dot16 = [](u32 a, u32 b) {
    return from_operand(a) * from_operand(b) + from_operand(a >> 16) * from_operand(b >> 16);
  };
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < 4; k++) {
      const u32 *a = w.words[g * 4 + k], *b = w.words[(2 * t + i % 2) * 4 + k];
      c[i] += dot16(a[i / 2], b[4]) + dot16(a[2 + i / 2], b[5]);
    }
  __syncwarp();
}

// Addresses in the blocks of a cluster: the rank in the upper bits.
inline u32 in_block(u32 address, u32 rank) { return address | rank << 20; }
inline char* at_address(u32 address) {
  Block* first = current->block - blockIdx.x % CLUSTER;
  return (char*)first[address >> 20].memory.data() + (address & 0xfffff);
}

struct Barrier {  // 8 bytes, as mbarrier's
  int bytes;
  unsigned short waiting, phases;  // arrivals that are missing (always of one thread); phases that have ended
  void end() {
    progress = true;
    if (!waiting && !bytes) waiting = 1, phases++;
  }
};
inline Barrier& barrier_at(u32 address) { return *reinterpret_cast<Barrier*>(at_address(address)); }
inline u32 own(u32 address) { return in_block(address, blockIdx.x % CLUSTER); }
inline void start_barrier(u32 barrier, u32 arrivals) { barrier_at(own(barrier)) = {0, 1, 0}; }
inline void expect(u32 barrier, u32 bytes) {
  Barrier& b = barrier_at(own(barrier));
  b.bytes += bytes, b.waiting--;
  b.end();
}
inline void await_phase(u32 barrier, u32 phase) {
  while ((barrier_at(own(barrier)).phases & 1) == (phase & 1)) yield();
  __syncwarp();
}
template <class T>
void send(bool there, u32 to, u32 barrier, T v) {
  if (!there) return;
  memcpy(at_address(to), &v, sizeof v);
  Barrier& b = barrier_at(barrier);
  b.bytes -= sizeof v;
  b.end();
}

static std::vector<Meeting> clusters(1024);
inline void meet_cluster() { meet(clusters[blockIdx.x / CLUSTER], CLUSTER * threads_of_block); }
#endif
