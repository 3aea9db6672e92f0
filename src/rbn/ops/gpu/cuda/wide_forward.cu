// The LSTM's forward pass for wide layers, equations 2 to 4 and 6 to 8: one launch for all steps.
#define SIDE 64  // columns of a block: 16 units, their gates i, f, g, o
#define PASSED 1
#include "wide.cuh"

// Statistics that are known before a step: those of the input term always.
#define GIVEN_X (MODE_X ? 128 : 0)
#define GIVEN_H (MODE_H == 2 ? 128 : 0)
#define GIVEN_C (MODE_C == 2 ? 32 : 0)
#define GIVEN (GIVEN_X + GIVEN_H + GIVEN_C)
#define NUMBERS 32  // summed over the batch at once

struct Forward {
  const Element* wx;      // [R, T, B, 4H]
  const Element* weight;  // [R, 4H, H]
  const float *bias, *gamma_x, *gamma_h, *gamma_c, *beta_c;
  const float *mean_x, *var_x;             // [R, rows_x, 4H]
  float *mean_h, *var_h, *mean_c, *var_c;  // [R, rows, features]: read if given, else written
  Element* hs;         // [R, T + 1, B, HS]; hs[:, 0] is h0
  float* cs;           // [R, T + 1, SUBS, B, 8], for the backward pass
  Element* wh;         // [R, T, SUBS, 4, B, 8], likewise: W_h h less its mean, or without a norm the
                       // gates before their nonlinearities
  const float* c0;     // [R, B, H]
  float *h_n, *c_n;    // [R, B, H]; h_n only where there are lengths
  const int* lengths;  // [B]
  const float* inv_n;  // [T]
  u32* counter;        // [R], zero
  uint4* passed;       // [R, 2, STEP_PIECES]: h of the last two steps; zero
  uint4* spilled;      // [R, GRID, FIRST + SECOND, GROUP_WORDS], room for weights
  uint4* handed;       // [R, GRID, TEAM - 1, SENT]: sums for the team
  u32* meetings;       // [R, GRID], zero: counters of the teams
  int T, B, rows_x, rows_h, rows_c;
  float eps;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) wide_forward(const Forward p) {
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
  Element* hs = p.hs + r * (p.T + 1) * B * HS;
  float* cs = p.cs + (r * (p.T + 1) * SUBS + sub) * B * 8 + 4 * (quad % 2);
  Element* wh = p.wh + (r * p.T * SUBS + sub) * 4 * B * 8 + 4 * (quad % 2);
  const float *mean_x = p.mean_x + r * p.rows_x * GATES, *var_x = p.var_x + r * p.rows_x * GATES;
  float *mean_h = p.mean_h + r * p.rows_h * GATES, *var_h = p.var_h + r * p.rows_h * GATES;
  float *mean_c = p.mean_c + r * p.rows_c * H, *var_c = p.var_c + r * p.rows_c * H;
  uint4* passed = p.passed + r * 2 * STEP_PIECES;
  uint4* handed = p.handed + r * GRID * (TEAM - 1) * SENT;
  uint4* spilled = p.spilled + (r * GRID + blockIdx.x) * (FIRST + SECOND) * GROUP_WORDS;

  const Element* weight = p.weight + r * GATES * H;
  pack(resident, spilled, [&](int n, int piece, int u) {
    const int of = unit_of(n), k = piece * UNITS + u;
    return of < H && k < H ? load_raw4(weight + i64(n / 16 % 4 * H + of) * H + k) : make_uint2(0, 0);
  });
  refill<FIRST>(slots, spilled);
  load_parameters(parameters, p.bias, p.gamma_x, p.gamma_h, r);

  float g_c[4] = {}, beta[4] = {}, c[2][4] = {}, shift_h[4][4] = {}, shift_c[4] = {};
  uint2 raw[2][4] = {};
  uint2 h0[2] = {};
  int length[2];
  bool in[2];
  if (mine) {
    if (MODE_C) load4(g_c, p.gamma_c + r * H + unit);
    if (BETA) load4(beta, p.beta_c + r * H + unit);
  }
#pragma unroll
  for (int j = 0; j < 2; j++) {
    const i64 row = row0 + 8 * j;
    in[j] = row < B && mine;
    length[j] = p.T;
    if (LENGTHS) length[j] = in[j] ? p.lengths[row] : 0;
    if (in[j]) load4(c[j], p.c0 + (r * B + row) * H + unit);
    if (in[j]) h0[j] = load_raw4(hs + row * HS + unit);
    if (SAVE && in[j]) store4(cs + row * 8, c[j]);
  }
  pass_on(passed, 0, h0[0], h0[1]);
  arrive(p.counter + r);

  // What a step takes from memory, a step before it is needed.
  Staged<GIVEN> staged;
  auto load_step = [&](i64 t) {
    staged.load([&](int i) {
      if (i < GIVEN_X + GIVEN_H) {
        const int column = column_of(i), kind = i / 64 % 2;
        const bool of_x = i < GIVEN_X;
        const int rows = of_x ? p.rows_x : p.rows_h;
        const float* from = of_x ? (kind ? var_x : mean_x) : (kind ? var_h : mean_h);
        return column < 0 ? 0.0f : from[(t < rows ? t : rows - 1) * GATES + column];
      }
      i -= GIVEN_X + GIVEN_H;
      const int u = blockIdx.x * UNITS + i % 16;
      return u < H ? (i / 16 ? var_c : mean_c)[(t < p.rows_c ? t : p.rows_c - 1) * H + u] : 0.0f;
    });
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int q = 0; q < 4; q++)
        if (in[j]) raw[j][q] = load_raw4(wx + (t * B + row0 + 8 * j) * GATES + q * H);
  };
  auto put_given = [&] {
    staged.put(given, p.eps, [](int i) {
      return i < GIVEN_X + GIVEN_H ? i / 64 % 2 == 1 : (i - GIVEN_X - GIVEN_H) / 16 == 1;
    });
  };

  load_step(0);
  put_given();

  for (i64 t = 0; t < p.T; t++) {
    const float inv = LENGTHS ? p.inv_n[t] : 1.0f / B;

    // W_h h
    refilled();
    wait_for(p.counter + r, GRID * u32(t + 1));
    float sums[COLUMNS / 2];
    product(sums, passed + t % 2 * STEP_PIECES, resident, slots, spilled);
    exchange(sums, handed, p.meetings + r * GRID, u32(t));
    float a[2][4][4];
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int i = 0; i < 16; i++) a[j][i / 4][i % 4] = sums[i / 2 * 4 + 2 * j + i % 2];

    // Equation 6
    float mean[4][4] = {}, rstd[4][4] = {};
    if (MODE_H == 1) {
      float v[32] = {};
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (in[j] && t < length[j])
#pragma unroll
          for (int i = 0; i < 16; i++) {
            const float d = a[j][i / 4][i % 4] - shift_h[i / 4][i % 4];
            v[i] += d;
            v[16 + i] += d * d;
          }
      sum_rows(v, room, total);
#pragma unroll
      for (int q = 0; q < 4; q++) {
        float var[4];
#pragma unroll
        for (int e = 0; e < 4; e++) {
          const float off = v[q * 4 + e] * inv;
          var[e] = variance(v[16 + q * 4 + e] * inv, off);
          shift_h[q][e] = mean[q][e] = inv > 0.0f ? shift_h[q][e] + off : 0.0f;
          rstd[q][e] = rsqrtf(var[e] + p.eps);
        }
        if (tid < 4 && mine) {
          store4(mean_h + t * GATES + q * H + unit, mean[q]);
          store4(var_h + t * GATES + q * H + unit, var);
        }
      }
    }
    if (MODE_H == 2) {
      read_gates(mean, given + GIVEN_X);
      read_gates(rstd, given + GIVEN_X + 64);
    }

    // The input term, gate by gate
    float b[4][4], g_h[4][4], offset[4][4], scale[4][4], g_x[4][4];
    read_gates(b, parameters);
    if (MODE_H) read_gates(g_h, parameters + 128);
    if (MODE_X) {
      read_gates(offset, given);
      read_gates(scale, given + 64);
      read_gates(g_x, parameters + 64);
    }
    float gate[2][4][4], cand[2][4];
#pragma unroll
    for (int q = 0; q < 4; q++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float x[4];
        widen4(x, raw[j][q]);
#pragma unroll
        for (int e = 0; e < 4; e++) {
          if (LENGTHS && t >= length[j]) x[e] = 0.0f;
          x[e] = MODE_X ? (x[e] - offset[q][e]) * (scale[q][e] * g_x[q][e]) + b[q][e] : x[e] + b[q][e];
          float v = a[j][q][e];
          if (MODE_H) {
            v = a[j][q][e] = v - mean[q][e];
            v *= rstd[q][e] * g_h[q][e];
          }
          v += x[e];
          if (!MODE_H) a[j][q][e] = v;
          gate[j][q][e] = q == 2 ? tanh_(v) : sigmoid(v);
        }
      }
    if (t + 1 < p.T) load_step(t + 1);

    // Equation 7
#pragma unroll
    for (int j = 0; j < 2; j++)
#pragma unroll
      for (int e = 0; e < 4; e++) cand[j][e] = gate[j][1][e] * c[j][e] + gate[j][0][e] * gate[j][2][e];

    // Equation 8
    float mc[4] = {}, rc[4] = {};
    if (MODE_C == 1) {
      float v[8] = {}, var[4];
#pragma unroll
      for (int j = 0; j < 2; j++)
        if (in[j] && t < length[j])
#pragma unroll
          for (int e = 0; e < 4; e++) {
            const float d = cand[j][e] - shift_c[e];
            v[e] += d;
            v[4 + e] += d * d;
          }
      sum_rows(v, room, total);
#pragma unroll
      for (int e = 0; e < 4; e++) {
        const float off = v[e] * inv;
        var[e] = variance(v[4 + e] * inv, off);
        shift_c[e] = mc[e] = inv > 0.0f ? shift_c[e] + off : 0.0f;
        rc[e] = rsqrtf(var[e] + p.eps);
      }
      if (tid < 4 && mine) {
        store4(mean_c + t * H + unit, mc);
        store4(var_c + t * H + unit, var);
      }
    }
    if (MODE_C == 2) {
      load4(mc, given + GIVEN_X + GIVEN_H + 4 * quad);
      load4(rc, given + GIVEN_X + GIVEN_H + 16 + 4 * quad);
    }
    float h[2][4];
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const bool valid = t < length[j];
#pragma unroll
      for (int e = 0; e < 4; e++) {
        float v = cand[j][e];
        if (MODE_C) v = (v - mc[e]) * rc[e] * g_c[e];
        h[j][e] = valid && in[j] ? gate[j][3][e] * tanh_(v + beta[e]) : 0.0f;
        c[j][e] = valid ? cand[j][e] : c[j][e];
      }
    }
    const uint2 packed[2] = {narrow4(h[0]), narrow4(h[1])};
    pass_on(passed + (t + 1) % 2 * STEP_PIECES, 0, packed[0], packed[1]);
    arrive(p.counter + r);

    // What nobody waits for.
    if (t + 1 < p.T) {
      refill<FIRST>(slots, spilled);
      put_given();
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const i64 row = row0 + 8 * j;
      if (row < B && unit < HS) store_raw4(hs + ((t + 1) * B + row) * HS + unit, packed[j]);
      if (SAVE && in[j]) {
#pragma unroll
        for (int q = 0; q < 4; q++) store_narrow4(wh + ((t * SUBS * 4 + q) * B + row) * 8, a[j][q]);
        store4(cs + ((t + 1) * SUBS * B + row) * 8, c[j]);
      }
      if (LENGTHS && in[j] && t < length[j]) store4(p.h_n + (r * B + row) * H + unit, h[j]);
    }
  }
#pragma unroll
  for (int j = 0; j < 2; j++)
    if (in[j]) store4(p.c_n + (r * B + row0 + 8 * j) * H + unit, c[j]);
}
