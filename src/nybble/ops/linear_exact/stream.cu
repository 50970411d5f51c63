// linear_exact for few tokens: the weight streams past once for TOKENS tokens, a warp for each ROWS of its rows.
//
// Lane c keeps chain c of the definition (reference.py): its 16 bytes of every 512 are the chain's next eight columns,
// so a warp reads rows in whole lines, and a lane multiplies and adds in the chain's own order. The 32 chains of an
// output are added up by one lane, in order. x comes through L1, where it stays.
#include "numbers.cuh"

#define WARPS 4

// sum += the products of one run.
__device__ __forceinline__ void multiply(float (*sum)[TOKENS], u32 (*raw)[W_WORDS], const Scale *scale,
                                         const char *const *x, long long x_at) {
  float w[ROWS][RUN];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) widen_weight(w[r], raw[r], scale[r]);
#pragma unroll
  for (int m = 0; m < TOKENS; ++m) {
    u32 bits[X_WORDS];
    float a[RUN];
    read_shared_by_many<X_WORDS>(bits, x[m] + x_at);
    widen<X_KIND>(a, bits);
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
      for (int i = 0; i < RUN; ++i) sum[r][m] = __fmaf_rn(a[i], w[r][i], sum[r][m]);
  }
}

// COUNT turns of the lane's chain: all of the weight is asked for before any of it is used.
template <int COUNT>
__device__ __forceinline__ void turns(float (*sum)[TOKENS], const Arguments &p, const char *const *w, const char *const *x,
                                      int row0, int turn) {
  u32 raw[COUNT][ROWS][W_WORDS];
  Scale scale[COUNT][ROWS];
#pragma unroll
  for (int u = 0; u < COUNT; ++u)
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
      read_once<W_WORDS>(raw[u][r], w[r] + (long long)(turn + u) * (CHAINS * W_WORDS * 4));
      scale[u][r] = scale_of(p, min(row0 + r, p.N - 1), (turn + u) * SPAN + threadIdx.x % 32 * RUN);
    }
#pragma unroll
  for (int u = 0; u < COUNT; ++u) multiply(sum, raw[u], scale[u], x, (long long)(turn + u) * (SPAN * X_BYTES));
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) linear_exact_stream(const Arguments p) {
  __shared__ float chains[WARPS][ROWS * TOKENS][CHAINS + 1];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int row0 = (blockIdx.x * WARPS + warp) * ROWS, token0 = blockIdx.y * TOKENS;
  if (row0 >= p.N) return;
  const char *w[ROWS], *x[TOKENS];
#pragma unroll
  for (int r = 0; r < ROWS; ++r) w[r] = p.w + min(row0 + r, p.N - 1) * p.w_row + lane * (W_WORDS * 4);
#pragma unroll
  for (int m = 0; m < TOKENS; ++m) x[m] = p.x + min(token0 + m, p.M - 1) * p.x_row + lane * (RUN * X_BYTES);
  float sum[ROWS][TOKENS] = {};
  const int mine = (p.K - lane * RUN + SPAN - 1) / SPAN;  // turns; none where the chain has no columns
  int turn = 0;
#pragma unroll 1
  for (; turn + UNROLL <= mine; turn += UNROLL) turns<UNROLL>(sum, p, w, x, row0, turn);
#pragma unroll 1
  for (; turn < mine; ++turn) turns<1>(sum, p, w, x, row0, turn);

#pragma unroll
  for (int i = 0; i < ROWS * TOKENS; ++i) chains[warp][i][lane] = sum[i / TOKENS][i % TOKENS];
  __syncwarp();
  const int row = row0 + lane / TOKENS, token = token0 + lane % TOKENS;
  if (lane >= ROWS * TOKENS || row >= p.N || token >= p.M) return;
  float total = 0;
#pragma unroll
  for (int c = 0; c < CHAINS; ++c) total = __fadd_rn(total, chains[warp][lane][c]);
  store(p, token, row, total);
}
