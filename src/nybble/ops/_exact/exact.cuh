// arithmetic.py in CUDA: the same operations in the same order. Every product, sum and quotient names its rounding
// (__fmul_rn, …), which forbids the compiler to contract a product and a sum into one rounding; nothing comes from a
// mathematics library, and subnormal numbers stay (the compiler's default).
//
// DTYPE is 0 for bf16, 1 for fp16, 2 for float32. T holds a value's bits.
#pragma once

typedef unsigned int u32;

#if DTYPE == 2
typedef float T;
#else
typedef unsigned short T;
#endif

#define CANONICAL_NAN __uint_as_float(0x7FC00000u)
#define INFINITE __uint_as_float(0x7F800000u)

__device__ __forceinline__ float from_half(unsigned short bits) {
  float f;
  asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));
  return f;
}
__device__ __forceinline__ unsigned short to_half(float f) {
  unsigned short bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f));
  return bits;
}

__device__ __forceinline__ float wide(T value) {
#if DTYPE == 0
  return __uint_as_float((u32)value << 16);
#elif DTYPE == 1
  return from_half(value);
#else
  return value;
#endif
}

// Rounded to nearest, ties to even; one kind of NaN.
__device__ __forceinline__ T narrow(float f) {
#if DTYPE == 0
  const u32 bits = __float_as_uint(f);
  return f != f ? 0x7FC0 : (T)((bits + 0x7FFFu + (bits >> 16 & 1u)) >> 16);
#elif DTYPE == 1
  return f != f ? 0x7E00 : to_half(f);
#else
  return f != f ? CANONICAL_NAN : f;
#endif
}

// 2^n for whole n from -126 up to 0x7F.
__device__ __forceinline__ float power(int n) { return __uint_as_float((u32)(n + 0x7F) << 23); }

// e^x; the constants are those of arithmetic.py, given by the launcher as the bits of float32.
#define FLOAT(bits) __uint_as_float((u32)(bits))
__device__ __forceinline__ float exact_exp(float x) {
  const float taylor[7] = {FLOAT(EXP_C6), FLOAT(EXP_C5), FLOAT(EXP_C4), FLOAT(EXP_C3), FLOAT(EXP_C2), FLOAT(EXP_C1), FLOAT(EXP_C0)};
  const float t = x != x ? 0.0f : fminf(fmaxf(x, FLOAT(EXP_LOWEST)), FLOAT(EXP_HIGHEST));
  const float n = rintf(__fmul_rn(t, FLOAT(EXP_LOG2_E)));
  const float r = __fsub_rn(__fsub_rn(t, __fmul_rn(n, FLOAT(EXP_LN2_HIGH))), __fmul_rn(n, FLOAT(EXP_LN2_LOW)));
  float y = FLOAT(EXP_C7);
#pragma unroll
  for (int k = 0; k < 7; ++k) y = __fadd_rn(__fmul_rn(y, r), taylor[k]);
  const int whole = (int)n, half = whole >> 1;
  y = __fmul_rn(__fmul_rn(y, power(half)), power(whole - half));
  return x != x ? CANONICAL_NAN : y;
}

// The last steps of a sum in lanes: a block's threads hold one lane each, `room` has a place for each.
template <int N>
__device__ __forceinline__ float fold(float lane, float *room) {
  const int t = threadIdx.x;
  room[t] = lane;
  __syncthreads();
#pragma unroll
  for (int width = N / 2; width; width >>= 1) {
    if (t < width) room[t] = __fadd_rn(room[t], room[t + width]);
    __syncthreads();
  }
  return room[0];
}
