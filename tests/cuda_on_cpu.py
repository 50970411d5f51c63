"""CUDA kernels of plain C++ run on a CPU, thread by thread: the order of every operation can be tested without a GPU.

A kernel's source is compiled by g++ with `__fmul_rn` and its like as the IEEE operations they are, and with no
contraction. A block's threads are coroutines: each runs to the next `__syncthreads()`, then the following one, so that
a missing barrier shows as a wrong result; lanes exchange values the same way, so that all threads of a block have to
take part. Blocks run one after another. Kernels that use PTX beyond the conversions below or tensor cores are not for
this.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from nybble.ops import _nvrtc

COMPILER = shutil.which("g++")

_BEFORE = r"""
#include <algorithm>
#include <cmath>
#include <cstring>
#include <ucontext.h>
#include <vector>
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __maxnreg__(...)
#define __shared__ static
struct Index { unsigned x, y; };
static Index threadIdx, blockIdx;
static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static unsigned current;
static void __syncthreads() { swapcontext(&fibers[current], &scheduler); }
// Values cross between lanes at two barriers: all have written before one reads, all have read before one writes.
static unsigned long long exchanged[1024];
template <typename T> static T __shfl_xor_sync(unsigned, T value, int apart) {
  std::memcpy(&exchanged[current], &value, sizeof value);
  __syncthreads();
  std::memcpy(&value, &exchanged[current ^ apart], sizeof value);
  __syncthreads();
  return value;
}
static unsigned __reduce_max_sync(unsigned mask, unsigned value) {
  for (int apart = 16; apart; apart /= 2) value = std::max(value, __shfl_xor_sync(mask, value, apart));
  return value;
}
static inline unsigned __vmaxu2(unsigned a, unsigned b) {
  return std::max(a >> 16, b >> 16) << 16 | std::max(a & 0xFFFFu, b & 0xFFFFu);
}
static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned pick) {
  const unsigned long long both = (unsigned long long)b << 32 | a;
  unsigned found = 0;
  for (int i = 0; i < 4; ++i) found |= (both >> (pick >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
  return found;
}
struct uint2 { unsigned x, y; };
struct uint4 { unsigned x, y, z, w; };
using std::max, std::min;
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fsqrt_rn(float a) { return std::sqrt(a); }
static inline unsigned __float_as_uint(float f) { unsigned u; std::memcpy(&u, &f, 4); return u; }
static inline float __uint_as_float(unsigned u) { float f; std::memcpy(&f, &u, 4); return f; }
static inline float half_float(unsigned short u) { _Float16 h; std::memcpy(&h, &u, 2); return (float)h; }
static inline unsigned short float_half(float f) {
  _Float16 h = (_Float16)f; unsigned short u; std::memcpy(&u, &h, 2); return u;
}
static inline unsigned bfloat(float f) {
  const unsigned u = __float_as_uint(f);
  return f != f ? 0x7FFF : u + 0x7FFF + (u >> 16 & 1) >> 16;
}
"""

_AFTER = r"""
static const Arguments *given;
static std::vector<char> done;
static void body() {
  KERNEL(*given);
  done[current] = 1;
  swapcontext(&fibers[current], &scheduler);
}
extern "C" void run(const void *argument, unsigned columns, unsigned rows, unsigned threads) {
  given = (const Arguments *)argument;
  const size_t room = 1 << 16;
  std::vector<char> stacks(threads * room);
  for (blockIdx.y = 0; blockIdx.y < rows; ++blockIdx.y)
    for (blockIdx.x = 0; blockIdx.x < columns; ++blockIdx.x) {
      fibers.assign(threads, ucontext_t());
      done.assign(threads, 0);
      for (unsigned t = 0; t < threads; ++t) {
        getcontext(&fibers[t]);
        fibers[t].uc_stack.ss_sp = &stacks[t * room];
        fibers[t].uc_stack.ss_size = room;
        makecontext(&fibers[t], body, 0);
      }
      for (bool left = true; left;) {
        left = false;
        for (current = 0; current < threads; ++current) {
          if (done[current]) continue;
          left = true;
          threadIdx.x = current;
          swapcontext(&scheduler, &fibers[current]);
        }
      }
    }
}
"""

_PTX = {
    'asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(bits));': "f = half_float(bits);",
    'asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(f));': "bits = float_half(f);",
    'asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));': (
        "both = float_half(high) << 16 | float_half(low);"
    ),
    'asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));': (
        "both = bfloat(high) << 16 | bfloat(low);"
    ),
    'asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(a));': "y = std::exp2(a);",
    'asm volatile("ld.relaxed.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(from) : "memory");': "found = *from;",
    'asm volatile("prefetch.global.L2 [%0];" ::"l"(p));': "",
    '"r"((u32)__cvta_generic_to_shared(mine))': '"r"(0)',  # of another block; blocks run one after another
    'asm volatile("griddepcontrol.launch_dependents;");': "",
    'asm volatile("griddepcontrol.wait;" ::: "memory");': "",
}


@cache
def _library(source: Path, kernel: str, defines: tuple[tuple[str, Any], ...]) -> ctypes.CDLL:
    folder = Path(tempfile.mkdtemp())
    for name, text in {source.name: source.read_text(), **_nvrtc.headers(source)}.items():
        for ptx, plain in _PTX.items():
            text = text.replace(ptx, plain)
        (folder / name).write_text(text)
    main = folder / "main.cpp"
    main.write_text(f'{_BEFORE}\n#include "{source.name}"\n{_AFTER}')
    library = folder / "kernel.so"
    options = [f"-D{name}={value}" for name, value in defines] + [f"-DKERNEL={kernel}"]
    command = ["g++", "-std=c++17", "-O1", "-w", "-ffp-contract=off", "-shared", "-fPIC", *options]
    subprocess.run([*command, str(main), "-o", str(library)], check=True, capture_output=True, timeout=120)
    loaded = ctypes.CDLL(str(library))
    shutil.rmtree(folder)
    return loaded


def run(
    source: Path, kernel: str, defines: tuple[tuple[str, Any], ...], grid: tuple[int, int], threads: int,
    argument: ctypes.Structure,
) -> None:  # fmt: skip
    """Run a kernel over a grid; pointers in `argument` are those of CPU tensors."""
    _library(source, kernel, defines).run(ctypes.byref(argument), *grid, threads)
