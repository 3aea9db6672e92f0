// The layer-normalized LSTM's forward pass, all steps in one launch: see ln.cuh.
#include "ln.cuh"

struct LNForward {
  const Element* wx;      // [T, B, 4H]
  const Element* weight;  // [4H, H]
  const float *bias, *gamma_x, *gamma_h;  // [4H]
  const float *gamma_c, *beta_c;          // [H]
  Element* hs;         // [T + 1, B, H]; hs[0] is h0
  float* cs;           // [T + 1, B, H]; cs[0] is c0; without SAVE [B, H]: c0, then c_n
  Element* centered;   // [T, B, 4H], for the backward pass: W_h h minus its mean
  float* moments;      // [T, B, FACTORS]; those of x are given, the others written
  float* h_n;          // [B, H], only with lengths
  const int* lengths;  // [B]
  uint4* streamed;     // see Shard
  int T, B;
  float eps;
};

#define M_TILES (UNITS / 4)  // tiles of 16 gate columns; column: gate * UNITS + unit
#define GROUPS (WARPS / SPLIT)
#define ROW_TILES ((M_TILES + GROUPS - 1) / GROUPS)
#define BLOCKS_OF_COLUMNS ((CLUSTER * UNITS + 31) / 32)
#define COLUMN_BLOCKS ((BLOCKS_OF_COLUMNS + SPLIT - 1) / SPLIT)
#define H_PITCH PITCH(32 * COLUMN_BLOCKS * SPLIT)
#define PART_PITCH (GROUPS * ROW_TILES * 16 + 4)

extern "C" __global__ void __launch_bounds__(THREADS, 1) ln_forward(const LNForward p) {
  extern __shared__ uint4 shared[];
  typedef Shard<ROW_TILES, COLUMN_BLOCKS> Weights;
  uint4* weights = shared;
  uint4* hidden = weights + WARPS * (Weights::ON_CHIP - Weights::IN_REGISTERS) * 32;  // [ROWS][H_PITCH]
  uint4* line = hidden + ROWS * H_PITCH;                     // [ROWS][UNITS / 8]: this block's h, staged for sending
  float* part = reinterpret_cast<float*>(line + ROWS * (UNITS / 8));  // [SPLIT][ROWS][PART_PITCH]
  float* down = part + SPLIT * ROWS * PART_PITCH;                    // [ROWS]: undoes the scale of h0
  float* vectors = down + ROWS;                                      // [2][4][UNITS]: bias, gamma_x
  float2* slots = reinterpret_cast<float2*>(vectors + 8 * UNITS);    // [2][ROWS][CLUSTER]
  float2* barriers = slots + 2 * ROWS * CLUSTER;                     // [2 ROWS + 1]
  CHECK_ALIGNED(Weights::SHARED + 16 * ROWS * (H_PITCH + UNITS / 8) + 4 * SPLIT * ROWS * PART_PITCH);
  const u32 first_barrier = address_of(barriers), of_h = first_barrier + 16 * ROWS;
  const Position at(p.B);
  const i64 B = p.B;

  const u32 top = largest_weight(p.weight, at, reinterpret_cast<u32*>(part));
  const float up = TYPE == 0 ? scale_up(top) : 1.0f, weight_down = TYPE == 0 ? scale_down(top) : 1.0f;
  const int group = at.warp % GROUPS, split = at.warp / GROUPS;
  Weights w;
  w.load(weights, p.streamed, group, GROUPS, split * COLUMN_BLOCKS, at, [&](int m, int k) {
    const int q = m / UNITS, unit = at.rank * UNITS + m % UNITS;
    const bool there = q < 4 && unit < H && k < H;
    return load8(p.weight + (there ? (i64(q) * H + unit) * H + k : 0), there ? H - k : 0, up);
  });
  for (int i = threadIdx.x; i < ROWS * H_PITCH; i += THREADS) hidden[i] = make_uint4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < 8 * UNITS; i += THREADS) {
    const int q = i / UNITS % 4, unit = at.rank * UNITS + i % UNITS;
    vectors[i] = unit < H ? (i < 4 * UNITS ? p.bias : p.gamma_x)[q * H + unit] : 0.0f;
  }
  if (CLUSTER > 1 && threadIdx.x == 0)
    for (int i = 0; i <= 2 * ROWS; i++) {
      start_barrier(first_barrier + 8 * i, 1);
      expect(first_barrier + 8 * i, i < 2 * ROWS ? 8 * CLUSTER : CLUSTER * ROWS * UNITS * 2);
    }
  __syncthreads();

  // h0 is scaled by its own magnitude; later |h| <= 1.
  const float one = TYPE == 0 ? 16384.0f : 1.0f;
  const Element* h0 = p.hs + at.at * H;
  u32 largest = 0;
  if (TYPE == 0) {
    if (at.in)
      for (int k = at.lane; k < H; k += 32) largest = max(largest, finite_magnitude(load1(h0 + k)));
    largest = __reduce_max_sync(~0u, largest);
    if (at.lane == 0) down[at.row] = scale_down(largest);
  }
  if (at.in)
    for (int k = at.lane; k < H; k += 32)
      store_operand(hidden + at.row * H_PITCH, k, load1(h0 + k) * (TYPE == 0 ? scale_up(largest) : 1.0f));

  float gamma_h[PER_LANE][4], gamma_c[PER_LANE], beta[PER_LANE], c[PER_LANE], x[PER_LANE][4];
  const int length = !at.in ? 0 : LENGTHS ? p.lengths[at.at] : p.T;
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) {
    const bool has = at.has(j);
#pragma unroll
    for (int q = 0; q < 4; q++) gamma_h[j][q] = has ? p.gamma_h[q * H + at.unit(j)] : 0.0f;
    gamma_c[j] = has ? p.gamma_c[at.unit(j)] : 0.0f, beta[j] = has ? p.beta_c[at.unit(j)] : 0.0f;
    c[j] = has && at.in ? p.cs[at.at * H + at.unit(j)] : 0.0f;
  }
  // Loads the input term of a step, one step ahead.
  Element raw[PER_LANE][4];
  float mean_x, rstd_x;
  auto load_step = [&](i64 t) {
    const i64 row = t * B + at.at;
    mean_x = at.in ? p.moments[row * FACTORS + MEAN_X] : 0.0f, rstd_x = at.in ? p.moments[row * FACTORS + RSTD_X] : 0.0f;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
#pragma unroll
      for (int q = 0; q < 4; q++) raw[j][q] = t < length && at.has(j) ? p.wx[row * GATES + q * H + at.unit(j)] : Element(0);
  };
  auto prepare = [&](i64 t) {  // the normalized input term of step t, plus the bias; padding is treated as zeros
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const float* vector = vectors + q * UNITS + at.within(j);
        x[j][q] = at.within(j) < UNITS ? (load1(&raw[j][q]) - mean_x) * rstd_x * vector[4 * UNITS] + vector[0] : 0.0f;
      }
    if (t + 1 < p.T) load_step(t + 1);
  };
  w.prefetch();
  load_step(0);
  prepare(0);
  Exchange of_gates(slots, first_barrier, at), of_cells(slots + ROWS * CLUSTER, first_barrier + 8 * ROWS, at);
  const u32 line_at = address_of(hidden + at.row * H_PITCH + at.rank * (UNITS / 8));
  if (CLUSTER > 1) meet_cluster();  // all barriers are ready
  __syncthreads();

  for (i64 t = 0; t < p.T; t++) {
    if (t > 0) {
      if (CLUSTER > 1) {
        await_phase(of_h, u32(t - 1));
        if (threadIdx.x == 0) expect(of_h, CLUSTER * ROWS * UNITS * 2);
      } else {
        __syncthreads();
      }
    }
    float sums[ROW_TILES][TILES][Weights::CHAINS][4] = {};
    w.multiply(sums, hidden, H_PITCH, split * COLUMN_BLOCKS, at);
    const int g = at.lane >> 2, quad = at.lane & 3;
#pragma unroll
    for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
      for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++)
          part[(split * ROWS + 8 * n + 2 * quad + i % 2) * PART_PITCH + 16 * (group + j * GROUPS) + g + i / 2 * 8] =
              in_all(sums[j][n], i);
    __syncthreads();  // from here on no warp of this block reads `hidden`

    float a[PER_LANE][4];
    const float scale = TYPE == 0 ? weight_down * (t ? 1.0f / one : down[at.row]) : 1.0f;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
#pragma unroll
      for (int q = 0; q < 4; q++) {
        float sum = 0.0f;
        if (at.has(j))
#pragma unroll
          for (int s = 0; s < SPLIT; s++) sum += part[(s * ROWS + at.row) * PART_PITCH + q * UNITS + at.within(j)];
        a[j][q] = TYPE == 0 ? sum * scale : sum;
      }
    const float2 of_h_term = normalizer(a, p.eps, of_gates, at);
    float cell[PER_LANE][1], out[PER_LANE], h[PER_LANE];
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
      float gate[4];
#pragma unroll
      for (int q = 0; q < 4; q++) {
        a[j][q] -= of_h_term.x;
        const float v = a[j][q] * of_h_term.y * gamma_h[j][q] + x[j][q];
        gate[q] = q == 2 ? tanh_(v) : sigmoid(v);
      }
      cell[j][0] = at.has(j) ? gate[1] * c[j] + gate[0] * gate[2] : 0.0f, out[j] = gate[3];
    }
    const float2 of_c = normalizer(cell, p.eps, of_cells, at);
    const bool valid = t < length;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
      h[j] = out[j] * tanh_((cell[j][0] - of_c.x) * of_c.y * gamma_c[j] + beta[j]);
      if (!valid || !at.has(j)) h[j] = 0.0f;
      if (valid) c[j] = cell[j][0];
    }
    if (t + 1 < p.T) {
      uint4* row = CLUSTER > 1 ? line + at.row * (UNITS / 8) : hidden + at.row * H_PITCH;
#pragma unroll
      for (int j = 0; j < PER_LANE; j++)
        if (at.within(j) < UNITS) store_operand(row, at.within(j), one * h[j]);
      if (CLUSTER > 1) {
        __syncwarp();
        for (int i = at.lane; i < CLUSTER * (UNITS / 8); i += 32) {
          const u32 other = i / (UNITS / 8), piece = i % (UNITS / 8);
          send(true, in_block(line_at + 16 * piece, other), in_block(of_h, other), row[piece]);
        }
      }
    }

    // The rest of the step, which no other block waits for.
    const i64 row = t * B + at.at;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
      if (!at.in || !at.has(j)) continue;
      const int unit = at.unit(j);
      store1(p.hs + (row + B) * H + unit, h[j]);
      if (LENGTHS && valid) p.h_n[at.at * H + unit] = h[j];
      if (SAVE) {
        p.cs[(row + B) * H + unit] = c[j];
#pragma unroll
        for (int q = 0; q < 4; q++) store1(p.centered + row * GATES + q * H + unit, a[j][q]);
      }
    }
    if (SAVE && at.in && at.rank == 0 && at.lane == 0) {
      float* kept = p.moments + row * FACTORS;
      kept[RSTD_H] = of_h_term.y, kept[MEAN_C] = of_c.x, kept[RSTD_C] = of_c.y;
    }
    if (t + 1 < p.T) prepare(t + 1);
  }
#pragma unroll
  for (int j = 0; j < PER_LANE; j++)
    if (!SAVE && at.in && at.has(j)) p.cs[at.at * H + at.unit(j)] = c[j];
  if (CLUSTER > 1) meet_cluster();  // no block exits while others may still write to its shared memory
}
