// wgmma of Hopper (sm_90a) for 128 to 256 tokens at once: d[64, TOKENS] += a[64, DEPTH] @ b[TOKENS, DEPTH]^T, on 16-bit floats
// where X_FP16 is defined, else on 8-bit operands: in int32 for integers, in float32 for floats. a comes from shared memory
// or from registers, in the order of mma.m16n8's operand of that depth; b from shared memory, rows of 128 bytes swizzled as
// wgmma.cuh says. With `keep` = 0 what was in d is dropped.
#pragma once

#ifdef X_FP16
#define TYPES "k16.f32." X_TYPE "." X_TYPE
#define SIGNS ", 1, 1, 0"
#elif FLOAT8
#define TYPES "k32.f32.e4m3.e4m3"
#define SIGNS ", 1, 1"
#else
#define TYPES "k32.s32.s8.s8"
#define SIGNS ""
#endif
#if defined(X_FP16) || FLOAT8
#define SUM "+f"
typedef float Sum;
#else
#define SUM "+r"
typedef int Sum;
#endif

#define D8(i) SUM(d[i]), SUM(d[i + 1]), SUM(d[i + 2]), SUM(d[i + 3]), SUM(d[i + 4]), SUM(d[i + 5]), SUM(d[i + 6]), SUM(d[i + 7])
#define D32(i) D8(i), D8(i + 8), D8(i + 16), D8(i + 24)
#define LIST_64 "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, %17, %18, %19, %20, %21, %22, " \
                "%23, %24, %25, %26, %27, %28, %29, %30, %31, %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, " \
                "%44, %45, %46, %47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LIST_96 LIST_64 ", %64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, %80, %81, " \
                "%82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define LIST_128 LIST_96 ", %96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
                 "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#if TOKENS == 256
#define SHAPE "m64n256"
#define LIST LIST_128
#define SUMS D32(0), D32(32), D32(64), D32(96)
#define SHARED_OPERANDS "}, %128, %129, p"
#define SHARED_KEEP "%130"
#define REGISTER_OPERANDS "}, {%128, %129, %130, %131}, %132, p"
#define REGISTER_KEEP "%133"
#elif TOKENS == 192
#define SHAPE "m64n192"
#define LIST LIST_96
#define SUMS D32(0), D32(32), D32(64)
#define SHARED_OPERANDS "}, %96, %97, p"
#define SHARED_KEEP "%98"
#define REGISTER_OPERANDS "}, {%96, %97, %98, %99}, %100, p"
#define REGISTER_KEEP "%101"
#else
#define SHAPE "m64n128"
#define LIST LIST_64
#define SUMS D32(0), D32(32)
#define SHARED_OPERANDS "}, %64, %65, p"
#define SHARED_KEEP "%66"
#define REGISTER_OPERANDS "}, {%64, %65, %66, %67}, %68, p"
#define REGISTER_KEEP "%69"
#endif

#ifndef X_FP16
__device__ __forceinline__ void wgmma_shared(Sum *d, u64 a, u64 b, int keep) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, " SHARED_KEEP ", 0;\n"
               "wgmma.mma_async.sync.aligned." SHAPE TYPES " {" LIST SHARED_OPERANDS SIGNS "; }"
               : SUMS : "l"(a), "l"(b), "r"(keep));
}
#endif
__device__ __forceinline__ void wgmma_registers(Sum *d, const u32 *a, u64 b, int keep) {
  asm volatile("{ .reg .pred p; setp.ne.s32 p, " REGISTER_KEEP ", 0;\n"
               "wgmma.mma_async.sync.aligned." SHAPE TYPES " {" LIST REGISTER_OPERANDS SIGNS "; }"
               : SUMS : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(keep));
}
