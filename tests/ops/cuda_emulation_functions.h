// The kernels' functions that are written in PTX, for the CPU. What follows a line "In place of NAME" goes where the
// kernel defines NAME, after all macros that it may need; other functions in PTX are left out.

// In place of pack:
// bfloat16 with TYPE 1, else float16.
#if TYPE == 1
inline unsigned short to_half(float v) {
  const unsigned u = __float_as_uint(v);
  return v != v ? 0x7fff : (u + 0x7fff + ((u >> 16) & 1)) >> 16;
}
inline float from_half(unsigned short bits) { return __uint_as_float(unsigned(bits) << 16); }
#else
inline unsigned short to_half(float v) {
  const unsigned u = __float_as_uint(v), sign = u >> 16 & 0x8000, size = u & 0x7fffffff;
  if (size > 0x7f800000) return 0x7fff;
  if (size >= 0x477ff000) return sign | 0x7c00;
  if (size < 0x38800000) return sign | unsigned(nearbyintf(ldexpf(__uint_as_float(size), 24)));
  return sign | (((size + 0xfff + (size >> 13 & 1)) >> 13) - (112 << 10));
}
inline float from_half(unsigned short bits) {
  const unsigned exponent = bits >> 10 & 31, fraction = bits & 1023, sign = (bits & 0x8000) << 16;
  if (!exponent) return ldexpf(bits & 0x8000 ? -float(fraction) : float(fraction), -24);
  return __uint_as_float(sign | (exponent == 31 ? 255 : exponent + 112) << 23 | fraction << 13);
}
#endif
inline u32 pack(float x, float y) { return to_half(x) | u32(to_half(y)) << 16; }

// In place of unpack:
inline float2 unpack(u32 p) { return make_float2(from_half(p), from_half(p >> 16)); }

// In place of publish:
inline void publish(Element* p, float2 v) {
  progress = true;
  Pair two = narrow(v);
  memcpy(p, &two, sizeof two);
}

// In place of peek:
inline uint4 peek(const Element* p) {
  yield();
  return *reinterpret_cast<const uint4*>(p);
}

// In place of fetch:
inline uint4 fetch(const Element* p) { return *reinterpret_cast<const uint4*>(p); }

// In place of announce:
inline void announce(u32* counter) {
  progress = true;
  ++*counter;
}

// In place of wait_until:
inline void wait_until(const u32* counter, u32 arrivals) {
  while (*counter < arrivals) yield();
}

// In place of exp2_:
inline float exp2_(float x) { return exp2f(x); }

// In place of inverse:
inline float inverse(float x) { return 1.0f / x; }

// In place of tanh_:
inline float tanh_(float x) { return tanhf(x); }

// In place of multiply:
inline float dot16(u32 a, u32 b) {
  const float2 x = unpack(a), y = unpack(b);
  return x.x * y.x + x.y * y.y;
}
inline float dot(u32 a, u32 b) { return TYPE == 0 ? __uint_as_float(a) * __uint_as_float(b) : dot16(a, b); }

// m16n8k16, or m16n8k8 with operands of twice as many bits: which lane holds which part is the same. Without a2, a3 and
// b1 it has half of the columns.
template <class Dot>
inline void multiply_with(Dot dot, float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
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
inline void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  multiply_with(dot, c, a0, a1, a2, a3, b0, b1);
}

// In place of rounded:
inline u32 rounded_word(u32 v) { return TYPE == 0 ? (v + 0x1000) & ~0x1fffu : v; }
inline uint4 rounded(uint4 v) {
  return {rounded_word(v.x), rounded_word(v.y), rounded_word(v.z), rounded_word(v.w)};
}

// In place of multiply16:
inline void multiply16(float (&c)[4], uint4 a, u32 b0, u32 b1) {
  multiply_with(dot16, c, a.x, a.y, a.z, a.w, b0, b1);
}

// In place of multiply8:
inline void multiply8(float (&c)[4], u32 a0, u32 a1, u32 b) { multiply_with(dot16, c, a0, a1, 0, 0, b, 0); }

// In place of turn:
inline u32 turn(u32 v) {
  Warp& w = this_warp();
  const int lane = threadIdx.x % 32, row = lane >> 2, pair = lane & 3;
  w.words[lane][0] = v;
  __syncwarp();
  auto at = [&](int i, int j) { return w.words[4 * i + j / 2][0] >> j % 2 * 16 & 0xffff; };
  v = at(2 * pair, row) | at(2 * pair + 1, row) << 16;
  __syncwarp();
  return v;
}

// In place of pick:
inline float pick(bool first, float x, float y) { return first ? x : y; }

// In place of tanh_of:
inline float tanh_of(float x) { return tanhf(x); }

// In place of rsqrt_:
inline float rsqrt_(float x) { return 1.0f / sqrtf(x); }

// In place of in_block:
inline u32 offset_of(u32 address) { return address & ((1u << RANK_AT) - 1); }
inline u32 in_block(u32 address, u32 rank) { return offset_of(address) | rank << RANK_AT; }
inline Block& block_of(u32 address) { return *current->block->cluster->blocks.at(address >> RANK_AT); }
inline char* at_address(u32 address) { return (char*)block_of(address).memory.data() + offset_of(address); }

// In place of start_barrier:
struct Barrier {  // 8 bytes, as mbarrier's
  int bytes;
  unsigned char arrivals, missing;
  unsigned short phases;  // that have ended
  void add(int more) {
    progress = true;
    bytes += more;
    if (!missing && !bytes) missing = arrivals, phases++;
  }
};
inline Barrier& barrier_at(u32 address) { return *reinterpret_cast<Barrier*>(at_address(address)); }
inline void start_barrier(u32 barrier, u32 arrivals) {
  const unsigned char n = arrivals;
  barrier_at(barrier) = {0, n, n, 0};
}

// In place of expect:
inline void expect(u32 barrier, u32 bytes) {
  barrier_at(barrier).missing--;
  barrier_at(barrier).add(bytes);
}

// In place of await_phase:
inline void await_phase(u32 barrier, u32 phase) {
  auto& copies = current->block->copies;
  while ((barrier_at(barrier).phases & 1) == (phase & 1)) {
    for (size_t i = 0; i < copies.size();) {
      const Copy c = copies[i];
      if (c.barrier != barrier) {
        i++;
        continue;
      }
      c.make();
      barrier_at(barrier).add(-c.bytes);
      copies[i] = copies.back(), copies.pop_back();
    }
    yield();
  }
  __syncwarp();
}

// In place of send:
template <class T>
void send(bool there, u32 to, u32 barrier, T v) {
  if (!there) return;
  Copy c = {at_address(to), nullptr, sizeof v, {}, barrier};
  memcpy(&c.value, &v, sizeof v);
  block_of(barrier).copies.push_back(c);
}
inline void send(u32 to, u32 barrier, float v) { send(true, to, barrier, v); }

// In place of meet_cluster:
inline void meet_cluster() {
  Cluster& c = *current->block->cluster;
  if (c.blocks.size() > 1) meet(c.meeting, c.threads);
}

// In place of take_registers:
inline void take_registers() {}

// In place of give_registers:
inline void give_registers() {}

// In place of await:
template <int NUMBER, int COUNT = THREADS>
void await() {
  meet(current->block->named[NUMBER], COUNT);
}

// In place of done:
template <int NUMBER>
void done() {
  arrive(current->block->named[NUMBER], THREADS);
}

// In place of fetch_async:
template <int BYTES>
void fetch_async(u32 to, const void* from, bool there) {
  current->copies.push_back({at_address(to), there ? from : nullptr, BYTES, {}, 0});
}

// In place of fetched:
inline void fetched() {
  for (const Copy& c : current->copies) c.make();
  current->copies.clear();
  __syncwarp();
}

// In place of maybe_late:
inline void maybe_late(u32) {}

// In place of pass_word:
inline void pass_word(uint4* p, uint4 v) { *p = v; }

// In place of for_copies:
inline void for_copies() {}

// In place of copy_bulk:
inline void copy_bulk(u32 to, const uint4* from, u32 bytes, u32 barrier) {
  current->block->copies.push_back({at_address(to), from, int(bytes), {}, barrier});
}

// In place of bring_row:
inline void bring_row(const void*, u32) {}

// In place of bring:
inline void bring(const void*) {}

// In place of load_mask:
inline u32 load_mask(const unsigned char* p, bool on) { return on ? *reinterpret_cast<const u32*>(p) : 0; }

// In place of load_here4:
inline void load_here4(float (&v)[4], const float* p, bool on) {
  for (int i = 0; i < 4; i++) v[i] = on ? p[i] : 0.0f;
}

// In place of store_here4:
inline void store_here4(float* p, const float (&v)[4], bool on) {
  if (on) memcpy(p, v, sizeof v);
}

// In place of load_here:
inline uint2 load_here(const Element* p, bool on) { return on ? *reinterpret_cast<const uint2*>(p) : uint2{}; }

// In place of store_here:
inline void store_here(Element* p, uint2 v, bool on) {
  if (on) *reinterpret_cast<uint2*>(p) = v;
}

// In place of multiply_wide:
// m64nNk16 with weights in shared memory: a warp has 16 of the rows, and lanes hold parts as in `multiply_with`.
inline void multiply_wide(float (&c)[COLUMNS / 2], const uint4& a, u64 b, int more) {
  Warp& w = this_warp();
  const int lane = threadIdx.x % 32, g = lane >> 2, t = lane & 3;
  memcpy(w.words[lane], &a, sizeof a);
  __syncwarp();
  // 8 columns, each with 8 numbers, are 128 bytes in a row.
  const uint4* weights = current->block->memory.data() + (b & 0x3fff);
  const u32 other_numbers = b >> 16 & 0x3fff, other_columns = b >> 32 & 0x3fff;
  for (int i = 0; i < COLUMNS / 2; i++) {
    if (!more) c[i] = 0.0f;
    for (int half = 0; half < 2; half++) {
      const uint4 v = weights[i / 4 * other_columns + half * other_numbers + 2 * t + i % 2];
      const u32 column[] = {v.x, v.y, v.z, v.w};
      for (int k = 0; k < 4; k++) c[i] += dot16(w.words[g * 4 + k][2 * half + i / 2 % 2], column[k]);
    }
  }
  __syncwarp();
}

// In place of begin_products:
inline void begin_products() {}

// In place of commit_products:
inline void commit_products() {}

// In place of await_products:
template <int LEFT>
void await_products() {}

// In place of fetch_piece:
template <int OFFSET>
uint4 fetch_piece(const uint4* p) {
  return p[OFFSET / 16];
}

// In place of look_at_exponent:
inline u32 look_at_exponent(const u32* p, bool on) { return on ? *p : 0; }

// In place of pass_exponent:
inline void pass_exponent(u32* p, u32 v) { *p = v; }

// In place of multiply_halves:
inline void multiply_halves(u32& v, u32 factor) {
  const float2 a = unpack(v), b = unpack(factor);
  v = pack(a.x * b.x, a.y * b.y);
}

// In place of hand_word:
inline void hand_word(uint4* p, uint4 v) {
  progress = true;
  *p = v;
}

// In place of look_at_word:
inline uint4 look_at_word(const uint4* p) {
  yield();
  return *p;
}

// In place of hand_power:
inline void hand_power(u32* p, u32 v) {
  progress = true;
  *p = v;
}

// In place of look_at_power:
inline u32 look_at_power(const u32* p) {
  yield();
  return *p;
}
