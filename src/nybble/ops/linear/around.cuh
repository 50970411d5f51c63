// What stream.cu may do around its product: the RMSNorm of x + residual before it, the gate of an MLP after it.
//
// Every block needs all of x, so every block normalizes all of it, which costs a reduction over its threads and saves a
// kernel; the sum is made in one order everywhere, so that all blocks have the same bits. The instructions are those
// that Triton makes of ops/rmsnorm and ops/silu_mul (approximate root, exponential and quotients).
//
// Definitions: NORM (tokens to normalize), PIECES (of 8 columns that a thread has of a row), THREADS, WARPS.
#pragma once
#include "pairs.cuh"

#define PIECE_COLUMNS 8
#define LOG2_E 1.4426950408889634f

__device__ __forceinline__ void load_piece(u32 *to, const void *from) {
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "l"(from)
               : "memory");
}
__device__ __forceinline__ void store_piece(void *to, const u32 *from) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}
__device__ __forceinline__ void keep_piece(u32 to, const u32 *from) {
  asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3])
               : "memory");
}
__device__ __forceinline__ float quotient(float a, float b) {
  float q;
  asm("div.full.f32 %0, %1, %2;" : "=f"(q) : "f"(a), "f"(b));
  return q;
}

__device__ __forceinline__ float root(float a) {
  float r;
  asm("sqrt.approx.f32 %0, %1;" : "=f"(r) : "f"(a));
  return r;
}
__device__ __forceinline__ float power_of_2(float a) {
  float p;
  asm("ex2.approx.f32 %0, %1;" : "=f"(p) : "f"(a));
  return p;
}

// silu(gate) * up, the first rounded before it multiplies.
__device__ __forceinline__ unsigned short gated(float gate, float up) {
  return float_x(x_float(float_x(quotient(gate, 1.f + power_of_2(-gate * LOG2_E)))) * up);
}

#if NORM
// A thread's columns of every token: asked for first, added and normalized when other copies are under way.
struct Rows {
  u32 x[NORM][PIECES][4], residual[NORM][PIECES][4], gain[PIECES][4];

  static __device__ __forceinline__ int column(int piece) { return (piece * THREADS + threadIdx.x) * PIECE_COLUMNS; }

  __device__ __forceinline__ void ask(const char *x_rows, long long x_row, const char *residual_rows, const char *gains,
                                      int K) {
#pragma unroll
    for (int i = 0; i < PIECES; ++i) {
      const int k = column(i);
#pragma unroll
      for (int t = 0; t < NORM; ++t)
#pragma unroll
        for (int w = 0; w < 4; ++w) x[t][i][w] = 0, residual[t][i][w] = SIGN;  // -0 as addend keeps every sign
#pragma unroll
      for (int w = 0; w < 4; ++w) gain[i][w] = 0;
      if (k >= K) continue;
#pragma unroll
      for (int t = 0; t < NORM; ++t) {
        load_piece(x[t][i], x_rows + (t * x_row + k) * 2);
        if (residual_rows) load_piece(residual[t][i], residual_rows + ((long long)t * K + k) * 2);
      }
      load_piece(gain[i], gains + k * 2ll);
    }
  }
  // x becomes x + residual, which goes to `h` too unless that is null; a warp's sums of squares go to `sums`.
  __device__ __forceinline__ void add(unsigned short *h, float *sums, int K) {
#pragma unroll
    for (int t = 0; t < NORM; ++t) {
      float squares = 0;
#pragma unroll
      for (int i = 0; i < PIECES; ++i) {
#pragma unroll
        for (int w = 0; w < 4; ++w) {
          x[t][i][w] = fma2(x[t][i][w], POWER(0), residual[t][i][w]);
          const float low = x_float(x[t][i][w] & 0xFFFF), high = x_float(x[t][i][w] >> 16);
          squares = fmaf(high, high, fmaf(low, low, squares));
        }
        if (h && column(i) < K) store_piece(h + (long long)t * K + column(i), x[t][i]);
      }
#pragma unroll
      for (int apart = 16; apart; apart /= 2) squares += __shfl_xor_sync(0xFFFFFFFFu, squares, apart);
      if (threadIdx.x % 32 == 0) sums[t * WARPS + threadIdx.x / 32] = squares;
    }
  }
  // gain * (h / sqrt(mean of h^2 + eps)) to shared rows of `stride` bytes, zeros from K to `width`.
  __device__ __forceinline__ void normalize(u32 rows, int stride, const float *sums, float eps, int K, int width) const {
#pragma unroll
    for (int t = 0; t < NORM; ++t) {
      float sum = 0;
#pragma unroll
      for (int warp = 0; warp < WARPS; ++warp) sum += sums[t * WARPS + warp];
      const float scale = quotient(1.f, root(quotient(sum, (float)K) + eps));
#pragma unroll
      for (int i = 0; i < PIECES; ++i) {
        u32 y[4];
#pragma unroll
        for (int w = 0; w < 4; ++w)
          y[w] = mul2(gain[i][w], rounded(x_float(x[t][i][w] & 0xFFFF) * scale, x_float(x[t][i][w] >> 16) * scale));
        if (column(i) < width) keep_piece(rows + t * stride + column(i) * 2, y);
      }
    }
  }
};
#endif
