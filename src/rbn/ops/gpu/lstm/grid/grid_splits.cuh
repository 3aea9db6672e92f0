// Batches split over several blocks. SPLITS blocks own the same units, each for a part of the rows, and form a thread-block
// cluster: the blocks with the same blockIdx.x and consecutive blockIdx.y. Exchange, team sums and synchronization are per
// split, because the rows of a product are independent. Only sums over the batch involve all splits: the thread that owns
// a sum sends it to the same thread of the other splits, through distributed shared memory, and adds all of them in the
// order of the splits, so that all splits get bitwise identical results.
//
// A barrier counts the received bytes. Barriers and memory are double-buffered: a split that sends in a step has received
// what the others sent in the step before, so they have read what arrived two steps ago.
#ifndef SPLITS
#define SPLITS 1
#endif

__device__ __forceinline__ u32 own_split() { return SPLITS > 1 ? blockIdx.y % SPLITS : 0; }

// Rows per split: the same number of full tiles for all but the last one.
__device__ __forceinline__ int share_of(int B) { return ((B + SPLITS - 1) / SPLITS + 15) / 16 * 16; }
__device__ __forceinline__ int first_row(int B) { return SPLITS > 1 ? int(own_split()) * share_of(B) : 0; }
__device__ __forceinline__ int end_of_rows(int B) { return SPLITS > 1 ? min(B, first_row(B) + share_of(B)) : B; }

__device__ __forceinline__ void meet_cluster() {
  if (SPLITS == 1) return;
  __syncwarp();
  asm volatile("barrier.cluster.arrive.release.aligned;\n\tbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// Stores to the shared memory of another split, whose `barrier` counts the bytes.
__device__ __forceinline__ void send(u32 to, u32 barrier, float v) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.b32 [%0], %1, [%2];"
               ::"r"(to), "r"(__float_as_uint(v)), "r"(barrier) : "memory");
}

// Adds NUMBERS sums of a step over the splits, one per thread of full warps.
template <int NUMBERS>
struct OverSplits {
  float* scratch;   // [2][SPLITS][NUMBERS]
  u32 barriers;  // two

  __device__ __forceinline__ void start() const {
    if (SPLITS > 1 && threadIdx.x == 0) start_barrier(barriers, 1), start_barrier(barriers + 8, 1);
  }
  // times: calls so far.
  __device__ __forceinline__ void send_sum(float own, int number, u32 times) const {
    if (SPLITS == 1) return;
    const u32 at = address_of(scratch) + ((times % 2 * SPLITS + own_split()) * NUMBERS + number) * 4;
    const u32 barrier = barriers + times % 2 * 8;
    if (number == 0) expect(barrier, (SPLITS - 1) * NUMBERS * 4);
#pragma unroll
    for (u32 s = 1; s < SPLITS; s++) {
      const u32 to = (own_split() + s) % SPLITS;
      send(in_block(at, to), in_block(barrier, to), own);
    }
    __syncwarp();
  }
  __device__ __forceinline__ void await(u32 times) const {
    if (SPLITS > 1) await_phase(barriers + times % 2 * 8, times / 2);
  }
  // The total of a number, after `send_sum` and `await`.
  __device__ __forceinline__ float total(float own, int number, u32 times) const {
    if (SPLITS == 1) return own;
    const float* received = scratch + times % 2 * SPLITS * NUMBERS + number;
    float sum = 0.0f;
#pragma unroll
    for (u32 s = 0; s < SPLITS; s++) {
      const float other = received[s * NUMBERS];
      sum += s == own_split() ? own : other;
    }
    return sum;
  }
  __device__ __forceinline__ float all(float own, int number, u32 times) const {
    send_sum(own, number, times);
    await(times);
    return total(own, number, times);
  }
};
