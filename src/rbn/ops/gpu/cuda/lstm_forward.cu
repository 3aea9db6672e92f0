// The LSTM's forward pass, equations 2 to 4 and 6 to 8: one launch for all steps.
#include "common.cuh"

#define NT 4  // tiles of 8 columns: the gates i, f, g, o
#define PITCH 40
#define COLUMN_BLOCKS ((HS + BLOCK - 1) / BLOCK)
#define KBW ((COLUMN_BLOCKS + KS - 1) / KS)

struct Forward {
  const Element* wx;      // [R, T, B, 4H]
  const Element* weight;  // [R, 4H, H]
  const float *bias, *gamma_x, *gamma_h, *gamma_c, *beta_c;
  float *mean_x, *rstd_x, *mean_h, *rstd_h, *mean_c, *rstd_c;  // [R, rows, features]
  Element* hs;         // [R, T + 1, B, HS]; hs[:, 0] is h0, the rest EMPTY
  float* cs;           // [R, T + 1 or 1, B, H], begins with c0
  Element* wh;         // [R, T, B, 4H]: W_h h less its mean, or without a norm the gates before their nonlinearities
  float* h_n;          // [R, B, H], where there are lengths
  const int* lengths;  // [B]
  const float* inv_n;  // [T]
  int T, B, rows_x, rows_h, rows_c;
  float eps;
};

struct Moments {
  float mean[4][2], rstd[4][2];
};

__device__ __forceinline__ void read_moments(Moments& m, const float* mean, const float* rstd, i64 row, int unit) {
#pragma unroll
  for (int q = 0; q < 4; q++) {
    const float2 a = load2(mean + row * GATES + q * H + unit), b = load2(rstd + row * GATES + q * H + unit);
    m.mean[q][0] = a.x, m.mean[q][1] = a.y, m.rstd[q][0] = b.x, m.rstd[q][1] = b.y;
  }
}

// From the sums of d and d * d, d = value - shift.
__device__ __forceinline__ void moments_of(Moments& m, const float (&v)[16], const float (&shift)[4][2], float inv, float eps) {
#pragma unroll
  for (int q = 0; q < 4; q++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float off = v[q * 2 + e] * inv, var = fmaxf(v[8 + q * 2 + e] * inv - off * off, 0.0f);
      m.mean[q][e] = inv > 0.0f ? shift[q][e] + off : 0.0f;
      m.rstd[q][e] = rsqrtf(var + eps);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) lstm_forward(const Forward p) {
  extern __shared__ uint4 shared[];
  float* part = reinterpret_cast<float*>(shared);
  float* room = part + KS * ROWS * PITCH;
  float* total = room + 64 * (WARPS + 1);
  float* parameters = total + 64;
  uint4* weights = reinterpret_cast<uint4*>(parameters + PARAMETERS);

  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, mw = warp % MW, ks = warp / MW;
  const int unit = blockIdx.x * UNITS + 2 * (tid & 3);
  const bool mine = unit < H;
  const i64 r = blockIdx.y, B = p.B;
  const Element* wx = p.wx + r * p.T * B * GATES;
  Element* wh = p.wh + r * p.T * B * GATES;
  Element* hs = p.hs + r * (p.T + 1) * B * HS;
#if SAVE
  float* cs = p.cs + r * (p.T + 1) * B * H;
#else
  float* cs = p.cs + r * B * H;
#endif
  float *mean_x = p.mean_x + r * p.rows_x * GATES, *rstd_x = p.rstd_x + r * p.rows_x * GATES;
  float *mean_h = p.mean_h + r * p.rows_h * GATES, *rstd_h = p.rstd_h + r * p.rows_h * GATES;
  float *mean_c = p.mean_c + r * p.rows_c * H, *rstd_c = p.rstd_c + r * p.rows_c * H;

  Weights<NT, KBW> w;
  w.load(p.weight + r * GATES * H, H, ks, mw, lane, weights, [&](int q) -> i64 {
    const int u = blockIdx.x * UNITS + (lane >> 2);
    return u < H ? i64(q * H + u) : -1;
  });

  load_parameters(parameters, p.bias, p.gamma_x, p.gamma_h, r);
  float g_c[2] = {}, beta[2] = {};
  if (mine)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if (MODE_C) g_c[e] = p.gamma_c[r * H + unit + e];
      if (BETA) beta[e] = p.beta_c[r * H + unit + e];
    }

  float c[RPT][2], x[RPT][4][2], raw[RPT][4][2], first[4][2];
  int length[RPT];
  bool in[RPT];
#pragma unroll
  for (int j = 0; j < RPT; j++) {
    const int row = (tid >> 2) + j * STEP;
    in[j] = row < B && mine;
    length[j] = p.T;
    if (LENGTHS) length[j] = in[j] ? p.lengths[row] : 0;
    const float2 v = in[j] ? load2(cs + i64(row) * H + unit) : make_float2(0, 0);
    c[j][0] = v.x, c[j][1] = v.y;
  }
  float shift_h[4][2] = {}, shift_c[2] = {};
  Moments mx, mh;

  // The input term of a step, before it is needed.
  auto load_x = [&](i64 t) {
#pragma unroll
    for (int q = 0; q < 4; q++) {
      const Element* column = wx + t * B * GATES + q * H + unit;
      if (MODE_X == 1) {
        const float2 v = mine ? load_pair(column) : make_float2(0, 0);
        first[q][0] = v.x, first[q][1] = v.y;
      }
#pragma unroll
      for (int j = 0; j < RPT; j++) {
        const int row = (tid >> 2) + j * STEP;
        const float2 v = in[j] ? load_pair(column + i64(row) * GATES) : make_float2(0, 0);
        raw[j][q][0] = v.x, raw[j][q][1] = v.y;
      }
    }
  };
  auto prepare_x = [&](i64 t) {
    if (MODE_X == 1) {
      float v[16] = {};
#pragma unroll
      for (int j = 0; j < RPT; j++)
        if (in[j] && t < length[j])
#pragma unroll
          for (int q = 0; q < 4; q++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const float d = raw[j][q][e] - first[q][e];
              v[q * 2 + e] += d;
              v[8 + q * 2 + e] += d * d;
            }
      sum_rows(v, room, total);
      moments_of(mx, v, first, LENGTHS ? p.inv_n[t] : 1.0f / B, p.eps);
      if (tid < 4 && mine)
#pragma unroll
        for (int q = 0; q < 4; q++) {
          store2(mean_x + t * GATES + q * H + unit, mx.mean[q][0], mx.mean[q][1]);
          store2(rstd_x + t * GATES + q * H + unit, mx.rstd[q][0], mx.rstd[q][1]);
        }
    }
    if (MODE_X == 2 && mine) read_moments(mx, mean_x, rstd_x, t < p.rows_x ? t : p.rows_x - 1, unit);
    float b[4][2], g_x[4][2];
    read_parameters(b, parameters, BIAS_OF);
    if (MODE_X) read_parameters(g_x, parameters, GAMMA_X_OF);
#pragma unroll
    for (int j = 0; j < RPT; j++)
#pragma unroll
      for (int q = 0; q < 4; q++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float v = LENGTHS && t >= length[j] ? 0.0f : raw[j][q][e];
          if (MODE_X) v = (v - mx.mean[q][e]) * mx.rstd[q][e] * g_x[q][e];
          x[j][q][e] = v + b[q][e];
        }
  };

  __syncthreads();
  load_x(0);
  prepare_x(0);
  load_x(p.T > 1 ? 1 : 0);

  for (i64 t = 0; t < p.T; t++) {
    const float inv = LENGTHS ? p.inv_n[t] : 1.0f / B;
    if (MODE_H == 2 && mine) read_moments(mh, mean_h, rstd_h, t < p.rows_h ? t : p.rows_h - 1, unit);
    float mc[2] = {}, rc[2] = {};
    if (MODE_C == 2 && mine) {
      const i64 row = t < p.rows_c ? t : p.rows_c - 1;
      const float2 m = load2(mean_c + row * H + unit), s = load2(rstd_c + row * H + unit);
      mc[0] = m.x, mc[1] = m.y, rc[0] = s.x, rc[1] = s.y;
    }

    // W_h h
    float sums[MPW][NT][4] = {};
    gather_multiply<NT, KBW>(sums, w, hs + t * B * HS, HS, HS, p.B, ks, mw, lane, t > 0);
    put_sums<NT, PITCH>(part, sums, ks, mw, lane);
    __syncthreads();
    float a[RPT][4][2];
#pragma unroll
    for (int j = 0; j < RPT; j++) {
      const int row = (tid >> 2) + j * STEP;
#pragma unroll
      for (int q = 0; q < 4; q++) {
        float2 v = make_float2(0, 0);
        if (row < ROWS)
#pragma unroll
          for (int k = 0; k < KS; k++) {
            const float2 s = load2(part + (k * ROWS + row) * PITCH + q * 8 + 2 * (tid & 3));
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
          for (int q = 0; q < 4; q++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
              const float d = a[j][q][e] - shift_h[q][e];
              v[q * 2 + e] += d;
              v[8 + q * 2 + e] += d * d;
            }
      sum_rows(v, room, total);
      moments_of(mh, v, shift_h, inv, p.eps);
#pragma unroll
      for (int q = 0; q < 4; q++)
#pragma unroll
        for (int e = 0; e < 2; e++) shift_h[q][e] = mh.mean[q][e];
    }
    float gate[RPT][4][2], cand[RPT][2], g_h[4][2];
    if (MODE_H) read_parameters(g_h, parameters, GAMMA_H_OF);
#pragma unroll
    for (int j = 0; j < RPT; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
#pragma unroll
        for (int q = 0; q < 4; q++) {
          float v = a[j][q][e];
          if (MODE_H) {
            v = a[j][q][e] = v - mh.mean[q][e];
            v *= mh.rstd[q][e] * g_h[q][e];
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
      sum_rows(v, room, total);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float off = v[e] * inv, var = fmaxf(v[2 + e] * inv - off * off, 0.0f);
        shift_c[e] = mc[e] = inv > 0.0f ? shift_c[e] + off : 0.0f;
        rc[e] = rsqrtf(var + p.eps);
      }
    }
    float h[RPT][2];
#pragma unroll
    for (int j = 0; j < RPT; j++) {
      const int row = (tid >> 2) + j * STEP;
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

    // What nobody waits for.
#pragma unroll
    for (int j = 0; j < RPT; j++) {
      const i64 row = (tid >> 2) + j * STEP;
      if (!in[j]) continue;
#if SAVE
#pragma unroll
      for (int q = 0; q < 4; q++)
        store_pair(wh + (t * B + row) * GATES + q * H + unit, make_float2(a[j][q][0], a[j][q][1]));
      store2(cs + ((t + 1) * B + row) * H + unit, c[j][0], c[j][1]);
#endif
      if (LENGTHS && t < length[j]) store2(p.h_n + (r * B + row) * H + unit, h[j][0], h[j][1]);
    }
    if (tid < 4 && mine) {
      if (MODE_H == 1)
#pragma unroll
        for (int q = 0; q < 4; q++) {
          store2(mean_h + t * GATES + q * H + unit, mh.mean[q][0], mh.mean[q][1]);
          store2(rstd_h + t * GATES + q * H + unit, mh.rstd[q][0], mh.rstd[q][1]);
        }
      if (MODE_C == 1) {
        store2(mean_c + t * H + unit, mc[0], mc[1]);
        store2(rstd_c + t * H + unit, rc[0], rc[1]);
      }
    }
    if (t + 1 < p.T) {
      prepare_x(t + 1);
      load_x(t + 2 < p.T ? t + 2 : t + 1);
    }
    if (MODE_H != 1 && MODE_C != 1 && MODE_X != 1) __syncthreads();  // part is free again
  }
#if !SAVE
#pragma unroll
  for (int j = 0; j < RPT; j++)
    if (in[j]) store2(cs + i64((tid >> 2) + j * STEP) * H + unit, c[j][0], c[j][1]);
#endif
}
