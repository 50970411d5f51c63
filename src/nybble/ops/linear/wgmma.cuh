// wgmma of Hopper (sm_90a): d[64 rows, TOKENS_N] += a[64 rows, 16] @ b[16, TOKENS_N], run by a warpgroup in the background.
//
// a comes from registers, in mma.m16n8k16's order, each warp its 16 rows; b from shared memory, a row of 128 bytes a
// token, the 16-byte pieces of row r swizzled by XOR with r % 8 (PTX ISA, "128-Byte swizzling modes"). Registers given
// to a wgmma must not change before a wait says that it is done.
#pragma once
#include "pairs.cuh"

#if X_FP16
#define X_TYPE "f16"
#else
#define X_TYPE "bf16"
#endif

// The matrix descriptor of shared rows of 128 bytes: 1024 bytes between groups of eight rows, 128-byte swizzle.
__device__ __forceinline__ u64 row_descriptor(u32 address) {
  return (u64)((address & 0x3FFFF) >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}
__device__ __forceinline__ void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING> __device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// Holds the compiler back: what is read of these registers is read after this point, what is written is written before.
template <int Count> __device__ __forceinline__ void settle(int *registers) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+r"(registers[i])::"memory");
}
template <int Count> __device__ __forceinline__ void settle(float *registers) {
#pragma unroll
  for (int i = 0; i < Count; ++i) asm volatile("" : "+f"(registers[i])::"memory");
}
// Gives registers back, or takes more, a warpgroup at a time.
template <int COUNT, bool MOVES, bool MORE> __device__ __forceinline__ void keep_registers() {
  if (!MOVES) return;
  if (MORE)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT ? COUNT : 24));
  else
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT ? COUNT : 24));
}

// Barriers in shared memory that count arrivals and bytes; a phase's parity tells whether it is over.
__device__ __forceinline__ void barrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void barrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ __forceinline__ void barrier_expect(u32 barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
  asm volatile("{ .reg .pred p; again%=: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @p bra done%=; bra again%=; done%=: }"
               ::"r"(barrier), "r"(parity) : "memory");
}

// The copy engine: bytes, or a box of a tensor map, from global to shared memory, counted by a barrier.
struct alignas(64) TensorMap {
  char opaque[128];
};
template <int BYTES> __device__ __forceinline__ void bulk_copy(u32 to, const char *from, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(from), "n"(BYTES), "r"(barrier) : "memory");
}
template <int BYTES> __device__ __forceinline__ void prefetch_bulk(const char *from) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "n"(BYTES) : "memory");
}
__device__ __forceinline__ void bulk_tensor(u32 to, const TensorMap *map, int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
               ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier) : "memory");
}

template <int THREADS_MEETING> __device__ __forceinline__ void consumers_sync() {
  asm volatile("barrier.sync 1, %0;" ::"n"(THREADS_MEETING) : "memory");
}
__device__ __forceinline__ void cluster_sync() {
  asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
__device__ __forceinline__ u32 cluster_rank() {
  u32 rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}
// sum += four floats at `address` of this block's shared memory, or of block `rank`'s of the cluster.
template <bool REMOTE> __device__ __forceinline__ void add_four(float *sum, u32 address, u32 rank) {
  float a, b, c, d;
  if (REMOTE)
    asm volatile("{ .reg .b32 r; mapa.shared::cluster.u32 r, %4, %5; ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [r]; }"
                 : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "r"(address), "r"(rank));
  else
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(a), "=f"(b), "=f"(c), "=f"(d) : "r"(address));
  sum[0] += a, sum[1] += b, sum[2] += c, sum[3] += d;
}

__device__ __forceinline__ void wgmma(float *d, const u32 *a, u64 b) {
#if TOKENS_N == 32
  asm volatile("{ .reg .pred p; setp.eq.u32 p, 0, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n32k16.f32." X_TYPE "." X_TYPE " {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15"
               "}, {%16, %17, %18, %19}, %20, p, 1, 1, 0; }"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
                 "+f"(d[15])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
#if TOKENS_N == 64
  asm volatile("{ .reg .pred p; setp.eq.u32 p, 0, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32." X_TYPE "." X_TYPE " {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20,"
               "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
               "}, {%32, %33, %34, %35}, %36, p, 1, 1, 0; }"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
                 "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
                 "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
                 "+f"(d[29]), "+f"(d[30]), "+f"(d[31])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
#if TOKENS_N == 128
  asm volatile("{ .reg .pred p; setp.eq.u32 p, 0, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n128k16.f32." X_TYPE "." X_TYPE " {"
               "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20,"
               "%21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39,"
               "%40, %41, %42, %43, %44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58,"
               "%59, %60, %61, %62, %63"
               "}, {%64, %65, %66, %67}, %68, p, 1, 1, 0; }"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7]),
                 "+f"(d[8]), "+f"(d[9]), "+f"(d[10]), "+f"(d[11]), "+f"(d[12]), "+f"(d[13]), "+f"(d[14]),
                 "+f"(d[15]), "+f"(d[16]), "+f"(d[17]), "+f"(d[18]), "+f"(d[19]), "+f"(d[20]), "+f"(d[21]),
                 "+f"(d[22]), "+f"(d[23]), "+f"(d[24]), "+f"(d[25]), "+f"(d[26]), "+f"(d[27]), "+f"(d[28]),
                 "+f"(d[29]), "+f"(d[30]), "+f"(d[31]), "+f"(d[32]), "+f"(d[33]), "+f"(d[34]), "+f"(d[35]),
                 "+f"(d[36]), "+f"(d[37]), "+f"(d[38]), "+f"(d[39]), "+f"(d[40]), "+f"(d[41]), "+f"(d[42]),
                 "+f"(d[43]), "+f"(d[44]), "+f"(d[45]), "+f"(d[46]), "+f"(d[47]), "+f"(d[48]), "+f"(d[49]),
                 "+f"(d[50]), "+f"(d[51]), "+f"(d[52]), "+f"(d[53]), "+f"(d[54]), "+f"(d[55]), "+f"(d[56]),
                 "+f"(d[57]), "+f"(d[58]), "+f"(d[59]), "+f"(d[60]), "+f"(d[61]), "+f"(d[62]), "+f"(d[63])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
#endif
}
