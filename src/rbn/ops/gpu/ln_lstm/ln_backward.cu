// The layer-normalized LSTM's backward recurrence, all steps in one launch, the last first: see ln.cuh.
//
// A block multiplies its own d(W_h h), [ROWS, 4 UNITS], by its rows of W_h. This gives its share (partial sum) of dh for
// all units. It sends each block the shares of that block's units; the receiver adds the shares in the order of the ranks.
#include "ln.cuh"

struct LNBackward {
  const Element* wx;      // [T, B, 4H]
  const Element* weight;  // [4H, H]
  const Element* transposed;  // [H, 4H]: the weight
  const float *bias, *gamma_x, *gamma_h;  // [4H]
  const float *gamma_c, *beta_c;          // [H]
  const float* cs;         // [T + 1, B, H]
  const Element* centered;  // [T, B, 4H]
  const float* moments;    // [T, B, FACTORS]
  const int* lengths;      // [B]
  const Element* doutput;  // [T, B, H]
  const float *dh_n, *dc_n;  // [B, H], or null
  Element* da;             // [T, B, 4H]: d(W_h h)
  Element* dpre;           // [T, B, 4H]: the gradient of the pre-activations
  float* rows;                // [4, B, H]: gradients of h0 and c0, and each row's gradients of gamma_c and beta_c
  uint4* streamed;            // see Shard
  int T, B;
};

#define ALL_UNITS (CLUSTER * UNITS)
#define M_TILES ((ALL_UNITS + 15) / 16)  // tiles of 16 units
#define ROW_TILES ((M_TILES + WARPS - 1) / WARPS)
#define COLUMN_BLOCKS (UNITS / 8)  // blocks of 32 gate columns; column: gate * UNITS + unit
#define D_PITCH PITCH(4 * UNITS)
#define SHARES (CLUSTER * ROWS * UNITS)
#if SHARES16
typedef unsigned short Share;
#else
typedef float Share;
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) ln_backward(const LNBackward p) {
  extern __shared__ uint4 shared[];
  typedef Shard<ROW_TILES, COLUMN_BLOCKS> Weights;
  uint4* weights = shared;
  uint4* gradients = weights + WARPS * (Weights::ON_CHIP - Weights::IN_REGISTERS) * 32;    // [ROWS][D_PITCH]: d(W_h h)
  Share* shares = reinterpret_cast<Share*>(gradients + ROWS * D_PITCH);  // [CLUSTER][ROWS][UNITS]: of dh
  float* down = reinterpret_cast<float*>(shares + SHARES);               // [ROWS]: undoes the scale of `gradients`
  float* vectors = down + ROWS;                                          // [2][4][UNITS]: bias, gamma_x
  float2* slots = reinterpret_cast<float2*>(vectors + 8 * UNITS);        // [2][ROWS][CLUSTER]
  float2* barriers = slots + 2 * ROWS * CLUSTER;                         // [2 ROWS + 1]
  CHECK_ALIGNED(Weights::SHARED + 16 * ROWS * D_PITCH + int(sizeof(Share)) * SHARES);
  const u32 first_barrier = address_of(barriers), of_shares = first_barrier + 16 * ROWS;
  const Position at(p.B);
  const i64 B = p.B;

  const u32 top = largest_weight(p.weight, at, reinterpret_cast<u32*>(shares));
  const float up = TYPE == 0 ? scale_up(top) : 1.0f, weight_down = TYPE == 0 ? scale_down(top) : 1.0f;
  Weights w;
  w.load(weights, p.streamed, at.warp, WARPS, 0, at, [&](int m, int k) {
    const int unit = at.rank * UNITS + k % UNITS;
    const bool there = m < H && unit < H;
    return load8(p.transposed + (there ? i64(m) * GATES + k / UNITS * H + unit : 0), there ? H - unit : 0, up);
  });
  for (int i = threadIdx.x; i < ROWS * D_PITCH; i += THREADS) gradients[i] = make_uint4(0, 0, 0, 0);
  for (int i = threadIdx.x; i < 8 * UNITS; i += THREADS) {
    const int q = i / UNITS % 4, unit = at.rank * UNITS + i % UNITS;
    vectors[i] = unit < H ? (i < 4 * UNITS ? p.bias : p.gamma_x)[q * H + unit] : 0.0f;
  }
  if (CLUSTER > 1 && threadIdx.x == 0)
    for (int i = 0; i <= 2 * ROWS; i++) {
      start_barrier(first_barrier + 8 * i, 1);
      expect(first_barrier + 8 * i, i < 2 * ROWS ? 8 * CLUSTER : int(sizeof(Share)) * SHARES);
    }

  float gamma_h[PER_LANE][4], gamma_c[PER_LANE], beta[PER_LANE], dc[PER_LANE], skip[PER_LANE];
  float dgamma[PER_LANE] = {}, dbeta[PER_LANE] = {};
  const int length = !at.in ? 0 : LENGTHS ? p.lengths[at.at] : p.T;
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) {
    const bool has = at.has(j);
#pragma unroll
    for (int q = 0; q < 4; q++) gamma_h[j][q] = has ? p.gamma_h[q * H + at.unit(j)] : 0.0f;
    gamma_c[j] = has ? p.gamma_c[at.unit(j)] : 0.0f, beta[j] = has ? p.beta_c[at.unit(j)] : 0.0f;
    dc[j] = has && at.in && p.dc_n ? p.dc_n[at.at * H + at.unit(j)] : 0.0f;
    skip[j] = has && at.in && p.dh_n ? p.dh_n[at.at * H + at.unit(j)] : 0.0f;  // the part of dh that bypasses W_h
  }
  // Loads a step's inputs, one step ahead.
  Element raw_x[PER_LANE][4], raw_a[PER_LANE][4], raw_d[PER_LANE];
  float before[PER_LANE], kept[FACTORS];
  auto load_step = [&](i64 t) {
    const i64 row = t * B + at.at;
#pragma unroll
    for (int i = 0; i < FACTORS; i++) kept[i] = at.in ? p.moments[row * FACTORS + i] : 0.0f;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
      const bool there = at.in && at.has(j);
      const int unit = at.unit(j);
#pragma unroll
      for (int q = 0; q < 4; q++) {
        raw_x[j][q] = t < length && there ? p.wx[row * GATES + q * H + unit] : Element(0);
        raw_a[j][q] = there ? p.centered[row * GATES + q * H + unit] : Element(0);
      }
      before[j] = there ? p.cs[row * H + unit] : 0.0f;
      raw_d[j] = DOUTPUT && t < length && there ? p.doutput[row * H + unit] : Element(0);
    }
  };
  float after[PER_LANE];
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) after[j] = at.in && at.has(j) ? p.cs[(p.T * B + at.at) * H + at.unit(j)] : 0.0f;
  w.prefetch();
  load_step(p.T - 1);
  Exchange of_cells(slots, first_barrier, at), of_gates(slots + ROWS * CLUSTER, first_barrier + 8 * ROWS, at);
  if (CLUSTER > 1) meet_cluster();  // all barriers are ready
  __syncthreads();

  // Waits for all blocks' shares and adds them to this lane's dh.
  auto through_product = [&](float (&dh)[PER_LANE], u32 phase) {
    if (CLUSTER > 1) {
      await_phase(of_shares, phase);
      if (threadIdx.x == 0) expect(of_shares, int(sizeof(Share)) * SHARES);
    } else {
      __syncthreads();
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
      if (at.within(j) < UNITS)
#pragma unroll
        for (int block = 0; block < CLUSTER; block++) {
          const Share v = shares[(block * ROWS + at.row) * UNITS + at.within(j)];
          dh[j] += SHARES16 ? unpack(u32(v)).x : v;
        }
  };

  // Sends the share of a row of dh, 8 bytes, to the block that owns these units.
  auto send_share = [&](int unit, int row, uint2 v) {
    const u32 block = unit < ALL_UNITS ? unit / UNITS : 0;
    Share* place = shares + (at.rank * ROWS + row) * UNITS + unit % UNITS;
    if (CLUSTER > 1)
      send(unit < ALL_UNITS, in_block(address_of(place), block), in_block(of_shares, block), v);
    else if (unit < ALL_UNITS)
      *reinterpret_cast<uint2*>(place) = v;
  };

  for (i64 t = p.T - 1; t >= 0; t--) {
    const bool valid = t < length;
    const i64 row = t * B + at.at;
    // Recompute the forward step, which waits for no other block.
    float a[PER_LANE][4], gate[PER_LANE][4], c[PER_LANE], c_hat[PER_LANE], tanh_c[PER_LANE], dh[PER_LANE];
    const float rstd_h = kept[RSTD_H], rstd_c = kept[RSTD_C];
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
      const bool has = at.has(j);
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const float* vector = vectors + q * UNITS + (at.within(j) < UNITS ? at.within(j) : 0);
        a[j][q] = load1(&raw_a[j][q]);
        const float x = (load1(&raw_x[j][q]) - kept[MEAN_X]) * kept[RSTD_X] * vector[4 * UNITS] + vector[0];
        const float v = a[j][q] * rstd_h * gamma_h[j][q] + x;
        gate[j][q] = q == 2 ? tanh_(v) : sigmoid(v);
      }
      c[j] = before[j];
      c_hat[j] = has ? (after[j] - kept[MEAN_C]) * rstd_c : 0.0f;
      tanh_c[j] = tanh_(c_hat[j] * gamma_c[j] + beta[j]);
      after[j] = c[j];
      dh[j] = skip[j] + load1(&raw_d[j]);
    }
    if (t > 0) load_step(t - 1);
    if (t + 1 < p.T) through_product(dh, u32(p.T - 2 - t));

    float dcell[PER_LANE], first = 0.0f, second = 0.0f;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
      skip[j] = LENGTHS && !valid ? dh[j] : 0.0f;
      if (!valid) dh[j] = 0.0f;
      dcell[j] = at.has(j) ? dh[j] * gate[j][3] * (1.0f - tanh_c[j] * tanh_c[j]) : 0.0f;
      first += dcell[j] * gamma_c[j], second += dcell[j] * gamma_c[j] * c_hat[j];
    }
    const float2 of_c = of_cells.sums(first, second, at.lane);

    float d[PER_LANE][4];
    first = second = 0.0f;
#pragma unroll
    for (int j = 0; j < PER_LANE; j++) {
      const float own = rstd_c * (dcell[j] * gamma_c[j] - of_c.x * (1.0f / H) - c_hat[j] * of_c.y * (1.0f / H));
      const float new_dc = valid && at.has(j) ? dc[j] + own : 0.0f;
      d[j][0] = new_dc * gate[j][2] * gate[j][0] * (1.0f - gate[j][0]);
      d[j][1] = new_dc * c[j] * gate[j][1] * (1.0f - gate[j][1]);
      d[j][2] = new_dc * gate[j][0] * (1.0f - gate[j][2] * gate[j][2]);
      d[j][3] = dh[j] * tanh_c[j] * gate[j][3] * (1.0f - gate[j][3]);
      if (valid) dc[j] = new_dc * gate[j][1];
      dgamma[j] += dcell[j] * c_hat[j], dbeta[j] += dcell[j];
      if (!at.has(j)) d[j][3] = 0.0f;
#pragma unroll
      for (int q = 0; q < 4; q++) first += d[j][q] * gamma_h[j][q], second += d[j][q] * gamma_h[j][q] * a[j][q];
    }
    const float2 of_a = of_gates.sums(first, second, at.lane);

    float da[PER_LANE][4];
    u32 largest = 0;
    const float back = of_a.y * rstd_h * rstd_h * (1.0f / (4 * H));
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const float v = rstd_h * (d[j][q] * gamma_h[j][q] - of_a.x * (1.0f / (4 * H)) - a[j][q] * back);
        da[j][q] = valid && at.has(j) ? v : 0.0f;
        if (TYPE == 0) largest = max(largest, finite_magnitude(da[j][q]));
      }
    float scale = 1.0f;
    if (TYPE == 0) {
      largest = __reduce_max_sync(~0u, largest);
      scale = scale_up(largest);
      if (at.lane == 0) down[at.row] = scale_down(largest) * weight_down;
    }
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
      if (at.within(j) < UNITS)
#pragma unroll
        for (int q = 0; q < 4; q++) store_operand(gradients + at.row * D_PITCH, q * UNITS + at.within(j), da[j][q] * scale);
    __syncthreads();

    float sums[ROW_TILES][TILES][Weights::CHAINS][4] = {};
    w.multiply(sums, gradients, D_PITCH, 0, at);
    const int g = at.lane >> 2, quad = at.lane & 3;
    const bool odd = g & 1;
#pragma unroll
    for (int j = 0; j < ROW_TILES; j++)
#pragma unroll
      for (int n = 0; n < TILES; n++) {
        const int row = 8 * n + 2 * quad + odd;
        float2 two[2];  // two units of a row, in each half of the tile
#pragma unroll
        for (int half = 0; half < 2; half++) {
          float x = in_all(sums[j][n], 2 * half), y = in_all(sums[j][n], 2 * half + 1);
          if (TYPE == 0) x *= down[8 * n + 2 * quad], y *= down[8 * n + 2 * quad + 1];
          const float other = __shfl_xor_sync(~0u, odd ? x : y, 4);
          two[half] = odd ? make_float2(other, y) : make_float2(x, other);
        }
        const int first = 16 * (at.warp + j * WARPS);
#if SHARES16
        const bool upper = g & 2;  // four units of a row, of this half
        const u32 own[2] = {pack(two[0].x, two[0].y), pack(two[1].x, two[1].y)};
        const u32 other = __float_as_uint(__shfl_xor_sync(~0u, __uint_as_float(own[upper ? 0 : 1]), 8));
        send_share(first + 8 * upper + (g & ~3), row, upper ? make_uint2(other, own[1]) : make_uint2(own[0], other));
#else
#pragma unroll
        for (int half = 0; half < 2; half++)
          send_share(first + 8 * half + (g & ~1), row, make_uint2(__float_as_uint(two[half].x), __float_as_uint(two[half].y)));
#endif
      }

    // The rest of the step, which no other block waits for.
#pragma unroll
    for (int j = 0; j < PER_LANE; j++)
      if (at.in && at.has(j))
#pragma unroll
        for (int q = 0; q < 4; q++) {
          const i64 place = row * GATES + q * H + at.unit(j);
          store1(p.da + place, da[j][q]), store1(p.dpre + place, d[j][q]);
        }
  }
  float dh[PER_LANE];
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) dh[j] = skip[j];
  through_product(dh, u32(p.T - 1));
#pragma unroll
  for (int j = 0; j < PER_LANE; j++) {
    if (!at.in || !at.has(j)) continue;
    const i64 place = at.at * H + at.unit(j);
    const i64 next = B * H;
    p.rows[place] = dh[j], p.rows[place + next] = dc[j];
    p.rows[place + 2 * next] = dgamma[j], p.rows[place + 3 * next] = dbeta[j];
  }
  if (CLUSTER > 1) meet_cluster();  // no block exits while others may still write to its shared memory
}
