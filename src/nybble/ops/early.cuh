// Programmatic dependent launch: the next kernel of the stream may start its prologue now; our own results and the
// previous kernel's are ordered by wait_for_previous, before which nothing that a kernel could have written is read.
// (A hint to the L2 cache reads nothing.)
#pragma once

__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void prefetch_l2(const void *p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }
