// Scales and codes as triton_codes.py has them, in CUDA: the same operations, every rounding named.
//
// A format's numbers come as macros, floats as their bits: element E_MANTISSA, E_BIAS, E_MAX (its reciprocal as E_INVERSE
// + E_REST), E_MIN, E_STEPS, BITS;
// scale S_MANTISSA, S_BIAS, S_MAX, S_FLOOR, S_NAN, S_TOP, S_MOST; TARGET and MOST of a tensor scale. NATIVE: the GPU
// converts to E4M3 itself. X_FP16: what is read is fp16, else bf16; two values lie in a word.
#pragma once
#include "pairs.cuh"

typedef unsigned char u8;

#define FLOAT(bits) __uint_as_float((u32)(bits))
#define POWER(n) FLOAT((0x7F + (n)) << 23)
#define MAGNITUDE 0x7FFFFFFFu
#define INFINITE 0x7F800000u
#define NAN_VALUE FLOAT(0x7FC00000)
#define TO_WHOLE FLOAT(0x4B400000)  // 1.5 * 2^23: added to |x| < 2^22, the adder rounds x to a whole
#define NATIVE_ELEMENT (NATIVE && BITS == 8 && E_MANTISSA == 3)
#define NATIVE_SCALE (NATIVE && S_BITS == 8 && S_MANTISSA == 3 && S_BIAS == 7)

// Two codes, the first in the low byte.
__device__ __forceinline__ u32 e4m3_pair(float low, float high) {
  u16 pair = 0;
#if NATIVE
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
#endif
  return pair;
}
__device__ __forceinline__ float e4m3_value(u32 code) {
  u32 pair = 0;
#if NATIVE
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(pair) : "h"((u16)code));
#endif
  return from_half((u16)pair);
}

// The scale's code of 0 <= a <= its largest, to nearest even, and the inverse.
__device__ __forceinline__ u32 scale_code(float a) {
#if NATIVE_SCALE
  return e4m3_pair(a, 0.f);
#else
  const int shift = 23 - S_MANTISSA;
  const u32 bits = __float_as_uint(a);
  const u32 normal = ((bits + (bits >> shift & 1) + (1u << (shift - 1)) - 1) >> shift) - ((0x7F - S_BIAS) << S_MANTISSA);
  const float magic = POWER(1 - S_BIAS + shift);
  return a < POWER(1 - S_BIAS) ? __float_as_uint(__fadd_rn(a, magic)) - __float_as_uint(magic) : normal;
#endif
}
__device__ __forceinline__ float scale_value(u32 code) {
#if NATIVE_SCALE
  return e4m3_value(code);
#elif S_BIAS == 0x7F
  return FLOAT(code << (23 - S_MANTISSA));  // the upper bits of a float32, subnormal ones too
#else
  const float below = __fmul_rn((float)code, POWER(1 - S_BIAS - S_MANTISSA));
  return code < (1u << S_MANTISSA) ? below : FLOAT((code + ((0x7F - S_BIAS) << S_MANTISSA)) << (23 - S_MANTISSA));
#endif
}

// a / E_MAX, rounded to nearest: E_MAX is at most 0x7F times a power of two, so that no quotient of 24 bits lies within
// 2^-9 of its last place beside a tie, and 1 / E_MAX as two floats is good to 2^-20 of it, where nothing is subnormal.
__device__ __forceinline__ float over_most(float a) {
  if (a < POWER(-80)) return __fdiv_rn(a, FLOAT(E_MAX));
  return __fmaf_rn(a, FLOAT(E_INVERSE), __fmul_rn(a, FLOAT(E_REST)));
}

struct Scale {
  u32 stored;
  float e;  // for scales that are powers of two 1 / e
};

// The scale of a block whose largest magnitude has these bits; NaN and infinity lie above INFINITE.
__device__ __forceinline__ Scale block_scale(u32 largest, float encode, float decode) {
#if S_MANTISSA == 0
  // One more from 1.75 on; a subnormal largest, which has its exponent only where S_TOP is 0, from 1.75 * 2^-0x7F.
  const u32 quarter = S_TOP == 0 && largest < 1u << 23 ? 1u << 20 : 1u << 21;
  const int near = (int)((largest + quarter) >> 23) - 0x7F - S_TOP;
  const int exponent = min(max(near, -S_BIAS), S_MOST);
  const bool finite = largest < INFINITE;
  const u32 inverse = max((u32)(0x7F - exponent) << 23, 1u << 22);  // 2^-0x7F is subnormal
  return {finite ? (u32)(exponent + S_BIAS) : S_NAN, finite ? FLOAT(inverse) : NAN_VALUE};
#else
  float scale = over_most(__uint_as_float(largest));
  if (TARGET) scale = __fmul_rn(encode, scale);
  const bool finite = (__float_as_uint(scale) & MAGNITUDE) < INFINITE;
#if S_MANTISSA == 23
  const float e = finite ? (scale == 0.f ? FLOAT(S_FLOOR) : scale) : NAN_VALUE;
  return {__float_as_uint(e), e};
#else
  const u32 code = scale_code(fminf(finite ? scale : 0.f, FLOAT(S_MAX)));
  const u32 kept = code == 0 ? S_FLOOR : code;
  const float value = finite ? scale_value(kept) : NAN_VALUE;
  return {finite ? kept : S_NAN, TARGET ? __fmul_rn(value, decode) : value};
#endif
#endif
}

// What a block's values are multiplied by: f, a power of two, and 1 / (e f) as two floats (triton_codes.reciprocal).
struct Divisor {
  float f, high, low;
  bool usual;  // f is 1, and quotients stay in the element's range; a branch otherwise, seldom taken

  __device__ __forceinline__ explicit Divisor(float e) : f(1.f), high(e), low(0.f), usual(true) {
    if (S_MANTISSA == 0) return;
    f = e < POWER(-60) ? POWER(80) : e > POWER(60) ? POWER(-80) : 1.f;
    usual = f == 1.f;
    const float scaled = __fmul_rn(e, f);
    high = __fdiv_rn(1.f, scaled);
    const float left = __fmaf_rn(-scaled, high, 1.f), first = __fmul_rn(left, high);
    low = __fmaf_rn(left, first, first);
  }
  // x over e, on the right side of every tie: x has at most eleven bits (triton_codes.quotient).
  template <bool USUAL> __device__ __forceinline__ float quotient(float x) const {
    if (!USUAL) x = __fmul_rn(x, f);
    float q = S_MANTISSA == 0 ? __fmul_rn(x, high) : __fmaf_rn(x, high, __fmul_rn(x, low));
    if (E_MANTISSA == 0 && (BLOCK > 0 || !USUAL)) q = fminf(fmaxf(q, FLOAT(E_MIN)), FLOAT(E_MAX));
    return q;
  }
};

// The code of x's quotient q (triton_codes.element_code). Of eight bits, it is in the low byte. Of four, it is what the sum
// exceeds TO_WHOLE's bits by: a magnitude, whose sign is added later, or an integer that may be negative.
__device__ __forceinline__ u32 element_code(float q, float x) {
#if E_MANTISSA == 0
  return __float_as_uint(__fmaf_rn(q, FLOAT(E_STEPS), TO_WHOLE));
#elif BITS == 4
  const float a = fminf(fabsf(q), FLOAT(E_MAX));
  u32 code = __float_as_uint(__fmaf_rn(a, POWER(E_MANTISSA + E_BIAS - 1), TO_WHOLE));
#pragma unroll
  for (int i = 1; i < (1 << (BITS - 1 - E_MANTISSA)) - 1; ++i)
    code = min(code, __float_as_uint(__fmaf_rn(a, POWER(E_MANTISSA + E_BIAS - 1 - i), TO_WHOLE + (i << E_MANTISSA))));
  return code;
#else
  const int shift = 23 - E_MANTISSA;
  const float a = fminf(fabsf(q), FLOAT(E_MAX));
  const u32 power = __float_as_uint(fmaxf(a, POWER(1 - E_BIAS))) & INFINITE;
  const u32 near = __float_as_uint(__fadd_rn(a, FLOAT(power + (shift << 23))));
  const u32 first = ((1 + 0x7F - E_BIAS) << E_MANTISSA) + (shift << 23);
  return (near - power - first + (power >> shift)) | (__float_as_uint(x) >> 24 & 0x80u);
#endif
}

// The codes of a word's two values: in the low bytes, or the second one four bits above the first.
template <bool USUAL> __device__ __forceinline__ u32 two_codes(u32 both, const Divisor &by) {
  const float low = low_of(both), high = high_of(both);
  const float first = by.quotient<USUAL>(low), second = by.quotient<USUAL>(high);
#if NATIVE_ELEMENT  // the sign is that of x: a zero quotient's may have been lost
  return e4m3_pair(copysignf(first, low), copysignf(second, high));
#elif BITS == 8
  return __byte_perm(element_code(first, low), element_code(second, high), 0x0040);
#else
  return element_code(first, low) + (element_code(second, high) << BITS);
#endif
}

// Eight codes of four bits: their sum in place, less what every one exceeds its code by, and the signs of the values,
// which are the top bits of their upper bytes.
template <bool USUAL> __device__ __forceinline__ u32 eight_codes(const u32 *w, const Divisor &by) {
  u32 codes = 0u - __float_as_uint(TO_WHOLE) * 0x11111111u;
#pragma unroll
  for (int i = 0; i < 4; ++i) codes += two_codes<USUAL>(w[i], by) << 8 * i;
#if E_MANTISSA == 0
  return (codes + 0x88888888u) ^ 0x88888888u;
#else
  const u32 a = __byte_perm(w[0], w[1], 0x7351), b = __byte_perm(w[2], w[3], 0x7351);
  const u32 first = __byte_perm(a, b, 0x5410), second = __byte_perm(a, b, 0x7632);
  return codes | (first >> 4 & 0x08080808u) | (second & 0x80808080u);
#endif
}
