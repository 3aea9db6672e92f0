// The LSTM's forward pass for small layers: one cluster of blocks for each recurrence, all steps.
#include "small.cuh"

#define GROUPS ((BLOCKS + 3) / 4)  // of 32 columns of h: one block's units for each thread of a quad
#define REGION (GROUPS * 32)       // of h: rows of a warp, in pieces of 16 bytes, [block][row]
#define BYTES (BLOCKS * 128)       // that a warp gets in a step
#define ROOM (80 * WARPS)
#define STATISTICS 144  // of the input term 64, of W_h h 64, of the cell 16
#define CONSTANTS 128   // bias 32; gamma_x and gamma_h 64; what undoes the scale of the weights 32
#define WHOLE 16384.0f  // what 1 is in the exchange of a layer in float32

struct Forward {
  const Element* wx;      // [R, T, B, 4H]
  const Element* weight;  // [R, 4H, H]
  const float *bias, *gamma_x, *gamma_h, *gamma_c, *beta_c;
  const float *mean_x, *var_x;              // [R, rows_x, 4H]
  float *mean_h, *var_h, *mean_c, *var_c;  // [R, rows, features]: read if given, else written
  Element* hs;         // [R, T + 1, B, HS]; hs[:, 0] is h0
  float* cs;           // [R, T + 1, BLOCKS, PAIRS, UNITS, 2 rows], for the backward pass
  Element* wh;         // [R, T, BLOCKS, PAIRS, UNITS, 4, 2 rows], likewise: W_h h less its mean, or
                       // without a norm the gates before their nonlinearities
  const float* c0;     // [R, B, H]
  float *h_n, *c_n;    // [R, B, H]; h_n only where there are lengths
  const int* lengths;  // [B]
  const float* inv_n;  // [T]
  u32* counter;        // not used but by CLOCK
  int T, B, rows_x, rows_h, rows_c;
  float eps;
};

// What the helper's lane brings for gate `quad` of unit `own`: the statistics of a step, read a step
// before they are needed.
struct Help {
  float mx = 0, vx = 0, mh = 0, vh = 0, mc = 0, vc = 0;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) small_forward(const Forward p) {
  extern __shared__ uint4 shared[];
  uint4* hidden = shared;  // [2][WARPS][REGION]
  float* room = reinterpret_cast<float*>(hidden + 2 * WARPS * REGION);
  float* room_c = room + 64 * WARPS;
  float* given = room + ROOM;                 // [2][STATISTICS]
  float* constants = given + 2 * STATISTICS;  // registers are scarce
  float2* gammas = reinterpret_cast<float2*>(constants + 32);
  const u32 barriers = address_of(constants + CONSTANTS);  // [2][WARPS]

  const u32 rank = blockIdx.x;
  if (rank >= BLOCKS) return;  // where the cluster is larger than need be
  const Place at = place_of(p.B);
  const int lane = at.lane, warp = at.warp, own = at.own, quad = at.quad, unit = at.unit;
  const i64 r = blockIdx.y, B = p.B;
  const Element* wx = p.wx + r * p.T * B * GATES + rank * UNITS;
  Element* hs = p.hs + r * (p.T + 1) * B * HS;
  const i64 saved = (rank * PAIRS + at.pair) * UNITS + own;
  float* cs = p.cs + (r * (p.T + 1) * BLOCKS * PAIRS * UNITS + saved) * 2;
  Element* wh = p.wh + (r * p.T * BLOCKS * PAIRS * UNITS + saved) * 8;
  const bool saves = SAVE && at.pair < PAIRS;
  const i64 step_saved = BLOCKS * PAIRS * UNITS;
  const int column = quad * H + unit;  // of lane's gate, for the adder and the helper

  // The weights of the unit: rows own and own + 8 of two sums are its gates.
  uint4 w[GROUPS][2][2];
  {
    const Element* weight = p.weight + r * GATES * H + i64(at.mine ? unit : 0) * H;
    float up[4] = {1, 1, 1, 1};
#if TYPE == 0
#pragma unroll
    for (int q = 0; q < 4; q++) {
      u32 top = 0;
      if (at.mine)
        for (int k = quad; k < H; k += 4) top = max(top, size_of(weight[q * H * H + k]));
      top = max(top, __shfl_xor_sync(~0u, top, 1));
      top = max(top, __shfl_xor_sync(~0u, top, 2));
      up[q] = scale_up(top);
      if (warp == ADDER && quad == 0) constants[96 + 4 * own + q] = scale_down(top);
    }
#endif
#pragma unroll
    for (int i = 0; i < GROUPS; i++)
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
          u32 v[4];
#pragma unroll
          for (int n = 0; n < 4; n++) {
            const int q = 2 * m + n % 2, k = (4 * i + quad) * UNITS + 4 * half + n / 2 * 2;
            v[n] = at.mine && k < H ? operand(weight + q * H * H + k, up[q]) : 0;
          }
          w[i][m][half] = make_uint4(v[0], v[1], v[2], v[3]);
        }
  }

  // h0 of the warp's rows; the other buffer is empty, and stays so where there is no block.
#if TYPE == 0
  u32 top = 0;
  for (int i = lane; i < 8 * HS; i += 32)
    if (8 * warp + i / HS < B) top = max(top, finite_size(hs[i64(8 * warp) * HS + i]));
  top = __reduce_max_sync(~0u, top);
  const float up_first = scale_up(top);
  float unscale = scale_down(top);
#else
  const float up_first = 1.0f;
#endif
  for (int i = lane; i < REGION; i += 32) {
    const int row = 8 * warp + i % 8;
    uint4 v = make_uint4(0, 0, 0, 0);
    if (row < B && i / 8 < BLOCKS) {
      const Element* from = hs + i64(row) * HS + i / 8 * UNITS;
      v.x = operand(from, up_first), v.y = operand(from + 2, up_first);
      v.z = operand(from + 4, up_first), v.w = operand(from + 6, up_first);
    }
    hidden[warp * REGION + i] = v;
    hidden[(WARPS + warp) * REGION + i] = make_uint4(0, 0, 0, 0);
  }

  const float g_c = MODE_C && at.mine ? p.gamma_c[r * H + unit] : 0.0f;
  const float beta = BETA && at.mine ? p.beta_c[r * H + unit] : 0.0f;
  if (warp == ADDER) {
    constants[4 * own + quad] = BIAS && at.mine ? p.bias[r * GATES + column] : 0.0f;
    gammas[slot(own, quad)] = make_float2(MODE_X && at.mine ? p.gamma_x[r * GATES + column] : 0.0f,
                                          MODE_H && at.mine ? p.gamma_h[r * GATES + column] : 0.0f);
  }
  for (int i = threadIdx.x; i < 2 * STATISTICS; i += THREADS) given[i] = 0.0f;
  Help help;
  auto row_of = [&](i64 t, int rows) { return r * rows + (t < rows ? t : rows - 1); };
  auto ask_input = [&](i64 t) {
    if (!MODE_X || warp != HELPER || !at.mine || t >= p.T) return;
    help.mx = p.mean_x[row_of(t, p.rows_x) * GATES + column];
    help.vx = p.var_x[row_of(t, p.rows_x) * GATES + column];
  };
  auto ask_given = [&](i64 t) {
    if (warp != HELPER || !at.mine || t >= p.T) return;
    if (MODE_H == 2) {
      help.mh = p.mean_h[row_of(t, p.rows_h) * GATES + column];
      help.vh = p.var_h[row_of(t, p.rows_h) * GATES + column];
    }
    if (MODE_C == 2) {
      help.mc = p.mean_c[row_of(t, p.rows_c) * H + unit];
      help.vc = p.var_c[row_of(t, p.rows_c) * H + unit];
    }
  };
  // A term is normalized by taking away the first number and multiplying with the second.
  auto put_input = [&](i64 t) {
    if (!MODE_X || warp != HELPER) return;
    const int here = slot(own, quad);
    reinterpret_cast<float2*>(given + (t & 1) * STATISTICS)[here] =
        make_float2(help.mx, rsqrtf(help.vx + p.eps) * gammas[here].x);
  };
  auto put_given = [&](float2* to) {
    if (warp != HELPER) return;
    const int here = slot(own, quad);
    if (MODE_H == 2) to[32 + here] = make_float2(help.mh, rsqrtf(help.vh + p.eps) * gammas[here].y);
    if (MODE_C == 2 && quad == 0) to[64 + own] = make_float2(help.mc, rsqrtf(help.vc + p.eps) * g_c);
  };

  float c[2], x[4][2];
  Pair raw[4];
  int length[2];
#pragma unroll
  for (int e = 0; e < 2; e++) {
    length[e] = !at.in[e] ? 0 : LENGTHS ? p.lengths[at.row[e]] : p.T;
    c[e] = at.in[e] ? p.c0[(r * B + at.row[e]) * H + unit] : 0.0f;
  }
  if (saves) store2(cs, c[0], c[1]);
  auto ask_rows = [&](i64 t) {
    if (t < p.T)
#pragma unroll
      for (int q = 0; q < 4; q++) raw[q] = load_tile(wx + t * B * GATES + q * H, GATES, at);
  };
  // The input term of step t, which is at hand; then that of the next step is asked for.
  auto prepare = [&](i64 t) {
    float2 of_x[4];
    if (MODE_X) read_slots(of_x, reinterpret_cast<const float2*>(given + (t & 1) * STATISTICS), own);
    const float4 b = reinterpret_cast<const float4*>(constants)[own];
    const float bias[4] = {b.x, b.y, b.z, b.w};
#pragma unroll
    for (int q = 0; q < 4; q++) {
      const float2 v = turned(raw[q]);
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float number = pick(t < length[e], e ? v.y : v.x, 0.0f);
        x[q][e] = (MODE_X ? (number - of_x[q].x) * of_x[q].y : number) + bias[q];
      }
    }
    ask_rows(t + 1);
  };
  ask_input(0);
  ask_given(0);
  ask_rows(0);

  // Four rows' pieces of 16 bytes go to four blocks at once, each block begins with another.
  const int piece = lane & 7;
  u32 to[GROUPS];
#pragma unroll
  for (int i = 0; i < GROUPS; i++) {
    const u32 nth = 4 * i + (lane >> 3);
    to[i] = in_block(address_of(shared), nth < BLOCKS ? (nth + rank) % BLOCKS : rank);
  }
  const u32 into = (warp * REGION + rank * 8 + piece) * 16, barrier_at = barriers - address_of(shared) + 8 * warp;

  start_barriers(barriers, 2 * WARPS, BYTES);
  __syncthreads();
  put_input(0);
  ask_input(1);
  __syncthreads();
  prepare(0);
  meet_cluster();
  Waiting waiting;

  for (i64 t = 0; t < p.T; t++) {
    const int now = t & 1;
    MARKS(p.counter, int(t));
    MARK(0);
    const bool valid[2] = {t < length[0], t < length[1]};
    float2* statistics = reinterpret_cast<float2*>(given + now * STATISTICS);
    const float2* before = reinterpret_cast<const float2*>(given + (now ^ 1) * STATISTICS);  // of step t - 1
    const float inv = LENGTHS ? p.inv_n[t] : 1.0f / B;
    put_input(t + 1);
    put_given(statistics);
    ask_input(t + 2);
    ask_given(t + 1);

    MARK(1);

    // W_h h
    if (t > 0) {
      const u32 barrier = barriers + 8 * (now * WARPS + warp);
      waiting.until(barrier, u32((t - 1) >> 1));
      if (lane == 0 && !waiting.tired) expect(barrier, BYTES);
    }
    MARK(2);
    float a[4][2] = {};
#ifndef NO_GATHER
    {
      const uint4* rows = hidden + (now * WARPS + warp) * REGION + quad * 8 + own;
      float sums[2][2][4] = {};
#if TYPE == 0
      const float4 undo = reinterpret_cast<const float4*>(constants + 96)[own];
      const float down[4] = {undo.x * unscale, undo.y * unscale, undo.z * unscale, undo.w * unscale};
#endif
#pragma unroll
      for (int i = 0; i < GROUPS; i++) {
        const uint4 b = rows[32 * i];
#pragma unroll
        for (int m = 0; m < 2; m++) {
          multiply16(sums[m][0], w[i][m][0], b.x, b.y);
          multiply16(sums[m][1], w[i][m][1], b.z, b.w);
        }
      }
#pragma unroll
      for (int q = 0; q < 4; q++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          a[q][e] = sums[q / 2][0][q % 2 * 2 + e] + sums[q / 2][1][q % 2 * 2 + e];
#if TYPE == 0
          a[q][e] *= down[q];
#endif
        }
    }
#endif
#if TYPE == 0
    unscale = 1.0f / WHOLE;
#endif

    MARK(3);

    // Equation 6
    if (SUM_H) {
      float v[2][4] = {}, sum[2];
      float2 shift[4];  // near the mean, so that nothing cancels
      read_slots(shift, before + 32, own);
#pragma unroll
      for (int q = 0; q < 4; q++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          const float d = pick(valid[e], a[q][e] - shift[q].x, 0.0f);
          v[0][q] += d;
          v[1][q] += d * d;
        }
      sum_gates(sum, v, quad);
      store2(room + (warp * 32 + lane) * 2, sum[0], sum[1]);
    }
    MARK(4);
    __syncthreads();
    MARK(5);
    if (SUM_H && warp == ADDER) {
      const float2 v = add_warps2(reinterpret_cast<float2*>(room) + lane, 32);
      const int here = slot(own, quad);
      const float off = v.x * inv, var = variance(v.y * inv, off);
      const float mean = inv > 0.0f ? before[32 + here].x + off : 0.0f;
      statistics[32 + here] = make_float2(mean, rsqrtf(var + p.eps) * gammas[here].y);
      hand_out();
      if (at.mine) {
        p.mean_h[(r * p.rows_h + t) * GATES + column] = mean;
        p.var_h[(r * p.rows_h + t) * GATES + column] = var;
      }
    } else if (SUM_H) {
      take();
    }

    MARK(6);
    float gate[4][2], cand[2];
    {
      float2 of_h[4];
      if (MODE_H) read_slots(of_h, statistics + 32, own);
#pragma unroll
      for (int q = 0; q < 4; q++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float v = a[q][e];
          if (MODE_H) {
            v = a[q][e] = v - of_h[q].x;
            v *= of_h[q].y;
          }
          v += x[q][e];
          if (!MODE_H) a[q][e] = v;
          gate[q][e] = q == 2 ? tanh_(v) : sigmoid(v);
        }
      }
    }
    // Equation 7
#pragma unroll
    for (int e = 0; e < 2; e++) cand[e] = gate[1][e] * c[e] + gate[0][e] * gate[2][e];

    // Equation 8
    float2 of_c = make_float2(0, 0);
    if (SUM_C) {
      float v[2] = {};
      const float shift = before[64 + own].x;
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const float d = pick(valid[e], cand[e] - shift, 0.0f);
        v[0] += d;
        v[1] += d * d;
      }
      sum_cells(room_c, v[0], v[1], at);
      MARK(7);
      __syncthreads();
      MARK(8);
      if (warp == ADDER) {
        const float2 s = add_warps2(reinterpret_cast<float2*>(room_c) + own, UNITS);
        const float off = s.x * inv, var = variance(s.y * inv, off), mean = inv > 0.0f ? shift + off : 0.0f;
        if (quad == 0) statistics[64 + own] = make_float2(mean, rsqrtf(var + p.eps) * g_c);
        hand_out();
        if (quad == 0 && at.mine) {
          p.mean_c[(r * p.rows_c + t) * H + unit] = mean;
          p.var_c[(r * p.rows_c + t) * H + unit] = var;
        }
      } else {
        take();
      }
    }
    MARK(9);
    if (MODE_C) of_c = statistics[64 + own];
    float h[2];
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const float v = MODE_C ? (cand[e] - of_c.x) * of_c.y : cand[e];
      h[e] = pick(valid[e], gate[3][e] * tanh_(v + beta), 0.0f);
      c[e] = pick(valid[e], cand[e], c[e]);
    }

    // To all blocks, this one too. A row's eight units are gathered from the quad that has them.
#if TYPE == 0
    const u32 line = turn(pack(WHOLE * h[0], WHOLE * h[1]));
#else
    const u32 line = turn(pack(h[0], h[1]));
#endif
    uint4 chunk;
    chunk.x = __shfl_sync(~0u, line, 4 * piece), chunk.y = __shfl_sync(~0u, line, 4 * piece + 1);
    chunk.z = __shfl_sync(~0u, line, 4 * piece + 2), chunk.w = __shfl_sync(~0u, line, 4 * piece + 3);
#ifndef NO_EXCHANGE
    if (t + 1 < p.T) {
      const u32 buffer = (now ^ 1) * WARPS * REGION * 16, barrier = barrier_at + (now ^ 1) * WARPS * 8;
#pragma unroll
      for (int i = 0; i < GROUPS; i++)
        send(4 * i + (lane >> 3) < BLOCKS, to[i] + into + buffer, to[i] + barrier, chunk);
      announce(barriers + 8 * ((now ^ 1) * WARPS + warp), lane);
    }
#endif

    MARK(10);
    // What nobody waits for.
#if TYPE == 0
    store_tile(hs + (t + 1) * B * HS + rank * UNITS, HS, at, h[0], h[1]);
#else
    if (lane < 8 && 8 * warp + piece < B)
      *reinterpret_cast<uint4*>(hs + ((t + 1) * B + 8 * warp + piece) * HS + rank * UNITS) = chunk;
#endif
    if (saves) {
      store_eight(wh + t * step_saved * 8, a);
      store2(cs + (t + 1) * step_saved * 2, c[0], c[1]);
    }
    if (LENGTHS)
#pragma unroll
      for (int e = 0; e < 2; e++)
        if (valid[e]) p.h_n[(r * B + at.row[e]) * H + unit] = h[e];
    MARK(11);
    if (t + 1 < p.T) prepare(t + 1);
    MARK(12);
  }
#pragma unroll
  for (int e = 0; e < 2; e++)
    if (at.in[e]) p.c_n[(r * B + at.row[e]) * H + unit] = c[e];
  meet_cluster();  // nobody leaves while its memory may still be written to
}
