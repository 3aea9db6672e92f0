// The arguments of the LSTM's kernels, forward and backward, the same for all families (cuda_kernels.py). Those that a
// family, or a call, does not need are null.
#if SCALAR
typedef float Input;
#else
typedef Element Input;
#endif

struct Forward {
  const Input* wx;        // [R, T, B, 4H]; if SCALAR x [R, T, X_ROWS]
  const Element* weight;  // [R, 4H, H]
  const float *bias, *gamma_x, *gamma_h, *gamma_c, *beta_c;
  const float *mean_x, *var_x;             // [R, rows_x, 4H]; if SCALAR and MODE_X = 1, var_x is that of x, [R, rows_x]
  float *mean_h, *var_h, *mean_c, *var_c;  // [R, rows, features]: read if given, else written
  Element* hs;         // [R, T + 1, B, HS], in `cluster` [R, T + 1, B, H]; hs[:, 0] is h0
  float* cs;           // cells for the backward pass; each family has its own layout of these two
  Element* wh;         // W_h h minus its mean, or without a norm the pre-activations, likewise
  const float* c0;     // [R, B, H]
  float *h_n, *c_n;    // [R, B, H]; h_n only with LENGTHS
  const int* lengths;  // [B]
  const float* inv_n;  // [T]
  u32* counter;        // `portable`: [R], initially zero
  const float* w;      // if SCALAR: [R, 4H]
  uint4* passed;       // `grid`: [R, SPLITS, BUFFERS, STEP_WORDS], initially zero: h of the last two steps
  uint4* spilled;      // `grid`: [R, SPLITS, GRID, FIRST + SECOND, GROUP_WORDS]: non-resident weights
  u32* barriers;       // `grid`: [R, SPLITS, TEAM, 32], initially zero: counters of the slices
  const unsigned char *mask_c, *mask_h;  // `grid`: [R, T, B, H]
  int T, B, rows_x, rows_h, rows_c;
  float eps, rate_c, rate_h;
};

struct Backward {
  const Input* wx;        // these as in the forward kernel
  const Element* weight;  // [R, H, 4H], transposed; in `grid` [R, 4H, H]
  const float *bias, *gamma_x, *gamma_h, *gamma_c, *beta_c;
  const float *mean_x, *var_x, *mean_h, *var_h, *mean_c, *var_c;
  const float* cs;
  const Element* wh;
  const int* lengths;
  const float* inv_n;
  const Element* doutput;  // [R, T, B, H]
  float *dh, *dc;          // [R, B, H]: read as dh_n and dc_n; written: the part of dh0 that bypasses W_h, and dc0
  Element* da;             // d(W_h h): [R, T, B, 4H], in `cluster` if SPLIT [R, T, B, H, 4]
  Input* dwx;              // [R, T, B, 4H]; if SCALAR d(w) [R, 4H]
  float *dbias, *dgamma_x, *dgamma_h, *dgamma_c, *dbeta_c;
  u32* counter;
  const float* w;
  uint4* passed;   // initially zero: d(W_h h) of the last two steps
  uint4* spilled;
  u32* barriers;
  uint4* handed;   // `grid`: [R, SPLITS, HANDED_WORDS], initially zero: the team's sums and scales, see grid_team.cuh
  const unsigned char *mask_c, *mask_h;
  int T, B, rows_x, rows_h, rows_c;
  float eps, rate_c, rate_h;
};
