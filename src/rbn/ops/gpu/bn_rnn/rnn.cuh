// Shared by both kernels of the batch-normalized RNN.
//
// A thread block owns UNITS hidden units for all rows of the batch. TEAM blocks divide the columns of their
// product: each reads 1 / TEAM of the columns of the exchanged rows, multiplies them for the units of the
// team, and sends the other blocks their partial sums. After the product a thread owns OWN neighbouring
// units of RPT rows. With one warp per tile of rows (DIRECT) these are its tensor core accumulators;
// otherwise the partial sums are added through shared memory.
//
// Macros: those of common.cuh, TEAM, RELU.
#include "common.cuh"

#define DIRECT (KS == 1 && MPW == 1 && UNITS == 8 && TEAM == 1)
#define TEAM_UNITS (TEAM * UNITS)
#define NT (TEAM_UNITS / 8)
#define PITCH (TEAM_UNITS > 8 ? TEAM_UNITS + 8 : 8)
#define PAIRS (OWN / 2)
#undef RPT
#define RPT (DIRECT ? 2 : (ROWS + STEP - 1) / STEP)
#define COLUMN_BLOCKS ((HS + BLOCK - 1) / BLOCK)
#define KBW ((COLUMN_BLOCKS + KS * TEAM - 1) / (KS * TEAM))
#define SUMS (DIRECT ? 0 : KS * ROWS * PITCH)  // floats of shared memory

// The position of a thread: its block's rank in the team, and the rows and units that it owns.
struct Owner {
  int tid, lane, warp, mw, ks, rank, unit;
  __device__ __forceinline__ Owner() {
    tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, mw = warp % MW, ks = warp / MW;
    rank = blockIdx.x % TEAM, unit = blockIdx.x * UNITS + OWN * (tid & 3);
  }
  __device__ __forceinline__ int row(int j) const {
    return DIRECT ? warp * 16 + (lane >> 2) + 8 * j : (tid >> 2) + j * STEP;
  }
  __device__ __forceinline__ bool has(int pair) const { return unit + 2 * pair < H; }
};

// The exchange of partial sums within a team, through global memory.
struct Team {
  float* handed;  // [blocks, TEAM, ROWS, UNITS]
  u32* counter;   // one per team, initially zero
};

// Loads this block's part of W [H, H] for the units of its team into registers or `shared`.
__device__ __forceinline__ void load_weights(Weights<NT, KBW>& w, const Element* weight, const Owner& o, uint4* shared) {
  w.load(weight, H, o.rank * KS + o.ks, o.mw, o.lane, shared - o.rank * KS * KBW * NT * 32, [&](int n) -> i64 {
    const int u = (blockIdx.x - o.rank) * UNITS + n * 8 + (o.lane >> 2);
    return u < H ? i64(u) : -1;
  });
  __syncthreads();
}

// result = rows [B, HS] times W. `step`: calls so far.
__device__ __forceinline__ void multiply_rows(float (&result)[RPT][OWN], const Weights<NT, KBW>& w,
                                              const Element* rows, int B, const Owner& o, float* part,
                                              Team team, int step, bool wait) {
  float sums[MPW][NT][4] = {};
  gather_multiply<NT, KBW, TEAM * KS>(sums, w, rows, HS, HS, B, o.rank * KS + o.ks, o.mw, o.lane, wait);
#if DIRECT
#pragma unroll
  for (int j = 0; j < RPT; j++) result[j][0] = sums[0][0][2 * j], result[j][1] = sums[0][0][2 * j + 1];
#else
  put_sums<NT, PITCH>(part, sums, o.ks, o.mw, o.lane);
  __syncthreads();
#pragma unroll
  for (int other = 0; other < TEAM; other++) {
#pragma unroll
    for (int j = 0; j < RPT; j++) {
      float v[OWN] = {};
      if (o.row(j) < ROWS)
#pragma unroll
        for (int k = 0; k < KS; k++)
#pragma unroll
          for (int i = 0; i < PAIRS; i++) {
            const float* from = part + (k * ROWS + o.row(j)) * PITCH + other * UNITS + OWN * (o.tid & 3);
            const float2 s = load2(from + 2 * i);
            v[2 * i] += s.x, v[2 * i + 1] += s.y;
          }
      if (other == o.rank) {
#pragma unroll
        for (int i = 0; i < OWN; i++) result[j][i] = v[i];
      } else if (o.row(j) < B) {
        const i64 to = ((blockIdx.x - o.rank + other) * TEAM + o.rank) * i64(ROWS) + o.row(j);
#pragma unroll
        for (int i = 0; i < PAIRS; i++)
          store2(team.handed + to * UNITS + OWN * (o.tid & 3) + 2 * i, v[2 * i], v[2 * i + 1]);
      }
    }
  }
#if TEAM > 1
  // Added in the order of the ranks, so that the result is deterministic.
  arrive(team.counter + blockIdx.x / TEAM);
  wait_for(team.counter + blockIdx.x / TEAM, TEAM * u32(step + 1));
#pragma unroll
  for (int j = 0; j < RPT; j++) {
    if (o.row(j) >= B) continue;
    float v[OWN] = {};
#pragma unroll
    for (int other = 0; other < TEAM; other++)
#pragma unroll
      for (int i = 0; i < PAIRS; i++) {
        const i64 from = (blockIdx.x * TEAM + other) * i64(ROWS) + o.row(j);
        float2 s = make_float2(result[j][2 * i], result[j][2 * i + 1]);
        if (other != o.rank)
          s = __ldcg(reinterpret_cast<const float2*>(team.handed + from * UNITS + OWN * (o.tid & 3) + 2 * i));
        v[2 * i] += s.x, v[2 * i + 1] += s.y;
      }
#pragma unroll
    for (int i = 0; i < OWN; i++) result[j][i] = v[i];
  }
#endif
#endif
}

// Sums each v[i] over all rows, in a fixed order, and returns the sums to all threads with the same units.
// scratch: [2, WARPS, 4, NV]; double-buffered, so that one barrier is enough.
template <int NV>
__device__ __forceinline__ void sum_over_rows(float (&v)[NV], float* scratch, i64 step) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, mine = threadIdx.x & 3;
  float* half = scratch + (step & 1) * WARPS * 4 * NV;
  const int index = sum_over_lanes(v, lane);
  constexpr int LEFT = NV > 8 ? NV / 8 : 1;
#pragma unroll
  for (int i = 0; i < LEFT; i++) half[(warp * 4 + mine) * NV + index + i] = v[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < NV; i++) v[i] = 0.0f;
#pragma unroll
  for (int w = 0; w < WARPS; w++)
#pragma unroll
    for (int i = 0; i < NV / 4; i++) {
      const float4 four = reinterpret_cast<const float4*>(half + (w * 4 + mine) * NV)[i];
      v[4 * i] += four.x, v[4 * i + 1] += four.y, v[4 * i + 2] += four.z, v[4 * i + 3] += four.w;
    }
}

// Loads the values of a thread's units from a row [H]; zero beyond the last unit.
__device__ __forceinline__ void load_units(float (&v)[OWN], const float* row, const Owner& o) {
#pragma unroll
  for (int i = 0; i < PAIRS; i++) {
    const float2 two = o.has(i) ? load2(row + o.unit + 2 * i) : make_float2(0, 0);
    v[2 * i] = two.x, v[2 * i + 1] = two.y;
  }
}

__device__ __forceinline__ void store_units(float* row, const float* v, const Owner& o) {
#pragma unroll
  for (int i = 0; i < PAIRS; i++)
    if (o.has(i)) store2(row + o.unit + 2 * i, v[2 * i], v[2 * i + 1]);
}

__device__ __forceinline__ Pair load_pair(const Element* p, bool ok) {
  return ok ? *reinterpret_cast<const Pair*>(p) : narrow(make_float2(0, 0));
}

__device__ __forceinline__ float activate(float v) {
  return RELU ? (v <= 0.0f ? 0.0f : v) : tanh_(v);  // NaN propagates
}
