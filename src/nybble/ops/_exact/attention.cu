// attention_exact in two kernels: one block a run of SPLIT entries, a key head and a token; then the runs put together.
// HEAD is D, GROUP the query heads that share a key head.
#include "exact.cuh"

struct Arguments {
  const T *q, *k_cache, *v_cache;
  const int *rows, *positions;
  float *parts;  // [N, Hq, runs, HEAD]: a run's sum of e v
  float *most;   // [N, Hq, runs]: its largest score
  float *sums;   // [N, Hq, runs]: its sum of e
  T *o;
  int kv_heads, capacity, runs;
  float scale;
};

#define THREADS 256
#define COLUMNS (THREADS / VALUE_LANES)
#define WORDS (HEAD * (int)sizeof(T) / 4)
#define PER_WORD (4 / (int)sizeof(T))

// One query head against one key: DOT_LANES chains, folded.
__device__ __forceinline__ float dot(const float *query, const T *key) {
  float lane[DOT_LANES];
#pragma unroll
  for (int l = 0; l < DOT_LANES; ++l) lane[l] = 0.0f;
#pragma unroll
  for (int d = 0; d < HEAD; ++d) lane[d % DOT_LANES] = __fadd_rn(lane[d % DOT_LANES], __fmul_rn(query[d], wide(key[d])));
#pragma unroll
  for (int width = DOT_LANES / 2; width; width >>= 1)
#pragma unroll
    for (int l = 0; l < width; ++l) lane[l] = __fadd_rn(lane[l], lane[l + width]);
  return lane[0];
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_exact_runs(const Arguments a) {
  __shared__ float query[GROUP][HEAD], score[GROUP][SPLIT], lanes[GROUP][DOT_LANES];
  __shared__ float part[GROUP][VALUE_LANES][COLUMNS];
  __shared__ u32 keys[SPLIT][WORDS + 1];  // one word more, so that a column's rows lie in different banks
  const int t = threadIdx.x, token = blockIdx.x / a.kv_heads, head = blockIdx.x % a.kv_heads, first = blockIdx.y * SPLIT;
  const int visible = a.positions[token] + 1 - first, count = visible < SPLIT ? visible : SPLIT;
  if (count <= 0) return;
  const long long start = (((long long)a.rows[token] * a.kv_heads + head) * a.capacity + first) * HEAD;
  const u32 *k = (const u32 *)(a.k_cache + start);
  const T *v = a.v_cache + start, *q = a.q + (long long)blockIdx.x * GROUP * HEAD;
  for (int n = t; n < GROUP * HEAD; n += THREADS) query[n / HEAD][n % HEAD] = wide(q[n]);
  for (int n = t; n < count * WORDS; n += THREADS) keys[n / WORDS][n % WORDS] = k[n];
  __syncthreads();
  for (int n = t; n < GROUP * SPLIT; n += THREADS) {
    const int g = n / SPLIT, j = n % SPLIT;
    score[g][j] = j < count ? __fmul_rn(dot(query[g], (const T *)keys[j]), a.scale) : -INFINITE;
  }
  __syncthreads();
  for (int n = t; n < GROUP * DOT_LANES; n += THREADS) {
    float most = -INFINITE;
    for (int j = n % DOT_LANES; j < SPLIT; j += DOT_LANES) most = fmaxf(most, score[n / DOT_LANES][j]);
    lanes[n / DOT_LANES][n % DOT_LANES] = most;
  }
  __syncthreads();
  const long long out = ((long long)blockIdx.x * GROUP) * a.runs + blockIdx.y;  // of group 0; the next is `runs` on
  for (int n = t; n < GROUP * SPLIT; n += THREADS) {
    const int g = n / SPLIT, j = n % SPLIT;
    float most = lanes[g][0];
    for (int l = 1; l < DOT_LANES; ++l) most = fmaxf(most, lanes[g][l]);
    score[g][j] = j < count ? exact_exp(__fsub_rn(score[g][j], most)) : 0.0f;
    if (j == 0) a.most[out + (long long)g * a.runs] = most;
  }
  __syncthreads();
  for (int g = t; g < GROUP; g += THREADS) {
    float lane[DOT_LANES];
    for (int l = 0; l < DOT_LANES; ++l) {
      lane[l] = 0.0f;
      for (int j = l; j < SPLIT; j += DOT_LANES) lane[l] = __fadd_rn(lane[l], score[g][j]);
    }
    for (int width = DOT_LANES / 2; width; width >>= 1)
      for (int l = 0; l < width; ++l) lane[l] = __fadd_rn(lane[l], lane[l + width]);
    a.sums[out + (long long)g * a.runs] = lane[0];
  }
  for (int base = 0; base < HEAD; base += COLUMNS) {
    const int l = t / COLUMNS, d = base + t % COLUMNS;
    float sum[GROUP];
    for (int g = 0; g < GROUP; ++g) sum[g] = 0.0f;
    for (int j = l; j < count && d < HEAD; j += VALUE_LANES) {
      const float value = wide(v[(long long)j * HEAD + d]);
#pragma unroll
      for (int g = 0; g < GROUP; ++g) sum[g] = __fadd_rn(sum[g], __fmul_rn(score[g][j], value));
    }
    for (int g = 0; g < GROUP; ++g) part[g][l][t % COLUMNS] = sum[g];
    __syncthreads();
    for (int n = t; n < GROUP * COLUMNS; n += THREADS) {
      const int g = n / COLUMNS, c = n % COLUMNS;
      for (int width = VALUE_LANES / 2; width; width >>= 1)
        for (int i = 0; i < width; ++i) part[g][i][c] = __fadd_rn(part[g][i][c], part[g][i + width][c]);
      if (base + c < HEAD) a.parts[(out + (long long)g * a.runs) * HEAD + base + c] = part[g][0][c];
    }
    __syncthreads();
  }
}

extern "C" __global__ void __launch_bounds__(THREADS) attention_exact_sum(const Arguments a) {
  __shared__ float share[THREADS];
  const int t = threadIdx.x, token = blockIdx.x / (a.kv_heads * GROUP), used = a.positions[token] / SPLIT + 1;
  const long long out = (long long)blockIdx.x * a.runs;
  float most = -INFINITE;
  for (int r = 0; r < used; ++r) most = fmaxf(most, a.most[out + r]);
  float total = 0.0f, sum = 0.0f;
  for (int base = 0; base < used; base += THREADS) {
    __syncthreads();
    if (base + t < used) share[t] = exact_exp(__fsub_rn(a.most[out + base + t], most));
    __syncthreads();
    for (int r = base; r < used && r < base + THREADS && t < HEAD; ++r) {
      total = __fadd_rn(total, __fmul_rn(share[r - base], a.sums[out + r]));
      sum = __fadd_rn(sum, __fmul_rn(share[r - base], a.parts[(out + r) * HEAD + t]));
    }
  }
  if (t < HEAD) a.o[(long long)blockIdx.x * HEAD + t] = narrow(__fdiv_rn(sum, total));
}
