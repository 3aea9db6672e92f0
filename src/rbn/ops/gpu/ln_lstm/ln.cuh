// The layer-normalized LSTM in one launch: shared by the forward and the backward kernel.
//
// Rows of the batch are independent. A cluster of CLUSTER thread blocks owns ROWS rows and keeps W_h, or as much of it
// as fits, in its shared memory and registers; a block owns the four gates of UNITS units. In element-wise work a warp owns
// one row of the batch and its lanes the block's units, PER_LANE each. So a mean over the features of a row is a warp
// reduction, followed by an exchange between the warps of the same row in all blocks through distributed shared
// memory. A step exchanges two such pairs of sums and, for the product, h (forward) or shares of dh (backward).
//
// Products have 16-bit operands: A is the weight (16 gate columns or units), B are 8 rows of the batch. In float32
// layers they are float16, which has the 11 significant bits of tf32, scaled by powers of two.
//
// Buffers are not double-buffered. A block sends data only after it has received, in the same step, from the warps
// that were the last to read what the data overwrite: see `Exchange`, `ln_forward` and `ln_backward`.
//
// Macros: TYPE, H, CLUSTER, UNITS (a multiple of 8), TILES (of 8 rows), KEPT and RESIDENT (fragments of a warp's
// weights in registers and in shared memory, see `Shard`), SHARED_BYTES, SPLIT (warps that divide the columns of a forward
// product), SHARES16 (dh is exchanged in 16 bits), LENGTHS, SAVE, DOUTPUT.
#define MT 1  // these are for common.cuh
#define MW 1
#define KS 1
#define CHUNK 1
#define REGISTERS 0
#define BARRIER 1
#define BIAS 1
#define MODE_X 1
#define MODE_H 1
#include "common.cuh"
#include "exchange.cuh"
#undef ROWS
#undef WARPS
#undef THREADS
#define ROWS (8 * TILES)
#define WARPS ROWS
#define THREADS (32 * WARPS)
#define PER_LANE ((UNITS + 31) / 32)
#define PIECES(columns) (((columns) + 31) / 32 * 4)  // 16-byte pieces per row of an operand
#define PITCH(columns) (PIECES(columns) + 4 - PIECES(columns) / 4 % 2 * 4)  // 64 bytes off a multiple of 128: no bank conflicts
#define DEPTH 4  // fragments prefetched
#define FACTORS 5  // saved statistics per row: see `Kept`

enum Kept { MEAN_X, RSTD_X, RSTD_H, MEAN_C, RSTD_C };

// Single elements -----------------------------------------------------------------------------------

__device__ __forceinline__ float load1(const Element* p) {
#if TYPE == 0
  return *p;
#else
  return widen(*p).x;
#endif
}

__device__ __forceinline__ void store1(Element* p, float v) {
#if TYPE == 0
  *p = v;
#else
  *p = Element(narrow(make_float2(v, 0.0f)));
#endif
}

// The position of a thread ---------------------------------------------------------------------------

struct Position {
  int lane, warp, rank, row;
  i64 at;  // the row's index in the batch
  bool in;
  __device__ __forceinline__ Position(int B) {
    lane = threadIdx.x & 31, warp = row = threadIdx.x >> 5, rank = blockIdx.x % CLUSTER;
    at = i64(blockIdx.x / CLUSTER) * ROWS + row, in = at < B;
  }
  __device__ __forceinline__ int within(int j) const { return lane + 32 * j; }
  __device__ __forceinline__ int unit(int j) const { return rank * UNITS + within(j); }
  __device__ __forceinline__ bool has(int j) const { return within(j) < UNITS && unit(j) < H; }
};

// The number of units of a block; the last block may have fewer than UNITS.
__device__ __forceinline__ int units_of(int rank) {
  const int left = H - rank * UNITS;
  return left < 0 ? 0 : left < UNITS ? left : UNITS;
}

// Sums over the features of a row --------------------------------------------------------------------

__device__ __forceinline__ float over_lanes(float v) {
#pragma unroll
  for (int mask = 16; mask > 0; mask >>= 1) v += __shfl_xor_sync(~0u, v, mask);
  return v;
}

// All-gather between the warps of a row in all blocks.
struct Exchange {
  const float2* slots;  // [CLUSTER], of this warp's row
  u32 to, barrier;      // in block `lane`: this block's slot, and the row's barrier
  u32 own;              // the row's barrier in this block
  u32 step;

  __device__ __forceinline__ Exchange(float2* all, u32 barriers, const Position& at) : step(0) {
    slots = all + at.row * CLUSTER, own = barriers + 8 * at.row;
    const u32 other = at.lane < CLUSTER ? at.lane : 0;
    to = in_block(address_of(slots + at.rank), other), barrier = in_block(own, other);
  }
  // Lane i gets the numbers of block i. They stay valid until this block sends something that depends on them.
  __device__ __forceinline__ float2 operator()(float2 v, int lane) {
    if (CLUSTER == 1) return v;
    send(lane < CLUSTER, to, barrier, make_uint2(__float_as_uint(v.x), __float_as_uint(v.y)));
    await_phase(own, step++);
    if (lane == 0) expect(own, 8 * CLUSTER);
    return lane < CLUSTER ? slots[lane] : make_float2(0.0f, 0.0f);
  }
  // Sums both numbers over all lanes and blocks.
  __device__ __forceinline__ float2 sums(float first, float second, int lane) {
    float2 v = (*this)(make_float2(over_lanes(first), over_lanes(second)), lane);
    if (CLUSTER > 1) v.x = over_lanes(v.x), v.y = over_lanes(v.y);
    return v;
  }
};

// Mean and 1 / sqrt(var + eps) of a row from PER_LANE x N features per lane, which are zero for units that do not exist.
// Each block sums squares about its own mean, which avoids cancellation.
template <int N>
__device__ __forceinline__ float2 normalizer(const float (&v)[PER_LANE][N], float eps, Exchange& exchange,
                                             const Position& at) {
  float sum = 0.0f, square = 0.0f;
#pragma unroll
  for (int j = 0; j < PER_LANE; j++)
#pragma unroll
    for (int q = 0; q < N; q++) sum += v[j][q];
  sum = over_lanes(sum);
  const int own = units_of(at.rank);
  const float mean = own > 0 ? sum / (N * own) : 0.0f;
#pragma unroll
  for (int j = 0; j < PER_LANE; j++)
#pragma unroll
    for (int q = 0; q < N; q++) {
      const float d = at.has(j) ? v[j][q] - mean : 0.0f;
      square += d * d;
    }
  square = over_lanes(square);
  if (CLUSTER == 1) return make_float2(mean, rsqrtf(square / (N * H) + eps));
  const float2 other = exchange(make_float2(mean, square), at.lane);
  const float n = at.lane < CLUSTER ? float(N * units_of(at.lane)) : 0.0f;
  const float row_mean = over_lanes(n * other.x) / (N * H), d = other.x - row_mean;
  return make_float2(row_mean, rsqrtf(over_lanes(other.y + n * d * d) / (N * H) + eps));
}

// Bytes of shared memory behind the operands: `down`, `vectors`, `slots` and `barriers` of both kernels.
#define COMMON_BYTES (4 * (ROWS + 8 * UNITS) + 8 * (2 * ROWS * CLUSTER + 2 * ROWS + 1))
#define CHECK_ALIGNED(...) CHECK_SHARED((COMMON_BYTES + __VA_ARGS__ + 15) / 16 * 16)

// Weights -------------------------------------------------------------------------------------------

// p[0] to p[7] as 16-bit operands, zero from `count` on.
__device__ __forceinline__ uint4 load8(const Element* p, int count, float scale) {
#if TYPE == 0
  float v[8];
#pragma unroll
  for (int i = 0; i < 8; i++) v[i] = i < count ? scale * p[i] : 0.0f;
  return make_uint4(pack(v[0], v[1]), pack(v[2], v[3]), pack(v[4], v[5]), pack(v[6], v[7]));
#else
  if (H % 8 == 0) return count > 0 ? *reinterpret_cast<const uint4*>(p) : make_uint4(0, 0, 0, 0);
  u32 v[4];
#pragma unroll
  for (int i = 0; i < 4; i++) v[i] = (2 * i < count ? p[2 * i] : 0) | (2 * i + 1 < count ? u32(p[2 * i + 1]) << 16 : 0);
  return make_uint4(v[0], v[1], v[2], v[3]);
#endif
}

// The part of a weight matrix that a warp multiplies by: J tiles of 16 rows, `tile_stride` tiles apart, by K blocks of 32
// columns. Its fragments, two per tile and block with 16 bytes per lane, are in registers (the first KEPT), in shared
// memory (the next RESIDENT), or streamed from L2 in each step, with a prefetch before the other operand has arrived.
template <int J, int K>
struct Shard {
  static constexpr int ALL = 2 * J * K, IN_REGISTERS = KEPT < ALL ? KEPT : ALL;
  static constexpr int ON_CHIP = KEPT + RESIDENT < ALL ? KEPT + RESIDENT : ALL, STREAMED = ALL - ON_CHIP;
  static constexpr int CHAINS = J * TILES < 4 ? 2 : 1;  // independent accumulators per sum
  static constexpr int SHARED = WARPS * (ON_CHIP - IN_REGISTERS) * 512;  // bytes
  uint4 kept[IN_REGISTERS > 0 ? IN_REGISTERS : 1], ahead[DEPTH];
  uint4 *resident, *streamed;

  __device__ __forceinline__ void prefetch(int f) {
    if (f < STREAMED) ahead[f % DEPTH] = fetch(reinterpret_cast<const Element*>(streamed + 32 * f));
  }
  // Prefetches the first streamed fragments of the next product.
  __device__ __forceinline__ void prefetch() {
#pragma unroll
    for (int f = 0; f < DEPTH; f++) prefetch(f);
  }

  // row(m, k): eight neighbouring columns of row m of the matrix from column k on, as operands. shared_memory:
  // [WARPS][RESIDENT][32]; memory: likewise, per block, for streamed fragments.
  template <class Row>
  __device__ __forceinline__ void load(uint4* shared_memory, uint4* memory, int tile, int tile_stride, int block,
                                       const Position& at, Row row) {
    resident = shared_memory + at.warp * (ON_CHIP - IN_REGISTERS) * 32 + at.lane;
    streamed = memory + (i64(blockIdx.x) * WARPS + at.warp) * STREAMED * 32 + at.lane;
    const int g = at.lane >> 2, t = at.lane & 3;
#pragma unroll
    for (int i = 0; i < J * K; i++) {
      const int m = 16 * (tile + i % J * tile_stride) + g, k = 32 * (block + i / J) + 8 * t;
      const uint4 low = row(m, k), high = row(m + 8, k);
      const uint4 both[2] = {make_uint4(low.x, high.x, low.y, high.y), make_uint4(low.z, high.z, low.w, high.w)};
#pragma unroll
      for (int half = 0; half < 2; half++) {
        const int f = 2 * i + half;
        if (f < IN_REGISTERS)
          kept[f < IN_REGISTERS ? f : 0] = both[half];
        else if (f < ON_CHIP)
          resident[(f - IN_REGISTERS) * 32] = both[half];
        else
          streamed[(f - ON_CHIP) * 32] = both[half];
      }
    }
  }

  // sums[j][n] = tile j times the 8 rows of tile n of `operand`, [ROWS][pitch] in pieces of 16 bytes.
  // A thread's piece holds other columns than the instruction assigns to it, but the same ones in both factors.
  __device__ __forceinline__ void multiply(float (&sums)[J][TILES][CHAINS][4], const uint4* operand, int pitch, int block,
                                           const Position& at) {
    const uint4* own = operand + (at.lane >> 2) * pitch + 4 * block + (at.lane & 3);
    uint4 b[TILES];
#pragma unroll
    for (int step = 0; step < ALL; step++) {
      // Streamed fragments first, then those on the chip.
      const int f = step < STREAMED ? ON_CHIP + step : step - STREAMED, i = f / (2 * J), j = f / 2 % J;
      if (step == 0 || step == STREAMED || f % (2 * J) == 0)
#pragma unroll
        for (int n = 0; n < TILES; n++) b[n] = own[8 * n * pitch + 4 * i];
      const bool here = f < IN_REGISTERS;
      uint4 a = here ? kept[here ? f : 0] : f < ON_CHIP ? resident[(here ? 0 : f - IN_REGISTERS) * 32] : ahead[step % DEPTH];
      if (step < STREAMED) prefetch(step + DEPTH);
#pragma unroll
      for (int n = 0; n < TILES; n++)
        multiply16(sums[j][n][f % CHAINS], a, f % 2 ? b[n].z : b[n].x, f % 2 ? b[n].w : b[n].y);
    }
    prefetch();
  }
};

template <int CHAINS>
__device__ __forceinline__ float in_all(const float (&sums)[CHAINS][4], int i) {
  return CHAINS > 1 ? sums[0][i] + sums[CHAINS - 1][i] : sums[0][i];
}

// The maximum over all threads of a block. Only needed in float32, whose operands are scaled.
__device__ __forceinline__ u32 block_max(u32 v, u32* scratch) {
  const int warp = threadIdx.x >> 5;
  scratch[warp] = __reduce_max_sync(~0u, v);
  __syncthreads();
#pragma unroll
  for (int w = 0; w < WARPS; w++) v = max(v, scratch[w]);
  __syncthreads();
  return v;
}

// The largest magnitude (float bits) of the weights of this block's units, which determines their scale; 0 except in
// float32. weight: [4H, H]
__device__ __forceinline__ u32 largest_weight(const Element* weight, const Position& at, u32* scratch) {
  u32 top = 0;
#if TYPE == 0
  for (int i = at.warp; i < 4 * UNITS; i += WARPS) {
    const int unit = at.rank * UNITS + i % UNITS;
    if (unit < H)
      for (int k = at.lane; k < H; k += 32) top = max(top, finite_magnitude(weight[(i64(i / UNITS) * H + unit) * H + k]));
  }
  top = block_max(top, scratch);
#endif
  return top;
}

// Stores one 16-bit number of an operand per lane.
__device__ __forceinline__ void store_operand(uint4* row, int column, float v) {
  reinterpret_cast<unsigned short*>(row)[column] = (unsigned short)pack(v, 0.0f);
}
