// The LSTM's forward pass for wide layers, equations 2 to 4 and 6 to 8: one launch for all steps.
#define SIDE 64  // product columns per block: the gates i, f, g, o of 16 units
#define PASSED 1
#include "grid.cuh"

static_assert(TEAM == 1, "h is small enough for every block to read all of it");

#define SUM_H (MODE_H == 1)  // each step needs sums over the batch
#define SUM_C (MODE_C == 1)
#define SECOND_AT 80  // offset of a warp's 64 sums of squares, at other banks than its 64 sums
#define PITCH (SECOND_AT + 64)  // numbers per warp
#define LOADS (8 + 2 * MASKS)  // loads per thread that are interleaved with a product
#define ONE_SCALED 16384.0f  // the scale of h in the exchange, in float32

// Saved for the backward pass: cs [R, T + 1, SUBS, B, 8], wh [R, T, SUBS, 4, B, 8].

// If W_h h is normalized, all terms of a pre-activation include the factor pre(gate).
__device__ __forceinline__ float scale_of(int gate) { return MODE_H ? pre(gate) : 1.0f; }

// The variance of a column: lanes 0 to 15 have the sums of the rows minus `shift`, lanes 16 to 31 those of the squares.
// Updates `shift` to the mean. pool: statistics of the earlier steps.
__device__ __forceinline__ float moments(float sum, float inv, float eps, float& shift, Pool& pool) {
  const float square = __shfl_xor_sync(~0u, sum, 16), off = sum * inv;
  if (LENGTHS && !(inv > 0.0f)) {
    shift = pool.mean;
    return pool.scale(eps);
  }
  shift += off;
  const float var = variance(square * inv, off);
  if (LENGTHS) pool.add(inv, shift, var);
  return var;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) grid_forward(const Forward p) {
  extern __shared__ __align__(128) uint4 slots[];
  uint4* resident = slots + FIRST * GROUP_WORDS;
  float* scratch = reinterpret_cast<float*>(resident + RESIDENT * GROUP_WORDS);  // [WARPS][PITCH]
  // Tables per column: shift and scale of W_h h, scale and offset of the input term; shift and scale of the cell.
  float *mean_of_h = scratch + WARPS * PITCH, *scale_of_h = mean_of_h + TABLE, *scale_of_x = scale_of_h + TABLE;
  float *plus_x = scale_of_x + TABLE, *mean_of_c = plus_x + TABLE, *scale_of_c = mean_of_c + UNITS;
  float *beta_of = scale_of_c + UNITS, *barriers = beta_of + UNITS;
  // After two barriers for weights: the barriers and buffers of the splits.
  const OverSplits<128> of_h = {barriers + 12, address_of(barriers + 4)};
  const OverSplits<32> of_c = {of_h.scratch + 2 * SPLITS * 128, of_h.barriers + 16};
  CHECK_GRID(WARPS * PITCH + 4 * TABLE + 3 * UNITS + 4, 128 + 32);

  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, quad = tid & 3;
  const int first = first_row(p.B), row0 = first + warp * 16 + (lane >> 2);  // and row0 + 8
  const int unit = blockIdx.x * UNITS + 4 * quad, sub = blockIdx.x * 2 + quad / 2;
  const bool mine = unit < H;
  const i64 r = blockIdx.y / SPLITS, B = p.B, end = end_of_rows(p.B);
  Element* hs = p.hs + r * (p.T + 1) * B * HS + i64(row0) * HS + unit;
  float* cs = p.cs + (r * (p.T + 1) * SUBS + sub) * B * 8 + 4 * (quad % 2) + row0 * 8;
  const i64 part = blockIdx.y;
  uint4* passed = p.passed + part * BUFFERS * STEP_WORDS;
  uint4* spilled = p.spilled + (part * GRID + blockIdx.x) * (FIRST + SECOND) * GROUP_WORDS;
  const uint4* slice = slice_of(passed);
  u32 begin = start_group() * 2 * ROW_THREADS;
  asm volatile("" : "+r"(begin));
  u32* counters = p.barriers + part * TEAM * 32;
  const Refill refill = {slots, spilled, address_of(barriers)};
  if (tid < 2) start_barrier(refill.barriers + 8 * tid, 1);
  of_h.start(), of_c.start();

  const Element* weight = p.weight + r * GATES * H;
  const float undo = pack_weights(resident, spilled, scratch, [&](int n, int piece, int u) {
    const int of = unit_of(n), k = piece * UNITS + u;
    if (of >= H || k >= H) return Raw4{};
    return __ldg(reinterpret_cast<const Raw4*>(weight + i64(n / 16 % 4 * H + of) * H + k));
  });
  refill.load_first();
  meet_cluster();

  // Each column's statistics are owned by one thread: those of W_h h in warps 0 to 3, a gate each; those of the input
  // term in warps 4 and 5; those of the cell in warp 7.
  const bool for_h = warp < 4, for_x = warp == 4 || warp == 5, for_c = warp == 7;
  const bool owner = for_x || ((for_h || for_c) && lane < 16);
  const int number = for_h ? warp * 16 + (lane & 15) : tid & 63;
  const int own_gate = gate_at(number), own = for_c ? cell_at(lane) : unit_at(number);
  const int place = table_index(own_gate, own);
  const bool has = owner && blockIdx.x * UNITS + own < H;
  const int column = blockIdx.x * UNITS + own + (for_c ? 0 : own_gate * H);
  float gamma = 0.0f, bias = 0.0f, shift = 0.0f, given_mean = 0.0f, given_var = 0.0f;
  Pool pool;
  const int features = for_c ? H : GATES, rows = for_h ? p.rows_h : for_c ? p.rows_c : p.rows_x;
  const i64 statistic = r * rows * features + column;  // index of the first step's
  const bool reads = has && ((for_h && MODE_H == 2) || (for_x && MODE_X) || (for_c && MODE_C == 2));
  if (has && for_h && MODE_H) gamma = p.gamma_h[r * GATES + column] * scale_of(own_gate);
  if (has && for_x && MODE_X) gamma = p.gamma_x[r * GATES + column] * scale_of(own_gate);
  if (has && for_x && BIAS) bias = p.bias[r * GATES + column] * scale_of(own_gate);
  if (has && for_c && MODE_C) gamma = p.gamma_c[r * H + column];
  auto prefetch_given = [&](int t) {
    if (!reads || t >= p.T) return;
    const i64 at = statistic + i64(t < rows ? t : rows - 1) * features;
    given_mean = (for_h ? p.mean_h : for_c ? p.mean_c : p.mean_x)[at];
    given_var = (for_h ? p.var_h : for_c ? p.var_c : p.var_x)[at];
  };
  auto write_given_x = [&] {
    if (!for_x) return;
    const float scale = MODE_X ? rsqrtf(given_var + p.eps) * gamma : scale_of(own_gate);
    scale_of_x[place] = scale;
    plus_x[place] = MODE_X ? bias - given_mean * scale : bias;
  };
  auto write_given_rest = [&] {
    const float scale = rsqrtf(given_var + p.eps) * gamma;
    if (MODE_H == 2 && for_h && owner) mean_of_h[place] = given_mean, scale_of_h[place] = scale;
    if (MODE_C == 2 && for_c && owner) mean_of_c[own] = given_mean, scale_of_c[own] = scale;
  };
  auto keep = [&](int t, float mean, float var) {
    const i64 at = statistic + i64(t) * features;
    if (!has || own_split()) return;
    (for_h ? p.mean_h : p.mean_c)[at] = mean;
    (for_h ? p.var_h : p.var_c)[at] = var;
  };

  float c[2][4] = {}, x[2][4][4];
  Raw4 raw[2][4] = {}, h0[2] = {};
  int length[2];
  bool in[2];
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const i64 row = row0 + 8 * j;
    in[j] = row < end && mine;
    length[j] = p.T;
    if (LENGTHS) length[j] = in[j] ? p.lengths[row] : 0;
    if (in[j]) load4(c[j], p.c0 + (r * B + row) * H + unit);
    if (in[j]) h0[j] = load_raw4(hs + 8 * j * HS);
    if (SAVE && in[j]) store4(cs + 64 * j, c[j]);
  }
  // The scale of h in the exchange, and the factor that undoes it and the weights' scale in W_h h.
  float up = 1.0f, down = 1.0f;
#if TYPE == 0
  {
    u32 top = ZONE_H ? __float_as_uint(1.0f) : 0;  // units may keep h0, so all steps use its scale, which must cover 1
    const Element* of_warp = p.hs + (r * (p.T + 1) * B + first + warp * 16) * HS;
    for (int k = 4 * lane; k < H; k += 128) {
      float v[16][4] = {};  // all loads in flight at once
#pragma unroll
      for (int row = 0; row < 16; row++)
        if (first + warp * 16 + row < end) load4(v[row], of_warp + row * HS + k);
#pragma unroll
      for (int i = 0; i < 64; i++) top = max(top, finite_magnitude(v[i / 4][i % 4]));
    }
    top = __reduce_max_sync(~0u, top);
    up = scale_up(top), down = scale_down(top) * undo;
  }
#endif
  pass_on(passed, 0, as_factors(h0[0], up), as_factors(h0[1], up));
  if (!ZONE_H) up = ONE_SCALED;
  arrive_at_slices(counters);

  // The input term is loaded during the product of the step before, and normalized while waiting for the other blocks.
  const Element* wx = p.wx + (r * p.T * B + row0) * GATES + unit;
  auto bring_rows = [&] {  // 16 units of a row and gate span one or two sectors, in float32 one more
    const int row = first + tid % ROWS;
    const Element* from = wx + i64(row - row0) * GATES - 4 * quad + tid / ROWS * 2 * H;
    if (row < end) bring(from), bring(from + H);
    if (TYPE == 0 && row < end && blockIdx.x * UNITS + 8 < H) bring(from + 8), bring(from + H + 8);
  };
  // Zoneout masks, four units of a row: prefetched to L2 a step ahead, loaded during the product of their own step.
  u32 zone_c[2] = {}, zone_h[2] = {};
  auto zone_at = [&](int t) { return ((r * p.T + t) * B + row0) * H + unit; };
  auto bring_masks = [&](int t) {
    const int row = first + tid % ROWS;
    const i64 from = zone_at(t) + i64(row - row0) * H - 4 * quad;
    if (ZONE_C == 1 && row < end && tid < ROWS) bring(p.mask_c + from);
    if (ZONE_H == 1 && row < end && tid >= ROWS) bring(p.mask_h + from);
  };
  auto load_zone_mask = [&](int k, int t) {
    const int j = k % 2;
    if (ZONE_C == 1 && k < 2) zone_c[j] = load_mask(p.mask_c + zone_at(t) + 8 * j * H, in[j]);
    else zone_h[j] = load_mask(p.mask_h + zone_at(t) + 8 * j * H, in[j]);
  };
  auto prepare = [&](int t) {
    float scale[4][4], plus[4][4];
    read_table(scale, scale_of_x);
    read_table(plus, plus_x);
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int q = 0; q < 4; q++) {
        float v[4];
        widen4(v, raw[j][q]);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if (LENGTHS && t >= length[j]) v[e] = 0.0f;
          x[j][q][e] = v[e] * scale[q][e] + plus[q][e];
        }
      }
  };
  for (int i = tid; i < TABLE; i += THREADS) {
    mean_of_h[i] = scale_of_h[i] = 0.0f;
  }
  if (tid < UNITS) {
    const int of = blockIdx.x * UNITS + tid;
    mean_of_c[tid] = scale_of_c[tid] = 0.0f;
    beta_of[tid] = BETA && of < H ? p.beta_c[r * H + of] : 0.0f;
  }
  prefetch_given(0);
#pragma unroll
  for (int i = 0; i < 8; i++)
    if (in[i / 4]) raw[i / 4][i % 4] = load_raw4(wx + 8 * (i / 4) * GATES + i % 4 * H);
  wx += B * GATES;
  __syncthreads();
  write_given_x();
  write_given_rest();
  prefetch_given(1);
  __syncthreads();
  prepare(0);

  // The outputs of a step, stored during the next product; these pointers lag one step behind.
  Element* wh = p.wh + ((r * p.T - 1) * SUBS + sub) * 4 * B * 8 + 4 * (quad % 2) + row0 * 8;
  Raw4 packed[2] = {}, kept[2][4] = {};
  if (ZONE_H) packed[0] = h0[0], packed[1] = h0[1];  // the previous h, which zoneout may keep
  auto save = [&](int k, bool on) {
    const int j = k % 2, q = k / 2;
    if (q == 4) store_here(hs + 8 * j * HS, packed[j], on && row0 + 8 * j < end_of_rows(p.B) && unit < HS);
    else if (SAVE && q < 4) store_here(wh + (q * anew(p.B) + 8 * j) * 8, kept[j][q], on && in[j]);
    else if (SAVE) store_here4(cs + 64 * j, c[j], on && in[j]);
  };
  // Interleaved with group i of step t's product: stores of the previous step, then loads for the next one.
  auto interleaved = [&](int i, int t) {
    const bool next = t + 1 < p.T;
    if (i == 0 && next) bring_rows();
    if (MASKS && i == 0 && next) bring_masks(t + 1);
#pragma unroll
    for (int k = 0; k < 12; k++)
      if (k * (SLICE / 2) / 12 == i) save(k, t > 0);
#pragma unroll
    for (int k = 0; k < LOADS; k++)
      if (SLICE / 2 + k * (SLICE / 4) / LOADS == i) {
        if (k < 8) raw[k % 2][k / 2] = load_here(wx + 8 * (k % 2) * GATES + k / 2 * H, next && in[k % 2]);
        else load_zone_mask(k - 8, t);
      }
    __syncwarp();
  };
  float inv = 1.0f / p.B;
  // Warps without rows pass the same barriers as those below, and do their part of the statistics.
  if constexpr (ROW_THREADS < THREADS) if (!has_rows()) {
    for (int t = 0; t < p.T; t++) {
      if (LENGTHS) inv = p.inv_n[t];
      wait_for_slices(counters, u32(t + 1));
      if (SECOND) refill.load_second();
      if (SUM_H) __syncthreads();
      write_given_x();
      if (for_x) prefetch_given(t + 2);
      if (SUM_H) __syncthreads();
      if (SUM_C && for_c) {
        await<SUMS_READY>();
        const float var = moments(of_c.all(over_warps(scratch + lane, 32), lane, u32(t)), inv, p.eps, shift, pool);
        if (owner) mean_of_c[own] = shift, scale_of_c[own] = rsqrtf(var + p.eps) * gamma;
        done<TOTALS_READY>();
        keep(t, shift, var);
      } else if (SUM_C) {
        done<SUMS_READY>();
        await<TOTALS_READY>();
      }
      arrive_at_slices(counters);
      if (t + 1 == p.T) continue;
      refill.load_first();
      write_given_rest();
      if (!for_x) prefetch_given(t + 2);
    }
    return;
  }
  for (int t = 0; t < p.T; t++) {
    if (LENGTHS) inv = p.inv_n[t];

    // W_h h
    const uint4* from = slice + t % BUFFERS * STEP_WORDS;
    asm volatile("" : "+l"(from));
    wait_for_slices(counters, u32(t + 1));
    maybe_late(0);
    float sums[COLUMNS / 2];
    AsPassed powers;
    product(sums, from, begin, resident, refill, u32(t), powers, [&](int i) { interleaved(i, t); });
    wx += B * GATES;
    float a[2][4][4];
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int i = 0; i < 16; i++) {
        a[j][i / 4][i % 4] = sums[i / 2 * 4 + 2 * j + i % 2];
        if (TYPE == 0) a[j][i / 4][i % 4] *= down;
      }
    if (!ZONE_H) down = undo / ONE_SCALED;
    const bool counts[2] = {in[0] && t < length[0], in[1] && t < length[1]};

    // Equation 6
    if (SUM_H) {
      float before[4][4], v[16], squares[16];
      read_table(before, mean_of_h);
#pragma unroll
      for (int i = 0; i < 32; i++)
        if (!counts[i / 16]) a[i / 16][i / 4 % 4][i % 4] = before[i / 4 % 4][i % 4];
#pragma unroll
      for (int i = 0; i < 16; i++) {
        const float d = a[0][i / 4][i % 4] - before[i / 4][i % 4], e = a[1][i / 4][i % 4] - before[i / 4][i % 4];
        v[i] = d + e;
        squares[i] = d * d + e * e;
      }
      fold_rows(v);
      fold_rows(squares);
      store2(scratch + warp * PITCH + 2 * lane, v[0], v[1]);
      store2(scratch + warp * PITCH + SECOND_AT + 2 * lane, squares[0], squares[1]);
      __syncthreads();
      float var = 0.0f;
      if (for_h) {
        const float sum = over_warps(scratch + (lane < 16 ? 0 : SECOND_AT) + number, PITCH);
        var = moments(of_h.all(sum, tid, u32(t)), inv, p.eps, shift, pool);
        if (owner) mean_of_h[place] = shift, scale_of_h[place] = rsqrtf(var + p.eps) * gamma;
      } else {
        write_given_x();
        if (for_x) prefetch_given(t + 2);
      }
      __syncthreads();
      if (for_h) keep(t, shift, var);
    } else {
      write_given_x();
      if (for_x) prefetch_given(t + 2);
    }

    // Equation 7
    float gate[2][4][4], cand[2][4], mean[4][4], scale[4][4];
    if (MODE_H) {
      read_table(mean, mean_of_h);
      read_table(scale, scale_of_h);
    }
    auto open = [&](int q) {
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          float v = a[j][q][e];
          if (MODE_H) v = a[j][q][e] = v - mean[q][e];
          v = MODE_H ? v * scale[q][e] + x[j][q][e] : v + x[j][q][e];
          if (!MODE_H) a[j][q][e] = v;
          gate[j][q][e] = gate_of(q, MODE_H ? v : v * pre(q));
        }
    };
    open(0), open(1), open(2);
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) cand[j][e] = gate[j][1][e] * c[j][e] + gate[j][0][e] * gate[j][2][e];

    // Equation 8
    float mc[4] = {}, rc[4] = {};
    if (SUM_C) {
      float v[8] = {}, before[4];
      load4(before, mean_of_c + 4 * quad);
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (counts[j])
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const float d = cand[j][e] - before[e];
            v[e] += d;
            v[4 + e] += d * d;
          }
      fold_rows(v);
      scratch[warp * 32 + lane] = v[0];
      if (for_c) {
        await<SUMS_READY>();
        const float var = moments(of_c.all(over_warps(scratch + lane, 32), lane, u32(t)), inv, p.eps, shift, pool);
        if (owner) mean_of_c[own] = shift, scale_of_c[own] = rsqrtf(var + p.eps) * gamma;
        done<TOTALS_READY>();
        keep(t, shift, var);
        __syncwarp();
      } else {
        done<SUMS_READY>();
      }
    }
    open(3);
    if (SUM_C && !for_c) await<TOTALS_READY>();
    if (MODE_C) load4(mc, mean_of_c + 4 * quad), load4(rc, scale_of_c + 4 * quad);
    float h[2][4], beta[4];
    load4(beta, beta_of + 4 * quad);
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float before[4] = {};
      if (ZONE_H) widen4(before, packed[j]);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float v = MODE_C ? (cand[j][e] - mc[e]) * rc[e] + beta[e] : cand[j][e] + beta[e];
        h[j][e] = zoned<ZONE_H>(zone_h[j], e, p.rate_h, before[e], gate[j][3][e] * tanh_(v));
        const float cell = zoned<ZONE_C>(zone_c[j], e, p.rate_c, c[j][e], cand[j][e]);
        c[j][e] = !LENGTHS || t < length[j] ? cell : c[j][e];
      }
      packed[j] = masked(narrow4(h[j]), counts[j]);
    }
    maybe_late(1);
    pass_on(passed + (t + 1) % BUFFERS * STEP_WORDS, 0, as_factors(packed[0], up), as_factors(packed[1], up));
    arrive_at_slices(counters);

    // The rest of the step, which no other block waits for.
    hs += B * HS;
    cs += SUBS * B * 8;
    wh += SUBS * 4 * B * 8;
    if (t + 1 < p.T) refill.load_first();
#pragma unroll
    for (int i = 0; i < 8; i++) kept[i / 4][i % 4] = narrow4(a[i / 4][i % 4]);
#pragma unroll
    for (int j = 0; j < 2; j++)
      if (LENGTHS && counts[j]) store4(p.h_n + (r * B + row0 + 8 * j) * H + unit, h[j]);
    if (t + 1 < p.T) {
      write_given_rest();
      if (!for_x) prefetch_given(t + 2);
      prepare(t + 1);
    }
  }
#pragma unroll
  for (int k = 0; k < 12; k++) save(k, true);
#pragma unroll
  for (int j = 0; j < 2; j++)
    if (in[j]) store4(p.c_n + (r * B + row0 + 8 * j) * H + unit, c[j]);
  meet_cluster();  // no block exits while others may still write to its shared memory
}
