// The LSTM's backward pass for wide layers: one launch for all steps, from the last to the first.
#define SIDE 16  // product columns per block: its units
#define PASSED 4
#include "grid.cuh"
#include "grid_team.cuh"

#define SEPARATE_X (MODE_H != 0)  // d(W_x x) differs from d(W_h h)

#define SKIPS (LENGTHS || ZONE_H)  // a part of dh bypasses the step

#define STORES (SEPARATE_X ? 16 : 8)
#define LOADS (10 + 2 * MASKS)
// In float32 both terms do not fit into the registers. So d(W_h h) is kept in 16 bits, as it was passed on, which is
// enough for the product with h; and the input term is loaded only when the last pieces leave their registers.
#define TIGHT (TYPE == 0 && SEPARATE_X)
#define PITCH 192  // sums per warp: 64 each of dpre, dpre times W_h h, dpre times the input term
#define GATE_SUMS (MODE_X ? 192 : MODE_H ? 128 : 64)  // the sums that are used
// Whether every step needs the sums over all splits; otherwise they are added only at the end, for the parameters.
#define TOTAL_GATES (MODE_H == 1 || MODE_X == 1)
#define TOTAL_CELL (MODE_C == 1)

extern "C" __global__ void __launch_bounds__(THREADS, 1) grid_backward(const Backward p) {
  extern __shared__ __align__(128) uint4 slots[];
  uint4* resident = slots + FIRST * GROUP_WORDS;
  float* scratch = reinterpret_cast<float*>(resident + RESIDENT * GROUP_WORDS);  // [WARPS][PITCH]
  // Tables per column. Pre-activation: W_h h times open_h, plus the input term times open_x, plus bias.
  float *open_h = scratch + WARPS * PITCH, *open_x = open_h + TABLE, *bias = open_x + TABLE;
  // d(W_h h) = dpre * slope_h + W_h h * times_h + plus_h; likewise d(W_x x). slope_h is double-buffered, because the
  // next step's is written while some warps may still read.
  float *slope_h = bias + TABLE, *times_h = slope_h + 2 * TABLE, *plus_h = times_h + TABLE;
  float *slope_x = plus_h + TABLE, *times_x = slope_x + TABLE, *plus_x = times_x + TABLE;
  // The same for the cell.
  float *mean_of_c = plus_x + TABLE, *open_c = mean_of_c + UNITS, *slope_c = open_c + UNITS;
  float *times_c = slope_c + 2 * UNITS, *plus_c = times_c + UNITS;
  // Parameters in the order of the threads that own a column, [64] each; then per unit.
  float *gamma_h = plus_c + UNITS, *gamma_x = gamma_h + 64, *bias_of = gamma_x + 64, *gamma_c = bias_of + 64;
  float *beta_of = gamma_c + UNITS, *barriers = beta_of + UNITS;
  // After two barriers for weights: the barriers and buffers of the splits.
  const OverSplits<GATE_SUMS> of_gates = {barriers + 12, address_of(barriers + 4)};
  const OverSplits<32> of_cell = {of_gates.scratch + 2 * SPLITS * GATE_SUMS, of_gates.barriers + 16};
  CHECK_GRID(WARPS * PITCH + 10 * TABLE + 8 * UNITS + 3 * 64 + 4, 192 + 32);  // up to 192 GATE_SUMS

  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, quad = tid & 3;
  const int first = first_row(p.B), row0 = first + warp * 16 + (lane >> 2);  // and row0 + 8
  const int unit = blockIdx.x * UNITS + 4 * quad, sub = blockIdx.x * 2 + quad / 2;
  const bool mine = unit < H;
  const i64 r = blockIdx.y / SPLITS, part = blockIdx.y, B = p.B, end = end_of_rows(p.B);
  const u32 always_zero = u32(p.B) >> 31;
  uint4* passed = p.passed + part * BUFFERS * STEP_WORDS;
  uint4* spilled = p.spilled + (part * GRID + blockIdx.x) * (FIRST + SECOND) * GROUP_WORDS;
  const uint4* slice = slice_of(passed);
  u32 begin = start_group() * 2 * ROW_THREADS;
  asm volatile("" : "+r"(begin));
  u32* counters = p.barriers + part * TEAM * 32;
  uint4* handed = p.handed + part * HANDED_WORDS;
  const Refill refill = {slots, spilled, address_of(barriers)};
  if (tid < 2) start_barrier(refill.barriers + 8 * tid, 1);
  of_gates.start(), of_cell.start();

  const Element* weight = p.weight + r * GATES * H;
  const float undo = pack_weights(resident, spilled, scratch, [&](int n, int piece, int u) {
    const int of = unit_of(n), k = piece / 4 * UNITS + u;
    if (of >= H || k >= H) return Raw4{};
    const Element* from = weight + i64(piece % 4 * H + k) * H + of;
#if TYPE == 0
    return make_float4(__ldg(from), __ldg(from + H), __ldg(from + 2 * H), __ldg(from + 3 * H));
#else
    u32 v[4];
#pragma unroll
    for (int e = 0; e < 4; e++) v[e] = __ldg(from + e * H);
    return make_uint2(v[0] | v[1] << 16, v[2] | v[3] << 16);
#endif
  });
  refill.load_first();
  meet_cluster();

  // Each column's three sums are owned by three threads: that of dpre in warps 0 and 1, of dpre times W_h h in warps 2
  // and 3, of dpre times the input term in warps 4 and 5. Those of the cell are in the two halves of warp 7.
  const bool for_c = warp == 7, for_gates = warp < 6;
  const int kind = for_c ? lane >> 4 : tid >> 6, number = tid & 63;
  const int own_gate = gate_at(number), own = for_c ? cell_at(lane) : unit_at(number);
  const int place = table_index(own_gate, own);
  const bool has = (for_c || for_gates) && blockIdx.x * UNITS + own < H;
  const int column = blockIdx.x * UNITS + own + (for_c ? 0 : own_gate * H);
  float running = 0.0f, mean_x = 0.0f;
  float next_mean = 0.0f, next_var_h = 0.0f, next_var = 0.0f;  // mean and var without suffix: of x or c
  float to_total = 1.0f, to_term = 0.0f;                       // a sum's factors: for the total, then for the table
  if (tid < 64) {
    gamma_h[tid] = has && MODE_H ? p.gamma_h[r * GATES + column] : 0.0f;
    gamma_x[tid] = has && MODE_X ? p.gamma_x[r * GATES + column] : 0.0f;
    bias_of[tid] = has && BIAS ? p.bias[r * GATES + column] : 0.0f;
  }
  if (for_c && kind == 0) gamma_c[own] = has && MODE_C ? p.gamma_c[r * H + column] : 0.0f;
  if (for_c && kind == 0) beta_of[own] = has && BETA ? p.beta_c[r * H + column] : 0.0f;
  __syncthreads();
  auto prefetch_statistics = [&](int t) {
    if (!has) return;
    auto at = [&](int rows, int features) { return (r * rows + (t < rows ? t : rows - 1)) * features + column; };
    if (for_c) {
      if (MODE_C) next_mean = p.mean_c[at(p.rows_c, H)], next_var = p.var_c[at(p.rows_c, H)];
      return;
    }
    if (MODE_H && kind < 2) next_var_h = p.var_h[at(p.rows_h, GATES)];
    if (MODE_X && kind != 1) next_var = p.var_x[at(p.rows_x, GATES)];
    if (MODE_X && kind != 1) next_mean = p.mean_x[at(p.rows_x, GATES)];
  };
  // Writes step t's prefetched statistics to the tables, which no warp reads between passing on and the next product.
  auto write_statistics = [&](int t) {
    const float rstd_h = rsqrtf(next_var_h + p.eps), rstd = rsqrtf(next_var + p.eps);
    if (for_c) {
      const float slope_of = slope<MODE_C>(rstd, gamma_c[own], p.eps);
      to_total = kind ? rstd : 1.0f, to_term = kind ? slope_of * rstd : slope_of;
      if (MODE_C && kind == 0) {
        mean_of_c[own] = next_mean, open_c[own] = rstd * gamma_c[own];
        slope_c[t % 2 * UNITS + own] = slope_of;
      }
    } else if (for_gates) {
      const float slope_of = slope<MODE_H>(rstd_h, gamma_h[number], p.eps);
      const float of_x = MODE_X ? rstd * gamma_x[number] : 1.0f;
      to_total = kind == 0 ? 1.0f : kind == 1 ? rstd_h : rstd;
      to_term = kind == 0 ? slope_of : kind == 1 ? slope_of * rstd_h : of_x;
      if (kind == 0) {
        open_h[place] = rstd_h * gamma_h[number] * pre(own_gate), slope_h[t % 2 * TABLE + place] = slope_of;
        open_x[place] = of_x * pre(own_gate);
        bias[place] = (MODE_X ? bias_of[number] - next_mean * of_x : bias_of[number]) * pre(own_gate);
      }
      mean_x = next_mean;
    }
  };
  float sum_b[16] = {}, sum_beta[8] = {};

  float dc[2][4] = {}, skip[2][4] = {}, c_t[2][4] = {}, c_before[2][4] = {};
  Raw4 raw_h[2][4] = {}, raw_x[2][4] = {}, dy[2] = {};
  u32 zone_c[2] = {}, zone_h[2] = {};
  int length[2];
  bool in[2];
  // Pointers to the last step; they move back step by step.
  const i64 last = p.T - 1;
  const Element* wh = p.wh + ((r * p.T + last) * SUBS + sub) * 4 * B * 8 + 4 * (quad % 2) + row0 * 8;
  const float* cs = p.cs + ((r * (p.T + 1) + p.T) * SUBS + sub) * B * 8 + 4 * (quad % 2) + row0 * 8;
  const Element* doutput = p.doutput + ((r * p.T + last) * B + row0) * H + unit;
  i64 at = ((r * p.T + last) * B + row0) * GATES + unit;  // index into wx, dwx and da
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const i64 row = row0 + 8 * j, of = (r * B + row) * H + unit;
    in[j] = row < end && mine;
    length[j] = p.T;
    if (LENGTHS) length[j] = in[j] ? p.lengths[row] : 0;
    if (!in[j]) continue;
    if (SKIPS) load4(skip[j], p.dh + of);
    load4(dc[j], p.dc + of);
    load4(c_before[j], cs + 64 * j);
  }

  // d(W_h h) and d(W_x x) of a step, stored piece by piece during the next product: stored all at once, they would stall
  // the loads that queue behind them, and with those the product.
  Raw4 kept[1 + SEPARATE_X][2][4] = {};
#if TIGHT
  uint2 sent[2][4] = {};
  float down = 0.0f;  // undoes the scale of `sent`
#endif
  auto save = [&](int k, i64 of, bool on) {
    const int j = k / 4 % 2, q = k % 4;
    Element* to = (k < 8 ? p.da : p.dwx) + of + 8 * j * GATES + q * H;
#if TIGHT
    if (k < 8) kept[0][j][q] = from_factors(sent[j][q], down);
#endif
    store_here(to, kept[SEPARATE_X ? k / 8 : 0][j][q], on && in[j]);
  };

  // A step's loads, in LOADS parts.
  auto zone_at = [&] { return (at - unit >> 2) + unit; };  // index into the masks
  auto prefetch = [&](int k) {
    const int j = k < 10 ? k / 5 : k % 2, q = k % 5;
    if (k >= 10) {
      if (ZONE_C == 1 && k < 12) zone_c[j] = load_mask(p.mask_c + zone_at() + 8 * j * H, in[j]);
      else zone_h[j] = load_mask(p.mask_h + zone_at() + 8 * j * H, in[j]);
    } else if (q < 4) {
      raw_h[j][q] = load_here(wh + (q * anew(p.B) + 8 * j) * 8, in[j]);
      if (SEPARATE_X && !TIGHT) raw_x[j][q] = load_here(p.wx + at + 8 * j * GATES + q * H, in[j]);
    } else {
      load_here4(c_before[j], cs + 64 * j, in[j]);
      if (DOUTPUT) dy[j] = load_here(doutput + 8 * j * H, in[j]);
    }
  };
  auto next_cell = [&] {
    cs -= SUBS * B * 8;
#pragma unroll
    for (int i = 0; i < 8; i++) c_t[i / 4][i % 4] = c_before[i / 4][i % 4];
  };
  // Prefetches the same data to L2.
  auto bring_step = [&] {
    const int row = first + tid % ROWS, subs = min(2, SUBS - int(blockIdx.x) * 2);
    const u32 row_bytes = TYPE == 0 ? 32 : 16;
    if (SPLITS > 1) {  // the split's rows are not contiguous
      const int second = quad / 2, rows = int(end) - first;
      const i64 back = second * B * 8 + 4 * (quad % 2) + (row0 - first) * 8;
      if (tid < 4 * subs && rows > 0) bring_row(wh - back - 3 * second * B * 8 + tid * B * 8, rows * row_bytes);
      if (tid < subs && rows > 0) bring_row(cs - SUBS * B * 8 - back + tid * B * 8, rows * 32);
    } else if (tid == 0 && subs > 0) {
      bring_row(wh - (4 * (quad % 2) + row0 * 8), subs * 4 * B * row_bytes);
      bring_row(cs - SUBS * B * 8 - (4 * (quad % 2) + row0 * 8), subs * B * 32);
    }
    if (row < end && blockIdx.x * UNITS < H) {
      const Element* from = p.wx + at + i64(row - row0) * GATES - 4 * quad + tid / ROWS * 2 * H;
      const bool more = TYPE == 0 && blockIdx.x * UNITS + 8 < H;  // whether there are second sectors
      if (SEPARATE_X) bring(from), bring(from + H);
      if (SEPARATE_X && more) bring(from + 8), bring(from + H + 8);
      if (DOUTPUT && tid < ROWS) bring(doutput + i64(row - row0) * H - 4 * quad);
      if (DOUTPUT && tid < ROWS && more) bring(doutput + i64(row - row0) * H - 4 * quad + 8);
      const i64 of_masks = zone_at() + i64(row - row0) * H - 4 * quad;
      if (ZONE_C == 1 && tid < ROWS) bring(p.mask_c + of_masks);
      if (ZONE_H == 1 && tid >= ROWS) bring(p.mask_h + of_masks);
    }
    __syncwarp();
  };
  // Interleaved with group i of step t's product: stores of step t + 1's gradients, then loads of step t's data.
  auto interleaved = [&](int i, int t) {
    if (i == 0) bring_step();
#pragma unroll
    for (int k = 0; k < STORES; k++)
      if (k * (SLICE / 2) / STORES == i) save(k, at + B * GATES, t < p.T - 1);
    if (i == SLICE / 2) next_cell();
#pragma unroll
    for (int k = 0; k < LOADS; k++)
      if (SLICE / 2 + k * (SLICE / 4) / LOADS == i) prefetch(k);
#pragma unroll
    for (int k = 0; k < (TIGHT ? 8 : 0); k++)
      if (SLICE - 4 + k / 2 == i) raw_x[k / 4][k % 4] = load_here(p.wx + at + 8 * (k / 4) * GATES + k % 4 * H, in[k / 4]);
    __syncwarp();
  };

  prefetch_statistics(p.T - 1);
  write_statistics(p.T - 1);

  float inv = 1.0f / p.B;
  auto total_of_cell = [&](u32 times) {
    await<SUMS_READY>();
    float sum = over_warps(scratch + lane, 32);
    if (TOTAL_CELL) sum = of_cell.all(sum, lane, times);
    const float total = sum * to_total;
    (kind ? times_c : plus_c)[own] = MODE_C == 1 ? -total * inv * to_term : 0.0f;
    running += total;
    done<TOTALS_READY>();
  };
  auto totals_of_gates = [&](u32 times) {
    if (for_gates && kind < 2) {
      float sum = over_warps(scratch + tid, PITCH);
      if (TOTAL_GATES) sum = of_gates.all(sum, tid, times);
      const float total = sum * to_total;
      running += total;
      (kind ? times_h : plus_h)[place] = MODE_H == 1 ? -total * inv * to_term : 0.0f;
    }
    if (MODE_X && for_gates && kind == 2) {
      float all = over_warps(scratch + number, PITCH), with_x = over_warps(scratch + tid, PITCH);
      if (TOTAL_GATES) with_x = of_gates.all(with_x, tid, times), all = of_gates.total(all, number, times);
      const float total = (with_x - mean_x * all) * to_total;
      running += total;
      const float factor = MODE_X == 1 ? -total * inv * to_term * to_total : 0.0f;
      slope_x[place] = to_term, times_x[place] = factor;
      plus_x[place] = (MODE_X == 1 ? -all * inv * to_term : 0.0f) - mean_x * factor;
    }
  };
  // Warps without rows pass the same barriers as those below, and do their part of the statistics.
  for (int t = p.T - 1; t >= 0 && !has_rows(); t--) {
    if (LENGTHS) inv = p.inv_n[t];
    wait_for_slices(counters, u32(p.T - 1 - t));
    if (SECOND) refill.load_second();
    if (t > 0) prefetch_statistics(t - 1);
    if (MODE_C && for_c) total_of_cell(u32(p.T - 1 - t));
    else if (MODE_C) done<SUMS_READY>(), await<TOTALS_READY>();
    if (MODE_H) {
      __syncthreads();
      totals_of_gates(u32(p.T - 1 - t));
      __syncthreads();
    }
    arrive_at_slices(counters);
    if (t > 0) refill.load_first(), write_statistics(t - 1);
  }
  for (int t = p.T - 1; t >= 0 && has_rows(); t--) {
    if (LENGTHS) inv = p.inv_n[t];
    const u32 times = u32(p.T - 1 - t);  // steps so far

    // dh through W_h. The last step has none and multiplies zeros, which avoids a second code path.
    float sums[COLUMNS / 2];
    const uint4* from = slice + times % BUFFERS * STEP_WORDS;
    asm volatile("" : "+l"(from));
    wait_for_slices(counters, times);
    maybe_late(0);
#if SCALED
    Powers powers;
    powers.prefetch(exponents_of(passed + times % BUFFERS * STEP_WORDS));
#else
    AsPassed powers;
#endif
    product(sums, from, begin, resident, refill, times, powers, [&](int i) { interleaved(i, t); });
    wh -= SUBS * 4 * B * 8, doutput -= B * H;
    maybe_late(1);
    send_sums(sums, handed, times, powers.back(undo));
    if (t > 0) prefetch_statistics(t - 1);

    // Recompute the forward step while the team's sums arrive: the factors of dh and of the cell's gradient. Before the
    // product they would not fit into the registers next to its accumulators.
    float c_centered[2][4], f[2][4];
    float k_cell[2][4], k_o[2][4], k_i[2][4], k_f[2][4], k_g[2][4];
    bool counts[2];
    Held held;
    {
      float of_h[4][4], of_x[4][4], b[4][4], mc[4] = {}, oc[4] = {}, beta[4];
      load4(beta, beta_of + 4 * quad);
      if (MODE_H) {
        read_table(of_h, open_h);
        read_table(b, bias);
        read_table(of_x, open_x);
      }
      if (MODE_C) load4(mc, mean_of_c + 4 * quad), load4(oc, open_c + 4 * quad);
#pragma unroll
      for (int j = 0; j < 2; j++) {
        counts[j] = in[j] && t < length[j];
        float gate[4][4];
#pragma unroll
        for (int q = 0; q < 4; q++) {
          float a[4], x[4];
          if (LENGTHS && !counts[j]) raw_x[j][q] = Raw4{};
          widen4(a, raw_h[j][q]);
          widen4(x, raw_x[j][q]);
#pragma unroll
          for (int e = 0; e < 4; e++)
            gate[q][e] = gate_of(q, SEPARATE_X ? a[e] * of_h[q][e] + (x[e] * of_x[q][e] + b[q][e]) : a[e] * pre(q));
          anew(raw_h[j][q]);
          anew(raw_x[j][q]);
        }
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float i = gate[0][e], g = gate[2][e], o = gate[3][e];
          f[j][e] = gate[1][e];
          // With zoneout the saved cell is not the one that the output was computed from.
          const float cell = ZONE_C ? f[j][e] * c_before[j][e] + i * g : c_t[j][e];
          c_centered[j][e] = MODE_C ? cell - mc[e] : cell;
          const float th = tanh_((MODE_C ? c_centered[j][e] * oc[e] : c_centered[j][e]) + beta[e]);
          k_cell[j][e] = zoned<ZONE_H>(zone_h[j], e, p.rate_h, 0.0f, o * (1.0f - th * th));
          k_o[j][e] = zoned<ZONE_H>(zone_h[j], e, p.rate_h, 0.0f, th * o * (1.0f - o));
          k_i[j][e] = g * i * (1.0f - i);
          k_f[j][e] = c_before[j][e] * f[j][e] * (1.0f - f[j][e]);
          k_g[j][e] = i * (1.0f - g * g);
        }
#pragma unroll
        for (int e = 0; e < 4; e++)
          if (!counts[j]) k_cell[j][e] = k_o[j][e] = k_i[j][e] = k_f[j][e] = k_g[j][e] = 0.0f;
#pragma unroll
        for (int e = 0; e < 4; e++) {
          held.hold(k_cell[j][e]), held.hold(k_o[j][e]), held.hold(k_i[j][e]);
          held.hold(k_f[j][e]), held.hold(k_g[j][e]);
        }
      }
    }
    float dh[2][4];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      float y[4] = {};
      if (DOUTPUT) widen4(y, dy[j]);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float kept = SKIPS ? skip[j][e] : 0.0f;
        dh[j][e] = LENGTHS && !counts[j] ? kept : kept + y[e];
      }
    }
    maybe_late(2);
    receive_sums(sums, handed, times, held.zero(always_zero));
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) dh[j][e] += sums[e / 2 * 4 + 2 * j + e % 2];
    if (!SKIPS && t == p.T - 1)  // otherwise dh_n is in `skip`
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float given[4] = {};
        if (in[j]) load4(given, p.dh + (r * B + row0 + 8 * j) * H + unit);
#pragma unroll
        for (int e = 0; e < 4; e++) dh[j][e] += given[e];
      }

    // Equation 8
    float a[2][4][4], x[2][4][4];
    float dpre[2][4][4], d_cell[2][4], v[3][16] = {};
    auto gather = [&](int q, int e) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float d = dpre[j][q][e];
        v[0][q * 4 + e] += d;
        if (MODE_H) v[1][q * 4 + e] += d * a[j][q][e];
        if (MODE_X) v[2][q * 4 + e] += d * x[j][q][e];
      }
    };
    auto output_gate = [&] {
#pragma unroll
      for (int i = 0; i < 8; i++) {
        widen4(a[i / 4][i % 4], raw_h[i / 4][i % 4]);
        widen4(x[i / 4][i % 4], raw_x[i / 4][i % 4]);
      }
#pragma unroll
      for (int e = 0; e < 4; e++) {
        dpre[0][3][e] = dh[0][e] * k_o[0][e], dpre[1][3][e] = dh[1][e] * k_o[1][e];
        gather(3, e);
      }
    };
    float v_c[8];
#pragma unroll
    for (int e = 0; e < 4; e++) {
      const float d0 = d_cell[0][e] = dh[0][e] * k_cell[0][e], d1 = d_cell[1][e] = dh[1][e] * k_cell[1][e];
      v_c[e] = d0 + d1;
      v_c[4 + e] = d0 * c_centered[0][e] + d1 * c_centered[1][e];
    }
    if (MODE_C) {
      fold_rows(v_c);
      scratch[warp * 32 + lane] = v_c[0];
      if (for_c) total_of_cell(times);
      else done<SUMS_READY>();
      output_gate();
      if (!for_c) await<TOTALS_READY>();
      __syncwarp();
    } else {
      output_gate();
#pragma unroll
      for (int e = 0; e < 4; e++) sum_beta[e] += v_c[e];
    }

    // Equation 7
    {
      float slope_of[4], times_of[4], plus_of[4];
      if (MODE_C) {
        load4(slope_of, slope_c + t % 2 * UNITS + 4 * quad);
        load4(times_of, times_c + 4 * quad);
        load4(plus_of, plus_c + 4 * quad);
      }
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) {
          float d = zoned<ZONE_C>(zone_c[j], e, p.rate_c, 0.0f, dc[j][e]);
          if (MODE_C) d += d_cell[j][e] * slope_of[e] + (c_centered[j][e] * times_of[e] + plus_of[e]);
          else d += d_cell[j][e];
          dpre[j][0][e] = d * k_i[j][e];
          dpre[j][1][e] = d * k_f[j][e];
          dpre[j][2][e] = d * k_g[j][e];
          float before = d * f[j][e];  // the gradient of the previous cell
          if (ZONE_C) before += zoned<ZONE_C>(zone_c[j], e, p.rate_c, dc[j][e], 0.0f);
          dc[j][e] = !LENGTHS || counts[j] ? before : dc[j][e];
          const float past = zoned<ZONE_H>(zone_h[j], e, p.rate_h, dh[j][e], 0.0f);
          if (SKIPS) skip[j][e] = !LENGTHS || counts[j] ? past : dh[j][e];
        }
#pragma unroll
      for (int i = 0; i < 12; i++) gather(i / 4, i % 4);
    }

    // Equation 6
    if (MODE_H) {
#pragma unroll
      for (int k = 0; k < (MODE_X ? 3 : 2); k++) {
        fold_rows(v[k]);
        store2(scratch + warp * PITCH + 64 * k + 2 * lane, v[k][0], v[k][1]);
      }
      __syncthreads();
      totals_of_gates(times);
      __syncthreads();
    }
#pragma unroll
    for (int q = 0; q < 4; q++) {
      float slope_of[4], times_of[4], plus_of[4];
      if (MODE_H) {
        load4(slope_of, slope_h + t % 2 * TABLE + quad * LINE + 4 * q);
        load4(times_of, times_h + quad * LINE + 4 * q);
        load4(plus_of, plus_h + quad * LINE + 4 * q);
      }
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float d[4];
#pragma unroll
        for (int e = 0; e < 4; e++)
          d[e] = MODE_H ? dpre[j][q][e] * slope_of[e] + (a[j][q][e] * times_of[e] + plus_of[e]) : dpre[j][q][e];
        kept[0][j][q] = masked(narrow4(d), counts[j]);
      }
#if !SCALED
      pass_on(passed + (times + 1) % BUFFERS * STEP_WORDS, q, kept[0][0][q], kept[0][1][q]);
#endif
    }
#if SCALED
    {
      uint4* step = passed + (times + 1) % BUFFERS * STEP_WORDS;
      float all[32];
#pragma unroll
      for (int i = 0; i < 32; i += 4) {
        const float4 four = kept[0][i / 16][i / 4 % 4];
        all[i] = four.x, all[i + 1] = four.y, all[i + 2] = four.z, all[i + 3] = four.w;
      }
      const u32 top = largest(all);
      const float up = scale_up(top);
#if !TIGHT
      uint2 sent[2][4];
#else
      down = scale_down(top);
#endif
#pragma unroll
      for (int q = 0; q < 4; q++) {
        sent[0][q] = as_factors(kept[0][0][q], up), sent[1][q] = as_factors(kept[0][1][q], up);
        pass_on(step, q, sent[0][q], sent[1][q]);
      }
      if (lane == 0 && blockIdx.x < OWNERS) pass_exponent(exponents_of(step) + blockIdx.x, exponent(top));
      __syncwarp();
    }
#endif
    arrive_at_slices(counters);

    // The rest of the step, which no other block waits for.
    if (t > 0) refill.load_first();
    if (!MODE_H)
#pragma unroll
      for (int i = 0; i < 16; i++) sum_b[i] += v[0][i];
    if (SEPARATE_X)
#pragma unroll
      for (int q = 0; q < 4; q++) {
        float slope_of[4], times_of[4], plus_of[4];
        load4(slope_of, slope_x + quad * LINE + 4 * q);
        load4(times_of, times_x + quad * LINE + 4 * q);
        load4(plus_of, plus_x + quad * LINE + 4 * q);
#pragma unroll
        for (int j = 0; j < 2; j++) {
          float d[4];
#pragma unroll
          for (int e = 0; e < 4; e++)
            d[e] = MODE_X ? dpre[j][q][e] * slope_of[e] + (x[j][q][e] * times_of[e] + plus_of[e]) : dpre[j][q][e];
          kept[SEPARATE_X][j][q] = masked(narrow4(d), counts[j]);
        }
      }
    at -= B * GATES;
    if (t > 0) write_statistics(t - 1);
  }

#pragma unroll
  for (int j = 0; j < 2; j++) {
    const i64 of = (r * B + row0 + 8 * j) * H + unit;
    if (!in[j]) continue;
    if (!SKIPS) skip[j][0] = skip[j][1] = skip[j][2] = skip[j][3] = 0.0f;
    store4(p.dh + of, skip[j]);
    store4(p.dc + of, dc[j]);
  }
#pragma unroll
  for (int k = 0; k < STORES; k++) save(k, at + B * GATES, true);
  // Sums that no step needed are reduced only now.
  __syncthreads();
  if (!MODE_H) {
    fold_rows(sum_b);
    store2(scratch + warp * PITCH + 2 * lane, sum_b[0], sum_b[1]);
    __syncthreads();
    if (tid < 64) running = over_warps(scratch + tid, PITCH);
    __syncthreads();
  }
  if (!MODE_C) {
    fold_rows(sum_beta);
    scratch[warp * 32 + lane] = sum_beta[0];
    __syncthreads();
    if (for_c) running = over_warps(scratch + lane, 32);
  }
  if (!TOTAL_GATES && tid < GATE_SUMS) running = of_gates.all(running, tid, 0);
  if (!TOTAL_CELL && for_c) running = of_cell.all(running, lane, 0);
  meet_cluster();  // no block exits while others may still write to its shared memory
  if (own_split()) return;
  if (for_c && has) (kind ? p.dgamma_c : p.dbeta_c)[r * H + column] = running;
  float* sums = kind == 0 ? p.dbias : kind == 1 ? p.dgamma_h : p.dgamma_x;
  if (for_gates && has && (MODE_H || kind == 0)) sums[r * GATES + column] = running;
}
