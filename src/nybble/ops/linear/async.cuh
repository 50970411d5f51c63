// Copies and matrix instructions, as PTX that exists from sm_80 on (sm_90 where marked).
// Shared memory is addressed by 32-bit addresses throughout.
#pragma once
#include "early.cuh"

__device__ __forceinline__ u32 shared_address(const void *p) { return (u32)__cvta_generic_to_shared(p); }

// Global to shared, asynchronously; 16 bytes skip L1.
template <int BYTES> __device__ __forceinline__ void async_copy(u32 to, const void *from) {
  if (BYTES == 16)
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(to), "l"(from), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

template <int WORDS> __device__ __forceinline__ void read_words(u32 *to, u32 from) {
  if (WORDS == 1)
    asm volatile("ld.shared.b32 %0, [%1];" : "=r"(to[0]) : "r"(from));
  else if (WORDS == 2)
    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "r"(from));
  else
    asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(from));
}

// BYTES that lie together, aligned to their own size or 16.
template <int BYTES> __device__ __forceinline__ void read_row(u32 *to, u32 from) {
  if (BYTES == 2)
    asm volatile("{ .reg .b16 h; ld.shared.b16 h, [%1]; cvt.u32.u16 %0, h; }" : "=r"(to[0]) : "r"(from));
#pragma unroll
  for (int i = 0; i < BYTES / 16 || i == 0 && BYTES > 2; ++i)
    read_words<(BYTES < 16 ? BYTES : 16) / 4 + (BYTES < 4)>(to + i * 4, from + i * 16);
}

// Four 8x8 matrices of 16-bit values; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void load_matrices(u32 *to, u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
               : "r"(from));
}
__device__ __forceinline__ void mma(float *d, const u32 *a, u32 b0, u32 b1) {
#if X_FP16
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Columns [first, end) of M tokens into shared rows of `stride` bytes, with zeros up to `width` columns.
__device__ __forceinline__ void load_x(char *to, int stride, const char *x, long long row, long long column, int M,
                                       int first, int end, int width, int threads) {
  const bool aligned = column == 1 && ((u64)x & 15) == 0 && (M == 1 || (row & 7) == 0);
  const int pieces = width / 8;
  for (int i = threadIdx.x; i < M * pieces; i += threads) {
    const int token = i / pieces, piece = i - token * pieces, k = first + piece * 8;
    char *slot = to + token * stride + piece * 16;
    const unsigned short *from = (const unsigned short *)x + token * row + k * column;
    if (aligned && k + 8 <= end) {
      async_copy<16>(shared_address(slot), from);
    } else {
#pragma unroll 1
      for (int e = 0; e < 8; ++e) ((unsigned short *)slot)[e] = k + e < end ? from[e * column] : 0;
    }
  }
}
