// The LSTM's backward pass: one launch for all steps, from the last to the first.
#include "common.cuh"
#include "arguments.cuh"

#define NT 1  // tiles of 8 columns: the units
#define PITCH 8
#define COLUMN_BLOCKS ((GATES + BLOCK - 1) / BLOCK)
#define KBW ((COLUMN_BLOCKS + KS - 1) / KS)
#define SPLIT (MODE_H != 0)  // d(W_x x) differs from d(W_h h)

// Statistics of a step: var_h; mean_x and var_x; mean_c and var_c. Variances are converted to rstd.
#define GIVEN_H (MODE_H ? 32 : 0)
#define GIVEN_X (MODE_X ? 64 : 0)
#define GIVEN_C (MODE_C ? 16 : 0)
#define GIVEN (GIVEN_H + GIVEN_X + GIVEN_C)

// Without BARRIER, da is initially EMPTY.

extern "C" __global__ void __launch_bounds__(THREADS, 1) portable_backward(const Backward p) {
  extern __shared__ uint4 shared[];
  float* part = reinterpret_cast<float*>(shared);
  float* scratch = part + KS * ROWS * PITCH;
  float* total = scratch + 96 * PADDED;
  float* parameters = total + 96;
  float* given = parameters + PARAMETERS;
  uint4* weights = reinterpret_cast<uint4*>(given + 112);
  CHECK_SHARED(4 * (KS * ROWS * PITCH + 96 * PADDED + 96 + PARAMETERS + 112) + Weights<NT, KBW>::SHARED);

  const int tid = threadIdx.x, lane = tid & 31, warp = tid >> 5, mw = warp % MW, ks = warp / MW;
  const int pair = PAIR_OF(tid), unit = blockIdx.x * UNITS + 2 * pair;
  const bool mine = unit < H;
  const i64 r = blockIdx.y, B = p.B;
  const Element* wx = p.wx + r * p.T * B * GATES;
  const Element* wh = p.wh + (r * p.T * BLOCKS + blockIdx.x) * 4 * B * UNITS + 2 * pair;
  Element *da = p.da + r * p.T * B * GATES, *dwx = p.dwx + r * p.T * B * GATES;
  const float* cs = p.cs + (r * (p.T + 1) * BLOCKS + blockIdx.x) * B * UNITS + 2 * pair;
  const Element* doutput = p.doutput + r * p.T * B * H;
  const float *mean_x = p.mean_x + r * p.rows_x * GATES, *var_x = p.var_x + r * p.rows_x * GATES;
  const float* var_h = p.var_h + r * p.rows_h * GATES;
  const float *mean_c = p.mean_c + r * p.rows_c * H, *var_c = p.var_c + r * p.rows_c * H;

  Weights<NT, KBW> w;
  w.load(p.weight + r * GATES * H, GATES, ks, mw, lane, weights, [&](int) -> i64 {
    const int u = blockIdx.x * UNITS + (lane >> 2);
    return u < H ? i64(u) : -1;
  });

  load_parameters(parameters, p.bias, p.gamma_x, p.gamma_h, r);
  float g_c[2] = {}, beta[2] = {}, sum_b[8] = {}, sum_beta[4] = {};
  float2 running_gates = make_float2(0, 0), running_cell = running_gates;
  if (mine)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if (MODE_C) g_c[e] = p.gamma_c[r * H + unit + e];
      if (BETA) beta[e] = p.beta_c[r * H + unit + e];
    }

  float dc[RPT][2], skip[RPT][2], c_t[RPT][2], c_before[RPT][2];
  Pair raw_h[RPT][4], raw_x[RPT][4], dy[RPT];
  int length[RPT];
  bool in[RPT];
#pragma unroll
  for (int j = 0; j < RPT; j++) {
    const i64 row = ROW_OF(tid) + j * STEP, at = (r * B + row) * H + unit;
    in[j] = row < B && mine;
    length[j] = p.T;
    if (LENGTHS) length[j] = in[j] ? p.lengths[row] : 0;
    const float2 h = in[j] ? load2(p.dh + at) : make_float2(0, 0);
    const float2 c = in[j] ? load2(p.dc + at) : make_float2(0, 0);
    const float2 l = in[j] ? load2(cs + (p.T * BLOCKS * B + row) * UNITS) : make_float2(0, 0);
    skip[j][0] = h.x, skip[j][1] = h.y, dc[j][0] = c.x, dc[j][1] = c.y;
    c_before[j][0] = l.x, c_before[j][1] = l.y;
  }

  // Loads a step's inputs, one step ahead.
  Staged<GIVEN> staged;
  auto load_step = [&](i64 t) {
    staged.load([&](int i) {
      if (i < GIVEN_H + GIVEN_X) {
        const bool of_h = i < GIVEN_H;
        const int column = column_of(i), rows = of_h ? p.rows_h : p.rows_x;
        const float* from = of_h ? var_h : (i - GIVEN_H) / 32 ? var_x : mean_x;
        return column < 0 ? 0.0f : from[(t < rows ? t : rows - 1) * GATES + column];
      }
      i -= GIVEN_H + GIVEN_X;
      const int u = blockIdx.x * UNITS + i % 8;
      return u < H ? (i / 8 ? var_c : mean_c)[(t < p.rows_c ? t : p.rows_c - 1) * H + u] : 0.0f;
    });
#pragma unroll
    for (int j = 0; j < RPT; j++) {
      const i64 row = ROW_OF(tid) + j * STEP;
      c_t[j][0] = c_before[j][0], c_t[j][1] = c_before[j][1];
      if (!in[j]) continue;
#pragma unroll
      for (int q = 0; q < 4; q++) {
        raw_h[j][q] = *reinterpret_cast<const Pair*>(wh + ((t * BLOCKS * 4 + q) * B + row) * UNITS);
        if (SPLIT) raw_x[j][q] = *reinterpret_cast<const Pair*>(wx + (t * B + row) * GATES + q * H + unit);
      }
      const float2 c = load2(cs + (t * BLOCKS * B + row) * UNITS);
      c_before[j][0] = c.x, c_before[j][1] = c.y;
      if (DOUTPUT) dy[j] = *reinterpret_cast<const Pair*>(doutput + (t * B + row) * H + unit);
    }
  };

#pragma unroll
  for (int j = 0; j < RPT; j++) {
    dy[j] = narrow(make_float2(0, 0));
#pragma unroll
    for (int q = 0; q < 4; q++) raw_h[j][q] = raw_x[j][q] = dy[j];
  }
  load_step(p.T - 1);

  for (i64 t = p.T - 1; t >= 0; t--) {
    const float inv = LENGTHS ? p.inv_n[t] : 1.0f / B;

    // Recompute the forward step, which waits for no other block.
    float a_hat[RPT][4][2], x_hat[RPT][4][2], gate[RPT][4][2], c_hat[RPT][2], tanh_c[RPT][2], dh[RPT][2];
    float rh[4][2], mx[4][2], rx[4][2], mc[2] = {}, rc[2] = {}, b[4][2], g_x[4][2], g_h[4][2];
    staged.put(given, p.eps, [](int i) {
      if (i < GIVEN_H + GIVEN_X) return i < GIVEN_H || (i - GIVEN_H) / 32 == 1;
      return (i - GIVEN_H - GIVEN_X) / 8 == 1;
    });
    __syncthreads();
    if (HAS_ROWS) {
      if (MODE_H) {
        read_gates(rh, given);
        read_gates(b, parameters);
        read_gates(g_h, parameters + 64);
      }
      if (MODE_X) {
        read_gates(mx, given + GIVEN_H);
        read_gates(rx, given + GIVEN_H + 32);
        read_gates(g_x, parameters + 32);
      }
      if (MODE_C) {
        const float2 m = load2(given + GIVEN_H + GIVEN_X + 2 * pair), s = load2(given + GIVEN_H + GIVEN_X + 8 + 2 * pair);
        mc[0] = m.x, mc[1] = m.y, rc[0] = s.x, rc[1] = s.y;
      }
#pragma unroll
      for (int q = 0; q < 4; q++) {
#pragma unroll
        for (int j = 0; j < RPT; j++) {
          const float2 vh = widen(raw_h[j][q]);
          a_hat[j][q][0] = vh.x, a_hat[j][q][1] = vh.y;
          if (SPLIT) {
            float2 vx = widen(raw_x[j][q]);
            if (LENGTHS && t >= length[j]) vx = make_float2(0, 0);
            x_hat[j][q][0] = vx.x, x_hat[j][q][1] = vx.y;
          }
#pragma unroll
          for (int e = 0; e < 2; e++) {
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
        // From here on rh and rx are the factors of the gradients.
#pragma unroll
        for (int e = 0; e < 2; e++) {
          if (MODE_H) rh[q][e] = slope<MODE_H>(rh[q][e], g_h[q][e], p.eps);
          if (MODE_X) rx[q][e] *= g_x[q][e];
        }
      }
#pragma unroll
      for (int j = 0; j < RPT; j++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float v = c_t[j][e];
          if (MODE_C) v = (v - mc[e]) * rc[e];
          c_hat[j][e] = v;
          tanh_c[j][e] = tanh_((MODE_C ? v * g_c[e] : v) + beta[e]);
          dh[j][e] = skip[j][e];
          if (DOUTPUT && in[j] && t < length[j]) dh[j][e] += e ? widen(dy[j]).y : widen(dy[j]).x;
        }
    }

    // dh through W_h
    if (t < p.T - 1) {
      if (BARRIER) wait_for(p.counter + r, BLOCKS * u32(p.T - 1 - t));
      float sums[MPW][NT][4] = {};
      gather_multiply<NT, KBW>(sums, w, da + (t + 1) * B * GATES, GATES, GATES, p.B, ks, mw, lane, true);
      put_sums<NT, PITCH>(part, sums, ks, mw, lane);
      __syncthreads();
#pragma unroll
      for (int j = 0; j < RPT; j++) {
        const int row = ROW_OF(tid) + j * STEP;
        if (row < ROWS && HAS_ROWS)
#pragma unroll
          for (int k = 0; k < KS; k++) {
            const float2 s = load2(part + k * ROWS * PITCH + sum_offset<NT, PITCH>(row, 2 * pair));
            dh[j][0] += s.x, dh[j][1] += s.y;
          }
      }
    } else if (FEW) {
      __syncthreads();  // before the next step's statistics overwrite these
    }
    if (!HAS_ROWS) {
      if (BARRIER) arrive(p.counter + r);
      if (t > 0) load_step(t - 1);
      continue;
    }

    // Equation 8
    float v_c[4] = {}, dc_hat[RPT][2], d_o[RPT][2];
    bool valid[RPT];
#pragma unroll
    for (int j = 0; j < RPT; j++) {
      valid[j] = in[j] && t < length[j];
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float o = gate[j][3][e], th = tanh_c[j][e];
        d_o[j][e] = dh[j][e] * th * o * (1.0f - o);
        dc_hat[j][e] = dh[j][e] * o * (1.0f - th * th);
        if (valid[j]) {
          v_c[e] += dc_hat[j][e];
          v_c[2 + e] += dc_hat[j][e] * c_hat[j][e];
        }
      }
    }
    if (MODE_C) sum_rows(v_c, scratch, total, running_cell);
    else
      sum_beta[0] += v_c[0], sum_beta[1] += v_c[1];

    // Equation 7
    float dpre[RPT][4][2], v[24] = {};
#pragma unroll
    for (int j = 0; j < RPT; j++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        float d = dc_hat[j][e];
        if (MODE_C == 1) d -= (v_c[e] + c_hat[j][e] * v_c[2 + e]) * inv;
        if (MODE_C) d *= slope<MODE_C>(rc[e], g_c[e], p.eps);
        d += dc[j][e];
        const float i = gate[j][0][e], f = gate[j][1][e], g = gate[j][2][e];
        dpre[j][0][e] = d * g * i * (1.0f - i);
        dpre[j][1][e] = d * c_before[j][e] * f * (1.0f - f);
        dpre[j][2][e] = d * i * (1.0f - g * g);
        dpre[j][3][e] = d_o[j][e];
        dc[j][e] = valid[j] ? d * f : dc[j][e];
        skip[j][e] = valid[j] ? 0.0f : dh[j][e];
#pragma unroll
        for (int q = 0; q < 4; q++) {
          if (!valid[j]) dpre[j][q][e] = 0.0f;
          v[q * 2 + e] += dpre[j][q][e];
          if (MODE_H) v[8 + q * 2 + e] += dpre[j][q][e] * a_hat[j][q][e];
          if (MODE_X) v[16 + q * 2 + e] += dpre[j][q][e] * x_hat[j][q][e];
        }
      }

    // Equation 6
    if (MODE_H) sum_rows(v, scratch, total, running_gates);
#pragma unroll
    for (int j = 0; j < RPT; j++) {
      const i64 row = ROW_OF(tid) + j * STEP;
#pragma unroll
      for (int q = 0; q < 4; q++) {
        float d[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          d[e] = dpre[j][q][e];
          if (MODE_H == 1) d[e] -= (v[q * 2 + e] + a_hat[j][q][e] * v[8 + q * 2 + e]) * inv;
          if (MODE_H) d[e] *= rh[q][e];
          if (!valid[j]) d[e] = 0.0f;
        }
        if (in[j]) publish(da + (t * B + row) * GATES + q * H + unit, make_float2(d[0], d[1]));
      }
    }

    if (BARRIER) arrive(p.counter + r);

    // The rest of the step, which no other block waits for.
    if (!MODE_H)
#pragma unroll
      for (int i = 0; i < 8; i++) sum_b[i] += v[i];
    if (SPLIT)
#pragma unroll
      for (int j = 0; j < RPT; j++) {
        const i64 row = ROW_OF(tid) + j * STEP;
        if (!in[j]) continue;
#pragma unroll
        for (int q = 0; q < 4; q++) {
          float d[2];
#pragma unroll
          for (int e = 0; e < 2; e++) {
            d[e] = dpre[j][q][e];
            if (MODE_X == 1) d[e] -= (v[q * 2 + e] + x_hat[j][q][e] * v[16 + q * 2 + e]) * inv;
            if (MODE_X) d[e] *= rx[q][e];
            if (!valid[j]) d[e] = 0.0f;
          }
          store_pair(dwx + (t * B + row) * GATES + q * H + unit, make_float2(d[0], d[1]));
        }
      }
    if (t > 0) load_step(t - 1);
  }

#pragma unroll
  for (int j = 0; j < RPT; j++) {
    const i64 at = (r * B + ROW_OF(tid) + j * STEP) * H + unit;
    if (!in[j]) continue;
    store2(p.dh + at, skip[j][0], skip[j][1]);
    store2(p.dc + at, dc[j][0], dc[j][1]);
  }
  // Sums that no step needed are reduced only now.
  __syncthreads();
  if (!MODE_H) sum_rows(sum_b, scratch, total, running_gates);
  if (!MODE_C) sum_rows(sum_beta, scratch, total, running_cell);
#if FEW
  if (tid < 64) {
    const int i = tid & 15;
    scratch[4 * i + pair] = running_gates.x, scratch[192 + 4 * i + pair] = running_cell.x;
    if (i < 8) scratch[64 + 4 * i + pair] = running_gates.y;
  }
  __syncthreads();
  running_gates.x = tid < 96 ? scratch[tid] : 0.0f, running_cell.x = tid < 16 ? scratch[192 + tid] : 0.0f;
#endif
  const int of = blockIdx.x * UNITS + 2 * (tid & 3) + ((tid >> 2) & 1);
  if (of < H && tid < 16) (tid < 8 ? p.dbeta_c : p.dgamma_c)[r * H + of] = running_cell.x;
  if (of < H && tid < (MODE_H ? 96 : 32)) {
    float* sums = tid < 32 ? p.dbias : tid < 64 ? p.dgamma_h : p.dgamma_x;
    sums[r * GATES + ((tid >> 3) & 3) * H + of] = running_gates.x;
  }
}
