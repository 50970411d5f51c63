// What the kernels of narrow products share: W's scales, floats and matrices in shared memory, a look at a barrier.
// Definitions: W_GROUPED (whether they change along K), W_SCALE (0 bf16, 1 fp16, 2 fp32).
#pragma once

__device__ __forceinline__ float half_float(unsigned short half, bool fp16) {
  float wide = __uint_as_float((u32)half << 16);
  if (fp16) asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half));
  return wide;
}
// W's scale of row n and a group; beyond the last row or group it is theirs.
template <class Arguments> __device__ __forceinline__ float w_scale(const Arguments &p, int n, int group) {
  const int row = min(n, p.N - 1) >> p.w_shift;
  const long long at = W_GROUPED ? (long long)row * p.groups + min(group, p.groups - 1) : row;
  return W_SCALE == 2 ? ((const float *)p.w_scale)[at] : half_float(((const unsigned short *)p.w_scale)[at], W_SCALE);
}

__device__ __forceinline__ float read_float(u32 from) {
  float value;
  asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from));
  return value;
}
__device__ __forceinline__ float2 read_two(u32 from) {
  float2 two;
  asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(two.x), "=f"(two.y) : "r"(from));
  return two;
}
__device__ __forceinline__ void write_float(u32 to, float value) {
  asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");
}
// Four 8x8 matrices of 16-bit values as they are; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_rows(u32 to, const u32 *from) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]) : "memory");
}
// Whether a barrier's phase is over, without waiting for it.
__device__ __forceinline__ bool barrier_over(u32 barrier, u32 parity) {
  u32 over;
  asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
               : "=r"(over) : "r"(barrier), "r"(parity) : "memory");
  return over;
}
