// CUDA's threads on the CPU: each is a fiber that runs until it waits for others. Compiled once, for all kernels.
#include <setjmp.h>
#include <ucontext.h>

#include <cstring>
#include <vector>
// C's math.h alone: C++'s takes a sixth of a kernel's compilation.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS

#define __device__
#define __global__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes)

struct alignas(8) float2 { float x, y; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) float4 { float x, y, z, w; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
inline float2 make_float2(float x, float y) { return {x, y}; }
inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }
inline unsigned __float_as_uint(float v) { unsigned u; memcpy(&u, &v, 4); return u; }
inline float __uint_as_float(unsigned u) { float v; memcpy(&v, &u, 4); return v; }
inline float rsqrtf(float v) { return 1.0f / sqrtf(v); }
inline float __expf(float v) { return expf(v); }
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned max(unsigned a, unsigned b) { return a > b ? a : b; }
inline unsigned min(unsigned a, unsigned b) { return a < b ? a : b; }
inline int min(int a, int b) { return a < b ? a : b; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldg(const T* p) { return *p; }

struct Meeting {
  int arrived = 0, times = 0;
};
// Made when a thread waits for it, no earlier: so that a wait that is missing shows.
struct Copy {
  void* to;
  const void* from;  // null: of `value`
  int bytes;
  uint4 value;
  unsigned barrier;  // that counts it
  void make() const { memcpy(to, from ? from : &value, bytes); }
};
struct Block;
struct Cluster {
  Meeting meeting;
  int threads = 0;  // those that have not returned
  std::vector<Block*> blocks;
};
struct Warp {
  Meeting meeting;
  unsigned words[32][6];
};
struct Block {
  Meeting meeting, named[16];
  int threads = 0;  // those that have not returned
  Cluster* cluster;
  unsigned rank;  // in the cluster
  std::vector<Warp> warps;
  std::vector<uint4> memory;
  std::vector<Copy> copies;
};
struct Index { unsigned x, y; };
struct Fiber {
  ucontext_t context;
  jmp_buf place_in_code;
  std::vector<Copy> copies;
  Block* block;
  Warp* warp;
  Index thread, place;
  bool started = false, done = false;
};
// Hidden: each kernel's library has its own.
#pragma GCC visibility push(hidden)
extern jmp_buf scheduler;
extern Fiber* current;
extern bool progress;
extern Index gridDim;
extern void (*body)();
// Blocks form clusters of so many neighbours, in a grid's first dimension or, if `down`, in its second.
// Returns 1 if all threads wait for ever.
int run_grid(int columns, int rows, int threads, int shared, int cluster, int down, unsigned seed);
#pragma GCC visibility pop
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
inline void arrive(Meeting& m, int count) {
  progress = true;
  if (++m.arrived == count) m.arrived = 0, m.times++;
}
// `count` becomes less where threads return.
inline void meet(Meeting& m, const int& count) {
  const int times = m.times;
  arrive(m, count);
  while (m.times == times) {
    if (m.arrived == count) m.arrived = 0, m.times++;
    else yield();
  }
}
inline void __syncthreads() { meet(current->block->meeting, current->block->threads); }
inline Warp& this_warp() { return *current->warp; }
inline void __syncwarp() { meet(this_warp().meeting, 32); }
inline unsigned __shfl_sync(unsigned, unsigned v, int from) {
  Warp& w = this_warp();
  w.words[current->thread.x % 32][0] = v;
  __syncwarp();
  const unsigned result = w.words[from][0];
  __syncwarp();
  return result;
}
inline unsigned __shfl_xor_sync(unsigned all, unsigned v, int mask) {
  return __shfl_sync(all, v, current->thread.x % 32 ^ mask);
}
inline float __shfl_xor_sync(unsigned all, float v, int mask) {
  return __uint_as_float(__shfl_xor_sync(all, __float_as_uint(v), mask));
}

inline unsigned __reduce_max_sync(unsigned, unsigned v) {
  Warp& w = this_warp();
  w.words[current->thread.x % 32][0] = v;
  __syncwarp();
  for (int i = 0; i < 32; i++) v = max(v, w.words[i][0]);
  __syncwarp();
  return v;
}
// Shared memory has addresses of its own, as on a GPU: the block's rank in its cluster is in the upper bits.
#define RANK_AT 20
inline unsigned __cvta_generic_to_shared(const void* p) {
  return unsigned((const char*)p - (const char*)current->block->memory.data()) | current->block->rank << RANK_AT;
}
