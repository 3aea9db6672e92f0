// The LSTM's forward pass, equations 2 to 4 and 6 to 8: one launch for all steps.
#include "common.cuh"
#include "arguments.cuh"

#define NT 4  // tiles of 8 columns: the gates i, f, g, o
#define PITCH 40
#define COLUMN_BLOCKS ((HS + BLOCK - 1) / BLOCK)
#define KBW ((COLUMN_BLOCKS + KS - 1) / KS)

// Statistics known before a step; those of the input term always are.
#define GIVEN_X (MODE_X ? 64 : 0)
#define GIVEN_H (MODE_H == 2 ? 64 : 0)
#define GIVEN_C (MODE_C == 2 ? 16 : 0)
#define GIVEN (GIVEN_X + GIVEN_H + GIVEN_C)

// Saved for the backward pass: cs [R, T + 1, BLOCKS, B, UNITS], wh [R, T, BLOCKS, 4, B, UNITS]. Without BARRIER, hs is EMPTY
// from step 1 on.

extern "C" __global__ void __launch_bounds__(THREADS, 1) portable_forward(const Forward p) {
  extern __shared__ uint4 shared[];
  float* part = reinterpret_cast<float*>(shared);
  float* scratch = part + KS * ROWS * PITCH;
  float* total = scratch + 64 * PADDED;
  float* parameters = total + 64;
  float* given = parameters + PARAMETERS;
  uint4* weights = reinterpret_cast<uint4*>(given + 144);
  CHECK_SHARED(4 * (KS * ROWS * PITCH + 64 * PADDED + 64 + PARAMETERS + 144) + Weights<NT, KBW>::SHARED);

  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, mw = warp % MW, ks = warp / MW;
  const int pair = PAIR_OF(tid), unit = blockIdx.x * UNITS + 2 * pair;
  const bool mine = unit < H;
  const i64 r = blockIdx.y, B = p.B;
  const Element* wx = p.wx + r * p.T * B * GATES;
  Element* hs = p.hs + r * (p.T + 1) * B * HS;
  float* cs = p.cs + (r * (p.T + 1) * BLOCKS + blockIdx.x) * B * UNITS + 2 * pair;
  Element* wh = p.wh + (r * p.T * BLOCKS + blockIdx.x) * 4 * B * UNITS + 2 * pair;
  const float *mean_x = p.mean_x + r * p.rows_x * GATES, *var_x = p.var_x + r * p.rows_x * GATES;
  float *mean_h = p.mean_h + r * p.rows_h * GATES, *var_h = p.var_h + r * p.rows_h * GATES;
  float *mean_c = p.mean_c + r * p.rows_c * H, *var_c = p.var_c + r * p.rows_c * H;

  Weights<NT, KBW> w;
  w.load(p.weight + r * GATES * H, H, ks, mw, lane, weights, [&](int q) -> i64 {
    const int u = blockIdx.x * UNITS + (lane >> 2);
    return u < H ? i64(q * H + u) : -1;
  });
  load_parameters(parameters, p.bias, p.gamma_x, p.gamma_h, r);

  float g_c[2] = {}, beta[2] = {}, c[RPT][2], x[RPT][4][2];
  float mean[4][2], rstd[4][2], shift_h[4][2] = {}, shift_c[2] = {};
  float var[4][2], mc[2] = {}, vc[2] = {}, rc[2] = {};
  Pair raw[RPT][4];
  int length[RPT];
  bool in[RPT];
  if (mine)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if (MODE_C) g_c[e] = p.gamma_c[r * H + unit + e];
      if (BETA) beta[e] = p.beta_c[r * H + unit + e];
    }
#pragma unroll
  for (int j = 0; j < RPT; j++) {
    const int row = ROW_OF(tid) + j * STEP;
    in[j] = row < B && mine;
    length[j] = p.T;
    if (LENGTHS) length[j] = in[j] ? p.lengths[row] : 0;
    const float2 v = in[j] ? load2(p.c0 + (r * B + row) * H + unit) : make_float2(0, 0);
    c[j][0] = v.x, c[j][1] = v.y;
    if (SAVE && row < B) store2(cs + row * UNITS, v.x, v.y);
#pragma unroll
    for (int q = 0; q < 4; q++) raw[j][q] = narrow(make_float2(0, 0));
  }

  // Loads a step's inputs, one step ahead.
  Staged<GIVEN> staged;
  auto load_step = [&](i64 t) {
    staged.load([&](int i) {
      if (i < GIVEN_X + GIVEN_H) {
        const int column = column_of(i), kind = i / 32 % 2;
        const bool of_x = i < GIVEN_X;
        const int rows = of_x ? p.rows_x : p.rows_h;
        const float* from = of_x ? (kind ? var_x : mean_x) : (kind ? var_h : mean_h);
        return column < 0 ? 0.0f : from[(t < rows ? t : rows - 1) * GATES + column];
      }
      i -= GIVEN_X + GIVEN_H;
      const int u = blockIdx.x * UNITS + i % 8;
      return u < H ? (i / 8 ? var_c : mean_c)[(t < p.rows_c ? t : p.rows_c - 1) * H + u] : 0.0f;
    });
#pragma unroll
    for (int j = 0; j < RPT; j++) {
      const i64 row = ROW_OF(tid) + j * STEP;
#pragma unroll
      for (int q = 0; q < 4; q++)
        if (in[j]) raw[j][q] = *reinterpret_cast<const Pair*>(wx + (t * B + row) * GATES + q * H + unit);
    }
  };
  // Normalizes the loaded input term of step t, then loads that of step t + 1.
  auto prepare = [&](i64 t) {
    staged.put(given, p.eps, [](int i) {
      return i < GIVEN_X + GIVEN_H ? i / 32 % 2 == 1 : (i - GIVEN_X - GIVEN_H) / 8 == 1;
    });
    __syncthreads();
    float scale[4][2], offset[4][2], b[4][2];
    read_gates(b, parameters);
    if (MODE_X) {
      read_gates(offset, given);
      read_gates(scale, given + 32);
      float g_x[4][2];
      read_gates(g_x, parameters + 32);
#pragma unroll
      for (int q = 0; q < 4; q++)
#pragma unroll
        for (int e = 0; e < 2; e++) scale[q][e] *= g_x[q][e];
    }
    if (MODE_H == 2) {
      read_gates(mean, given + GIVEN_X);
      read_gates(rstd, given + GIVEN_X + 32);
    }
    if (MODE_C == 2) {
      const float2 m = load2(given + GIVEN_X + GIVEN_H + 2 * pair), s = load2(given + GIVEN_X + GIVEN_H + 8 + 2 * pair);
      mc[0] = m.x, mc[1] = m.y, rc[0] = s.x, rc[1] = s.y;
    }
#pragma unroll
    for (int j = 0; j < RPT; j++)
#pragma unroll
      for (int q = 0; q < 4; q++) {
        float2 v = widen(raw[j][q]);
        if (LENGTHS && t >= length[j]) v = make_float2(0, 0);
        x[j][q][0] = MODE_X ? (v.x - offset[q][0]) * scale[q][0] + b[q][0] : v.x + b[q][0];
        x[j][q][1] = MODE_X ? (v.y - offset[q][1]) * scale[q][1] + b[q][1] : v.y + b[q][1];
      }
    if (t + 1 < p.T) load_step(t + 1);
  };

  load_step(0);
  prepare(0);

  for (i64 t = 0; t < p.T; t++) {
    const float inv = LENGTHS ? p.inv_n[t] : 1.0f / B;

    // W_h h
    if (BARRIER && t > 0) wait_for(p.counter + r, BLOCKS * u32(t));
    float sums[MPW][NT][4] = {};
    gather_multiply<NT, KBW>(sums, w, hs + t * B * HS, HS, HS, p.B, ks, mw, lane, t > 0);
    put_sums<NT, PITCH>(part, sums, ks, mw, lane);
    __syncthreads();
    if (!HAS_ROWS) {
      if (BARRIER) arrive(p.counter + r);
      if (t + 1 < p.T) prepare(t + 1);
      continue;
    }
    float a[RPT][4][2];
#pragma unroll
    for (int j = 0; j < RPT; j++) {
      const int row = ROW_OF(tid) + j * STEP;
#pragma unroll
      for (int q = 0; q < 4; q++) {
        float2 v = make_float2(0, 0);
        if (row < ROWS)
#pragma unroll
          for (int k = 0; k < KS; k++) {
            const float2 s = load2(part + k * ROWS * PITCH + sum_offset<NT, PITCH>(row, q * 8 + 2 * pair));
            v.x += s.x, v.y += s.y;
          }
        a[j][q][0] = v.x, a[j][q][1] = v.y;
      }
    }

    // Equation 6
    if (MODE_H == 1) {
      float v[16] = {};
#pragma unroll
      for (int j = 0; j < RPT; j++)
        if (in[j] && t < length[j])
#pragma unroll
          for (int i = 0; i < 8; i++) {
            const float d = a[j][i / 2][i % 2] - shift_h[i / 2][i % 2];
            v[i] += d;
            v[8 + i] += d * d;
          }
      sum_rows(v, scratch, total);
#pragma unroll
      for (int i = 0; i < 8; i++) {
        const int q = i / 2, e = i % 2;
        const float off = v[i] * inv;
        var[q][e] = variance(v[8 + i] * inv, off);
        shift_h[q][e] = mean[q][e] = shift_h[q][e] + off;
        if (LENGTHS && !(inv > 0.0f) && mine) {
          const i64 column = q * H + unit + e;
          const float2 both = constants(mean_h + column, var_h + column, GATES, p.inv_n, t, p.eps);
          shift_h[q][e] = mean[q][e] = both.x, var[q][e] = both.y;
        }
        rstd[q][e] = rsqrtf(var[q][e] + p.eps);
      }
    }
    float gate[RPT][4][2], cand[RPT][2], g_h[4][2];
    if (MODE_H) read_gates(g_h, parameters + 64);
#pragma unroll
    for (int j = 0; j < RPT; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
#pragma unroll
        for (int q = 0; q < 4; q++) {
          float v = a[j][q][e];
          if (MODE_H) {
            v = a[j][q][e] = v - mean[q][e];
            v *= rstd[q][e] * g_h[q][e];
          }
          v += x[j][q][e];
          if (!MODE_H) a[j][q][e] = v;
          gate[j][q][e] = q == 2 ? tanh_(v) : sigmoid(v);
        }
        // Equation 7
        cand[j][e] = gate[j][1][e] * c[j][e] + gate[j][0][e] * gate[j][2][e];
      }

    // Equation 8
    if (MODE_C == 1) {
      float v[4] = {};
#pragma unroll
      for (int j = 0; j < RPT; j++)
        if (in[j] && t < length[j])
#pragma unroll
          for (int e = 0; e < 2; e++) {
            const float d = cand[j][e] - shift_c[e];
            v[e] += d;
            v[2 + e] += d * d;
          }
      sum_rows(v, scratch, total);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float off = v[e] * inv;
        vc[e] = variance(v[2 + e] * inv, off);
        shift_c[e] = mc[e] = shift_c[e] + off;
        if (LENGTHS && !(inv > 0.0f) && mine) {
          const float2 both = constants(mean_c + unit + e, var_c + unit + e, H, p.inv_n, t, p.eps);
          shift_c[e] = mc[e] = both.x, vc[e] = both.y;
        }
        rc[e] = rsqrtf(vc[e] + p.eps);
      }
    }
    float h[RPT][2];
#pragma unroll
    for (int j = 0; j < RPT; j++) {
      const int row = ROW_OF(tid) + j * STEP;
      const bool valid = t < length[j];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float v = cand[j][e];
        if (MODE_C) v = (v - mc[e]) * rc[e] * g_c[e];
        h[j][e] = valid && mine ? gate[j][3][e] * tanh_(v + beta[e]) : 0.0f;
        c[j][e] = valid ? cand[j][e] : c[j][e];
      }
      if (row < B) publish(hs + ((t + 1) * B + row) * HS + unit, make_float2(h[j][0], h[j][1]));
    }
    if (BARRIER) arrive(p.counter + r);

    // The rest of the step, which no other block waits for.
#pragma unroll
    for (int j = 0; j < RPT; j++) {
      const i64 row = ROW_OF(tid) + j * STEP;
      if (SAVE && row < B) {
#pragma unroll
        for (int q = 0; q < 4; q++)
          store_pair(wh + ((t * BLOCKS * 4 + q) * B + row) * UNITS, make_float2(a[j][q][0], a[j][q][1]));
        store2(cs + ((t + 1) * BLOCKS * B + row) * UNITS, c[j][0], c[j][1]);
      }
      if (LENGTHS && in[j] && t < length[j]) store2(p.h_n + (r * B + row) * H + unit, h[j][0], h[j][1]);
    }
    if (ROW_OF(tid) == 0 && mine) {
      if (MODE_H == 1)
#pragma unroll
        for (int q = 0; q < 4; q++) {
          store2(mean_h + t * GATES + q * H + unit, mean[q][0], mean[q][1]);
          store2(var_h + t * GATES + q * H + unit, var[q][0], var[q][1]);
        }
      if (MODE_C == 1) {
        store2(mean_c + t * H + unit, mc[0], mc[1]);
        store2(var_c + t * H + unit, vc[0], vc[1]);
      }
    }
    if (t + 1 < p.T) prepare(t + 1);
  }
#pragma unroll
  for (int j = 0; j < RPT; j++)
    if (in[j]) store2(p.c_n + (r * B + ROW_OF(tid) + j * STEP) * H + unit, c[j][0], c[j][1]);
}
