// Elements and scales of a weight, from the bits of layouts_gpu.py to the operand registers of mma.m16n8k16.
//
// A tile is 16 rows x 128 columns, cut into eight steps of 16 columns. For a step, a lane holds 8 codes: pair p = 0..3
// belongs to operand register a[p] and to row (lane / 4) + 8 * (p & 1). The two codes of a pair lie at the same
// position of the two 16-bit halves of a word, so one shift and one mask bring a pair into place.
//
// No CUDA header is included: the few instructions needed are written as PTX, which keeps run-time compilation fast
// and free of a toolkit. The including file is compiled with these definitions (config.py derives them from a row
// of formats/table.py):
//   X_FP16       0: activations are bf16, 1: fp16
//   CODE         INT, FLOAT4, FLOAT8 or TABLE; BITS, ZERO_POINT (0/1), EXPONENT_BITS, MANTISSA_BITS, ELEMENT_BIAS
//   FOLD         1: the scale multiplies the element instead of the sum, which is exact for short elements and scales;
//                FOLD_UP: how far scales are raised; both together are then 2^(FOLD_UP - X_BIAS + ELEMENT_BIAS) too large
//   ROW_SCALE    1: one scale for the whole row, which is left to the end
//   SCALE        S_BF16, S_FP16, S_FP32 or S_FLOAT8; SCALE_MANTISSA_BITS, SCALE_BIAS; GROUP = 16, 32, 64 or 128
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;

// INT_TAKES_SCALE (an including file may define it as 1): integers are made times 2^INT_SCALE_UP times their scale.
#ifndef INT_TAKES_SCALE
#define INT_TAKES_SCALE 0
#endif
#define INT_SCALE_UP 96

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
__device__ __forceinline__ u32 mul2(u32 a, u32 b) { return fma2(a, b, SIGN); }  // -0 as addend keeps every sign
// (a & mask) | bits, (a & mask) ^ bits, and a's bits under the mask with b's elsewhere, as the one instruction each is;
// two constants would otherwise make two.
__device__ __forceinline__ u32 and_or(u32 a, u32 mask, u32 bits) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xEA;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
}
__device__ __forceinline__ u32 and_xor(u32 a, u32 mask, u32 bits) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0x6A;" : "=r"(d) : "r"(a), "r"(mask), "r"(bits));
  return d;
}
__device__ __forceinline__ u32 select(u32 a, u32 b, u32 mask) {
  u32 d;
  asm("lop3.b32 %0, %1, %2, %3, 0xE4;" : "=r"(d) : "r"(a), "r"(b), "r"(mask));
  return d;
}
template <int N> __device__ __forceinline__ u32 rotate_left(u32 w) { return __funnelshift_l(w, w, N); }
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
// The lowest X_MANTISSA + 1 bits of a wide float, taken alone, are a plain integer times the smallest subnormal: the
// first normal binade has the subnormals' step. So masking a field gives its integer times a power of two without
// moving it, and one fused multiply-add by POWER(X_BIAS) makes (integer - offset - zero point) * 2^-(X_MANTISSA - 1),
// exactly. XOR turns two's complement into offset binary on the way.
#define OFFSET (1 << (BITS - 1))
__device__ __forceinline__ u32 zero_term(int zero_point) {
  const float down = -__uint_as_float((127 + 1 - X_MANTISSA) << 23);
  return SPLAT(float_x((float)(OFFSET + zero_point) * down));
}
// The field AT bits up in each half of `word`; with INT_TAKES_SCALE, times `scale`, which `zero` has taken in already.
template <int AT> __device__ __forceinline__ u32 element(u32 word, u32 zero, u32 scale) {
  constexpr int mask = (1 << BITS) - 1;
  const u32 factor = INT_TAKES_SCALE ? mul2(scale, POWER(INT_SCALE_UP - AT)) : POWER(X_BIAS - AT);
  return fma2(and_xor(word, SPLAT(mask << AT), SPLAT(OFFSET << AT)), factor, zero);
}
#elif CODE == FLOAT8
// The code's exponent and mantissa go to the bottom of the wide exponent field; multiplying by 2^(difference of the
// biases) makes the value, subnormals included; by another `power`, the value times a power of two.
#define FIELD SPLAT((((1 << (EXPONENT_BITS + MANTISSA_BITS)) - 1) << X_MANTISSA) >> MANTISSA_BITS)
__device__ __forceinline__ u32 element(u32 high_bytes, u32 power) {
  const u32 magnitude = shift_left<X_MANTISSA - MANTISSA_BITS - 8>(high_bytes) & FIELD;
  return mul2(and_or(high_bytes, SIGN, magnitude), power);
}
#endif

#if CODE == TABLE
// Pairs of codes to pairs of values in x's dtype, then to what their rounding lost, a bank for every lane.
__device__ __forceinline__ void fill_table(u32 *to, const float *values, int words, int threads) {
  for (int i = threadIdx.x; i < words; i += threads) {
    const float low = values[i / 32 & 15], high = values[i / 512];
    const u32 l = float_x(low), h = float_x(high);
    to[i] = l | h << 16;
    to[i + words] = float_x(low - x_float(l)) | (u32)float_x(high - x_float(h)) << 16;
  }
}
#endif

#define REST 0x0603  // the bits of a half word that the first three pairs of a 4-bit float leave free

// Step j of a lane's tile, from its 2 * BITS words. `terms` and `scales` hold one value for each of the two rows: what to
// add to an integer, or to multiply a float by; what scales integers with INT_TAKES_SCALE.
__device__ __forceinline__ void decode_step(const u32 *words, int j, const u32 *terms, const u32 *scales,
                                            const u32 *table, u32 *a) {
#if CODE == INT && BITS == 4
  const u32 low = words[j], high = words[j] >> 8;
  a[0] = element<0>(low, terms[0], scales[0]), a[1] = element<4>(low, terms[1], scales[1]);
  a[2] = element<0>(high, terms[0], scales[0]), a[3] = element<4>(high, terms[1], scales[1]);
#elif CODE == INT && BITS == 2
  const u32 word = words[j >> 1] >> (8 * (j & 1));
  a[0] = element<0>(word, terms[0], scales[0]), a[1] = element<2>(word, terms[1], scales[1]);
  a[2] = element<4>(word, terms[0], scales[0]), a[3] = element<6>(word, terms[1], scales[1]);
#elif CODE == INT && BITS == 3
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const u32 low = (words[j >> 1] >> (8 * (j & 1) + 2 * p)) & SPLAT(3);
    const int at = p + 4 * (j & 3);
    const u32 high = at >= 2 ? words[4 + (j >> 2)] >> (at - 2) : words[4 + (j >> 2)] << (2 - at);
    a[p] = element<0>(low | (high & SPLAT(4)), terms[p & 1], scales[p & 1]);
  }
#elif CODE == INT && BITS == 8
#pragma unroll
  for (int p = 0; p < 4; ++p) a[p] = element<0>(words[2 * j + (p >> 1)] >> (8 * (p & 1)), terms[p & 1], scales[p & 1]);
#elif CODE == FLOAT8
#pragma unroll
  for (int p = 0; p < 4; ++p) a[p] = element(words[2 * j + (p >> 1)] << (8 * (1 - (p & 1))), terms[p & 1]);
#elif CODE == FLOAT4
  // Spread by layouts_gpu.py so that each pair lies in place up to a rotation: sign at 15, magnitude below the
  // exponent's end. Three pairs of a step have a word of their own; the fourth of two neighbouring steps share what
  // the two words have left.
  const u32 w = words[j];
  const u32 rest = select(words[j & ~1], words[j | 1] << 2, SPLAT(REST));
  a[0] = w, a[1] = w << 4, a[2] = rotate_left<10>(w);
  a[3] = j & 1 ? rotate_left<12>(rest) : rest << 6;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
#if X_MANTISSA == 6 + MANTISSA_BITS
    a[p] &= SIGN | SPLAT(0x01C0);
#else
    a[p] = and_or(a[p], SIGN, shift_left<X_MANTISSA - 6 - MANTISSA_BITS>(a[p] & SPLAT(0x01C0)));
#endif
    a[p] = mul2(a[p], terms[p & 1]);
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

// ---- scales: what a lane needs for a tile is [row 0 or 8][128 / GROUP], contiguous

#define GROUPS (128 / GROUP)
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
  // A bare power of two goes into float32's exponent.
  const int up = 23 - 8 * (index & 3);
  const u32 word = words[index >> 2], bits = (up >= 0 ? word << (up & 31) : word >> (-up & 31)) & 0x7F800000u;
  return __uint_as_float(max(bits, 0x00400000u));  // code 0 is a subnormal of float32; the NaN code becomes infinity
#else
  const int up = 23 - SCALE_MANTISSA_BITS - 8 * (index & 3);
  const u32 word = words[index >> 2];
  const u32 bits = (up >= 0 ? word << (up & 31) : word >> (-up & 31)) & (SCALE_CODE_MASK << (23 - SCALE_MANTISSA_BITS));
  return __uint_as_float(bits) * __uint_as_float((254 - SCALE_BIAS) << 23);
#endif
}

// The scale of row `row` of W, where a row has one.
__device__ __forceinline__ float row_scale(const char *scale, int row) {
  const long long at = row / 16 * 16 + row % 8 * 2 + row / 8 % 2;
  u32 word;
#if SCALE == S_FP32
  word = ((const u32 *)scale)[at];
#elif SCALE == S_FLOAT8
  word = ((const unsigned char *)scale)[at];
#else
  word = ((const unsigned short *)scale)[at];
#endif
  return scale_value(&word, 0);
}

// With FOLD, scales become multipliers of x's dtype: of a row half and four groups, two words of groups 0 and 2, 1 and 3. Four
// lanes of a row need the same; where there are eight groups each prepares a quarter and they exchange the results.
#define PREPARED_WORDS GROUPS
#define EXCHANGES (FOLD && GROUPS == 8)

#if FOLD
// Four groups' scales: placed at the bottom of the exponent field, then raised, in two steps where one power of two would
// not do.
__device__ __forceinline__ void prepare_scales(u32 word, u32 *out) {
  constexpr int up = X_MANTISSA - SCALE_MANTISSA_BITS, boost = FOLD_UP + X_BIAS - SCALE_BIAS;
  constexpr int second = boost > X_BIAS ? boost / 2 : 0;
  out[0] = word << up & SPLAT(SCALE_CODE_MASK << up);
  out[1] = shift_left<up - 8>(word) & SPLAT(SCALE_CODE_MASK << up);
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    out[i] = mul2(out[i], POWER(boost - second));
    if (second) out[i] = mul2(out[i], POWER(second));
  }
}
__device__ __forceinline__ u32 folded_scale(const u32 *prepared, int row, int group) {
  const u32 pair = prepared[row * (GROUPS / 2) + group / 4 * 2 + (group & 1)];
  u32 both;
  if (group & 2)
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {h, h}; }" : "=r"(both) : "r"(pair));
  else
    asm("{ .reg .b16 l, h; mov.b32 {l, h}, %1; mov.b32 %0, {l, l}; }" : "=r"(both) : "r"(pair));
  return both;
}
#endif
