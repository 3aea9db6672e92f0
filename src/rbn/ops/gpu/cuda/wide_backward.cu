// The LSTM's backward pass for wide layers: one launch for all steps, from the last to the first.
#define SIDE 16  // columns of a block: its units
#define PASSED 4
#include "wide.cuh"

#define SPLIT (MODE_H != 0)  // d(W_x x) is not d(W_h h)

// Statistics of a step: var_h; mean_x and var_x; mean_c and var_c. The variances become rstd.
#define GIVEN_H (MODE_H ? 64 : 0)
#define GIVEN_X (MODE_X ? 128 : 0)
#define GIVEN_C (MODE_C ? 32 : 0)
#define GIVEN (GIVEN_H + GIVEN_X + GIVEN_C)
#define NUMBERS 48  // summed over the batch at once

struct Backward {
  const Element* wx;      // [R, T, B, 4H]
  const Element* weight;  // [R, H, 4H], transposed
  const float *bias, *gamma_x, *gamma_h, *gamma_c, *beta_c;
  const float *mean_x, *var_x, *mean_h, *var_h, *mean_c, *var_c;
  const float* cs;     // [R, T + 1, SUBS, B, 8]
  const Element* wh;   // [R, T, SUBS, 4, B, 8]
  const int* lengths;  // [B]
  const float* inv_n;  // [T]
  const Element* doutput;  // [R, T, B, H]
  float *dh, *dc;          // [R, B, H]: those of h_n and c_n; then what skips W_h, and dc0
  Element* da;             // [R, T, B, 4H]: d(W_h h)
  Element* dwx;            // [R, T, B, 4H]
  float *dbias, *dgamma_x, *dgamma_h, *dgamma_c, *dbeta_c;
  u32* counter;    // [R], zero
  uint4* passed;   // [R, 2, STEP_PIECES]: d(W_h h) of the last two steps; zero
  uint4* spilled;  // [R, GRID, FIRST + SECOND, GROUP_WORDS], room for weights
  uint4* handed;   // [R, GRID, TEAM - 1, SENT]: sums for the team
  u32* meetings;   // [R, GRID], zero: counters of the teams
  int T, B, rows_x, rows_h, rows_c;
  float eps;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) wide_backward(const Backward p) {
  extern __shared__ __align__(128) uint4 slots[];
  uint4* resident = slots + SLOTS * GROUP_WORDS;
  float* room = reinterpret_cast<float*>(resident + RESIDENT * GROUP_WORDS);
  float* total = room + 4 * NUMBERS * PADDED;
  float* parameters = total + 4 * NUMBERS;
  float* given = parameters + PARAMETERS;

  const int tid = threadIdx.x, lane = tid & 31, quad = tid & 3;
  const int row0 = (tid >> 5) * 16 + (lane >> 2);  // and row0 + 8
  const int unit = blockIdx.x * UNITS + 4 * quad, sub = blockIdx.x * 2 + quad / 2;
  const bool mine = unit < H;
  const i64 r = blockIdx.y, B = p.B;
  const Element* wx = p.wx + r * p.T * B * GATES + unit;
  const Element* wh = p.wh + (r * p.T * SUBS + sub) * 4 * B * 8 + 4 * (quad % 2);
  Element *da = p.da + r * p.T * B * GATES + unit, *dwx = p.dwx + r * p.T * B * GATES + unit;
  const float* cs = p.cs + (r * (p.T + 1) * SUBS + sub) * B * 8 + 4 * (quad % 2);
  const Element* doutput = p.doutput + r * p.T * B * H + unit;
  const float *mean_x = p.mean_x + r * p.rows_x * GATES, *var_x = p.var_x + r * p.rows_x * GATES;
  const float* var_h = p.var_h + r * p.rows_h * GATES;
  const float *mean_c = p.mean_c + r * p.rows_c * H, *var_c = p.var_c + r * p.rows_c * H;
  uint4* passed = p.passed + r * 2 * STEP_PIECES;
  uint4* handed = p.handed + r * GRID * (TEAM - 1) * SENT;
  uint4* spilled = p.spilled + (r * GRID + blockIdx.x) * (FIRST + SECOND) * GROUP_WORDS;

  const Element* weight = p.weight + r * GATES * H;
  pack(resident, spilled, [&](int n, int piece, int u) {
    const int of = unit_of(n), k = piece / 4 * UNITS + u;
    return of < H && k < H ? load_raw4(weight + i64(of) * GATES + piece % 4 * H + k) : make_uint2(0, 0);
  });
  refill<FIRST>(slots, spilled);
  load_parameters(parameters, p.bias, p.gamma_x, p.gamma_h, r);

  float g_c[4] = {}, beta[4] = {}, sum_b[16] = {}, sum_beta[8] = {}, running_gates = 0, running_cell = 0;
  if (mine) {
    if (MODE_C) load4(g_c, p.gamma_c + r * H + unit);
    if (BETA) load4(beta, p.beta_c + r * H + unit);
  }

  float dc[2][4] = {}, skip[2][4] = {}, c_t[2][4] = {}, c_before[2][4] = {};
  uint2 raw_h[2][4] = {}, raw_x[2][4] = {}, dy[2] = {};
  int length[2];
  bool in[2];
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const i64 row = row0 + 8 * j, at = (r * B + row) * H + unit;
    in[j] = row < B && mine;
    length[j] = p.T;
    if (LENGTHS) length[j] = in[j] ? p.lengths[row] : 0;
    if (!in[j]) continue;
    load4(skip[j], p.dh + at);
    load4(dc[j], p.dc + at);
    load4(c_before[j], cs + (p.T * SUBS * B + row) * 8);
  }

  // What a step takes from memory, a step before it is needed.
  Staged<GIVEN> staged;
  auto load_step = [&](i64 t) {
    staged.load([&](int i) {
      if (i < GIVEN_H + GIVEN_X) {
        const bool of_h = i < GIVEN_H;
        const int column = column_of(i), rows = of_h ? p.rows_h : p.rows_x;
        const float* from = of_h ? var_h : (i - GIVEN_H) / 64 ? var_x : mean_x;
        return column < 0 ? 0.0f : from[(t < rows ? t : rows - 1) * GATES + column];
      }
      i -= GIVEN_H + GIVEN_X;
      const int u = blockIdx.x * UNITS + i % 16;
      return u < H ? (i / 16 ? var_c : mean_c)[(t < p.rows_c ? t : p.rows_c - 1) * H + u] : 0.0f;
    });
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const i64 row = row0 + 8 * j;
#pragma unroll
      for (int e = 0; e < 4; e++) c_t[j][e] = c_before[j][e];
      if (!in[j]) continue;
#pragma unroll
      for (int q = 0; q < 4; q++) {
        raw_h[j][q] = load_raw4(wh + ((t * SUBS * 4 + q) * B + row) * 8);
        if (SPLIT) raw_x[j][q] = load_raw4(wx + (t * B + row) * GATES + q * H);
      }
      load4(c_before[j], cs + (t * SUBS * B + row) * 8);
      if (DOUTPUT) dy[j] = load_raw4(doutput + (t * B + row) * H);
    }
  };

  load_step(p.T - 1);

  for (i64 t = p.T - 1; t >= 0; t--) {
    const float inv = LENGTHS ? p.inv_n[t] : 1.0f / B;
    staged.put(given, p.eps, [](int i) {
      if (i < GIVEN_H + GIVEN_X) return i < GIVEN_H || (i - GIVEN_H) / 64 == 1;
      return (i - GIVEN_H - GIVEN_X) / 16 == 1;
    });

    // dh through W_h
    float dh[2][4];
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) dh[j][e] = skip[j][e];
    if (t < p.T - 1) {
      refilled();
      wait_for(p.counter + r, GRID * u32(p.T - 1 - t));
      float sums[COLUMNS / 2];
      product(sums, passed + (t + 1) % 2 * STEP_PIECES, resident, slots, spilled);
      exchange(sums, handed, p.meetings + r * GRID, u32(p.T - 2 - t));
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int e = 0; e < 4; e++) dh[j][e] += sums[e / 2 * 4 + 2 * j + e % 2];
    } else {
      __syncthreads();
    }

    // The forward step again. Its numbers would be too many to keep beside the product's.
    float a_hat[2][4][4], x_hat[2][4][4], gate[2][4][4], c_hat[2][4], tanh_c[2][4], mc[4] = {}, rc[4] = {};
    {
      float rh[4][4], mx[4][4], rx[4][4], b[4][4], g_x[4][4], g_h[4][4];
      if (MODE_H) {
        read_gates(rh, given);
        read_gates(b, parameters);
        read_gates(g_h, parameters + 128);
      }
      if (MODE_X) {
        read_gates(mx, given + GIVEN_H);
        read_gates(rx, given + GIVEN_H + 64);
        read_gates(g_x, parameters + 64);
      }
#pragma unroll
      for (int q = 0; q < 4; q++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          widen4(a_hat[j][q], raw_h[j][q]);
          if (SPLIT) widen4(x_hat[j][q], raw_x[j][q]);
#pragma unroll
          for (int e = 0; e < 4; e++) {
            if (SPLIT && LENGTHS && t >= length[j]) x_hat[j][q][e] = 0.0f;
            float v = a_hat[j][q][e];
            if (MODE_H) {
              v = a_hat[j][q][e] = v * rh[q][e];
              v = v * g_h[q][e] + b[q][e];
            }
            if (SPLIT) {
              if (MODE_X) x_hat[j][q][e] = (x_hat[j][q][e] - mx[q][e]) * rx[q][e];
              v += MODE_X ? x_hat[j][q][e] * g_x[q][e] : x_hat[j][q][e];
            }
            gate[j][q][e] = q == 2 ? tanh_(v) : sigmoid(v);
          }
        }
    }
    if (MODE_C) {
      load4(mc, given + GIVEN_H + GIVEN_X + 4 * quad);
      load4(rc, given + GIVEN_H + GIVEN_X + 16 + 4 * quad);
    }

    // Equation 8
    float v_c[8] = {}, dc_hat[2][4];
    bool valid[2];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      valid[j] = in[j] && t < length[j];
      float y[4];
      if (DOUTPUT) widen4(y, dy[j]);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        if (DOUTPUT && valid[j]) dh[j][e] += y[e];
        float v = c_t[j][e];
        if (MODE_C) v = (v - mc[e]) * rc[e];
        c_hat[j][e] = v;
        tanh_c[j][e] = tanh_((MODE_C ? v * g_c[e] : v) + beta[e]);
        const float o = gate[j][3][e], th = tanh_c[j][e];
        dc_hat[j][e] = dh[j][e] * o * (1.0f - th * th);
        gate[j][3][e] = dh[j][e] * th * o * (1.0f - o);  // from here on its gradient
        if (valid[j]) {
          v_c[e] += dc_hat[j][e];
          v_c[4 + e] += dc_hat[j][e] * c_hat[j][e];
        }
      }
    }
    if (MODE_C) sum_rows(v_c, room, total, running_cell);
    else
#pragma unroll
      for (int e = 0; e < 4; e++) sum_beta[e] += v_c[e];

    // Equation 7
    float dpre[2][4][4], v[48] = {};
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float d = dc_hat[j][e];
        if (MODE_C == 1) d -= (v_c[e] + c_hat[j][e] * v_c[4 + e]) * inv;
        if (MODE_C) d *= slope<MODE_C>(rc[e], g_c[e], p.eps);
        d += dc[j][e];
        const float i = gate[j][0][e], f = gate[j][1][e], g = gate[j][2][e];
        dpre[j][0][e] = d * g * i * (1.0f - i);
        dpre[j][1][e] = d * c_before[j][e] * f * (1.0f - f);
        dpre[j][2][e] = d * i * (1.0f - g * g);
        dpre[j][3][e] = gate[j][3][e];
        dc[j][e] = valid[j] ? d * f : dc[j][e];
        skip[j][e] = valid[j] ? 0.0f : dh[j][e];
#pragma unroll
        for (int q = 0; q < 4; q++) {
          if (!valid[j]) dpre[j][q][e] = 0.0f;
          v[q * 4 + e] += dpre[j][q][e];
          if (MODE_H) v[16 + q * 4 + e] += dpre[j][q][e] * a_hat[j][q][e];
          if (MODE_X) v[32 + q * 4 + e] += dpre[j][q][e] * x_hat[j][q][e];
        }
      }

    // Equation 6
    if (MODE_H) sum_rows(v, room, total, running_gates);
    float factor[4][4], gamma[4][4];
    if (MODE_H) {
      read_gates(factor, given);
      read_gates(gamma, parameters + 128);
    }
    uint2 packed[2][4];
#pragma unroll
    for (int q = 0; q < 4; q++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float d[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
          d[e] = dpre[j][q][e];
          if (MODE_H == 1) d[e] -= (v[q * 4 + e] + a_hat[j][q][e] * v[16 + q * 4 + e]) * inv;
          if (MODE_H) d[e] *= slope<MODE_H>(factor[q][e], gamma[q][e], p.eps);
          if (!valid[j]) d[e] = 0.0f;
        }
        packed[j][q] = narrow4(d);
      }
      pass_on(passed + t % 2 * STEP_PIECES, q, packed[0][q], packed[1][q]);
    }

    arrive(p.counter + r);

    // What nobody waits for.
    if (t > 0) refill<FIRST>(slots, spilled);
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int q = 0; q < 4; q++)
        if (in[j]) store_raw4(da + (t * B + row0 + 8 * j) * GATES + q * H, packed[j][q]);
    if (!MODE_H)
#pragma unroll
      for (int i = 0; i < 16; i++) sum_b[i] += v[i];
    if (MODE_X) {
      read_gates(factor, given + GIVEN_H + 64);
      read_gates(gamma, parameters + 64);
    }
    if (SPLIT)
#pragma unroll
      for (int j = 0; j < 2; j++)
#pragma unroll
        for (int q = 0; q < 4; q++) {
          float d[4];
#pragma unroll
          for (int e = 0; e < 4; e++) {
            d[e] = dpre[j][q][e];
            if (MODE_X == 1) d[e] -= (v[q * 4 + e] + x_hat[j][q][e] * v[32 + q * 4 + e]) * inv;
            if (MODE_X) d[e] *= factor[q][e] * gamma[q][e];
            if (!valid[j]) d[e] = 0.0f;
          }
          if (in[j]) store_narrow4(dwx + (t * B + row0 + 8 * j) * GATES + q * H, d);
        }
    if (t > 0) {
      load_step(t - 1);
      __syncthreads();  // the statistics of this step were read
    }
  }

#pragma unroll
  for (int j = 0; j < 2; j++) {
    const i64 at = (r * B + row0 + 8 * j) * H + unit;
    if (!in[j]) continue;
    store4(p.dh + at, skip[j]);
    store4(p.dc + at, dc[j]);
  }
  refilled();  // of a single step nothing was used
  // Sums that were not made step by step are made here.
  __syncthreads();
  if (!MODE_H) sum_rows(sum_b, room, total, running_gates);
  if (!MODE_C) sum_rows(sum_beta, room, total, running_cell);
  const int of = blockIdx.x * UNITS + 4 * (tid & 3) + ((tid >> 2) & 3);
  if (of < H && tid < 32) (tid < 16 ? p.dbeta_c : p.dgamma_c)[r * H + of] = running_cell;
  if (of < H && tid < (MODE_H ? 192 : 64)) {
    float* sums = tid < 64 ? p.dbias : tid < 128 ? p.dgamma_h : p.dgamma_x;
    sums[r * GATES + ((tid >> 4) & 3) * H + of] = running_gates;
  }
}
