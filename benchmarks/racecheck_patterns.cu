// Minimal programs for racecheck_patterns.py: in each of a few rounds, some threads write what others read. A block has
// three warps: two workers, and the last one, which serves them. The comment above a pattern says whether it is right
// and whether it needs the three blocks to be a cluster, and then describes it.
typedef unsigned u32;

struct Args {
  u32* wrong;         // counts unexpected numbers
  const u32* memory;  // 0, 1, 2, ...
  int rounds;
};

__device__ __forceinline__ u32 at(const volatile void* p) { return u32(__cvta_generic_to_shared((const void*)p)); }
template <int COUNT = 96>
__device__ __forceinline__ void arrive() { asm volatile("barrier.cta.arrive.aligned 2, %0;" ::"n"(COUNT) : "memory"); }
template <int COUNT = 96>
__device__ __forceinline__ void sync() { asm volatile("barrier.cta.sync.aligned 2, %0;" ::"n"(COUNT) : "memory"); }
__device__ __forceinline__ void cluster() {
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
__device__ __forceinline__ void nap() {
  for (int i = 0; i < 4; i++) __nanosleep(200000);
}

// Barriers in shared memory.
__device__ __forceinline__ void start(u32 barrier, u32 count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void come(u32 barrier) {
  asm volatile("{\n\t.reg .b64 s;\n\tmbarrier.arrive.shared::cta.b64 s, [%0];\n\t}" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
  asm volatile("{\n\t.reg .b64 s;\n\tmbarrier.arrive.expect_tx.shared::cta.b64 s, [%0], %1;\n\t}"
               ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void until(u32 barrier, u32 phase) {
  u32 done;
  do {
    asm volatile("{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n\tselp.u32 %0, 1, 0, p;\n\t}"
                 : "=r"(done) : "r"(barrier), "r"(phase & 1) : "memory");
  } while (!done);
  __syncwarp();
}

// Other blocks of the cluster.
__device__ __forceinline__ u32 in_block(u32 address, u32 rank) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
  return there;
}
__device__ __forceinline__ void put(u32 to, u32 v) {
  asm volatile("st.shared::cluster.u32 [%0], %1;" ::"r"(to), "r"(v) : "memory");
}
__device__ __forceinline__ void send(u32 to, u32 barrier, u32 v) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %2, [%1];"
               ::"r"(to), "r"(barrier), "r"(v) : "memory");
}

// A thread in round t: writes v, or reads `some` of eight such numbers. late: who is late for the barrier, 1 the server,
// 2 the others.
struct Here {
  volatile u32 *data, *totals;  // [64], [16]
  u32 bars;                     // two barriers
  Args args;
  int late, warp, lane, some, t;
  bool server;
  u32 v, wrong;

  __device__ __forceinline__ void linger() { if (late == (server ? 1 : 2)) nap(); }
  __device__ __forceinline__ void see(u32 got, u32 want) { wrong += got != want; }
  __device__ __forceinline__ u32 next(u32 i = 1) const { return (blockIdx.x + i) % 3; }
  __device__ __forceinline__ void write() { if (server && lane < 8) data[lane] = v; linger(); }
  __device__ __forceinline__ void read() { if (!server) see(data[some], v); __syncthreads(); }
  // Sends sums of the workers to the server, and its results back: half 0, then 1.
  template <class Bring>
  __device__ __forceinline__ void sums(int half, Bring bring) {
    volatile u32 *room = data + 16 * half, *total = totals + 8 * half;
    if (!server && lane < 8) room[8 * warp + lane] = v;
    linger();
    bring();
    if (server) {
      const u32 sum = room[some] + room[8 + some];
      __syncwarp();
      if (lane < 8) total[lane] = sum;
    }
    linger();
    __syncthreads();
    if (!server) see(total[some], 2 * v);
  }
};
struct Base { static constexpr u32 count = 1, bytes = 0; };  // arrivals and bytes at a barrier per round
#define ROUND static __device__ __forceinline__ void round(Here& h)

// right: the server writes, __syncthreads, the others read
struct Syncthreads : Base { ROUND { h.write(), __syncthreads(), h.read(); } };

// right: the same with a named barrier, at which all wait (barrier.sync)
struct Named : Base { ROUND { h.write(), sync(), h.read(); } };

// right: the same, but the server waits at another place of the code
struct Apart : Base { ROUND { h.write(); if (h.server) { sync(); __nanosleep(1); } else sync(); h.read(); } };

// right: the server writes and arrives (barrier.arrive), the others wait (barrier.sync) and read
struct Arrive : Base { ROUND { h.write(); if (h.server) arrive(); else sync(); h.read(); } };

// right: the others write and arrive, the server waits and reads
struct ArriveBack : Base {
  ROUND {
    if (!h.server && h.lane < 8) h.data[8 * h.warp + h.lane] = h.v;
    h.linger();
    if (h.server) sync(), h.see(h.data[h.some], h.v), h.see(h.data[8 + h.some], h.v);
    else arrive();
    __syncthreads();
  }
};

// right: two warps, one writes and arrives, one waits and reads
struct ArrivePair : Base {
  ROUND {
    h.write();
    if (h.server) arrive<64>();
    if (h.warp == 0) sync<64>(), h.see(h.data[h.some], h.v);
    __syncthreads();
  }
};

// right: sums to the server by barrier.arrive and barrier.sync, totals back by __syncthreads, twice
struct Chain : Base {
  ROUND { for (int half = 0; half < 2; half++) h.sums(half, [&] { if (h.server) sync(); else arrive(); }); }
};

// right: the same, all wait at both
struct ChainWaiting : Base {
  ROUND { for (int half = 0; half < 2; half++) h.sums(half, [&] { if (h.server) sync(); else sync(); }); }
};

// right: the server writes, each of its lanes arrives at an mbarrier, the others wait for it and read
struct Mbarrier : Base {
  static constexpr u32 count = 32;
  ROUND { h.write(); if (h.server) come(h.bars); else until(h.bars, h.t); h.read(); }
};

// right: the same, __syncwarp and one lane arrives for all
struct MbarrierLane : Base {
  ROUND {
    h.write();
    if (h.server) { __syncwarp(); if (h.lane == 0) come(h.bars); }
    else until(h.bars, h.t);
    h.read();
  }
};

// WRONG: the server writes, the others sleep and read
struct Nothing : Base { ROUND { h.write(); if (!h.server) nap(); h.read(); } };

// Within a warp.
__device__ __forceinline__ void copied() { asm volatile("cp.async.wait_all;" ::: "memory"); }
template <class Write, class Wait>
__device__ __forceinline__ void in_warp(Here& h, u32 wanted, Write write, Wait wait) {
  volatile u32* room = h.data + 8 * h.warp;
  if (h.lane < 8) write(room + h.lane);
  wait();
  h.see(room[h.some ^ 1], wanted);
  copied(), __syncwarp();
}
#define OF_OTHER (1000 * h.t + (h.some ^ 1) + 1)
#define ASKED (8 * h.t + (h.some ^ 1))
__device__ __forceinline__ void ask(Here& h, volatile u32* to) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(at(to)), "l"(h.args.memory + 8 * h.t + h.lane) : "memory");
}

// right: lanes write, __syncwarp, other lanes read
struct Warp : Base { ROUND { in_warp(h, OF_OTHER, [&](volatile u32* to) { *to = h.v; }, [] { __syncwarp(); }); } };

// WRONG: lanes write, other lanes sleep and read
struct WarpNothing : Base { ROUND { in_warp(h, OF_OTHER, [&](volatile u32* to) { *to = h.v; }, [] { nap(); }); } };

// right: cp.async, cp.async.wait_all, __syncwarp, other lanes read
struct Copy : Base { ROUND { in_warp(h, ASKED, [&](volatile u32* to) { ask(h, to); }, [] { copied(), __syncwarp(); }); } };

// WRONG: cp.async, other lanes sleep and read
struct CopyNothing : Base { ROUND { in_warp(h, ASKED, [&](volatile u32* to) { ask(h, to); }, [] { nap(); }); } };

template <class Wait>
__device__ __forceinline__ void remote(Here& h, Wait wait) {
  if (!h.server && h.lane < 8) put(in_block(at(h.data + 8 * h.warp + h.lane), h.next()), h.v);
  h.linger();
  wait();
  if (!h.server) h.see(h.data[8 * h.warp + h.some], h.v);
  cluster();
}

// right, cluster: a store into the next block, barrier.cluster, it reads
struct Remote : Base { ROUND { remote(h, [] { cluster(); }); } };

// WRONG, cluster: a store into the next block, which sleeps and reads
struct RemoteNothing : Base { ROUND { remote(h, [] { nap(); }); } };

#define BYTES (2 * 2 * 8 * 4)  // that come to a block in a round: from two blocks, two warps of each
// right, cluster: st.async to all others into one of two buffers, which they wait for at its mbarrier (as small layers do)
struct Async : Base {
  static constexpr u32 bytes = BYTES;
  ROUND {
    if (h.server) return;
    const u32 now = h.t & 1, barrier = h.bars + 8 * now;
    volatile u32* buffer = h.data + 32 * now;
    h.linger();
    for (u32 i = 1; i < 3; i++) {
      const u32 to = at(buffer + 16 * (i - 1) + 8 * h.warp + h.lane), rank = h.next(i);
      if (h.lane < 8) send(in_block(to, rank), in_block(barrier, rank), h.v);
    }
    until(barrier, h.t >> 1);
    if (threadIdx.x == 0) expect(barrier, BYTES);
    h.see(buffer[8 * h.warp + h.some], h.v), h.see(buffer[16 + 8 * h.warp + h.some], h.v);
    __syncwarp();
  }
};

// Into one buffer of the next block only.
template <class Wait, class Meet>
__device__ __forceinline__ void to_next(Here& h, Wait wait, Meet meet) {
  if (!h.server) {
    h.linger();
    if (h.lane < 8) send(in_block(at(h.data + 8 * h.warp + h.lane), h.next()), in_block(h.bars, h.next()), h.v);
    wait();
    h.see(h.data[8 * h.warp + h.some], h.v);
    until(h.bars, h.t);
  }
  __syncthreads();
  if (threadIdx.x == 0) expect(h.bars, BYTES / 2);
  meet();
}

struct ToNext { static constexpr u32 count = 1, bytes = BYTES / 2; };

// WRONG, cluster: st.async, sleep instead of the wait, read
struct AsyncNothing : ToNext { ROUND { to_next(h, [] { nap(); }, [] { cluster(); }); } };

// WRONG, cluster: st.async, wait, read; then into the same buffer again after a sleep instead of a meeting
struct AsyncEarly : ToNext { ROUND { to_next(h, [&] { until(h.bars, h.t); }, [] { nap(); }); } };

template <class Pattern, bool IN_CLUSTER, int LATE>
__device__ __forceinline__ void run(Args args) {
  __shared__ u32 data[64], totals[16];
  __shared__ unsigned long long bars[2];
  Here h;
  h.data = data, h.totals = totals, h.bars = at(bars), h.args = args, h.late = LATE, h.wrong = 0;
  h.warp = threadIdx.x / 32, h.lane = threadIdx.x % 32, h.some = h.lane & 7, h.server = h.warp == 2;
  if (threadIdx.x == 0)
    for (int i = 0; i < 2; i++) {
      start(h.bars + 8 * i, Pattern::count);
      if (Pattern::bytes) expect(h.bars + 8 * i, Pattern::bytes);
    }
  __syncthreads();
  if (IN_CLUSTER) cluster();
#pragma unroll 1
  for (h.t = 0; h.t < args.rounds; h.t++) {
    h.v = 1000 * h.t + h.some + 1;
    Pattern::round(h);
  }
  __syncthreads();
  if (IN_CLUSTER) cluster();
  if (h.wrong) atomicAdd(args.wrong, h.wrong);
}
