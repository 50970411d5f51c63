// Blocks that stay and walk over tiles, two by two (sm_90): what a pair shares, rings in shared memory, results on their
// way out.
#pragma once

#define CLUSTER 2
#define OUT_TOKENS 32  // stored at once by a warpgroup
#define OUT_BYTES (OUT_TOKENS * 128)

// A stage of a ring of `Stages` and how often it has been round.
template <int Stages> struct Ring {
  u32 stage, phase;
  __device__ __forceinline__ void next() {
    if (++stage == Stages) stage = 0, phase ^= 1;
  }
};

// A box of a tensor map into the shared memory of both blocks, counted by each one's barrier.
__device__ __forceinline__ void tensor_to_both(u32 to, const TensorMap *map, int column, int row, u32 barrier) {
  asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster"
               " [%0], [%1, {%2, %3}], [%4], %5;"
               ::"r"(to), "l"(map), "r"(column), "r"(row), "r"(barrier), "h"((unsigned short)3) : "memory");
}
__device__ __forceinline__ void store_tensor(const TensorMap *map, u32 from, int column, int row) {
  asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%1, %2}], [%3];\ncp.async.bulk.commit_group;"
               ::"l"(map), "r"(column), "r"(row), "r"(from) : "memory");
}
template <int PENDING> __device__ __forceinline__ void stored_wait() {
  asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(PENDING) : "memory");
}
__device__ __forceinline__ void arrive_at(u32 barrier, u32 rank) {
  asm volatile("{ .reg .b32 r; mapa.shared::cluster.u32 r, %0, %1; mbarrier.arrive.shared::cluster.b64 _, [r]; }"
               ::"r"(barrier), "r"(rank) : "memory");
}
__device__ __forceinline__ void meet(int barrier, int threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ __forceinline__ void arrive(int barrier, int threads) {
  asm volatile("barrier.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
// Four 8x8 matrices of 16-bit values, transposed; lane i gives the address of row i % 8 of matrix i / 8.
__device__ __forceinline__ void store_matrices(u32 to, const u32 *from) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};"
               ::"r"(to), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]) : "memory");
}
