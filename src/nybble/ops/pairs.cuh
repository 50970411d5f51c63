// Two 16-bit values in a word, to float32 and back, rounded to nearest, ties to even. X_FP16, if defined: fp16, else bf16.
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;

__device__ __forceinline__ float from_half(u16 bits) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
  return f;
}
template <bool FP16> __device__ __forceinline__ u32 pack(float low, float high) {
  u32 both;
  if (FP16)
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  else
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
  return both;
}
#ifdef X_FP16
__device__ __forceinline__ float low_of(u32 both) { return X_FP16 ? from_half((u16)both) : __uint_as_float(both << 16); }
__device__ __forceinline__ float high_of(u32 both) {
  return X_FP16 ? from_half((u16)(both >> 16)) : __uint_as_float(both & 0xFFFF0000u);
}
__device__ __forceinline__ u32 rounded(float low, float high) { return pack<X_FP16>(low, high); }
#endif
