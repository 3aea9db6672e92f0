// The batch-normalized RNN's forward pass, equation 1 with both terms normalized: all steps in one launch.
#include "rnn.cuh"

struct RNNForward {
  const Element* wx;      // [T, B, H]
  const Element* weight;  // [H, H]
  const float *bias, *gamma_x, *gamma_h;  // [H]
  const float *mean_x, *var_x;            // [rows_x, H]
  float *mean_h, *var_h;                  // [rows_h, H]: read if given, else written
  Element* hs;         // [T + 1, B, HS]; hs[0] is h0; without BARRIER the rest is initially EMPTY
  Element* centered;   // [T, B, H], for the backward pass: W_h h minus its mean
  float* h_n;          // [B, H], only with lengths
  const int* lengths;  // [B]
  const float* inv_n;  // [T]: 1 / unpadded rows
  float* handed;       // see Team
  u32* counters;       // [1 + teams], initially zero
  int T, B, rows_x, rows_h;
  float eps;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) rnn_forward(const RNNForward p) {
  extern __shared__ uint4 shared[];
  constexpr int NV = 2 * OWN;
  float* part = reinterpret_cast<float*>(shared);
  float* scratch = part + SUMS;
  uint4* weights = reinterpret_cast<uint4*>(scratch + 2 * WARPS * 4 * NV);
  CHECK_SHARED(4 * (SUMS + 2 * WARPS * 4 * NV) + Weights<NT, KBW>::SHARED);
  const Owner o;
  const i64 B = p.B;
  const Team team = {p.handed, p.counters + 1};

  Weights<NT, KBW> w;
  load_weights(w, p.weight, o, weights);

  float b[OWN], g_x[OWN], g_h[OWN], mean[OWN] = {}, var[OWN] = {}, rstd[OWN], x[RPT][OWN];
  load_units(b, p.bias, o), load_units(g_x, p.gamma_x, o), load_units(g_h, p.gamma_h, o);
  bool in[RPT];
  int length[RPT];
#pragma unroll
  for (int j = 0; j < RPT; j++) {
    in[j] = o.row(j) < B;
    length[j] = LENGTHS ? (in[j] ? p.lengths[o.row(j)] : 0) : p.T;
  }

  // Loads a step's inputs, one step ahead.
  Pair raw[RPT][PAIRS];
  float next_mean_x[OWN], next_var_x[OWN], next_mean_h[OWN], next_var_h[OWN];
  auto load_step = [&](i64 t) {
#pragma unroll
    for (int j = 0; j < RPT; j++)
#pragma unroll
      for (int i = 0; i < PAIRS; i++)
        raw[j][i] = load_pair(p.wx + (t * B + o.row(j)) * H + o.unit + 2 * i, in[j] && o.has(i));
    const i64 of_x = (t < p.rows_x ? t : p.rows_x - 1) * H, of_h = (t < p.rows_h ? t : p.rows_h - 1) * H;
    load_units(next_mean_x, p.mean_x + of_x, o), load_units(next_var_x, p.var_x + of_x, o);
    if (MODE_H == 2) load_units(next_mean_h, p.mean_h + of_h, o), load_units(next_var_h, p.var_h + of_h, o);
  };
  auto prepare = [&](i64 t) {  // the normalized input term of step t, plus the bias
#pragma unroll
    for (int i = 0; i < OWN; i++) {
      const float scale = rsqrtf(next_var_x[i] + p.eps) * g_x[i];
#pragma unroll
      for (int j = 0; j < RPT; j++) {
        const float2 two = widen(raw[j][i / 2]);
        const float v = LENGTHS && t >= length[j] ? 0.0f : i % 2 ? two.y : two.x;
        x[j][i] = (v - next_mean_x[i]) * scale + b[i];
      }
      if (MODE_H == 2) mean[i] = next_mean_h[i], rstd[i] = rsqrtf(next_var_h[i] + p.eps);
    }
    if (t + 1 < p.T) load_step(t + 1);
  };
  load_step(0);
  prepare(0);

  for (i64 t = 0; t < p.T; t++) {
    if (BARRIER && t > 0) wait_for(p.counters, gridDim.x * u32(t));
    float a[RPT][OWN];
    multiply_rows(a, w, p.hs + t * B * HS, p.B, o, part, team, int(t), t > 0);

    if (MODE_H == 1) {  // sums of differences to the previous step's mean, which avoids cancellation
      const float inv = LENGTHS ? p.inv_n[t] : 1.0f / B;
      float v[NV] = {};
#pragma unroll
      for (int j = 0; j < RPT; j++)
        if (in[j] && t < length[j])
#pragma unroll
          for (int i = 0; i < OWN; i++) {
            const float d = a[j][i] - mean[i];
            v[i] += d, v[OWN + i] += d * d;
          }
      sum_over_rows(v, scratch, t);
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        const float off = v[i] * inv;
        var[i] = variance(v[OWN + i] * inv, off);
        mean[i] += off;
        if (LENGTHS && !(inv > 0.0f) && o.has(i / 2)) {
          const float2 both = constants(p.mean_h + o.unit + i, p.var_h + o.unit + i, H, p.inv_n, t, p.eps);
          mean[i] = both.x, var[i] = both.y;
        }
        rstd[i] = rsqrtf(var[i] + p.eps);
      }
    }
    float h[RPT][OWN];
#pragma unroll
    for (int j = 0; j < RPT; j++) {
      const bool valid = in[j] && t < length[j];
#pragma unroll
      for (int i = 0; i < OWN; i++) {
        a[j][i] = valid ? a[j][i] - mean[i] : 0.0f;
        h[j][i] = valid && o.has(i / 2) ? activate(a[j][i] * rstd[i] * g_h[i] + x[j][i]) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < PAIRS; i++)
        if (in[j] && o.unit + 2 * i < HS)
          publish(p.hs + ((t + 1) * B + o.row(j)) * HS + o.unit + 2 * i, make_float2(h[j][2 * i], h[j][2 * i + 1]));
    }
    if (BARRIER) arrive(p.counters);

    // The rest of the step, which no other block waits for.
#pragma unroll
    for (int j = 0; j < RPT; j++) {
      if (!in[j]) continue;
#pragma unroll
      for (int i = 0; i < PAIRS; i++)
        if (SAVE && o.has(i))
          store_pair(p.centered + (t * B + o.row(j)) * H + o.unit + 2 * i, make_float2(a[j][2 * i], a[j][2 * i + 1]));
      if (LENGTHS && t < length[j]) store_units(p.h_n + i64(o.row(j)) * H, h[j], o);
    }
    if (MODE_H == 1 && o.tid < 4) store_units(p.mean_h + t * H, mean, o), store_units(p.var_h + t * H, var, o);
    if (t + 1 < p.T) prepare(t + 1);
    if (MODE_H == 2 && !DIRECT) __syncthreads();  // before the next sums overwrite these
  }
}
