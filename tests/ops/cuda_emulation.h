// CUDA's threads on the CPU: each is a fiber that runs until it waits for others.
#include <setjmp.h>
#include <ucontext.h>

#include <cmath>
#include <cstring>
#include <vector>

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct alignas(8) float2 { float x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline unsigned __float_as_uint(float v) { unsigned u; memcpy(&u, &v, 4); return u; }
inline float __uint_as_float(unsigned u) { float v; memcpy(&v, &u, 4); return v; }
inline float rsqrtf(float v) { return 1.0f / std::sqrt(v); }
inline float __expf(float v) { return std::exp(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
template <class T> T __ldcg(const T* p) { return *p; }

struct Meeting {
  int arrived = 0, times = 0;
};
struct Warp {
  Meeting meeting;
  unsigned words[32][6];
};
struct Block {
  Meeting meeting;
  std::vector<Warp> warps;
  std::vector<uint4> memory;
};
struct Index { unsigned x, y; };
struct Fiber {
  ucontext_t context;
  jmp_buf place_in_code;
  std::vector<char> stack;
  Block* block;
  Index thread, place;
  bool started = false, done = false;
};
static jmp_buf scheduler;
static Fiber* current;
static int threads_of_block;
static bool progress;
static Index gridDim;
static void (*body)();
#define threadIdx (current->thread)
#define blockIdx (current->place)

// swapcontext would ask the kernel for the signal mask each time.
inline void yield() {
  if (!_setjmp(current->place_in_code)) _longjmp(scheduler, 1);
}
inline void resume() {
  if (_setjmp(scheduler)) return;
  if (current->started) _longjmp(current->place_in_code, 1);
  current->started = true;
  setcontext(&current->context);
}
inline void meet(Meeting& m, int count) {
  const int times = m.times;
  progress = true;
  if (++m.arrived == count) m.arrived = 0, m.times++;
  else
    while (m.times == times) yield();
}
inline void __syncthreads() { meet(current->block->meeting, threads_of_block); }
inline Warp& this_warp() { return current->block->warps[current->thread.x / 32]; }
inline void __syncwarp() { meet(this_warp().meeting, 32); }
inline float __shfl_xor_sync(unsigned, float v, int mask) {
  Warp& w = this_warp();
  const int lane = current->thread.x % 32;
  w.words[lane][0] = __float_as_uint(v);
  __syncwarp();
  const float result = __uint_as_float(w.words[lane ^ mask][0]);
  __syncwarp();
  return result;
}

inline unsigned __reduce_max_sync(unsigned, unsigned v) {
  Warp& w = this_warp();
  w.words[current->thread.x % 32][0] = v;
  __syncwarp();
  for (int i = 0; i < 32; i++) v = max(v, w.words[i][0]);
  __syncwarp();
  return v;
}
// Shared memory has addresses of its own, as on a GPU.
inline unsigned __cvta_generic_to_shared(const void* p) {
  return unsigned((const char*)p - (const char*)current->block->memory.data());
}

static void enter() {
  body();
  current->done = progress = true;
  yield();
}

// Returns 1 if all threads wait for ever.
inline int run_grid(int blocks, int threads, int shared, unsigned seed) {
  std::vector<Block> all(blocks);
  std::vector<Fiber> fibers(size_t(blocks) * threads);
  threads_of_block = threads;
  gridDim = {unsigned(blocks), 1};
  for (Block& b : all) {
    b.warps.resize(threads / 32);
    b.memory.assign(shared / 16, make_uint4(~0u, ~0u, ~0u, ~0u));  // NaN
  }
  for (size_t i = 0; i < fibers.size(); i++) {
    Fiber& f = fibers[i];
    f.block = &all[i / threads];
    f.place = {unsigned(i / threads), 0}, f.thread = {unsigned(i % threads), 0};
    f.stack.resize(1 << 16);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack.data(), f.context.uc_stack.ss_size = 1 << 16;
    f.context.uc_link = nullptr;
    makecontext(&f.context, enter, 0);
  }
  std::vector<Fiber*> order;
  for (Fiber& f : fibers) {  // in random order
    seed = seed * 1664525u + 1013904223u;
    order.insert(order.begin() + (seed >> 8) % (order.size() + 1), &f);
  }
  for (int idle = 0; !order.empty();) {
    progress = false;
    for (Fiber* f : order) {
      current = f;
      resume();
    }
    std::vector<Fiber*> left;
    for (Fiber* f : order)
      if (!f->done) left.push_back(f);
    order = left;
    idle = progress ? 0 : idle + 1;
    if (idle > 100) return 1;
  }
  return 0;
}
