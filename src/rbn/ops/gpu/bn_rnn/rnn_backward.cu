// The batch-normalized RNN's backward pass: all steps in one launch, the last first.
#include "rnn.cuh"

struct RNNBackward {
  const Element* wx;      // [T, B, H]
  const Element* weight;  // [H, H], transposed
  const float *bias, *gamma_x, *gamma_h;  // [H]
  const float *mean_x, *var_x;            // [rows_x, H]
  const float* var_h;                     // [rows_h, H]
  const Element* centered;                // [T, B, H]
  const int* lengths;                     // [B]
  const float* inv_n;                     // [T]
  const Element* doutput;                 // [T, B, H]
  float* dh;       // [B, H]: read as dh_n; written: the part of dh0 that bypasses W_h
  Element* da;     // [T, B, HS]: d(W_h h); without BARRIER initially EMPTY
  Element* dwx;    // [T, B, H]
  float *dbias, *dgamma_x, *dgamma_h;  // [H]
  float* handed;   // see Team
  u32* counters;   // [1 + teams], initially zero
  int T, B, rows_x, rows_h;
  float eps;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) rnn_backward(const RNNBackward p) {
  extern __shared__ uint4 shared[];
  constexpr int NV = 4 * OWN;  // must be a multiple of 8; the last quarter is unused
  float* part = reinterpret_cast<float*>(shared);
  float* scratch = part + SUMS;
  uint4* weights = reinterpret_cast<uint4*>(scratch + 2 * WARPS * 4 * NV);
  CHECK_SHARED(4 * (SUMS + 2 * WARPS * 4 * NV) + Weights<NT, KBW>::SHARED);
  const Owner o;
  const i64 B = p.B;
  const Team team = {p.handed, p.counters + 1};

  Weights<NT, KBW> w;
  load_weights(w, p.weight, o, weights);

  float b[OWN], g_x[OWN], g_h[OWN], skip[RPT][OWN] = {}, total[3 * OWN] = {};
  load_units(b, p.bias, o), load_units(g_x, p.gamma_x, o), load_units(g_h, p.gamma_h, o);
  bool in[RPT];
  int length[RPT];
#pragma unroll
  for (int j = 0; j < RPT; j++) {
    in[j] = o.row(j) < B;
    length[j] = LENGTHS ? (in[j] ? p.lengths[o.row(j)] : 0) : p.T;
    if (in[j]) load_units(skip[j], p.dh + i64(o.row(j)) * H, o);
  }

  // Loads a step's inputs, one step ahead.
  Pair raw_a[RPT][PAIRS], raw_x[RPT][PAIRS], dy[RPT][PAIRS];
  float next_mean_x[OWN], next_var_x[OWN], next_var_h[OWN];
  auto load_step = [&](i64 t) {
#pragma unroll
    for (int j = 0; j < RPT; j++)
#pragma unroll
      for (int i = 0; i < PAIRS; i++) {
        const i64 at = (t * B + o.row(j)) * H + o.unit + 2 * i;
        const bool ok = in[j] && o.has(i);
        raw_a[j][i] = load_pair(p.centered + at, ok), raw_x[j][i] = load_pair(p.wx + at, ok);
        if (DOUTPUT) dy[j][i] = load_pair(p.doutput + at, ok);
      }
    const i64 of_x = (t < p.rows_x ? t : p.rows_x - 1) * H, of_h = (t < p.rows_h ? t : p.rows_h - 1) * H;
    load_units(next_mean_x, p.mean_x + of_x, o), load_units(next_var_x, p.var_x + of_x, o);
    load_units(next_var_h, p.var_h + of_h, o);
  };
  load_step(p.T - 1);

  for (i64 t = p.T - 1; t >= 0; t--) {
    const int step = int(p.T - 1 - t);
    const float inv = LENGTHS ? p.inv_n[t] : 1.0f / B;

    // Recompute the forward step, which waits for no other block.
    float a_hat[RPT][OWN], x_hat[RPT][OWN], d[RPT][OWN], slope_act[RPT][OWN], slope_h[OWN], slope_x[OWN];
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const float r_h = rsqrtf(next_var_h[i] + p.eps), r_x = rsqrtf(next_var_x[i] + p.eps);
      slope_h[i] = slope<MODE_H>(r_h, g_h[i], p.eps), slope_x[i] = r_x * g_x[i];
#pragma unroll
      for (int j = 0; j < RPT; j++) {
        const bool valid = in[j] && t < length[j];
        const float2 va = widen(raw_a[j][i / 2]), vx = widen(raw_x[j][i / 2]);
        a_hat[j][i] = (i % 2 ? va.y : va.x) * r_h;
        x_hat[j][i] = valid ? ((i % 2 ? vx.y : vx.x) - next_mean_x[i]) * r_x : 0.0f;
        const float pre = a_hat[j][i] * g_h[i] + x_hat[j][i] * g_x[i] + b[i], y = activate(pre);
        slope_act[j][i] = RELU ? (pre <= 0.0f ? 0.0f : 1.0f) : 1.0f - y * y;
        d[j][i] = skip[j][i];
        if (DOUTPUT && valid) {
          const float2 two = widen(dy[j][i / 2]);
          d[j][i] += i % 2 ? two.y : two.x;
        }
      }
    }

    // dh through W_h
    if (step > 0) {
      if (BARRIER) wait_for(p.counters, gridDim.x * u32(step));
      float through[RPT][OWN];
      multiply_rows(through, w, p.da + (t + 1) * B * HS, p.B, o, part, team, step - 1, true);
#pragma unroll
      for (int j = 0; j < RPT; j++)
#pragma unroll
        for (int i = 0; i < OWN; i++) d[j][i] += through[j][i];
    }

    // Through the nonlinearity, and the sums over the batch.
    float v[NV] = {};
#pragma unroll
    for (int j = 0; j < RPT; j++) {
      const bool valid = in[j] && t < length[j];
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        skip[j][i] = valid ? 0.0f : d[j][i];
        d[j][i] = !valid || (RELU && slope_act[j][i] == 0.0f) ? 0.0f : d[j][i] * slope_act[j][i];
        v[i] += d[j][i];
        if (valid) v[OWN + i] += d[j][i] * x_hat[j][i], v[2 * OWN + i] += d[j][i] * a_hat[j][i];
      }
    }
    sum_over_rows(v, scratch, step);
#pragma unroll
    for (int i = 0; i < 3 * OWN; i++) total[i] += v[i];

    // Through both normalizations.
#pragma unroll
    for (int j = 0; j < RPT; j++) {
      const bool valid = in[j] && t < length[j];
      float da[OWN];
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        da[i] = d[j][i];
        if (MODE_H == 1) da[i] -= (v[i] + a_hat[j][i] * v[2 * OWN + i]) * inv;
        da[i] = valid && o.has(i / 2) ? da[i] * slope_h[i] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < PAIRS; i++)
        if (in[j] && o.unit + 2 * i < HS)
          publish(p.da + (t * B + o.row(j)) * HS + o.unit + 2 * i, make_float2(da[2 * i], da[2 * i + 1]));
    }
    if (BARRIER) arrive(p.counters);

    // The rest of the step, which no other block waits for.
    if (t > 0) load_step(t - 1);
#pragma unroll
    for (int j = 0; j < RPT; j++) {
      const bool valid = in[j] && t < length[j];
      float dx[OWN];
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        dx[i] = d[j][i];
        if (MODE_X == 1) dx[i] -= (v[i] + x_hat[j][i] * v[OWN + i]) * inv;
        dx[i] = valid ? dx[i] * slope_x[i] : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < PAIRS; i++)
        if (in[j] && o.has(i))
          store_pair(p.dwx + (t * B + o.row(j)) * H + o.unit + 2 * i, make_float2(dx[2 * i], dx[2 * i + 1]));
    }
  }

  if (LENGTHS)
#pragma unroll
    for (int j = 0; j < RPT; j++)
      if (in[j]) store_units(p.dh + i64(o.row(j)) * H, skip[j], o);
  if (o.tid < 4) {
    store_units(p.dbias, total, o);
    store_units(p.dgamma_x, total + OWN, o);
    store_units(p.dgamma_h, total + 2 * OWN, o);
  }
}
