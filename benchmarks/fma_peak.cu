// The float32 units at their best: sixteen independent chains of fused multiply-adds a thread, nothing else.
struct Arguments {
  float *out;
  int rounds;
  float a, b;
};
extern "C" __global__ void __launch_bounds__(256) fma_peak(const Arguments p) {
  float sum[16];
#pragma unroll
  for (int i = 0; i < 16; ++i) sum[i] = threadIdx.x + i;
#pragma unroll 1
  for (int round = 0; round < p.rounds; ++round)
#pragma unroll
    for (int i = 0; i < 16 * 16; ++i) sum[i % 16] = __fmaf_rn(sum[i % 16], p.a, p.b);
  float total = 0;
#pragma unroll
  for (int i = 0; i < 16; ++i) total += sum[i];
  if (total == p.b) p.out[threadIdx.x] = total;
}
