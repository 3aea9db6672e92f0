// The LSTM's backward pass for small layers: one cluster of blocks for each recurrence, from the last
// step to the first.
//
// A block multiplies its own d(W_h h), 32 columns, with its rows of W_h: its share of dh of all units. It
// sends each block the share of that block's units, which adds up what it gets. So BLOCKS x 8 units
// come to a block in a step, not d(W_h h) of all BLOCKS x 32 columns.
#include "small.cuh"

#define TILES ((BLOCKS + 1) / 2)  // of 16 units of dh: those of two blocks
#define SPLIT (MODE_H != 0)       // d(W_x x) is not d(W_h h)
#if HALF_SUMS
typedef u32 Share;
#else
typedef float2 Share;
#endif
#define SHARE int(sizeof(Share))         // of a thread: its unit and rows
#define REGION (BLOCKS * 32)             // of shares: those for a warp, [block][thread]
#define BYTES (REGION * SHARE)           // that a warp gets in a step
#define ROOM (112 * WARPS)               // sums of warps: 64 and 32 of gates, 16 of cells
#define STATISTICS 160                   // of the gates 128, of the cell 32
#define CONSTANTS 128
#ifndef BATCH
#define BATCH 4  // tiles multiplied side by side
#endif
#define TOTALS 112  // sums over the batch: 64 and 16 of gates and cells, 32 of the input term
#define GIVEN 160   // statistics of a step on their way from memory, 5 for each lane of the helper

struct Backward {
  const Element* wx;      // [R, T, B, 4H]
  const Element* weight;  // [R, H, 4H], transposed
  const float *bias, *gamma_x, *gamma_h, *gamma_c, *beta_c;
  const float *mean_x, *var_x, *mean_h, *var_h, *mean_c, *var_c;
  const float* cs;     // as the forward kernel has left them
  const Element* wh;
  const int* lengths;  // [B]
  const float* inv_n;  // [T]
  const Element* doutput;  // [R, T, B, H]
  float *dh, *dc;          // [R, B, H]: those of h_n and c_n; then what skips W_h, and dc0
  Element* da;             // [R, T, B, 4H]: d(W_h h)
  Element* dwx;            // [R, T, B, 4H]
  float *dbias, *dgamma_x, *dgamma_h, *dgamma_c, *dbeta_c;
  u32* counter;  // not used but by CLOCK
  int T, B, rows_x, rows_h, rows_c;
  float eps;
};

__device__ __forceinline__ Share to_share(float x, float y) {
#if HALF_SUMS
  return pack(x, y);
#else
  return make_float2(x, y);
#endif
}

__device__ __forceinline__ float2 from_share(Share s) {
#if HALF_SUMS && TYPE == 0
  return make_float2(0, 0);  // float16 has not the range
#elif HALF_SUMS
  return widen(s);
#else
  return s;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) small_backward(const Backward p) {
  extern __shared__ uint4 shared[];
  const u32 rank = blockIdx.x;
  if (rank >= BLOCKS) return;  // where the cluster is larger than need be
  const Place at = place_of(p.B);
  Share* shares = reinterpret_cast<Share*>(shared);  // [2][WARPS][REGION]
  const Ahead ahead = {reinterpret_cast<u32*>(shares + 2 * WARPS * REGION)};
  float* room = reinterpret_cast<float*>(ahead.room + WORDS * THREADS);
  float *room_x = room + 64 * WARPS, *room_c = room_x + 32 * WARPS;
  float* given = room + ROOM;  // [2][STATISTICS]: rstd and slope of W_h h, mean and rstd of W_x x
                               // [gate][unit]; mean, rstd, slope of the cell
  float4* constants = reinterpret_cast<float4*>(given + 2 * STATISTICS);  // bias, gamma_x, gamma_h [gate][unit]
  float* totals = given + 2 * STATISTICS + CONSTANTS;
  float2 *total_h = reinterpret_cast<float2*>(totals), *total_c = total_h + 32;
  float* total_x = totals + 80;  // [gate][unit]
  float* running = totals + TOTALS;  // the sums over all steps so far: of lane's gate, of its unit
  float2 *running_h = reinterpret_cast<float2*>(running) + at.lane, *running_c = running_h + 32;
  float* running_x = running + 128 + at.lane;
  float* asked = running + 160 + at.lane;
  const u32 barriers = address_of(running + 160 + GIVEN);  // [2][WARPS]

  const int lane = at.lane, warp = at.warp, own = at.own, quad = at.quad, unit = at.unit;
  const i64 r = blockIdx.y, B = p.B;
  // Where a step's numbers begin. Registers are scarce, so that no pointers are kept.
  auto rows_before = [&](int t) { return (r * p.T + t) * B; };
  auto gates_at = [&](int t, int q) { return rows_before(t) * GATES + q * H + rank * UNITS; };
  const int saved = (rank * PAIRS + at.pair) * UNITS + own;
  auto saved_at = [&](i64 step) { return step * (BLOCKS * PAIRS * UNITS) + saved; };
  const bool kept = at.pair < PAIRS;
  const int column = quad * H + unit;  // of lane's gate, for the adder and the helper

  // The weights of the block's columns, k = 8 * gate + unit; each block begins with other units of dh.
  uint4 w[TILES][2];
  float undo = 1.0f;
  const u32 start = rank % TILES;
  auto tile_of = [&](u32 m) { return m + start < TILES ? m + start : m + start - TILES; };
  {
    const Element* weight = p.weight + r * GATES * H + rank * UNITS + 2 * quad;
    const bool there = rank * UNITS + 2 * quad < H;
    float up = 1.0f;
#if TYPE == 0
    u32 top = 0;
    if (there)
      for (int u = own; u < H; u += 8)
        for (int q = 0; q < 4; q++) {
          const float2 v = load2(weight + i64(u) * GATES + q * H);
          top = max(top, max(size_of(v.x), size_of(v.y)));
        }
    top = __reduce_max_sync(~0u, top);
    up = scale_up(top), undo = scale_down(top);
#endif
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int half = 0; half < 2; half++) {
        u32 v[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
          const int u = 16 * tile_of(m) + 8 * (n % 2) + own, q = 2 * half + n / 2;
          v[n] = there && u < H ? operand(weight + i64(u) * GATES + q * H, up) : 0;
        }
        w[m][half] = make_uint4(v[0], v[1], v[2], v[3]);
      }
  }

  for (int i = threadIdx.x; i < 160 + GIVEN; i += THREADS) running[i] = 0.0f;
  __syncthreads();  // before anything is asked for
  if (warp == ADDER)
    constants[quad * UNITS + own] = make_float4(BIAS && at.mine ? p.bias[r * GATES + column] : 0.0f,
                                                MODE_X && at.mine ? p.gamma_x[r * GATES + column] : 0.0f,
                                                MODE_H && at.mine ? p.gamma_h[r * GATES + column] : 0.0f, 0.0f);
  const float g_c = MODE_C && at.mine ? p.gamma_c[r * H + unit] : 0.0f;
  const float beta = BETA && at.mine ? p.beta_c[r * H + unit] : 0.0f;

  auto ask_given = [&](int t) {
    if (warp != HELPER || t < 0) return;
    auto row = [&](int rows) { return r * rows + (t < rows ? t : rows - 1); };
    auto ask = [&](int n, const float* from, i64 offset) {
      fetch_async<4>(address_of(asked + 32 * n), from + (at.mine ? offset : 0), at.mine);
    };
    if (MODE_H) ask(0, p.var_h, row(p.rows_h) * GATES + column);
    if (MODE_X) ask(1, p.mean_x, row(p.rows_x) * GATES + column), ask(2, p.var_x, row(p.rows_x) * GATES + column);
    if (MODE_C) ask(3, p.mean_c, row(p.rows_c) * H + unit), ask(4, p.var_c, row(p.rows_c) * H + unit);
  };
  auto put_given = [&](float4* to) {
    if (warp != HELPER) return;
    const int here = quad * UNITS + own;
    if (MODE_H) {
      const float rh = rsqrtf(asked[0] + p.eps), mx = MODE_X ? asked[32] : 0.0f;
      const float rx = MODE_X ? rsqrtf(asked[64] + p.eps) : 0.0f;
      to[here] = make_float4(rh, slope<MODE_H>(rh, constants[here].z, p.eps), mx, rx);
    }
    if (MODE_C && quad == 0) {
      const float rc = rsqrtf(asked[128] + p.eps);
      to[32 + own] = make_float4(asked[96], rc, slope<MODE_C>(rc, g_c, p.eps), 0.0f);
    }
  };

  // What a step takes from memory, asked for a step before it is needed.
  auto ask_rows = [&](int t) {
    if (t < 0) return;
    ahead.ask_saved(p.wh + saved_at(r * p.T + t) * 8, p.cs + saved_at(r * (p.T + 1) + t) * 2, kept);
    if (SPLIT)
#pragma unroll
      for (int q = 0; q < 4; q++) ahead.ask_tile(q, p.wx + gates_at(t, q), GATES, at);
    if (DOUTPUT) ahead.ask_tile(4, p.doutput + rows_before(t) * H + rank * UNITS, H, at);
  };

  float c_t[2], dc[2], skip[2], sum_c[2] = {}, sum_v[3][4] = {};
  int length[2];
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const i64 here = (r * B + at.row[e]) * H + unit;
    length[e] = !at.in[e] ? 0 : LENGTHS ? p.lengths[at.row[e]] : p.T;
    skip[e] = at.in[e] ? p.dh[here] : 0.0f;
    dc[e] = at.in[e] ? p.dc[here] : 0.0f;
    c_t[e] = 0.0f;
  }
  if (kept) {
    const float2 last = load2(p.cs + saved_at(r * (p.T + 1) + p.T) * 2);
    c_t[0] = last.x, c_t[1] = last.y;
  }
  ask_given(p.T - 1);
  ask_rows(p.T - 1);

  const u32 into = ((warp * BLOCKS + rank) * 32 + lane) * SHARE;
  const u32 barrier_at = barriers - address_of(shared) + 8 * warp;
  start_barriers(barriers, 2 * WARPS, BYTES);
  __syncthreads();
  meet_cluster();
  Waiting waiting;

  for (int k = 0; k < p.T; k++) {
    const int t = p.T - 1 - k;
    const int now = k & 1;
    MARKS(p.counter, k);
    MARK(0);
    const bool valid[2] = {t < length[0], t < length[1]};
    const float inv = LENGTHS ? p.inv_n[t] : 1.0f / B;
    const float4* statistics = reinterpret_cast<const float4*>(given + now * STATISTICS);
    ahead.wait();
    MARK(1);
    put_given(reinterpret_cast<float4*>(given + now * STATISTICS));
    ask_given(t - 1);
    __syncthreads();

    MARK(2);
    // The forward step again, which waits for nobody.
    float a_hat[4][2], x_hat[4][2], gate[4][2], c_hat[2], tanh_c[2], dh[2];
    ahead.saved(a_hat);
#pragma unroll
    for (int q = 0; q < 4; q++) {
      const float4 s = MODE_H ? statistics[q * UNITS + own] : make_float4(0, 0, 0, 0);
      const float4 b = constants[q * UNITS + own];
      float2 vx = make_float2(0, 0);
      if (SPLIT) vx = ahead.tile(q);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float v = a_hat[q][e];
        if (MODE_H) {
          v = a_hat[q][e] = v * s.x;
          v = v * b.z + b.x;
        }
        x_hat[q][e] = 0.0f;
        if (SPLIT) {
          const float number = pick(valid[e], e ? vx.y : vx.x, 0.0f);
          x_hat[q][e] = MODE_X ? (number - s.z) * s.w : number;
          v += MODE_X ? x_hat[q][e] * b.y : number;
        }
        gate[q][e] = q == 2 ? tanh_(v) : sigmoid(v);
      }
    }
    float4 of_c = make_float4(0, 0, 0, 0);
    if (MODE_C) of_c = statistics[32 + own];
    const float2 dy = DOUTPUT ? ahead.tile(4) : make_float2(0, 0);
    const float2 cells = ahead.cells();
    const float c_first[2] = {cells.x, cells.y};  // of step t - 1
#pragma unroll
    for (int e = 0; e < 2; e++) {
      c_hat[e] = MODE_C ? (c_t[e] - of_c.x) * of_c.y : c_t[e];
      tanh_c[e] = tanh_((MODE_C ? c_hat[e] * g_c : c_hat[e]) + beta);
      dh[e] = skip[e];
      if (DOUTPUT) dh[e] += pick(valid[e], e ? dy.y : dy.x, 0.0f);
      c_t[e] = c_first[e];
    }
    ask_rows(t - 1);

    MARK(3);
    // dh through W_h
    if (k > 0) {
      const u32 barrier = barriers + 8 * ((now ^ 1) * WARPS + warp);
      waiting.until(barrier, u32((k - 1) >> 1));
      if (lane == 0 && !waiting.tired) expect(barrier, BYTES);
      MARK(4);
      const Share* from = shares + ((now ^ 1) * WARPS + warp) * REGION + lane;
      float2 sum[4] = {};
#pragma unroll
      for (int s = 0; s < BLOCKS; s++) {
        const float2 v = from_share(from[32 * s]);
        sum[s % 4].x += v.x, sum[s % 4].y += v.y;
      }
      dh[0] += (sum[0].x + sum[1].x) + (sum[2].x + sum[3].x);
      dh[1] += (sum[0].y + sum[1].y) + (sum[2].y + sum[3].y);
    }

    // Equation 8
    float dc_hat[2], d_o[2], v_c[2] = {};
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float o = gate[3][e], th = tanh_c[e];
      skip[e] = pick(valid[e], 0.0f, dh[e]);
      dh[e] = pick(valid[e], dh[e], 0.0f);
      d_o[e] = dh[e] * th * o * (1.0f - o);
      dc_hat[e] = dh[e] * o * (1.0f - th * th);
      v_c[0] += dc_hat[e];
      v_c[1] += dc_hat[e] * c_hat[e];
    }
    float2 off_c = make_float2(0, 0);
    if (SUM_C) {
      sum_cells(room_c, v_c[0], v_c[1], at);
      MARK(5);
      __syncthreads();
      MARK(6);
      if (warp == ADDER) {
        const float2 s = add_warps2(reinterpret_cast<float2*>(room_c) + own, UNITS);
        if (quad == 0) total_c[own] = make_float2(s.x * inv, s.y * inv);
        hand_out();
        if (quad == 0) running_c->x += s.x, running_c->y += s.y;
      } else {
        take();
      }
      off_c = total_c[own];
    } else {
      sum_c[0] += v_c[0], sum_c[1] += v_c[1];
    }

    MARK(7);
    // Equation 7
    float dpre[4][2], v[3][4] = {};
#pragma unroll
    for (int e = 0; e < 2; e++) {
      float d = dc_hat[e];
      if (MODE_C == 1) d -= off_c.x + c_hat[e] * off_c.y;
      if (MODE_C) d *= of_c.z;
      d = pick(valid[e], d + dc[e], 0.0f);
      const float i = gate[0][e], f = gate[1][e], g = gate[2][e];
      dpre[0][e] = d * g * i * (1.0f - i);
      dpre[1][e] = d * c_first[e] * f * (1.0f - f);
      dpre[2][e] = d * i * (1.0f - g * g);
      dpre[3][e] = d_o[e];
      dc[e] = pick(valid[e], d * f, dc[e]);
#pragma unroll
      for (int q = 0; q < 4; q++) {
        v[0][q] += dpre[q][e];
        if (MODE_H) v[1][q] += dpre[q][e] * a_hat[q][e];
        if (MODE_X) v[2][q] += dpre[q][e] * x_hat[q][e];
      }
    }

    // Equation 6
    if (SUM_H) {
      float sum[3];
      sum_gates(sum, v, quad);
      store2(room + (warp * 32 + lane) * 2, sum[0], sum[1]);
      room_x[warp * 32 + lane] = sum[2];
      MARK(8);
      __syncthreads();
      MARK(9);
      if (warp == ADDER) {
        const float2 s = add_warps2(reinterpret_cast<float2*>(room) + lane, 32);
        total_h[slot(own, quad)] = make_float2(s.x * inv, s.y * inv);
        running_h->x += s.x, running_h->y += s.y;
      }
      if (warp == HELPER && MODE_X) {
        const float s = add_warps(room_x + lane, 32);
        total_x[quad * UNITS + own] = s * inv;
        *running_x += s;
      }
      __syncthreads();
    } else {
#pragma unroll
      for (int n = 0; n < 3; n++)
#pragma unroll
        for (int q = 0; q < 4; q++) sum_v[n][q] += v[n][q];
    }
    MARK(10);
    float2 off[4];
    float d[4][2];
    if (MODE_H == 1) read_slots(off, total_h, own);
#pragma unroll
    for (int q = 0; q < 4; q++) {
      const float factor = MODE_H ? statistics[q * UNITS + own].y : 1.0f;
#pragma unroll
      for (int e = 0; e < 2; e++) {
        d[q][e] = dpre[q][e];
        if (MODE_H == 1) d[q][e] -= off[q].x + a_hat[q][e] * off[q].y;
        d[q][e] = pick(valid[e], d[q][e] * factor, 0.0f);
      }
    }

    // The share of dh of all units, for step t - 1.
    float up = 1.0f, down = undo;
#if TYPE == 0
    u32 top = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) top = max(top, finite_size(d[i / 2][i % 2]));
    top = __reduce_max_sync(~0u, top);
    up = scale_up(top), down *= scale_down(top);
#endif
    u32 line[4];
#pragma unroll
    for (int q = 0; q < 4; q++) line[q] = turn(TYPE == 0 ? pack(d[q][0] * up, d[q][1] * up) : pack(d[q][0], d[q][1]));
    if (t > 0) {
      const u32 buffer = into + now * WARPS * REGION * SHARE, barrier = barrier_at + now * WARPS * 8;
      // Several tiles side by side, as many as there are registers for.
#pragma unroll
      for (int first = 0; first < TILES; first += BATCH) {
        float sum[BATCH][4] = {};
#ifndef NO_GATHER
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
          for (int m = 0; m < BATCH; m++)
            if (first + m < TILES) multiply16(sum[m], w[first + m][half], line[2 * half], line[2 * half + 1]);
#endif
#ifndef NO_EXCHANGE
#pragma unroll
        for (int m = 0; m < BATCH; m++)
          if (first + m < TILES)
#pragma unroll
            for (int half = 0; half < 2; half++) {
              const u32 rank_to = 2 * tile_of(first + m) + half;
              const u32 there = in_block(address_of(shared), min(rank_to, u32(BLOCKS - 1)));
              const float x = sum[m][2 * half] * down, y = sum[m][2 * half + 1] * down;
              send(rank_to < BLOCKS, there + buffer, there + barrier, to_share(x, y));
            }
#endif
      }
      announce(barriers + 8 * (now * WARPS + warp), lane);
    }

    MARK(11);
    // What nobody waits for. da may lie over wh of later steps: the shares of step t + 1 were sent after
    // the first __syncthreads of that step, by when all warps of the block had its wh.
#pragma unroll
    for (int q = 0; q < 4; q++) {
      const i64 here = gates_at(t, q);
#if TYPE == 0
      store_tile(p.da + here, GATES, at, d[q][0], d[q][1]);
#else
      store_line(p.da + here, GATES, at, line[q]);
#endif
      if (SPLIT) {
        const float4 s = statistics[q * UNITS + own];
        const float gamma = constants[q * UNITS + own].y, total = MODE_X == 1 ? total_x[q * UNITS + own] : 0.0f;
        float dx[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          dx[e] = dpre[q][e];
          if (MODE_X == 1) dx[e] -= off[q].x + x_hat[q][e] * total;
          if (MODE_X) dx[e] *= s.w * gamma;
          dx[e] = pick(valid[e], dx[e], 0.0f);
        }
        store_tile(p.dwx + here, GATES, at, dx[0], dx[1]);
      }
    }
    MARK(12);
  }

#pragma unroll
  for (int e = 0; e < 2; e++) {
    const i64 here = (r * B + at.row[e]) * H + unit;
    if (!at.in[e]) continue;
    p.dh[here] = skip[e];
    p.dc[here] = dc[e];
  }
  // Sums that were not made step by step are made here.
  __syncthreads();
  if (!SUM_H) {
    float sum[3];
    sum_gates(sum, sum_v, quad);
    store2(room + (warp * 32 + lane) * 2, sum[0], sum[1]);
    room_x[warp * 32 + lane] = sum[2];
  }
  if (!SUM_C) sum_cells(room_c, sum_c[0], sum_c[1], at);
  __syncthreads();
  if (warp == ADDER) {
    const float2 s = SUM_H ? *running_h : add_warps2(reinterpret_cast<float2*>(room) + lane, 32);
    const float2 c = SUM_C ? *running_c : add_warps2(reinterpret_cast<float2*>(room_c) + own, UNITS);
    if (at.mine) {
      p.dbias[r * GATES + column] = s.x;
      if (MODE_H) p.dgamma_h[r * GATES + column] = s.y;
      if (quad == 0) p.dbeta_c[r * H + unit] = c.x, p.dgamma_c[r * H + unit] = c.y;
    }
  }
  if (warp == HELPER && MODE_H && at.mine)
    p.dgamma_x[r * GATES + column] = SUM_H ? *running_x : add_warps(room_x + lane, 32);
  meet_cluster();  // nobody leaves while its memory may still be written to
}
