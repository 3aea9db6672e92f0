// The LSTM's forward pass for small layers: all steps in one launch, one thread-block cluster per recurrence.
#define WORKER_REGISTERS 232
#include "cluster.cuh"

#define PLACES (BLOCKS * HALVES)  // places of 8 units each in the buffer of h; the halves of a block are adjacent
#define GROUPS (PLACES / 4)       // groups of 4 places, 32 columns of h: one place per thread of a quad
#define REST (PLACES % 4)         // places after the last full group
#define SOURCES ((PLACES + 3) / 4 * 4)
#define SOURCE (8 * ROW_TILES + 2)  // 16-byte pieces per place: one per row, plus two against bank conflicts
#define SENDS ((BLOCKS + 2) / 4)      // stores per row tile: each goes to four other blocks at once
#define SCRATCH (80 * WARPS)               // partial sums per warp: 64 of gates, 16 of cells
// Offsets in a step's table of pairs (shift, scale): the input term from 0, then
#define OF_H (4 * UNITS)   // W_h h
#define OF_C (8 * UNITS)   // the cell
#define STATISTICS (18 * UNITS)
#define CONSTANTS (8 * UNITS)  // the bias, and the inverse scale of the weights
#define ONE_SCALED 16384.0f  // the scale of h in the exchange, in float32
#define CHAINS (RT > 1 ? 1 : 2)  // independent accumulators per tile

// Saved for the backward pass: cs [R, T + 1, EIGHTS, PAIRS, 8, 2 rows], wh [R, T, EIGHTS, PAIRS, 8, 4, 2 rows].

struct Layout {
  uint4* hidden;       // [2][SOURCES][SOURCE]
  float *scratch, *cell_sums;
  float* given;        // [2][STATISTICS]: shifts and scales
  float* constants;
  u32* sheets;         // [WARPS][5][SHEET]: the four gates of the input term, and h
  u32 barriers;        // [2]

  __device__ __forceinline__ float2* statistics(int t) const {
    return reinterpret_cast<float2*>(given + (t & 1) * STATISTICS);
  }
};

// Bytes received from all other blocks in a step.
__device__ __forceinline__ u32 counted(int B) { return 16 * B * (BLOCKS - 1) * HALVES; }

// If W_h h is normalized, all terms of a pre-activation include the factor pre(gate).
__device__ __forceinline__ float scale_of(int gate) { return MODE_H ? pre(gate) : 1.0f; }

// The last warp: statistics. Each lane owns a gate of a unit, in each half.
__device__ __forceinline__ void run_statistics_warp(const Forward& p, const Position& at, const Layout& in) {
  const int own = at.own, quad = at.quad, first = slot(own, quad);
  const i64 r = blockIdx.y, column = quad * H + at.unit;
  const float scale = pick(quad == 2, scale_of(2), scale_of(0));
  auto here = [&](int s) { return first + 16 * s; };
  float g_x[HALVES], g_h[HALVES], g_c[HALVES];
#if SCALAR
  float w[HALVES], bias[HALVES];
  EACH_HALF {
    w[s] = at.has(s) ? p.w[r * GATES + column + 8 * s] : 0.0f;
    bias[s] = (BIAS && at.has(s) ? p.bias[r * GATES + column + 8 * s] : 0.0f) * scale;
  }
#endif
  EACH_HALF {
    const bool mine = at.has(s);
    g_x[s] = (MODE_X && mine ? p.gamma_x[r * GATES + column + 8 * s] : 0.0f) * scale;
    g_h[s] = (MODE_H && mine ? p.gamma_h[r * GATES + column + 8 * s] : 0.0f) * scale;
    g_c[s] = (MODE_C && mine ? p.gamma_c[r * H + at.unit + 8 * s] : 0.0f) * pre(2);
    in.constants[4 * (own + 8 * s) + quad] = (BIAS && mine ? p.bias[r * GATES + column + 8 * s] : 0.0f) * scale;
  }

  // Prefetched: statistics known before the step.
  float mx[HALVES] = {}, vx[HALVES] = {}, mh[HALVES] = {}, vh[HALVES] = {}, mc[HALVES] = {}, vc[HALVES] = {}, inv = 1.0f / p.B;
  auto prefetch = [&](int t) {
    if (!at.mine || t >= p.T) return;
    auto row_of = [&](int rows) { return r * rows + (t < rows ? t : rows - 1); };
    EACH_HALF {
      if (s == 0 || at.has(s)) {
        const i64 gate = column + 8 * s, unit = at.unit + 8 * s;
        if (SCALAR && MODE_X == 1) vx[s] = p.var_x[row_of(p.rows_x)];
        else if (MODE_X) mx[s] = p.mean_x[row_of(p.rows_x) * GATES + gate], vx[s] = p.var_x[row_of(p.rows_x) * GATES + gate];
        if (MODE_H == 2) mh[s] = p.mean_h[row_of(p.rows_h) * GATES + gate], vh[s] = p.var_h[row_of(p.rows_h) * GATES + gate];
        if (MODE_C == 2) mc[s] = p.mean_c[row_of(p.rows_c) * H + unit], vc[s] = p.var_c[row_of(p.rows_c) * H + unit];
      }
    }
  };
  auto write_tables = [&](int t) {
    float2* to = in.statistics(t);
    EACH_HALF {
#if SCALAR
      if (MODE_X) {
        const float factor = rsqrt_((MODE_X == 1 ? w[s] * w[s] * vx[s] : vx[s]) + p.eps) * g_x[s];
        to[here(s)] = make_float2(MODE_X == 1 ? bias[s] : bias[s] - mx[s] * factor, w[s] * factor);
      } else {
        to[here(s)] = make_float2(bias[s], w[s] * scale);
      }
#else
      if (MODE_X) to[here(s)] = make_float2(mx[s], rsqrt_(vx[s] + p.eps) * g_x[s]);
#endif
      if (MODE_H == 2) to[OF_H + here(s)] = make_float2(mh[s], rsqrt_(vh[s] + p.eps) * g_h[s]);
      if (MODE_C == 2 && quad == 0) to[OF_C + own + 8 * s] = make_float2(mc[s], rsqrt_(vc[s] + p.eps) * g_c[s]);
    }
    prefetch(t + 1);
  };
  prefetch(0);
  write_tables(0);
  __syncthreads();
  meet_cluster();

  i64 to_h = r * p.rows_h * GATES + column, to_c = r * p.rows_c * H + at.unit;
  // Shifts are the means of the step before, so that sums of squares do not cancel.
  float shift_h[HALVES] = {}, shift_c[HALVES] = {}, var_c[HALVES] = {};
  for (int t = 0; t < p.T; t++) {
    float2* statistics = in.statistics(t);
    if (LENGTHS) inv = p.inv_n[t];
    if (HALVES > 1) let_workers_meet();
    if (SUM_H) {
      await<SUMS_1>();
      float var_h[HALVES];
      EACH_HALF {
        const float2 v = add_warps2(reinterpret_cast<float2*>(in.scratch) + s * MW * 32 + at.lane, 32);
        const float off = v.x * inv;
        float var = variance(v.y * inv, off);
        shift_h[s] += off;
        if (LENGTHS && !(inv > 0.0f) && at.has(s)) {
          const i64 first = to_h + 8 * s - i64(t) * GATES;
          const float2 both = constants(p.mean_h + first, p.var_h + first, GATES, p.inv_n, t, p.eps);
          shift_h[s] = both.x, var = both.y;
        }
        statistics[OF_H + here(s)] = make_float2(shift_h[s], rsqrt_(var + p.eps) * g_h[s]);
        var_h[s] = var;
      }
      if (!SUM_C) write_tables(t + 1);
      __syncthreads();
      EACH_HALF
        if (at.has(s)) p.mean_h[to_h + 8 * s] = shift_h[s], p.var_h[to_h + 8 * s] = var_h[s];
      to_h += GATES;
      if (SUM_C) write_tables(t + 1);
    }
    if (SUM_C) {
      await<SUMS_2>();
      EACH_HALF {
        const float2 v = add_warps2(reinterpret_cast<float2*>(in.cell_sums) + s * MW * 8 + own, 8);
        const float off = v.x * inv;
        float var = variance(v.y * inv, off);
        shift_c[s] += off;
        if (LENGTHS && !(inv > 0.0f) && at.has(s)) {
          const i64 first = to_c + 8 * s - i64(t) * H;
          const float2 both = constants(p.mean_c + first, p.var_c + first, H, p.inv_n, t, p.eps);
          shift_c[s] = both.x, var = both.y;
        }
        if (quad == 0) statistics[OF_C + own + 8 * s] = make_float2(shift_c[s], rsqrt_(var + p.eps) * g_c[s]);
        var_c[s] = var;
      }
      if (!SUM_H) write_tables(t + 1);
      __syncthreads();
    }
    if (!SUM_H && !SUM_C) write_tables(t + 1);
    EACH_HALF
      if (SUM_C && quad == 0 && at.has(s)) p.mean_c[to_c + 8 * s] = shift_c[s], p.var_c[to_c + 8 * s] = var_c[s];
    to_c += H;
    if (!SUM_H && !SUM_C) __syncthreads();
  }
}

// The worker warps.
__device__ __forceinline__ void run_worker(const Forward& p, const Position& at, const Layout& in) {
  const int lane = at.lane, warp = at.warp, own = at.own, quad = at.quad, within = at.within;
  const i64 r = blockIdx.y, B = p.B, rank = blockIdx.x, unit = at.unit;

  // The unit's weights: its gates are rows own and own + 8 of two MMA tiles.
  uint4 w[GROUPS + 1][2][2];
  auto column_of = [&](int place, int k) { return place < PLACES ? sender(place / HALVES) * UNITS + 8 * (place % HALVES) + k : H; };
  {
    const Element* weight = p.weight + r * GATES * H + (at.mine ? unit : 0) * H;
    float up[4] = {1, 1, 1, 1};
#if TYPE == 0
#pragma unroll
    for (int q = 0; q < 4; q++) {
      u32 top = 0;
      if (at.mine)
        for (int k = quad; k < H; k += 4) top = max(top, magnitude(weight[q * H * H + k]));
      top = max(top, __shfl_xor_sync(~0u, top, 1));
      top = max(top, __shfl_xor_sync(~0u, top, 2));
      up[q] = scale_up(top);
      if ((HALVES > 1 ? at.tile : warp) == 0 && quad == 0) in.constants[4 * UNITS + 4 * within + q] = scale_down(top) * (1.0f / ONE_SCALED);
    }
#endif
    // The operand for columns k to k + 3.
    auto four = [&](int m, int k) {
      u32 v[4];
#pragma unroll
      for (int n = 0; n < 4; n++) {
        const int q = 2 * m + n % 2, column = k + n / 2 * 2;
        v[n] = at.mine && column < H ? operand(weight + q * H * H + column, up[q]) : 0;
      }
      return make_uint4(v[0], v[1], v[2], v[3]);
    };
#pragma unroll
    for (int i = 0; i <= GROUPS; i++)
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          int place = 4 * i + quad, k = 4 * half;
          if (i == GROUPS && REST == 1) place = half ? PLACES : 4 * i, k = 2 * quad;
          if (i == GROUPS && REST == 2) place = half ? PLACES : 4 * i + (quad >> 1), k = 4 * (quad & 1);
          w[i][m][half] = four(m, column_of(place, k));
        }
  }

  // h0 of the warp's rows. The other buffer is zeroed; places without a block stay zero.
  const Element* h0 = p.hs + r * (p.T + 1) * B * H;
#if TYPE == 0
  u32 top = 0;
  for (int i = lane; i < 8 * RT * H; i += 32)
    if (8 * at.tile + i / H < B) top = max(top, finite_magnitude(h0[i64(8 * at.tile) * H + i]));
  top = __reduce_max_sync(~0u, top);
  const float up_first = scale_up(top);
  float unscale = scale_down(top) * ONE_SCALED;
#else
  const float up_first = 1.0f;
#endif
  for (int i = lane; i < 8 * RT * SOURCES / HALVES; i += 32) {
    const int row = 8 * at.tile + i % (8 * RT), place = i / (8 * RT) * HALVES + at.half;
    u32 v[4];
#pragma unroll
    for (int n = 0; n < 4; n++) {
      const int column = column_of(place, 2 * n);
      v[n] = row < B && column < H ? operand(h0 + i64(row) * H + column, up_first) : 0;
    }
    in.hidden[place * SOURCE + row] = make_uint4(v[0], v[1], v[2], v[3]);
    in.hidden[(SOURCES + place) * SOURCE + row] = make_uint4(0, 0, 0, 0);
  }

  // Pointers to the thread's data of the current step.
  const i64 step_saved = EIGHTS * PAIRS * 8, pair = (rank * HALVES + at.half) * PAIRS + 4 * at.tile + quad;
#if SCALAR
  const Input* wx = p.wx + r * p.T * X_ROWS + at.row(0, 0);
#else
  const Input* wx = p.wx + (r * p.T * B + 8 * at.tile) * GATES + rank * UNITS + FIRST(at.half);
#endif
  float* cs = p.cs + (r * (p.T + 1) * step_saved + pair * 8 + own) * 2;
  Element* wh = p.wh + r * p.T * step_saved * 8 + eight_at(pair, own);
  Element* hs = p.hs + ((r * (p.T + 1) + 1) * B + 8 * at.tile) * H + rank * UNITS + FIRST(at.half);
  const float beta = (BETA && at.mine ? p.beta_c[r * H + unit] : 0.0f) * pre(2);
  bool stores[RT];
  int length[RT][2];
  float c[RT][2], x[RT][4][2];
  auto sheet_of = [&](int i) { return in.sheets + (warp * 5 + i) * SHEET; };
  auto valid = [&](int n, int e, int t) { return LENGTHS ? t < length[n][e] : at.in(n, e); };
#pragma unroll
  for (int n = 0; n < RT; n++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      length[n][e] = LENGTHS && at.in(n, e) ? p.lengths[at.row(n, e)] : 0;
      c[n][e] = at.in(n, e) ? p.c0[(r * B + at.row(n, e)) * H + unit] : 0.0f;
    }
    stores[n] = SAVE && at.row(n, 0) / 2 < PAIRS && (HALVES == 1 || unit - own < H);
    if (stores[n]) store2(cs + 64 * n, c[n][0], c[n][1]);
  }
#if SCALAR
  // Two rows of each tile, and the step's shifts and scales: loaded before h is sent, because later loads would queue
  // behind the stores.
  float2 inputs[RT], of_x[4];
  auto prefetch_rows = [&]() {
#pragma unroll
    for (int n = 0; n < RT; n++) inputs[n] = load2(wx + 8 * n);
    wx += X_ROWS;
  };
  auto load_x_table = [&](int t) { read_slots(of_x, in.statistics(t), within); };
  auto prepare = [&](int t) {
#pragma unroll
    for (int n = 0; n < RT; n++)
#pragma unroll
      for (int q = 0; q < 4; q++)
#pragma unroll
        for (int e = 0; e < 2; e++) x[n][q][e] = (e ? inputs[n].y : inputs[n].x) * of_x[q].y + of_x[q].x;
    if (t + 1 < p.T) prefetch_rows();
  };
#else
  auto load_x_table = [](int) {};
  auto prefetch_rows = [&]() {
#pragma unroll
    for (int q = 0; q < 4; q++) prefetch_sheet(sheet_of(q), wx + q * H, GATES, at);
    wx += B * GATES;
  };
  // Normalizes the input term of step t, which was prefetched a step ago, and prefetches the next one.
  auto prepare = [&](int t) {
    fetched();
    float2 of_x[4];
    if (MODE_X) read_slots(of_x, in.statistics(t), within);
    const float4 b = reinterpret_cast<const float4*>(in.constants)[within];
    const float bias[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int n = 0; n < RT; n++)
#pragma unroll
      for (int q = 0; q < 4; q++) {
        const float2 v = from_sheet(sheet_of(q), n, at);
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float number = e ? v.y : v.x;
          if (LENGTHS) number = pick(valid(n, e, t), number, 0.0f);
          x[n][q][e] = MODE_X ? (number - of_x[q].x) * of_x[q].y + bias[q] : number * scale_of(q) + bias[q];
        }
      }
    __syncwarp();
    if (t + 1 < p.T) prefetch_rows();
  };
#endif
  prefetch_rows();

  // A store of a warp sends 16-byte pieces of eight rows to four blocks; each block starts with its neighbour.
  const int piece = lane & 7;
  const u32 shared = address_of(in.hidden), first_place = 1 + (lane >> 3);
  u32 to[SENDS > 0 ? SENDS : 1];
#pragma unroll
  for (int i = 0; i < SENDS; i++) to[i] = in_block(shared, receiver(4 * i + first_place < BLOCKS ? 4 * i + first_place : 0));
  const u32 into = ((first_place * HALVES + at.half) * SOURCE + 8 * at.tile + piece) * 16, barrier_at = in.barriers - shared;

  // The outputs of a step, which no block waits for. c still holds the cells until the next ones replace them.
  Eight pending[RT];
  // Writes parts `first` to `last`: W_h h of each tile, then everything else. In 16 bits the second half of W_h h is
  // small enough to go with the rest. `after` is 0, but depends on values that must be loaded before the stores.
  auto write_outputs = [&](int first, int last, u32 after = 0) {
#pragma unroll
    for (int n = 0; n < RT; n++) {
      if (first <= n && n < last && stores[n]) pending[n].store(wh + 256 * n + after);
      if (last > RT && stores[n]) store2(cs + step_saved * 2 + 64 * n, c[n][0], c[n][1]);
    }
    if (last <= RT) return;
    write_sheet(hs, H, sheet_of(4), at);
    wh += step_saved * 8, hs += B * H, cs += step_saved * 2;
  };

  const bool sends_last = HALVES > 1 && warp >= (WARPS + 1) / 2;

  __syncthreads();
  load_x_table(0);
  prepare(0);
  meet_cluster();

  for (int t = 0; t < p.T; t++) {
    const int now = t & 1;
    const float2 *statistics = in.statistics(t), *before = in.statistics(t + 1);  // of step t - 1

    // W_h h. In step 0 there is no data to wait for: a new barrier reports the phase before its first as complete.
    if (BLOCKS > 1) {
      const u32 barrier = in.barriers + 8 * now;
      await_phase(barrier, u32((t - 1) >> 1));
      if (EXPECTS) expect(barrier, EXPECTED(counted(p.B)));
    } else {
      __syncwarp();
    }
    // The other half's warp has written its part of these rows. And no warp still waits for this phase: without this
    // barrier, a warp without rows could fall behind by a phase and miss it, because no other warp or block waits for it.
    if (HALVES > 1) meet_workers();
    float a[RT][4][2] = {};
    {
      const uint4* rows = in.hidden + now * SOURCES * SOURCE + 8 * at.tile + own;
      float sums[RT][2][CHAINS][4] = {};
#pragma unroll
      for (int i = 0; i < GROUPS + (REST == 3); i++) {
#pragma unroll
        for (int n = 0; n < RT; n++) {
          const uint4 b = rows[8 * n + (4 * i + quad) * SOURCE];
#pragma unroll
          for (int m = 0; m < 2; m++) {
            multiply16(sums[n][m][0], w[i][m][0], b.x, b.y);
            multiply16(sums[n][m][CHAINS - 1], w[i][m][1], b.z, b.w);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < RT; n++) {
        const u32* rest = reinterpret_cast<const u32*>(rows + 8 * n + 4 * GROUPS * SOURCE);
#pragma unroll
        for (int m = 0; m < 2; m++) {
          const uint4 v = w[GROUPS][m][0];
          if (REST == 1) multiply8(sums[n][m][0], v.x, v.y, rest[quad]);
          if (REST == 2) {
            const u32* two = rest + 4 * SOURCE * (quad >> 1) + 2 * (quad & 1);
            multiply16(sums[n][m][0], v, two[0], two[1]);
          }
        }
      }
#if TYPE == 0
      const float4 undo = reinterpret_cast<const float4*>(in.constants + 4 * UNITS)[within];
      const float down[4] = {undo.x * unscale, undo.y * unscale, undo.z * unscale, undo.w * unscale};
      unscale = 1.0f;
#endif
#pragma unroll
      for (int n = 0; n < RT; n++)
#pragma unroll
        for (int q = 0; q < 4; q++)
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float(&part)[CHAINS][4] = sums[n][q / 2];
            a[n][q][e] = part[0][q % 2 * 2 + e];
            if (CHAINS > 1) a[n][q][e] += part[CHAINS - 1][q % 2 * 2 + e];
#if TYPE == 0
            a[n][q][e] *= down[q];
#endif
          }
    }

    // Equation 6
    if (SUM_H) {
      float v[2][4], sum[2];
      float2 shift[4];
      read_slots(shift, before + OF_H, within);
#pragma unroll
      for (int q = 0; q < 4; q++)
#pragma unroll
        for (int i = 0; i < 2 * RT; i++) {
          const float d = pick(valid(i / 2, i % 2, t), a[i / 2][q][i % 2] - shift[q].x, 0.0f);
          v[0][q] = i ? v[0][q] + d : d;
          v[1][q] = i ? v[1][q] + d * d : d * d;
        }
      sum_gates(sum, v, quad);
      store2(in.scratch + (warp * 32 + lane) * 2, sum[0], sum[1]);
      done<SUMS_1>();
      if (t > 0) write_outputs(0, RT / 2);
      __syncthreads();
    }
    float gate[RT][4][2], cand[RT][2];
    float2 of_h[4] = {};
    if (MODE_H) read_slots(of_h, statistics + OF_H, within);
    const float shift_c = SUM_C ? before[OF_C + within].x : 0.0f;
    // `never` is 0, because T is not negative; but the compiler does not know, and so cannot move the loads behind the
    // stores.
    const u32 never = u32(p.T) >> 31, seen = __float_as_uint(of_h[3].y) ^ __float_as_uint(of_h[0].y) ^ __float_as_uint(shift_c);
    if (TYPE == 0 && t > 0) write_outputs(SUM_H ? RT / 2 : 0, RT, MODE_H ? seen & never : 0);
    auto activate = [&](int n, int q, int e) {
      float v = a[n][q][e];
      if (MODE_H) v = a[n][q][e] = v - of_h[q].x;
      v = (MODE_H ? v * of_h[q].y : v) + x[n][q][e];
      if (!MODE_H) a[n][q][e] = v;
      gate[n][q][e] = gate_of(q, MODE_H ? v : v * pre(q));
    };
    // Equation 7
#pragma unroll
    for (int n = 0; n < RT; n++)
#pragma unroll
      for (int q = 0; q < 3; q++)
#pragma unroll
        for (int e = 0; e < 2; e++) activate(n, q, e);
#pragma unroll
    for (int n = 0; n < RT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) cand[n][e] = gate[n][1][e] * c[n][e] + gate[n][0][e] * gate[n][2][e];

    // Equation 8
    if (SUM_C) {
      float v[2];
#pragma unroll
      for (int i = 0; i < 2 * RT; i++) {
        const float d = pick(valid(i / 2, i % 2, t), cand[i / 2][i % 2] - shift_c, 0.0f);
        v[0] = i ? v[0] + d : d;
        v[1] = i ? v[1] + d * d : d * d;
      }
      sum_cells(in.cell_sums, v[0], v[1], at);
      done<SUMS_2>();
    }
    if (t > 0) write_outputs(TYPE == 0 ? RT : SUM_H ? RT / 2 : 0, RT + 1);
    u32 mixed = 0;
#pragma unroll
    for (int n = 0; n < RT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        activate(n, 3, e);
        mixed ^= __float_as_uint(gate[n][3][e]);
      }
    // A store that never executes but depends on the output gates: otherwise the compiler computes them after the wait.
    if (SUM_C && (mixed & never)) in.cell_sums[0] = 0.0f;
    if (SUM_C) {
      __syncthreads();
    }
    const float2 of_c = MODE_C ? statistics[OF_C + within] : make_float2(0, pre(2));
    if (SUM_H || SUM_C) load_x_table(t + 1);
    float h[RT][2];
    u32 line[RT];
#pragma unroll
    for (int n = 0; n < RT; n++) {
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const bool there = valid(n, e, t);
        h[n][e] = pick(there, gate[n][3][e] * tanh_of((cand[n][e] - of_c.x) * of_c.y + beta), 0.0f);
        c[n][e] = LENGTHS ? pick(there, cand[n][e], c[n][e]) : cand[n][e];
      }
      const float scaled_one = TYPE == 0 ? ONE_SCALED : 1.0f;
      line[n] = turn(pack(scaled_one * h[n][0], scaled_one * h[n][1]));
    }

    // Sends h to all blocks, including this one.
    auto send_h = [&]() {
      if (t + 1 >= p.T) return;
      u32* mine = reinterpret_cast<u32*>(in.hidden + ((now ^ 1) * SOURCES + at.half) * SOURCE + 8 * at.tile) + lane;
#pragma unroll
      for (int n = 0; n < RT; n++) mine[32 * n] = line[n];
      // Gathers a row's eight units from the quad that holds them.
      const u32 buffer = (now ^ 1) * SOURCES * SOURCE * 16, barrier = barrier_at + (now ^ 1) * 8;
#pragma unroll
      for (int n = 0; n < RT; n++) {
        uint4 chunk;
        chunk.x = __shfl_sync(~0u, line[n], 4 * piece), chunk.y = __shfl_sync(~0u, line[n], 4 * piece + 1);
        chunk.z = __shfl_sync(~0u, line[n], 4 * piece + 2), chunk.w = __shfl_sync(~0u, line[n], 4 * piece + 3);
#pragma unroll
        for (int i = 0; i < SENDS; i++)
          send(4 * i + first_place < BLOCKS && 8 * (at.tile + n) + piece < B,
               to[i] + into + buffer + 4 * i * HALVES * SOURCE * 16 + 128 * n, to[i] + barrier, chunk);
      }
    };
    if (!sends_last) send_h();

    __syncwarp();  // all lanes have read the sheet that is now overwritten
#pragma unroll
    for (int n = 0; n < RT; n++) {
      pending[n].take(a[n]);
      to_sheet(sheet_of(4), n, at, h[n][0], h[n][1]);
      if (LENGTHS)
#pragma unroll
        for (int e = 0; e < 2; e++)
          if (valid(n, e, t)) p.h_n[(r * B + at.row(n, e)) * H + unit] = h[n][e];
    }
    __syncwarp();
    if (!SUM_H && !SUM_C) __syncthreads(), load_x_table(t + 1);
    if (t + 1 < p.T) prepare(t + 1);
    if (sends_last) send_h();
  }
  write_outputs(0, RT + 1);
#pragma unroll
  for (int n = 0; n < RT; n++)
#pragma unroll
    for (int e = 0; e < 2; e++)
      if (at.in(n, e)) p.c_n[(r * B + at.row(n, e)) * H + unit] = c[n][e];
}

extern "C" __global__ void __launch_bounds__(LAUNCHED, 1) cluster_forward(const Forward p) {
  extern __shared__ uint4 shared[];
  if (blockIdx.x >= BLOCKS) return;  // the cluster may have idle blocks
  Layout in;
  in.hidden = shared;
  in.scratch = reinterpret_cast<float*>(in.hidden + 2 * SOURCES * SOURCE);
  in.cell_sums = in.scratch + 64 * WARPS;
  in.given = in.scratch + SCRATCH;
  in.constants = in.given + 2 * STATISTICS;
  in.sheets = reinterpret_cast<u32*>(in.constants + CONSTANTS);
  in.barriers = address_of(in.sheets + 5 * SHEET * WARPS);
  CHECK_SHARED(16 * (2 * SOURCES * SOURCE + 1) + 4 * (SCRATCH + 2 * STATISTICS + CONSTANTS + 5 * SHEET * WARPS));
  const Position at = thread_position(p.B);
  for (int i = threadIdx.x; i < 2 * STATISTICS; i += THREADS) in.given[i] = 0.0f;
  if (threadIdx.x == 0)
    for (int i = 0; i < 2; i++) start_barrier(in.barriers + 8 * i, ARRIVALS);
  __syncthreads();
  if (EXPECTS && BLOCKS > 1) expect(in.barriers + 8, EXPECTED(counted(p.B)));  // for step 1
  if (HALVES > 1 ? at.warp >= WARPS : at.warp == WARPS) {
    give_registers();
    if (HALVES > 1 && at.warp > WARPS) return;
    run_statistics_warp(p, at, in);
  } else {
    take_registers();
    run_worker(p, at, in);
  }
  meet_cluster();  // no block exits while others may still write to its shared memory
}
