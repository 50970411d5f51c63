// Elements and scales of a weight, from the bits of layouts_gpu.py to the operand registers of mma.m16n8k16.
//
// A tile is 16 rows x 64 columns, cut into four steps of 16 columns. For a step, a lane holds 8 codes: pair p = 0..3
// belongs to operand register a[p] and to row (lane / 4) + 8 * (p & 1). The two codes of a pair lie at the same
// position of the two 16-bit halves of a word, so one shift and one mask bring a pair into place.
//
// No CUDA header is included: the few instructions needed are written as PTX, which keeps run-time compilation fast
// and free of a toolkit. The including file is compiled with these definitions (config.py derives them from a row
// of formats/table.py):
//   X_FP16       0: activations are bf16, 1: fp16
//   CODE         INT, FLOAT4, FLOAT8 or TABLE; BITS, ZERO_POINT (0/1), EXPONENT_BITS, MANTISSA_BITS, ELEMENT_BIAS
//   SCALE        S_BF16, S_FP16, S_FP32 or S_FLOAT8; SCALE_MANTISSA_BITS, SCALE_BIAS; GROUP = 16, 32 or 64
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

#define INT 0
#define FLOAT4 1
#define FLOAT8 2
#define TABLE 3
#define S_BF16 0
#define S_FP16 1
#define S_FP32 2
#define S_FLOAT8 3

// A wide float's layout: where the mantissa ends, its bias, and 2^mantissa_bits (the numbers from here on count 1).
#if X_FP16
#define X_MANTISSA 10
#define X_BIAS 15
#else
#define X_MANTISSA 7
#define X_BIAS 127
#endif
#define SPLAT(half) ((u32)(half) * 0x10001u)
#define POWER(exponent) SPLAT(((exponent) + X_BIAS) << X_MANTISSA)  // 2^exponent, twice
#define UNIT POWER(X_MANTISSA)                                      // 2^mantissa_bits: its ulp is 1
#define SIGN 0x80008000u

__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
  u32 d;
#if X_FP16
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#else
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
#endif
  return d;
}
__device__ __forceinline__ u32 add2(u32 a, u32 b) { return fma2(a, POWER(0), b); }
__device__ __forceinline__ u32 mul2(u32 a, u32 b) { return fma2(a, b, SIGN); }  // -0 as addend keeps every sign
template <int N> __device__ __forceinline__ u32 shift_left(u32 w) { return N >= 0 ? w << (N & 31) : w >> (-N & 31); }

__device__ __forceinline__ float bf16_float(u32 bits) { return __uint_as_float(bits << 16); }
__device__ __forceinline__ float fp16_float(u32 bits) {
  float f;
  asm("{.reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h;}" : "=f"(f) : "r"(bits));
  return f;
}
__device__ __forceinline__ float x_float(u32 bits) { return X_FP16 ? fp16_float(bits) : bf16_float(bits); }
__device__ __forceinline__ unsigned short float_x(float f) {
  unsigned short h;
#if X_FP16
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
#else
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
#endif
  return h;
}

// ---- elements

#if CODE == INT
// OR-ing n bits under the exponent of UNIT makes UNIT + n exactly; subtracting UNIT + 2^(bits-1) + zero_point leaves
// the element. Two's complement becomes offset binary by the XOR that places the exponent, so it costs nothing.
#define OFFSET (1 << (BITS - 1))
#define PLACED SPLAT((UNIT & 0xFFFF) ^ OFFSET)
__device__ __forceinline__ u32 zero_term(int zero_point) {  // -(UNIT + offset + zero point), twice
#if X_FP16 || BITS < 8
  return SPLAT((UNIT & 0xFFFF) | 0x8000) + SPLAT(OFFSET + zero_point);
#else
  return SPLAT(float_x(-(float)zero_point));
#endif
}
__device__ __forceinline__ u32 element(u32 bits, u32 zero) {
#if X_FP16 || BITS < 8
  return add2((bits & SPLAT((1 << BITS) - 1)) ^ PLACED, zero);
#else
  // Eight bits do not fit under bf16's seven: the top bit moves the subtrahend from 2^7 to 2^8 instead.
  const u32 low = (bits & SPLAT(0x7F)) | UNIT, high = (bits & SPLAT(0x80)) | UNIT | SIGN;
  const u32 value = add2(low, high);
  return ZERO_POINT ? add2(value, zero) : value;
#endif
}
#elif CODE == FLOAT8
// The code's exponent and mantissa go to the bottom of the wide exponent field; multiplying by 2^(difference of the
// biases) makes the value, subnormals included.
#define FIELD SPLAT((((1 << (EXPONENT_BITS + MANTISSA_BITS)) - 1) << X_MANTISSA) >> MANTISSA_BITS)
__device__ __forceinline__ u32 element(u32 high_bytes, u32) {
  const u32 magnitude = shift_left<X_MANTISSA - MANTISSA_BITS - 8>(high_bytes) & FIELD;
  return mul2((high_bytes & SIGN) | magnitude, POWER(X_BIAS - ELEMENT_BIAS));
}
#endif

// Words of a lane's tile: step j decodes into a[0..3]. `words` holds BITS words; `zero` one term for each of the rows.
__device__ __forceinline__ void decode_step(const u32 *words, int j, const u32 *zero, const u32 *table, u32 *a) {
#if CODE == INT && BITS == 4
#pragma unroll
  for (int p = 0; p < 4; ++p) a[p] = element(words[j] >> (4 * p), zero[p & 1]);
#elif CODE == INT && BITS == 2
#pragma unroll
  for (int p = 0; p < 4; ++p) a[p] = element(words[j >> 1] >> (8 * (j & 1) + 2 * p), zero[p & 1]);
#elif CODE == INT && BITS == 3
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const u32 low = (words[j >> 1] >> (8 * (j & 1) + 2 * p)) & SPLAT(3);
    const u32 high = p + 4 * j >= 2 ? words[2] >> (p + 4 * j - 2) : words[2] << (2 - p - 4 * j);
    a[p] = element(low | (high & SPLAT(4)), zero[p & 1]);
  }
#elif CODE == INT && BITS == 8
#pragma unroll
  for (int p = 0; p < 4; ++p) a[p] = element(words[2 * j + (p >> 1)] >> (8 * (p & 1)), zero[p & 1]);
#elif CODE == FLOAT8
#pragma unroll
  for (int p = 0; p < 4; ++p) a[p] = element(words[2 * j + (p >> 1)] << (8 * (1 - (p & 1))), 0);
#elif CODE == FLOAT4
  // Spread by layouts_gpu.py so that three pairs lie in place up to a shift: sign at 15, magnitude below the
  // exponent's end. The fourth takes the bits left over: sign 14, then 13, 11, 10.
  const u32 w = words[j];
  a[0] = w, a[1] = w << 3, a[2] = w << 6;
  a[3] = ((w << 1) & SIGN) | ((w >> 5) & SPLAT(0x0100)) | ((w >> 4) & SPLAT(0x00C0));
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const u32 magnitude = shift_left<X_MANTISSA - 6 - MANTISSA_BITS>(a[p] & SPLAT(0x01C0));
    a[p] = mul2(magnitude | (a[p] & SIGN), POWER(X_BIAS - ELEMENT_BIAS));
  }
#elif CODE == TABLE
  // Two codes make an index of 8 bits; each lane looks it up in a bank of its own.
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const u32 pair = (words[j] >> (4 * p)) & SPLAT(0xF);
    a[p] = table[((pair | pair >> 12) & 0xFF) * 32];
  }
#endif
}

// ---- scales: what a lane needs for a tile is [row 0/8][64 / GROUP], contiguous

#define GROUPS (64 / GROUP)
#if SCALE == S_FP32
#define SCALE_SIZE 4
#elif SCALE == S_FLOAT8
#define SCALE_SIZE 1
#else
#define SCALE_SIZE 2
#endif
#define SCALE_BYTES (2 * GROUPS * SCALE_SIZE)

__device__ __forceinline__ float scale_value(const u32 *words, int index) {
#if SCALE == S_FP32
  return __uint_as_float(words[index]);
#elif SCALE == S_BF16
  return __uint_as_float(index & 1 ? words[index >> 1] & 0xFFFF0000u : words[index >> 1] << 16);
#elif SCALE == S_FP16
  return fp16_float(words[index >> 1] >> (16 * (index & 1)) & 0xFFFF);
#elif SCALE_MANTISSA_BITS == 0
  // A bare power of two: exponent 0 and the NaN code need a mantissa bit of their own in float32.
  const u32 code = words[index >> 2] >> (8 * (index & 3)) & 0xFF;
  return __uint_as_float(code << 23 | (((code + 1) & 0xFF) < 2 ? 0x00400000u : 0u));
#else
  const int up = 23 - SCALE_MANTISSA_BITS - 8 * (index & 3);
  const u32 word = words[index >> 2];
  const u32 bits = (up >= 0 ? word << (up & 31) : word >> (-up & 31)) & (SCALE_CODE_MASK << (23 - SCALE_MANTISSA_BITS));
  return __uint_as_float(bits) * __uint_as_float((254 - SCALE_BIAS) << 23);
#endif
}
