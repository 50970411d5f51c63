"""A Hopper kernel run on a CPU: clusters of two blocks, rings that the copy engine fills, barriers, wgmma.

The kernel's own source is compiled by g++; async.cuh, wgmma.cuh, wgmma_many.cuh and cluster.cuh are replaced by the
functions below, which do what PTX says of them, at an unkind time: a box of the copy engine poisons its place at once
and arrives some rounds later; a product is formed when it is waited for, not when it is started. The threads of both
blocks are coroutines that change where they wait, warps in a random order. So a wrong barrier, phase, stage, swizzle or
index shows as a wrong number, one arrival too many or a standstill. What it cannot show is whether the PTX itself is
right. cuda_on_cpu.py does the same for kernels of plain C++.
"""

from __future__ import annotations

import ctypes
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from cuda_on_cpu import COMPILER
from nybble.formats.table import E4M3
from nybble.quantize import elements

__all__ = ["COMPILER", "Box", "Standstill", "run"]

_BEFORE = r"""
#include <algorithm>
#include <cstring>
#include <functional>
#include <map>
#include <random>
#include <stdexcept>
#include <ucontext.h>
#include <vector>
#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __align__(...)
#define __shared__
#define CLUSTER 2
typedef unsigned int u32;
typedef unsigned long long u64;
using std::min, std::max;
struct Index { u32 x, y; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
struct uint4 { u32 x, y, z, w; };
static Index threadIdx, blockIdx, gridDim;
char shared[1];
static float2 make_float2(float x, float y) { return {x, y}; }
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fadd_rn(float a, float b) { return a + b; }
template <class To, class From> static To bits(From from) { To to; memcpy(&to, &from, sizeof to); return to; }
static float __uint_as_float(u32 u) { return bits<float>(u); }
static u32 fp16(float f) { return bits<unsigned short>((_Float16)f); }
static u32 bf16(float f) { const u32 u = bits<u32>(f); return f != f ? 0x7FFF : u + 0x7FFF + (u >> 16 & 1) >> 16; }
template <bool FP16> static u32 pack(float low, float high) {
  return FP16 ? fp16(high) << 16 | fp16(low) : bf16(high) << 16 | bf16(low);
}

// Coroutines: the threads of two blocks. What stops a run leaves its reason here.
const int BLOCK = 384;
static ucontext_t scheduler;
static std::vector<ucontext_t> fibers;
static std::vector<char> done;
static int current;
static bool moved;
static const char *wrong;
static std::mt19937 chance;
static int block() { return current / BLOCK; }
static void give_way() { swapcontext(&fibers[current], &scheduler); }
static void fail(const char *why) { wrong = why; for (;;) give_way(); }
struct Meeting { int here; long over; };
static std::map<int, Meeting> meetings;
static void gather(int place, int threads) {
  Meeting &m = meetings[place];
  const long turn = m.over;
  if (++m.here == threads) m.here = 0, ++m.over;
  while (m.over == turn) give_way();
  moved = true;
}
static void meet(int barrier, int threads) { gather(block() * 16 + barrier, threads); }
static void __syncwarp() { gather(100 + current / 32, 32); }
static void gather_warpgroup() { gather(200 + current / 128, 128); }
static void cluster_sync() { gather(300, 2 * BLOCK); }
static u32 cluster_rank() { return block(); }
static int exchanged[2 * BLOCK];
static int __shfl_sync(u32, int value, int lane) {
  exchanged[current] = value;
  __syncwarp();
  value = exchanged[current / 32 * 32 + lane];
  __syncwarp();
  return value;
}
static void wait_for_previous() {}
static void launch_dependents() {}
template <int COUNT, bool MOVES, bool MORE> static void keep_registers() {}

// Shared memory: each block's from address 1024 on.
static std::vector<unsigned char> memory_of[2];
static unsigned char *at(int which, u32 address) {
  if (address < 1024 || address >= memory_of[which].size()) fail("an access outside shared memory");
  return &memory_of[which][address];
}
static u32 shared_address(const void *) { return 1024; }
template <class T> static T load(u32 address) {
  T value;
  memcpy(&value, at(block(), address), sizeof value);
  return value;
}
template <class T> static void save(u32 address, T value) { memcpy(at(block(), address), &value, sizeof value); }
template <int WORDS> static void read_words(u32 *to, u32 from) { memcpy(to, at(block(), from), WORDS * 4); }
static void store_four(u32 to, const u32 *from) {  // stmatrix: a thread has two values of each matrix's row lane / 4
  exchanged[current] = to;
  __syncwarp();
  const int lane = current % 32;
  for (int m = 0; m < 4; ++m) save<u32>(exchanged[current - lane + m * 8 + lane / 4] + lane % 4 * 4, from[m]);
  __syncwarp();
}

// Barriers that count arrivals and bytes.
struct Barrier { int arrivals, missing; long bytes; u32 phase; };
static std::map<u32, Barrier> barriers[2];
static Barrier &barrier_at(int which, u32 address) {
  if (!barriers[which].count(address)) fail("a barrier that was not made");
  return barriers[which][address];
}
static void turn(Barrier &b) {
  if (!b.missing && !b.bytes) b.phase ^= 1, b.missing = b.arrivals;
  moved = true;
}
static void arrive_at(u32 address, u32 rank) {
  Barrier &b = barrier_at(rank, address);
  if (!b.missing--) fail("more arrivals than a barrier expects");
  turn(b);
}
static void barrier_init(u32 address, int arrivals) { barriers[block()][address] = {arrivals, arrivals, 0, 0}; }
static void barrier_init_fence() {}
static void barrier_arrive(u32 address) { arrive_at(address, block()); }
static void barrier_expect(u32 address, int bytes) {
  barrier_at(block(), address).bytes += bytes;
  barrier_arrive(address);
}
static bool barrier_is_over(u32 address, u32 parity) { return barrier_at(block(), address).phase != parity; }
static void barrier_wait(u32 address, u32 parity) {
  while (!barrier_is_over(address, parity)) give_way();
  moved = true;
}

// The copy engine: boxes of 128 bytes a row, swizzled, zeros outside.
struct alignas(64) TensorMap { const unsigned char *bytes; int rows, columns, box; char rest[104]; };
struct Copy { int rounds; std::function<void()> land; };
static std::vector<Copy> copies;
static void copy_box(int which, u32 to, const TensorMap *map, int column, int row, u32 barrier) {
  memset(at(which, to), 0x7F, map->box * 128);
  copies.push_back({(int)(chance() % 40), [=] {
    for (int r = 0; r < map->box; ++r)
      for (int c = 0; c < 128; ++c) {
        const bool inside = row + r < map->rows && column + c < map->columns;
        unsigned char *byte = at(which, to + r * 128 + (c / 16 ^ r % 8) * 16 + c % 16);
        *byte = inside ? map->bytes[(long)(row + r) * map->columns + column + c] : 0;
      }
    Barrier &b = barrier_at(which, barrier);
    b.bytes -= map->box * 128;
    turn(b);
  }});
}
static void bulk_tensor(u32 to, const TensorMap *map, int column, int row, u32 barrier) {
  copy_box(block(), to, map, column, row, barrier);
}
static void tensor_to_both(u32 to, const TensorMap *map, int column, int row, u32 barrier) {
  for (int which = 0; which < 2; ++which) copy_box(which, to, map, column, row, barrier);
}
template <int STAGES_> struct Ring {
  u32 stage, phase;
  void next() { if (++stage == STAGES_) stage = 0, phase ^= 1; }
};

// wgmma on e4m3 from shared memory, 64 x 128 x 32.
typedef float Sum;
struct Product { float *sums; u64 a, b; int keep; };
static std::vector<std::vector<Product>> started;
static float e4m3[256];
static u64 row_descriptor(u32 address) { return (u64)(address >> 4) | 1ull << 16 | 64ull << 32 | 1ull << 62; }
static void wgmma_fence() {}
static void wgmma_commit() {}
static void wgmma_shared(float *sums, u64 a, u64 b, int keep) {
  if ((a & ~0x3FFFull) != row_descriptor(0) || (b & ~0x3FFFull) != row_descriptor(0)) fail("a matrix descriptor");
  started[current].push_back({sums, a, b, keep});
}
static float operand(u64 descriptor, int row, int column) {
  const u32 address = (u32)(descriptor & 0x3FFF) * 16 + row * 128 + column;
  return e4m3[load<unsigned char>(address ^ (address >> 7 & 7) << 4)];
}
template <int PENDING> static void wgmma_wait() {
  static_assert(PENDING == 0);
  gather_warpgroup();
  const int g = current / 32 % 4 * 16 + current % 32 / 4, t = current % 4 * 2;
  for (const Product &p : started[current])
    for (int i = 0; i < 64; ++i) {
      const int row = g + i / 2 % 2 * 8, column = i / 4 * 8 + t + i % 2;
      float sum = 0;
      for (int k = 0; k < 32; ++k) sum += operand(p.a, row, k) * operand(p.b, column, k);
      p.sums[i] = p.keep ? p.sums[i] + sum : sum;
    }
  started[current].clear();
  gather_warpgroup();
}
template <int COUNT> static void settle(float *) {}
"""

_AFTER = r"""
static const Arguments *given;
static void body() {
  KERNEL(*given);
  done[current] = moved = true;
  give_way();
}
static void round_of(std::vector<int> &warps) {
  std::shuffle(warps.begin(), warps.end(), chance);
  for (int warp : warps)
    for (int lane = 0; lane < 32 && chance() % 64; ++lane) {
      current = warp * 32 + lane;
      threadIdx.x = current % BLOCK, blockIdx.x = blockIdx.x / 2 * 2 + block();
      if (!done[current]) swapcontext(&scheduler, &fibers[current]);
    }
  for (size_t i = 0; i < copies.size(); ++i) {
    if (copies[i].rounds-- > 0) continue;
    const auto land = copies[i].land;
    copies.erase(copies.begin() + i--), land();
  }
}
extern "C" const char *run(const void *argument, u32 clusters, u32 bytes, u32 seed, const float *values) {
  given = (const Arguments *)argument;
  memcpy(e4m3, values, sizeof e4m3);
  chance.seed(seed);
  gridDim.x = CLUSTER * clusters;
  const size_t room = 1 << 16, threads = CLUSTER * BLOCK;
  std::vector<char> stacks(threads * room);
  std::vector<int> warps;
  for (int i = 0; i < threads / 32; ++i) warps.push_back(i);
  for (u32 cluster = 0; cluster < clusters; ++cluster) {
    fibers.assign(threads, {}), done.assign(threads, 0), started.assign(threads, {});
    meetings.clear(), copies.clear(), wrong = nullptr, blockIdx.x = CLUSTER * cluster;
    for (int which = 0; which < 2; ++which) memory_of[which].assign(bytes, 0x7F), barriers[which].clear();
    for (size_t t = 0; t < threads; ++t) {
      getcontext(&fibers[t]);
      fibers[t].uc_stack.ss_sp = &stacks[t * room], fibers[t].uc_stack.ss_size = room;
      makecontext(&fibers[t], body, 0);
    }
    for (int idle = 0; std::count(done.begin(), done.end(), 0);) {
      moved = !copies.empty();
      round_of(warps);
      idle = moved ? 0 : idle + 1;
      if (wrong) return wrong;
      if (idle > 1000) return "all threads wait";
    }
    if (!copies.empty()) return "copies in flight after the end";
  }
  return nullptr;
}
"""

_PTX = {
    'asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"(half));': "wide = bits<_Float16>(half);",
    'asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(from));': "value = load<float>(from);",
    'asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(two.x), "=f"(two.y) : "r"(from));': (
        "two = load<float2>(from);"
    ),
    'asm volatile("st.shared.f32 [%0], %1;" ::"r"(to), "f"(value) : "memory");': "save(to, value);",
    'asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};"\n'
    '               ::"r"(to), "r"(from[0]), "r"(from[1]), "r"(from[2]), "r"(from[3]) : "memory");': (
        "store_four(to, from);"
    ),
    'asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"\n'
    '               : "=r"(over) : "r"(barrier), "r"(parity) : "memory");': "over = barrier_is_over(barrier, parity);",
    "extern __shared__ __align__(1024) char shared[];": "",
}


class Standstill(AssertionError):
    """The run could not go on; the message says why."""


class Box(ctypes.Structure):
    """What stands for a tensor map of bytes: a matrix, and the rows that are copied at once."""

    _fields_ = [
        ("bytes", ctypes.c_void_p), *((name, ctypes.c_int) for name in ("rows", "columns", "box")),
        ("rest", ctypes.c_char * 108),
    ]  # fmt: skip

    @classmethod
    def of(cls, codes: Tensor, box: int) -> Box:
        return cls(codes.data_ptr(), *codes.shape, box)


@cache
def _library(source: str, headers: Path, kernel: str, defines: tuple[tuple[str, int], ...]) -> ctypes.CDLL:
    assert COMPILER is not None
    folder = Path(tempfile.mkdtemp())
    for name in ("async", "wgmma", "wgmma_many", "cluster"):
        source = source.replace(f'#include "{name}.cuh"\n', "")
    for name in ("bands", "narrow"):
        source = source.replace(f'#include "{name}.cuh"\n', (headers / f"{name}.cuh").read_text())
    for ptx, plain in _PTX.items():
        assert ptx in source, ptx
        source = source.replace(ptx, plain)
    assert "asm" not in source
    (folder / "main.cpp").write_text(f"{_BEFORE}\n{source.replace('#pragma once', '')}\n{_AFTER}")
    command = [COMPILER, "-std=c++17", "-O2", "-ffp-contract=off", "-w", "-shared", "-fPIC", f"-DKERNEL={kernel}"]
    command += [f"-D{name}={value}" for name, value in defines]
    built = [*command, str(folder / "main.cpp"), "-o", str(folder / "kernel.so")]
    done = subprocess.run(built, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[:4000]
    library = ctypes.CDLL(str(folder / "kernel.so"))
    library.run.restype = ctypes.c_char_p
    return library


def run(
    source: str, headers: Path, kernel: str, defines: dict[str, int], argument: ctypes.Structure, clusters: int,
    shared_bytes: int, seed: int = 0,
) -> None:  # fmt: skip
    """Run a kernel; Standstill where it does not come to its end.

    Args:
        source: of the .cu file. headers: the folder of narrow.cuh and bands.cuh. kernel: its name. defines: its macros.
        argument: its one argument, with a Box in the place of each tensor map.
        clusters: how many there are. shared_bytes: of a block. seed: of the order in which things happen.
    """
    library = _library(source, headers, kernel, tuple(sorted(defines.items())))
    codes = torch.arange(256, dtype=torch.uint8)
    values = (ctypes.c_float * 256)(*elements.decode(E4M3, codes).tolist())
    size = ctypes.sizeof(argument)
    room = ctypes.create_string_buffer(size + 64)
    aligned = ctypes.addressof(room) + -ctypes.addressof(room) % 64
    ctypes.memmove(aligned, ctypes.addressof(argument), size)
    why = library.run(ctypes.c_void_p(aligned), clusters, shared_bytes, seed, values)
    if why is not None:
        raise Standstill(why.decode())
