// The LSTM's backward pass for small layers: all steps in one launch, the last first, one thread-block cluster per
// recurrence.
//
// A block multiplies its own d(W_h h), 32 columns, by its rows of W_h. This gives its share (partial sum) of dh for all
// units. It sends each block the shares of that block's units, and the receiver adds them up. So a block receives
// BLOCKS x 8 units per step instead of all BLOCKS x 32 columns of d(W_h h). Shares are rounded to 16 bits, like the
// operands of their products; in float32 each comes with a power of two.
//
// Blocks of 16 units have 64 columns. Their warps divide the product by receiving blocks instead of rows: a warp
// multiplies d(W_h h) of all rows, through shared memory, by weights that need few registers.
#define WORKER_REGISTERS 208
#include "cluster.cuh"

#if HALVES > 1
#define TILES ((BLOCKS + WARPS - 1) / WARPS)  // tiles of 16 units of dh: one block each
#else
#define TILES ((BLOCKS + 1) / 2)  // tiles of 16 units of dh: two blocks each
#endif
#define SPLIT (MODE_H != 0)       // d(W_x x) differs from d(W_h h)
#define WRITES_GATES (!(SPLIT && SCALAR))  // a tensor is written gate by gate: d(W_x x), or the one that serves as both
#if SCALAR
#define GATES_TO p.da
#else
#define GATES_TO (SPLIT ? p.dwx : p.da)
#endif
#define MEETS_X (SUM_H && MODE_X && !(SCALAR && SUM_C))  // one more barrier, for the input term's sums over the batch
#define X_GATES (SCALAR ? 1 : 4)                         // input values per thread and row
#define SUMS_X (MODE_X || SCALAR)                        // sums of products with the input are needed
#define SUMS (SCALAR && MODE_X == 2 ? 4 : 3)             // sums per gate
#define PIECE (32 * RT + (TYPE == 0 ? 4 : 0))  // words of a warp's shares from one block: [thread][RT], and a factor
#define SOURCE (WARPS * PIECE)                 // words of all warps' shares from one block
#define SCRATCH (112 * WARPS)                // partial sums per warp: 64 and 32 of gates, 16 of cells
// Offsets in a step's tables of four coefficients each (see below): gates from 0, then
#define OF_C (4 * UNITS)  // cells
#define OF_X (5 * UNITS)  // given statistics; in `totals` the input term
#define TABLES (36 * UNITS)
#define LINES (HALVES > 1 ? ROW_TILES * HALVES * 128 : 0)  // words of d(W_h h) in 16 bits
#define PARTS (TYPE == 0 ? HALVES : 1)  // accumulators per sum: in float32 each half has its own power of two
#define BATCH (RT > 1 ? 2 : 4)  // tiles multiplied in parallel
#define PENDING (RT * 4 * EIGHTH * WORKERS + 4 * SHEET * WARPS)  // words of gradients that are written in the next step

// In float32 d(W_h h) is scaled below 2^7 (64 products: 2^6) and W_h below 2^3, so that a sum of 32 products is in
// float16's range.
#define LESS_D (1.0f / (512 * HALVES))
#define LESS_W (1.0f / 8192)

// A step's inputs are prefetched into shared memory, which saves registers.
#define SAVED (4 * EIGHTH + 2)                              // words per thread and tile saved by the forward pass
#define PREFETCHED (RT * SAVED * WORKERS + 5 * SHEET * WARPS)  // words in total

struct Prefetched {
  u32* scratch;  // [RT][SAVED][WORKERS], with 16 bytes of each thread before 8 of each; then [WARPS][5][SHEET]

  __device__ __forceinline__ u32* words(int n, int first, int width) const {
    return scratch + (n * SAVED + first) * WORKERS + width * threadIdx.x;
  }
  __device__ __forceinline__ u32* sheet(int i, const Position& at) const {
    return scratch + RT * SAVED * WORKERS + (at.warp * 5 + i) * SHEET;
  }

  __device__ __forceinline__ void prefetch_saved(int n, const Element* wh, const float* cs, bool there) const {
#pragma unroll
    for (int i = 0; i < EIGHTH; i++) fetch_async<16>(address_of(words(n, 4 * i, 4)), wh + i * EIGHT_STEP, there);
    fetch_async<8>(address_of(words(n, 4 * EIGHTH, 2)), cs, there);
  }

  __device__ __forceinline__ void saved(int n, float (&v)[4][2]) const {
    Eight all;
#pragma unroll
    for (int i = 0; i < EIGHTH; i++) all.part[i] = *reinterpret_cast<const uint4*>(words(n, 4 * i, 4));
    all.give(v);
  }
  __device__ __forceinline__ float2 cells(int n) const {
    return *reinterpret_cast<const float2*>(words(n, 4 * EIGHTH, 2));
  }
};

struct Layout {
  u32* shares;    // [2][BLOCKS][SOURCE]: shares received from all blocks
  Prefetched prefetched;
  u32* pending;  // [RT][EIGHTH][WORKERS][4]; [WARPS][4][SHEET]
  float *scratch, *x_sums, *cell_sums;
  float* mean_sums;  // [WARPS][4 * SHEET], in the unused sheets of `pending`: the fourth sum
  float* given;  // [2][TABLES]
  float4* totals;
  uint4* lines;    // [ROW_TILES][HALVES][32]: d(W_h h) as an operand, all gates
  u32* exponents;  // [WARPS]: the exponents of its scales, in float32
  u32 barriers;  // [2]

  __device__ __forceinline__ float4* table(int k) const { return reinterpret_cast<float4*>(given + (k & 1) * TABLES); }
};

#define COUNTED (4 * SOURCE * (BLOCKS - 1))  // bytes received from all other blocks in a step

// The last warp precomputes these coefficients, so that the workers compute nothing that is the same for all rows:
//   gate:  a * table.x + ((x - table.y) * table.z + table.w), a: W_h h minus its mean; without table.y if SCALAR
//   cell:  (c - table.x) * table.y + beta
//   d(.):  g * totals.x + totals.y + (x minus its mean) * totals.z, for a term x and the gradient g of its normalized value

// The last warp: statistics and sums over the batch. Each lane owns a gate of a unit, in each half.
__device__ __forceinline__ void run_statistics_warp(const Backward& p, const Position& at, const Layout& in) {
  const int own = at.own, quad = at.quad, first = quad * UNITS + own;
  const i64 r = blockIdx.y, column = quad * H + at.unit;
  const float scale = pick(quad == 2, pre(2), pre(0));
  auto here = [&](int s) { return first + 8 * s; };
  float bias[HALVES], g_x[HALVES], g_h[HALVES], g_c[HALVES];
  EACH_HALF {
    const bool mine = at.has(s);
    bias[s] = BIAS && mine ? p.bias[r * GATES + column + 8 * s] : 0.0f;
    g_x[s] = MODE_X && mine ? p.gamma_x[r * GATES + column + 8 * s] : 1.0f;
    g_h[s] = MODE_H && mine ? p.gamma_h[r * GATES + column + 8 * s] : 0.0f;
    g_c[s] = MODE_C && mine ? p.gamma_c[r * H + at.unit + 8 * s] : 0.0f;
  }
  float vh[HALVES] = {}, mx[HALVES] = {}, vx[HALVES] = {}, mc[HALVES] = {}, vc[HALVES] = {};  // prefetched
  float inv = 1.0f / p.B, rh[HALVES] = {}, rx[HALVES], rc[HALVES] = {}, next_rh[HALVES] = {}, next_rx[HALVES], next_rc[HALVES] = {};
  float2 all_h[HALVES] = {}, all_c[HALVES] = {};  // sums over all steps so far
  float all_x[HALVES] = {};
  EACH_HALF rx[s] = next_rx[s] = 1.0f;

#if SCALAR
  float w[HALVES], all_w[HALVES] = {};  // all_w: sums weighted by r^3, see cluster.cuh
  EACH_HALF w[s] = at.has(s) ? p.w[r * GATES + column + 8 * s] : 0.0f;
#endif

  auto prefetch = [&](int t) {
    if (!at.mine || t < 0) return;
    auto row = [&](int rows) { return r * rows + (t < rows ? t : rows - 1); };
    EACH_HALF {
      if (s == 0 || at.has(s)) {
        if (MODE_H) vh[s] = p.var_h[row(p.rows_h) * GATES + column + 8 * s];
        if (SCALAR && MODE_X == 1) vx[s] = p.var_x[row(p.rows_x)];
        else if (MODE_X) mx[s] = p.mean_x[row(p.rows_x) * GATES + column + 8 * s], vx[s] = p.var_x[row(p.rows_x) * GATES + column + 8 * s];
        if (MODE_C) mc[s] = p.mean_c[row(p.rows_c) * H + at.unit + 8 * s], vc[s] = p.var_c[row(p.rows_c) * H + at.unit + 8 * s];
      }
    }
  };
  auto write_tables = [&](int k) {
    float4* to = in.table(k);
    EACH_HALF {
      if (MODE_H) {
        next_rh[s] = rsqrt_(vh[s] + p.eps);
#if SCALAR
        if (MODE_X) next_rx[s] = rsqrt_((MODE_X == 1 ? w[s] * w[s] * vx[s] : vx[s]) + p.eps);
        const float factor = next_rx[s] * g_x[s] * scale;
        to[here(s)] = make_float4(next_rh[s] * g_h[s] * scale, 0.0f, w[s] * factor, bias[s] * scale - mx[s] * factor);
        if (!SUM_H)
          to[OF_X + here(s)] = make_float4(slope<MODE_H>(next_rh[s], g_h[s], p.eps), next_rh[s], next_rx[s], mx[s] * next_rx[s]);
#else
        if (MODE_X) next_rx[s] = rsqrt_(vx[s] + p.eps);
        to[here(s)] = make_float4(next_rh[s] * g_h[s] * scale, mx[s], next_rx[s] * g_x[s] * scale, bias[s] * scale);
        if (!SUM_H)
          to[OF_X + here(s)] = make_float4(slope<MODE_H>(next_rh[s], g_h[s], p.eps), next_rh[s], next_rx[s], next_rx[s] * g_x[s]);
#endif
      }
      if (MODE_C) {
        next_rc[s] = rsqrt_(vc[s] + p.eps);
        if (quad == 0)
          to[OF_C + own + 8 * s] = make_float4(mc[s], next_rc[s] * g_c[s] * pre(2), slope<MODE_C>(next_rc[s], g_c[s], p.eps), next_rc[s]);
      }
    }
    prefetch(p.T - 2 - k);
  };
  prefetch(p.T - 1);
  write_tables(0);
  __syncthreads();
  meet_cluster();

  for (int k = 0; k < p.T; k++) {
    EACH_HALF rh[s] = next_rh[s], rx[s] = next_rx[s], rc[s] = next_rc[s];
    if (LENGTHS) inv = p.inv_n[p.T - 1 - k];
    if (!SUM_H && !SUM_C) __syncthreads();
    if (SUM_C) {
      await<SUMS_1>();
      float2 sum[HALVES];
      EACH_HALF {
        sum[s] = add_warps2(reinterpret_cast<float2*>(in.cell_sums) + s * MW * 8 + own, 8);
        const float f = slope<MODE_C>(rc[s], g_c[s], p.eps);
        if (quad == 0)
          in.totals[OF_C + own + 8 * s] = make_float4(f, -(sum[s].x * inv) * f, -(sum[s].y * inv) * (rc[s] * rc[s]) * f, 0.0f);
      }
      if (!SUM_H) write_tables(k + 1);
      __syncthreads();
      EACH_HALF all_c[s].x += sum[s].x, all_c[s].y += sum[s].y * rc[s];
    }
    if (SUM_C == SUM_H) write_tables(k + 1);
    if (SUM_H) {
      await<SUMS_2>();
      float2 sum[HALVES];
      float off[HALVES], sum_x[HALVES];
      EACH_HALF {
        sum[s] = add_warps2(reinterpret_cast<float2*>(in.scratch) + s * MW * 32 + at.lane, 32);
        const float f = slope<MODE_H>(rh[s], g_h[s], p.eps);
        off[s] = sum[s].x * inv;
        in.totals[here(s)] = make_float4(f, -off[s] * f, -(sum[s].y * inv) * (rh[s] * rh[s]) * f, 0.0f);
      }
      if (!SUM_C) write_tables(k + 1);
      __syncthreads();
      EACH_HALF {
        all_h[s].x += sum[s].x, all_h[s].y += sum[s].y * rh[s];
        sum_x[s] = MODE_X ? add_warps(in.x_sums + s * MW * 32 + at.lane, 32) : 0.0f;
#if SCALAR
        all_w[s] += sum_x[s] * (rx[s] * rx[s] * rx[s]);
#else
        const float fx = rx[s] * g_x[s];
        if (MODE_X == 1)
          in.totals[OF_X + here(s)] = make_float4(fx, -off[s] * fx, -(sum_x[s] * inv) * (rx[s] * rx[s]) * fx, 0.0f);
        if (MODE_X == 2) in.totals[OF_X + here(s)] = make_float4(fx, 0.0f, 0.0f, 0.0f);
#endif
      }
      if (MEETS_X) __syncthreads();
      EACH_HALF all_x[s] += sum_x[s] * rx[s];
    }
    if (HALVES > 1 && !MEETS_X) let_workers_meet();
  }

  __syncthreads();  // sums that no step needed are reduced only now
  EACH_HALF {
    const float2 sum = SUM_H ? all_h[s] : add_warps2(reinterpret_cast<float2*>(in.scratch) + s * MW * 32 + at.lane, 32);
    const float2 c = SUM_C ? all_c[s] : add_warps2(reinterpret_cast<float2*>(in.cell_sums) + s * MW * 8 + own, 8);
    if (!at.has(s)) return;  // later halves do not exist either
    p.dbias[r * GATES + column + 8 * s] = sum.x;
    if (MODE_H) p.dgamma_h[r * GATES + column + 8 * s] = sum.y;
    if (quad == 0) p.dbeta_c[r * H + at.unit + 8 * s] = c.x, p.dgamma_c[r * H + at.unit + 8 * s] = c.y;
#if SCALAR
    // With minibatch statistics, see SCALAR in cluster.cuh. With given ones x is not centered: there are sums of products
    // with x / std and with mean / std.
    const float of_x = SUM_H ? all_x[s] : add_warps(in.x_sums + s * MW * 32 + at.lane, 32);
    const float of_mean = SUMS > 3 ? add_warps(in.mean_sums + s * MW * 4 * SHEET + at.lane, 4 * SHEET) : 0.0f;
    if (MODE_X) p.dgamma_x[r * GATES + column + 8 * s] = w[s] * of_x - of_mean;
    p.dwx[r * GATES + column + 8 * s] = MODE_X == 1 ? g_x[s] * p.eps * all_w[s] : MODE_X ? g_x[s] * of_x : of_x;
#else
    if (MODE_H) p.dgamma_x[r * GATES + column + 8 * s] = SUM_H ? all_x[s] : add_warps(in.x_sums + s * MW * 32 + at.lane, 32);
#endif
  }
}

// A thread's share of dh for one block: one unit, two rows of each tile.
struct Share {
  u32 words[RT];

  __device__ __forceinline__ void get(const u32* from) {
    if (RT == 4) {
      const uint4 v = *reinterpret_cast<const uint4*>(from);
      words[0] = v.x, words[1 % RT] = v.y, words[2 % RT] = v.z, words[3 % RT] = v.w;
    } else if (RT == 2) {
      const uint2 v = *reinterpret_cast<const uint2*>(from);
      words[0] = v.x, words[1 % RT] = v.y;
    } else {
      for (int n = 0; n < RT; n++) words[n] = from[n];
    }
  }
  __device__ __forceinline__ void put(u32* to) const {
#pragma unroll
    for (int n = 0; n < RT; n++) to[n] = words[n];
  }
  __device__ __forceinline__ void send_to(u32 to, u32 barrier) const {
    if (RT == 4)
      send(true, to, barrier, make_uint4(words[0], words[1 % RT], words[2 % RT], words[3 % RT]));
    else if (RT == 2)
      send(true, to, barrier, make_uint2(words[0], words[1 % RT]));
    else
      for (int n = 0; n < RT; n++) send(true, to + 4 * n, barrier, words[n]);
  }
};

// The worker warps.
__device__ __forceinline__ void run_worker(const Backward& p, const Position& at, const Layout& in) {
  const int lane = at.lane, warp = at.warp, own = at.own, quad = at.quad, within = at.within;
  const i64 r = blockIdx.y, B = p.B, unit = at.unit;
  const u32 rank = blockIdx.x;
  const Prefetched prefetched = in.prefetched;

  // The weights of the block's columns, k = 8 * gate + unit, for the units of the receiving blocks.
  uint4 w[TILES][2 * HALVES];
  float undo = 1.0f;
  {
    const Element* weight = p.weight + r * GATES * H + rank * UNITS + 2 * quad;
    const bool there[] = {rank * UNITS + 2 * quad < H, rank * UNITS + 8 + 2 * quad < H};
    float up = 1.0f;
#if TYPE == 0
    u32 top = 0;
    EACH_HALF
      if (there[s])
        for (int u = own; u < H; u += 8)
          for (int q = 0; q < 4; q++) {
            const float2 v = load2(weight + i64(u) * GATES + q * H + 8 * s);
            top = max(top, max(magnitude(v.x), magnitude(v.y)));
          }
    top = __reduce_max_sync(~0u, top);
    up = scale_up(top) * LESS_W, undo = scale_down(top) / (LESS_W * LESS_D);
#endif
#pragma unroll
    for (int m = 0; m < TILES; m++)
#pragma unroll
      for (int half = 0; half < 2 * HALVES; half++) {
        u32 v[4];
#pragma unroll
        for (int n = 0; n < 4; n++) {
          const int s = half / 2, q = half % 2 * 2 + n / 2, i = HALVES > 1 ? warp + WARPS * m : 2 * m + n % 2;
          const int u = i < BLOCKS ? receiver(i) * UNITS + own + (HALVES > 1 ? 8 * (n % 2) : 0) : H;
          v[n] = there[s] && u < H ? operand(weight + i64(u) * GATES + q * H + FIRST(s), up) : 0;
        }
        w[m][half] = make_uint4(v[0], v[1], v[2], v[3]);
      }
  }

  // Pointers to the thread's data of the step to prefetch and of the step to write.
  const i64 step_saved = EIGHTS * PAIRS * 8, pair = i64(HALVES > 1 ? rank * HALVES + at.half : rank) * PAIRS + 4 * at.tile + quad;
  const i64 last = (r + 1) * p.T - 1;
  const float* cs = p.cs + ((last + r) * step_saved + pair * 8 + own) * 2;
  const Element* wh = p.wh + last * step_saved * 8 + eight_at(pair, own);
  i64 gates_prefetched = (last * B + 8 * at.tile) * GATES + rank * UNITS + FIRST(at.half), gates_written = gates_prefetched;
#if SCALAR
  const Input* x_prefetched = p.wx + last * X_ROWS + 8 * at.tile;
#endif
  Element* da = p.da + last * B * GATES + i64(at.row(0, 0)) * GATES + 4 * unit;  // if SPLIT
  const Element* doutput = p.doutput + (last * B + 8 * at.tile) * H + rank * UNITS + FIRST(at.half);
  bool stored[RT];
#pragma unroll
  for (int n = 0; n < RT; n++) stored[n] = at.row(n, 0) / 2 < PAIRS && (HALVES == 1 || at.unit - own < H);

  // Prefetches a step's inputs, one step ahead.
  auto prefetch_rows = [&]() {
#pragma unroll
    for (int n = 0; n < RT; n++) prefetched.prefetch_saved(n, stored[n] ? wh + 256 * n : p.wh, stored[n] ? cs + 64 * n : p.cs, stored[n]);
#if SCALAR
    if (lane < 2 * RT) fetch_async<16>(address_of(prefetched.sheet(0, at) + 4 * lane), x_prefetched + 4 * lane, true);
    x_prefetched -= X_ROWS;
#else
    if (SPLIT)
#pragma unroll
      for (int q = 0; q < 4; q++) prefetch_sheet(prefetched.sheet(q, at), p.wx + gates_prefetched + q * H, GATES, at);
#endif
    if (DOUTPUT) prefetch_sheet(prefetched.sheet(4, at), doutput, H, at);
    wh -= step_saved * 8, cs -= step_saved * 2, gates_prefetched -= B * GATES, doutput -= B * H;
  };

  const float beta = (BETA && at.mine ? p.beta_c[r * H + unit] : 0.0f) * pre(2);
  float c_t[RT][2], dc[RT][2], skip[RT][2], sum_c[2] = {}, sum_v[SUMS][4] = {};
  int length[RT][2];
  auto valid = [&](int n, int e, int t) { return LENGTHS ? t < length[n][e] : at.in(n, e); };
#pragma unroll
  for (int n = 0; n < RT; n++) {
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const i64 here = (r * B + at.row(n, e)) * H + unit;
      length[n][e] = LENGTHS && at.in(n, e) ? p.lengths[at.row(n, e)] : 0;
      skip[n][e] = at.in(n, e) ? p.dh[here] : 0.0f;
      dc[n][e] = at.in(n, e) ? p.dc[here] : 0.0f;
      c_t[n][e] = 0.0f;
    }
    if (stored[n]) {
      const float2 final = load2(cs + step_saved * 2 + 64 * n);
      c_t[n][0] = final.x, c_t[n][1] = final.y;
    }
  }
  prefetch_rows();

  const u32 shared = address_of(in.shares), into = warp * PIECE * 4 + 4 * RT * lane, barrier_at = in.barriers - shared;
  const bool sends_last = HALVES > 1 && warp >= (WARPS + 1) / 2;
  float own_share[RT][2] = {};
#if HALVES > 1
  u32 there[TILES];
#pragma unroll
  for (int m = 0; m < TILES; m++) there[m] = in_block(shared, receiver(warp + WARPS * m < BLOCKS ? warp + WARPS * m : 0));
#endif

  // The gradients of a step, which no block waits for, stay in shared memory until they are written: if SPLIT d(W_h h)
  // unit by unit, in each thread's order; then, gate by gate, d(W_x x) or the tensor that serves as both. d(W_h h) may
  // overwrite W_h h of later steps (`backward._consumed`): all blocks have read those, or else they could not have
  // sent the shares that this step's d(W_h h) depends on.
  auto slot_of = [&](int n, int i) { return reinterpret_cast<uint4*>(in.pending) + (n * EIGHTH + i) * WORKERS + threadIdx.x; };
  auto sheet_of = [&](int q) { return in.pending + RT * 4 * EIGHTH * WORKERS + (warp * 4 + q) * SHEET; };
  auto write_units = [&](int n) {
    if (!SPLIT) return;
#pragma unroll
    for (int e = 0; e < 2; e++) {
      if (!at.in(n, e)) continue;
      Element* to = da + (8 * n + e) * GATES;
#if TYPE == 0
      *reinterpret_cast<uint4*>(to) = *slot_of(n, e);
#else
      *reinterpret_cast<uint2*>(to) = reinterpret_cast<const uint2*>(slot_of(n, 0))[e];
#endif
    }
  };
  auto write_gates = [&](int first, int last) {
    if (!WRITES_GATES) return;
    __syncwarp();
#pragma unroll
    for (int q = 0; q < 4; q++) {
      if (q < first || q >= last) continue;
      write_sheet(GATES_TO + gates_written + q * H, GATES, sheet_of(q), at);
    }
  };
  auto write_all = [&]() {
#pragma unroll
    for (int n = 0; n < RT; n++) write_units(n);
    write_gates(0, 4);
    da -= B * GATES, gates_written -= B * GATES;
  };
  __syncthreads();
  meet_cluster();

  for (int k = 0; k < p.T; k++) {
    const int t = p.T - 1 - k, now = k & 1;
    const float4* table = in.table(k);
    fetched();
    if (!SUM_H && !SUM_C) __syncthreads();

    // Recompute the forward step, and from it the factors of the gradients; this waits for no other block.
    float a[RT][4][2], x[RT][X_GATES][2], gate[RT][4][2], cell[RT][2], dh[RT][2], through[RT][5][2], forgot[RT][2];
#pragma unroll
    for (int n = 0; n < RT; n++) prefetched.saved(n, a[n]);
#pragma unroll
    for (int q = 0; q < 4; q++) {
      const float4 s = MODE_H ? table[q * UNITS + within] : make_float4(0, 0, 0, 0);
#pragma unroll
      for (int n = 0; n < RT; n++) {
#if SCALAR
        if (q == 0) {
          const float2 two = *reinterpret_cast<const float2*>(prefetched.sheet(0, at) + 8 * n + 2 * quad);
          x[n][0][0] = two.x, x[n][0][1] = two.y;
        }
#else
        const float2 vx = SPLIT ? from_sheet(prefetched.sheet(q, at), n, at) : make_float2(0, 0);
#endif
#pragma unroll
        for (int e = 0; e < 2; e++) {
#if !SCALAR
          x[n][q][e] = e ? vx.y : vx.x;
          if (LENGTHS) x[n][q][e] = pick(valid(n, e, t), x[n][q][e], 0.0f);
          if (MODE_X) x[n][q][e] -= s.y;
#endif
          gate[n][q][e] = gate_of(q, MODE_H ? a[n][q][e] * s.x + (x[n][q % X_GATES][e] * s.z + s.w) : a[n][q][e] * pre(q));
        }
      }
    }
    const float4 of_c = MODE_C ? table[OF_C + within] : make_float4(0, pre(2), 1, 1);
#pragma unroll
    for (int n = 0; n < RT; n++) {
      const float2 dy = DOUTPUT ? from_sheet(prefetched.sheet(4, at), n, at) : make_float2(0, 0);
      const float2 first = prefetched.cells(n);  // of step t - 1
#pragma unroll
      for (int e = 0; e < 2; e++) {
        cell[n][e] = c_t[n][e] - of_c.x;
        c_t[n][e] = e ? first.y : first.x;
        const float th = tanh_of(cell[n][e] * of_c.y + beta);
        const float i = gate[n][0][e], f = gate[n][1][e], g = gate[n][2][e], o = gate[n][3][e];
        through[n][0][e] = g * (i - i * i);
        through[n][1][e] = c_t[n][e] * (f - f * f);
        through[n][2][e] = i - i * (g * g);
        through[n][3][e] = th * (o - o * o);
        through[n][4][e] = o - o * (th * th);
        forgot[n][e] = f;
        dh[n][e] = skip[n][e];
        const float y = e ? dy.y : dy.x;
        if (DOUTPUT) dh[n][e] += LENGTHS ? pick(valid(n, e, t), y, 0.0f) : y;
      }
    }
    __syncwarp();
    if (t > 0) prefetch_rows();
    if (k > 0) {
#pragma unroll
      for (int n = 0; n < RT; n++) write_units(n);
      da -= B * GATES;
    }

    // dh through W_h
    if (k > 0) {
      if (BLOCKS > 1) {
        const u32 barrier = in.barriers + 8 * (now ^ 1);
        await_phase(barrier, u32((k - 1) >> 1));
        if (EXPECTS) expect(barrier, EXPECTED(COUNTED));
      }
      const u32* from = in.shares + (now ^ 1) * BLOCKS * SOURCE + warp * PIECE;
      float sum[2][RT][2] = {};
#pragma unroll
      for (int s = HALVES > 1 ? 0 : 1; s < BLOCKS; s++) {
        Share share;
        share.get(from + s * SOURCE + RT * lane);
        const float factor = TYPE == 0 ? __uint_as_float(from[s * SOURCE + 32 * RT]) : 1.0f;
#pragma unroll
        for (int n = 0; n < RT; n++) {
          const float2 v = unpack(share.words[n]);
          sum[s % 2][n][0] = TYPE == 0 ? fmaf(v.x, factor, sum[s % 2][n][0]) : sum[s % 2][n][0] + v.x;
          sum[s % 2][n][1] = TYPE == 0 ? fmaf(v.y, factor, sum[s % 2][n][1]) : sum[s % 2][n][1] + v.y;
        }
      }
#pragma unroll
      for (int i = 0; i < 2 * RT; i++) dh[i / 2][i % 2] += own_share[i / 2][i % 2];
#pragma unroll
      for (int i = 0; i < 2 * RT; i++) dh[i / 2][i % 2] += sum[0][i / 2][i % 2] + sum[1][i / 2][i % 2];
    }

    // Equation 8
    float dc_hat[RT][2], d_o[RT][2], v_c[2] = {};
#pragma unroll
    for (int n = 0; n < RT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const bool there = valid(n, e, t);
        skip[n][e] = LENGTHS ? pick(there, 0.0f, dh[n][e]) : 0.0f;
        dh[n][e] = pick(there, dh[n][e], 0.0f);
        d_o[n][e] = dh[n][e] * through[n][3][e];
        dc_hat[n][e] = dh[n][e] * through[n][4][e];
        const float c = SUM_C ? cell[n][e] : cell[n][e] * of_c.w;
        v_c[0] = n + e ? v_c[0] + dc_hat[n][e] : dc_hat[n][e];
        v_c[1] = n + e ? v_c[1] + dc_hat[n][e] * c : dc_hat[n][e] * c;
      }
    float4 total_c = make_float4(of_c.z, 0, 0, 0);
    if (SUM_C) {
      sum_cells(in.cell_sums, v_c[0], v_c[1], at);
      done<SUMS_1>();
      if (k > 0) write_gates(0, 2);
      __syncthreads();
      total_c = in.totals[OF_C + within];
    } else {
      sum_c[0] += v_c[0], sum_c[1] += v_c[1];
      if (k > 0) write_gates(0, 2);
    }

    // Equation 7
    float dpre[RT][4][2], v[SUMS][4];
#pragma unroll
    for (int n = 0; n < RT; n++)
#pragma unroll
      for (int e = 0; e < 2; e++) {
        const bool there = valid(n, e, t);
        float d = dc_hat[n][e] * total_c.x;
        if (SUM_C) d += total_c.y + cell[n][e] * total_c.z;
        d = pick(there, d + dc[n][e], 0.0f);
#pragma unroll
        for (int q = 0; q < 3; q++) dpre[n][q][e] = d * through[n][q][e];
        dpre[n][3][e] = d_o[n][e];
        dc[n][e] = LENGTHS ? pick(there, d * forgot[n][e], dc[n][e]) : d * forgot[n][e];
#pragma unroll
        for (int q = 0; q < 4; q++) {
          const float g = dpre[n][q][e];
          const float4 s = MODE_H && !SUM_H ? table[OF_X + q * UNITS + within] : make_float4(1, 1, 1, 1);
          const float left = SUM_H ? a[n][q][e] : a[n][q][e] * s.y, right = SUM_H ? x[n][q % X_GATES][e] : x[n][q % X_GATES][e] * s.z;
          v[0][q] = n + e ? v[0][q] + g : g;
          v[1][q] = !MODE_H ? 0.0f : n + e ? v[1][q] + g * left : g * left;
          v[2][q] = !SUMS_X ? 0.0f : n + e ? v[2][q] + g * right : g * right;
          if (SUMS > 3) v[SUMS - 1][q] = n + e ? v[SUMS - 1][q] + g * s.w : g * s.w;
        }
      }

    // Equation 6
    if (SUM_H) {
      float sum[SUMS];
      sum_gates(sum, v, quad);
      store2(in.scratch + (warp * 32 + lane) * 2, sum[0], sum[1]);
      if (MODE_X) in.x_sums[warp * 32 + lane] = sum[2];
      done<SUMS_2>();
    } else {
#pragma unroll
      for (int n = 0; n < SUMS; n++)
#pragma unroll
        for (int q = 0; q < 4; q++) sum_v[n][q] += v[n][q];
    }
    if (k > 0) write_gates(2, 4), gates_written -= B * GATES;
    if (SUM_H) __syncthreads();
    float d[RT][4][2];
#pragma unroll
    for (int q = 0; q < 4; q++) {
      float4 s = make_float4(1, 0, 0, 0);
      if (MODE_H) s = SUM_H ? in.totals[q * UNITS + within] : table[OF_X + q * UNITS + within];
#pragma unroll
      for (int n = 0; n < RT; n++)
#pragma unroll
        for (int e = 0; e < 2; e++) {
          float g = dpre[n][q][e];
          if (MODE_H) g *= s.x;
          if (SUM_H) g += s.y + a[n][q][e] * s.z;
          d[n][q][e] = pick(valid(n, e, t), g, 0.0f);
        }
    }

    // The shares of dh of all units, for step t - 1.
    float up = 1.0f;
#if TYPE != 0
    const float factor = 1.0f;
#else
    float largest = 0.0f;  // fmaxf ignores NaN
#pragma unroll
    for (int i = 0; i < 8 * RT; i++) largest = fmaxf(largest, fabsf(d[i / 8][i / 2 % 4][i % 2]));
    u32 top = __reduce_max_sync(~0u, __float_as_uint(largest));
    if (top >= 0x7f800000u) {  // ignore infinities, too
      top = 0;
#pragma unroll
      for (int i = 0; i < 8 * RT; i++) top = max(top, finite_magnitude(d[i / 8][i / 2 % 4][i % 2]));
      top = __reduce_max_sync(~0u, top);
    }
    up = scale_up(top) * LESS_D;
    const float factor = undo * scale_down(top);
#endif
    u32 line[RT][4];
#pragma unroll
    for (int n = 0; n < RT; n++)
#pragma unroll
      for (int q = 0; q < 4; q++)
        line[n][q] = turn(TYPE == 0 ? pack(d[n][q][0] * up, d[n][q][1] * up) : pack(d[n][q][0], d[n][q][1]));
#if HALVES > 1
#pragma unroll
    for (int n = 0; n < RT; n++)
      in.lines[((at.tile + n) * HALVES + at.half) * 32 + lane] = make_uint4(line[n][0], line[n][1], line[n][2], line[n][3]);
#if TYPE == 0
    if (lane == 0) in.exponents[warp] = exponent(top);
#endif
#endif
    // The input term's totals are ready at this barrier or, in blocks of 8 units, at the one below.
    if (HALVES > 1 && MEETS_X)
      __syncthreads();
    else if (HALVES > 1)
      meet_workers();

    auto send_shares = [&]() {
#if HALVES > 1
      // All operands are loaded before the first store, behind which the loads would queue.
      uint4 lines[ROW_TILES][HALVES];
#pragma unroll
      for (int i = 0; i < ROW_TILES * HALVES; i++) lines[i / HALVES][i % HALVES] = in.lines[i * 32 + lane];
#if TYPE == 0
      // Factors that bring both halves to the larger of their powers of two, which the lane sends for some rows.
      float down[MW][HALVES];
#pragma unroll
      for (int i = 0; i < MW; i++) {
        const u32 one = in.exponents[i], other = in.exponents[MW + i], most = max(one, other);
        down[i][0] = most - one < 127 ? __uint_as_float((127 - (most - one)) << 23) : 0.0f;
        down[i][1] = most - other < 127 ? __uint_as_float((127 - (most - other)) << 23) : 0.0f;
      }
      const u32 most = max(in.exponents[lane % MW], in.exponents[MW + lane % MW]);
#endif
#pragma unroll
      for (int first = 0; first < MW; first++) {
        float sums[PARTS][TILES][RT][4] = {};
#pragma unroll
        for (int s = 0; s < HALVES; s++)
#pragma unroll
          for (int half = 0; half < 2; half++)
#pragma unroll
            for (int m = 0; m < TILES; m++)
#pragma unroll
              for (int n = 0; n < RT; n++) {
                const uint4 v = lines[first * RT + n][s];
                multiply16(sums[s % PARTS][m][n], w[m][2 * s + half], half ? v.z : v.x, half ? v.w : v.y);
              }
        float(&sum)[TILES][RT][4] = sums[0];
#if TYPE == 0
#pragma unroll
        for (int i = 0; i < TILES * RT * 4; i++) {
          const int m = i / (4 * RT), n = i / 4 % RT, j = i % 4;
          sum[m][n][j] = sum[m][n][j] * down[first][0] + sums[PARTS - 1][m][n][j] * down[first][1];
        }
#endif
        // Send to the warps that own these rows, in both halves.
#pragma unroll
        for (int m = 0; m < TILES; m++)
#pragma unroll
          for (int half = 0; half < HALVES; half++) {
            const u32 i = warp + WARPS * m, from = (now * BLOCKS + i) * SOURCE + (half * MW + first) * PIECE + RT * lane;
            Share share;
#pragma unroll
            for (int n = 0; n < RT; n++) share.words[n] = pack(sum[m][n][2 * half], sum[m][n][2 * half + 1]);
            if (i == 0)
              share.put(in.shares + from);
            else if (i < BLOCKS)
              share.send_to(there[m] + 4 * from, there[m] + barrier_at + now * 8);
          }
      }
#if TYPE == 0
      {  // Send the powers of two: one lane per receiving block and warp.
        const int m = lane / WARPS, to = lane % WARPS;
        const u32 i = warp + WARPS * m, from = (now * BLOCKS + i) * SOURCE + to * PIECE + 32 * RT;
        const uint4 power = make_uint4(__float_as_uint(undo * __uint_as_float((most - 14) << 23)), 0, 0, 0);
        const u32 block = in_block(shared, receiver(i < BLOCKS ? i : 0));
        if (m < TILES && i == 0) *reinterpret_cast<uint4*>(in.shares + from) = power;
        send(m < TILES && 0 < i && i < BLOCKS, block + 4 * from, block + barrier_at + now * 8, power);
      }
#endif
      // The block's share for itself is written by its first warp, which therefore arrives at the barrier.
      if (warp == 0 && BLOCKS > 1) {
        __syncwarp();
        if (EXPECTS) expect(in.barriers + now * 8, 0);
      }
#else
      const u32 buffer = into + now * BLOCKS * SOURCE * 4, barrier = barrier_at + now * 8;
      // Several tiles in parallel, as many as the registers allow.
#pragma unroll
      for (int first = 0; first < TILES; first += BATCH) {
        float sum[BATCH][RT][4] = {};
#pragma unroll
        for (int half = 0; half < 2; half++)
#pragma unroll
          for (int m = 0; m < BATCH; m++)
#pragma unroll
            for (int n = 0; n < RT; n++)
              if (first + m < TILES) multiply16(sum[m][n], w[first + m][half], line[n][2 * half], line[n][2 * half + 1]);
#pragma unroll
        for (int m = 0; m < BATCH; m++)
          if (first + m < TILES)
#pragma unroll
            for (int half = 0; half < 2; half++) {
              const int i = 2 * (first + m) + half;  // the receiver
              if (i == 0)
#pragma unroll
                for (int n = 0; n < RT; n++)
#pragma unroll
                  for (int e = 0; e < 2; e++) own_share[n][e] = TYPE == 0 ? sum[m][n][e] * factor : sum[m][n][e];
              Share share;
#pragma unroll
              for (int n = 0; n < RT; n++) share.words[n] = pack(sum[m][n][2 * half], sum[m][n][2 * half + 1]);
              const u32 there = in_block(shared, receiver(i < BLOCKS ? i : 0));
              if (0 < i && i < BLOCKS) share.send_to(there + buffer + i * SOURCE * 4, there + barrier);
            }
      }
#if TYPE == 0
      const u32 there = in_block(shared, receiver(min(lane, BLOCKS - 1)));
      send(0 < lane && lane < BLOCKS, there + buffer + lane * SOURCE * 4 + 4 * RT * (32 - lane), there + barrier,
           make_uint4(__float_as_uint(factor), 0, 0, 0));
#endif
#endif
    };
    if (t > 0 && !sends_last) send_shares();

    // Keep the gradients in shared memory until they are written.
    if (HALVES == 1 && MEETS_X) __syncthreads();
    __syncwarp();
#if WRITES_GATES
#pragma unroll
    for (int q = 0; q < 4; q++) {
      float4 s = make_float4(1, 0, 0, 0);
      if (SPLIT && MODE_X) s = SUM_H ? in.totals[OF_X + q * UNITS + within] : table[OF_X + q * UNITS + within];
      if (SPLIT && MODE_X && !SUM_H) s = make_float4(s.w, 0, 0, 0);
#pragma unroll
      for (int n = 0; n < RT; n++) {
        float dx[2];
#pragma unroll
        for (int e = 0; e < 2; e++) {
          dx[e] = SPLIT ? dpre[n][q][e] : d[n][q][e];
          if (SPLIT && MODE_X) dx[e] *= s.x;
          if (SPLIT && MODE_X == 1) dx[e] += s.y + x[n][q][e] * s.z;
          if (SPLIT && LENGTHS) dx[e] = pick(valid(n, e, t), dx[e], 0.0f);
        }
        to_sheet(sheet_of(q), n, at, dx[0], dx[1]);
      }
    }
#endif
    if (SPLIT)
#pragma unroll
      for (int n = 0; n < RT; n++) {
#if TYPE == 0
#pragma unroll
        for (int e = 0; e < 2; e++)
          *slot_of(n, e) = make_uint4(__float_as_uint(d[n][0][e]), __float_as_uint(d[n][1][e]), __float_as_uint(d[n][2][e]),
                                      __float_as_uint(d[n][3][e]));
#else
        *slot_of(n, 0) = make_uint4(pack(d[n][0][0], d[n][1][0]), pack(d[n][2][0], d[n][3][0]),
                                    pack(d[n][0][1], d[n][1][1]), pack(d[n][2][1], d[n][3][1]));
#endif
      }
    if (t > 0 && sends_last) send_shares();
  }

  write_all();
#pragma unroll
  for (int n = 0; n < RT; n++)
#pragma unroll
    for (int e = 0; e < 2; e++) {
      const i64 here = (r * B + at.row(n, e)) * H + unit;
      if (!at.in(n, e)) continue;
      p.dh[here] = skip[n][e];
      p.dc[here] = dc[n][e];
    }
  if (!SUM_H) {
    float sum[SUMS];
    sum_gates(sum, sum_v, quad);
    store2(in.scratch + (warp * 32 + lane) * 2, sum[0], sum[1]);
    in.x_sums[warp * 32 + lane] = sum[2];
    if (SUMS > 3) in.mean_sums[warp * 4 * SHEET + lane] = sum[SUMS - 1];
  }
  if (!SUM_C) sum_cells(in.cell_sums, sum_c[0], sum_c[1], at);
  __syncthreads();
}

extern "C" __global__ void __launch_bounds__(LAUNCHED, 1) cluster_backward(const Backward p) {
  extern __shared__ uint4 shared[];
  if (blockIdx.x >= BLOCKS) return;  // the cluster may have idle blocks
  Layout in;
  in.shares = reinterpret_cast<u32*>(shared);
  in.prefetched.scratch = in.shares + 2 * BLOCKS * SOURCE;
  in.pending = in.prefetched.scratch + PREFETCHED;
  in.scratch = reinterpret_cast<float*>(in.pending + PENDING);
  in.mean_sums = reinterpret_cast<float*>(in.pending + RT * 4 * EIGHTH * WORKERS);
  in.x_sums = in.scratch + 64 * WARPS, in.cell_sums = in.x_sums + 32 * WARPS;
  in.given = in.scratch + SCRATCH;
  in.totals = reinterpret_cast<float4*>(in.given + 2 * TABLES);
  in.lines = reinterpret_cast<uint4*>(in.given + 3 * TABLES);
  in.exponents = reinterpret_cast<u32*>(in.given + 3 * TABLES + LINES);
  constexpr int EXPONENTS = HALVES > 1 && TYPE == 0 ? WARPS : 0;
  in.barriers = address_of(in.exponents + EXPONENTS);
  CHECK_SHARED(4 * (2 * BLOCKS * SOURCE + PREFETCHED + PENDING + SCRATCH + 3 * TABLES + LINES + EXPONENTS + 4));
  const Position at = thread_position(p.B);
  if (threadIdx.x == 0)
    for (int i = 0; i < 2; i++) start_barrier(in.barriers + 8 * i, HALVES * ARRIVALS);
  __syncthreads();
  if (EXPECTS && BLOCKS > 1)
    for (int i = 0; i < 2; i++) expect(in.barriers + 8 * i, EXPECTED(COUNTED));
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
