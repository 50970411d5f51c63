// rope_cache_exact_: a block a token, a thread a pair of values.
#include "exact.cuh"

struct Arguments {
  const T *qkv;
  const float *cos, *sin;
  T *k_cache, *v_cache;
  const int *rows, *positions;
  T *q;
  int query_heads, kv_heads, half, capacity;
};

extern "C" __global__ void __launch_bounds__(THREADS) rope_cache_exact(const Arguments a) {
  const int d = 2 * a.half, turned = a.query_heads + a.kv_heads, position = a.positions[blockIdx.x];
  const T *qkv = a.qkv + (long long)blockIdx.x * (turned + a.kv_heads) * d;
  const float *cos = a.cos + (long long)position * a.half, *sin = a.sin + (long long)position * a.half;
  // Of a cache [B, Hkv, S, D]: where this token's entry of head 0 begins, and how far the next head is.
  const long long step = (long long)a.capacity * d, entry = a.rows[blockIdx.x] * a.kv_heads * step + position * d;
  for (int n = threadIdx.x; n < turned * a.half; n += THREADS) {
    const int head = n / a.half, i = n % a.half;
    const float low = wide(qkv[head * d + i]), high = wide(qkv[head * d + a.half + i]);
    T *to = head < a.query_heads ? a.q + ((long long)blockIdx.x * a.query_heads + head) * d
                                 : a.k_cache + entry + (head - a.query_heads) * step;
    to[i] = narrow(__fsub_rn(__fmul_rn(low, cos[i]), __fmul_rn(high, sin[i])));
    to[a.half + i] = narrow(__fadd_rn(__fmul_rn(high, cos[i]), __fmul_rn(low, sin[i])));
  }
  for (int n = threadIdx.x; n < a.kv_heads * d; n += THREADS)
    a.v_cache[entry + n / d * step + n % d] = qkv[turned * d + n];
}
