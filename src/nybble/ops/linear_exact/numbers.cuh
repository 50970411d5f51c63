// Eight consecutive columns of x or of the weight, from their bytes to float32, exactly; and the way back, rounded once.
//
// Compiled with X_KIND and W_KIND (BF16, FP16, FP32, or INT for the weight; INT comes with BITS, 4 or 8, and GROUP, the
// columns that share a scale, 0 for a whole row). Every product and sum names its rounding (__fmaf_rn, …), which forbids
// contraction and leaves the order of dependent operations to the source; nothing flushes subnormals. No CUDA header is
// included, as in linear/decode.cuh.
#pragma once

typedef unsigned int u32;

#define BF16 0
#define FP16 1
#define FP32 2
#define INT 3
#define RUN 8
#define CHAINS 32
#define SPAN (RUN * CHAINS)

#define X_BYTES (X_KIND == FP32 ? 4 : 2)
#define X_WORDS (2 * X_BYTES)  // of a run
#if W_KIND == INT
#define W_WORDS (BITS / 4)
#else
#define W_WORDS (W_KIND == FP32 ? 8 : 4)
#endif
#define CANONICAL_NAN __uint_as_float(0x7FC00000u)

struct Arguments {
  const char *x, *w;    // [M, K], [N, K]; rows of whole runs, aligned to a run or to 16 bytes
  const float *scale;   // [N, groups]
  const signed char *zero;
  const float *bias;    // [N] or none
  char *y;              // [M, N] in x's kind
  long long x_row, w_row;  // bytes
  int M, N, K, groups;
};

// Bytes that nothing else reads stay out of L1.
template <int WORDS> __device__ __forceinline__ void read_once(u32 *to, const char *from) {
  if (WORDS == 1)
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.b32 %0, [%1];" : "=r"(to[0]) : "l"(from));
  else if (WORDS == 2)
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
#pragma unroll
  for (int i = 0; i < WORDS / 4; ++i)
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[4 * i]), "=r"(to[4 * i + 1]), "=r"(to[4 * i + 2]), "=r"(to[4 * i + 3])
                 : "l"(from + 16 * i));
}
template <int WORDS> __device__ __forceinline__ void read_shared_by_many(u32 *to, const char *from) {
#pragma unroll
  for (int i = 0; i < WORDS / 4; ++i)
    asm volatile("ld.global.nc.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[4 * i]), "=r"(to[4 * i + 1]), "=r"(to[4 * i + 2]), "=r"(to[4 * i + 3])
                 : "l"(from + 16 * i));
}

template <int KIND> __device__ __forceinline__ void widen(float *to, const u32 *raw) {
#pragma unroll
  for (int i = 0; i < RUN; ++i) {
    if (KIND == FP32)
      to[i] = __uint_as_float(raw[i]);
    else if (KIND == BF16)
      to[i] = __uint_as_float(i % 2 ? raw[i / 2] & 0xFFFF0000u : raw[i / 2] << 16);
    else
      asm("{ .reg .b16 h; cvt.u16.u32 h, %1; cvt.f32.f16 %0, h; }" : "=f"(to[i]) : "r"(i % 2 ? raw[i / 2] >> 16 : raw[i / 2]));
  }
}

// What a run of integers needs besides its codes: the scale, and what is taken away from 2^23 + code + OFFSET.
struct Scale {
  float scale, below;
};
__device__ __forceinline__ Scale scale_of(const Arguments &p, int row, int column) {
#if W_KIND == INT
  const long long at = (long long)row * p.groups + (GROUP ? column / (GROUP ? GROUP : 1) : 0);
  const int offset = (1 << 23) + (1 << (BITS - 1)) + (p.zero ? p.zero[at] : 0);
  return {p.scale[at], (float)offset};
#else
  return {};
#endif
}

// (code - zero point) * scale, rounded once. Codes are two's complement; with the top bit turned round they count from
// -2^(BITS-1) up, and put under the exponent of 2^23 they make a float from which the difference is exact.
__device__ __forceinline__ void widen_weight(float *to, const u32 *raw, const Scale &s) {
#if W_KIND == INT
  constexpr u32 mask = (1 << BITS) - 1, turned = 0x4B000000u ^ (1 << (BITS - 1));
#pragma unroll
  for (int i = 0; i < RUN; ++i) {
    const u32 code = raw[i * BITS / 32] >> (i * BITS % 32) & mask;
    to[i] = __fmul_rn(__fsub_rn(__uint_as_float(code ^ turned), s.below), s.scale);
  }
#else
  widen<W_KIND>(to, raw);
#endif
}

// y[at] = total + bias in x's kind; one kind of NaN.
__device__ __forceinline__ void store(const Arguments &p, int token, int row, float total) {
  const long long at = (long long)token * p.N + row;
  if (p.bias) total = __fadd_rn(total, p.bias[row]);
  const bool nan = total != total;
#if X_KIND == FP32
  ((float *)p.y)[at] = nan ? CANONICAL_NAN : total;
#else
  unsigned short half;
#if X_KIND == BF16
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(half) : "f"(total));
  if (nan) half = 0x7FC0;
#else
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(half) : "f"(total));
  if (nan) half = 0x7E00;
#endif
  ((unsigned short *)p.y)[at] = half;
#endif
}
