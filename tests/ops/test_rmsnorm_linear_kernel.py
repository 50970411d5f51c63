"""stream.cu with a norm before its product and a gate behind it, run on the CPU, thread by thread.

Plain C++ is put in for its PTX: matrix instructions exchange their operands lane by lane, warps and blocks meet where
they have to and only there (tests/cuda_on_cpu.py runs the rest), asynchronous copies happen at once, and approximate
roots, quotients and powers are exact.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import cuda_on_cpu
from nybble.ops import _nvrtc
from nybble.ops.linear import config, cuda
from nybble.ops.rmsnorm import add_rmsnorm_reference
from nybble.ops.rmsnorm_linear import RMSNORM_LINEAR
from nybble.ops.silu_mul import silu_mul_reference
from nybble.quantize import QuantTensor, quantize

pytestmark = pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="g++ is not installed")
OTHERS = ("wgmma.cuh", "wgmma_many.cuh", "cluster.cuh", "bands.cuh", "operands.cuh", "narrow.cuh")  # not of stream.cu
PLANS = [
    config.Stream(1, 2, 1, 2, 2), config.Stream(1, 1, 2, 2, 3), config.Stream(1, 2, 2, 1, 2, places=2),
    config.Stream(1, 2, 3, 2, 2), config.Stream(1, 1, 14, 1, 4),
]  # fmt: skip

HELPERS = """
static Index gridDim = {GRID, 1};
alignas(128) static char shared_memory[1 << 18];
static unsigned lanes[1024][6];
static unsigned waiting[33], turns[33];
static void meet(unsigned place, unsigned count) {
  const unsigned turn = turns[place];
  if (++waiting[place] == count) waiting[place] = 0, ++turns[place];
  while (turns[place] == turn) __syncthreads();
}
template <int N> static void from_lanes(const unsigned *mine) {
  meet(current / 32, 32);
  for (int i = 0; i < N; ++i) lanes[current][i] = mine[i];
  meet(current / 32, 32);
}
static float of_lane(float value, int apart) {
  const unsigned mine = __float_as_uint(value);
  from_lanes<1>(&mine);
  return __uint_as_float(lanes[current ^ apart][0]);
}
#define __shfl_xor_sync(mask, value, apart) of_lane(value, apart)
#define __syncthreads() meet(32, WN * WK * 32)
static unsigned __shfl_sync(unsigned, unsigned value, int lane, int width) {
  from_lanes<1>(&value);
  return lanes[current / width * width + lane][0];
}
static inline unsigned __funnelshift_l(unsigned a, unsigned, int n) { return n ? a << n | a >> (32 - n) : a; }
static inline float wide(unsigned bits) { return X_FP16 ? half_float(bits) : __uint_as_float(bits << 16); }
static inline unsigned narrow(float f) { return X_FP16 ? float_half(f) : bfloat(f); }
static inline unsigned fma_half(unsigned a, unsigned b, unsigned c) {
  return narrow((double)wide(a & 0xFFFF) * wide(b & 0xFFFF) + wide(c & 0xFFFF));
}
"""
BODIES = {
    "fma2": "return fma_half(a >> 16, b >> 16, c >> 16) << 16 | fma_half(a, b, c);",
    "and_or": "return (a & mask) | bits;",
    "and_xor": "return (a & mask) ^ bits;",
    "select": "return (a & mask) | (b & ~mask);",
    "fp16_float": "return half_float(bits);",
    "folded_scale": """const unsigned pair = prepared[row * (GROUPS / 2) + group / 4 * 2 + (group & 1)];
      return (group & 2 ? pair >> 16 : pair & 0xFFFF) * 0x10001;""",
    "float_x": "return narrow(f);",
    "shared_address": "return (const char *)p - shared_memory;",
    "async_copy": "std::memcpy(shared_memory + to, from, BYTES);",
    "async_commit": "",
    "async_wait": "",
    "prefetch_l2": "",
    "read_words": "std::memcpy(to, shared_memory + from, 4 * WORDS);",
    "load_matrices": """from_lanes<1>(&from);
      for (int i = 0; i < 4; ++i) {
        const unsigned row = lanes[current / 32 * 32 + i * 8 + current % 32 / 4][0];
        std::memcpy(to + i, shared_memory + row + current % 4 * 4, 4);
      }""",
    "mma": """const unsigned mine[6] = {a[0], a[1], a[2], a[3], b0, b1};
      from_lanes<6>(mine);
      const unsigned warp = current / 32 * 32, lane = current % 32;
      for (int i = 0; i < 4; ++i)
        for (int k = 0; k < 16; ++k) {
          const unsigned w = lanes[warp + lane / 4 * 4 + k % 8 / 2][i / 2 + k / 8 * 2] >> k % 2 * 16;
          const unsigned x = lanes[warp + (lane % 4 * 2 + i % 2) * 4 + k % 8 / 2][4 + k / 8] >> k % 2 * 16;
          d[i] += wide(w & 0xFFFF) * wide(x & 0xFFFF);
        }""",
    "load_piece": "std::memcpy(to, from, 16);",
    "store_piece": "std::memcpy(to, from, 16);",
    "keep_piece": "std::memcpy(shared_memory + to, from, 16);",
    "quotient": "return a / b;",
    "root": "return std::sqrt(a);",
    "power_of_2": "return std::exp2(a);",
}


def plain(text: str) -> str:
    """A source with the bodies above for those of its functions."""
    for name, body in BODIES.items():
        found = re.search(rf"__forceinline__ [\w ]+ {name}\([^{{]*{{", text)
        if found is not None:
            end = re.compile(r"\n}\n" if text[found.end()] == "\n" else "}\n").search(text, found.end())
            text = f"{text[: found.end()]}\n{body}\n}}\n{text[end.end() :]}"
    return text.replace("extern __shared__ __align__(128) char shared[];", "char *shared = shared_memory;")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """stream.cu and what it includes, with plain C++ for their PTX."""
    folder = tmp_path_factory.mktemp("stream")
    included = _nvrtc.headers(cuda._STREAM)
    for name, text in {"stream.cu": cuda._STREAM.read_text(), **included}.items():
        if name not in OTHERS:
            (folder / name).write_text(plain(text))
    header = (folder / "decode.cuh").read_text()
    (folder / "decode.cuh").write_text(header.replace("#pragma once\n", f"#pragma once\n{HELPERS}"))
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, sources: Path) -> Callable[..., Tensor]:
    """cuda.stream with a kernel that runs here; returns y."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda, "machine", lambda device: config.H200)

    def here(
        x: Tensor, w: QuantTensor, bias: Tensor | None, plan: config.Stream, around: cuda.Around | None = None,
        folder: Path = sources,
    ) -> Tensor:  # fmt: skip
        def kernel(source: Path, defines: tuple[tuple[str, int], ...], name: str, device: int) -> Any:
            def launch(grid: tuple[int, int], threads: int, shared: int, argument: Any, *rest: Any) -> None:
                given = (*defines, ("GRID", grid[0]))
                cuda_on_cpu.run(folder / source.name, name, given, grid, threads, argument)

            return SimpleNamespace(launch=launch)

        monkeypatch.setattr(cuda, "_kernel", kernel)
        gate = around is not None and around.gate
        y = torch.full((len(x), w.shape[0] // (1 + gate)), torch.nan, dtype=x.dtype)
        cuda.stream(x, w.to_layout(cuda.sound_layout(w)), bias, plan, y, around=around)
        return y

    return here


def arguments(m: int, n: int, k: int, name: str, dtype: torch.dtype, seed: int) -> tuple[Any, ...]:
    """x, residual, gain, weight, bias; the second token is zero, and so is its residual."""
    generator = torch.Generator().manual_seed(seed)
    x, residual = (torch.randn(m, k, generator=generator) for _ in range(2))
    x[1:2], residual[1:2] = 0, 0
    gain, bias = torch.randn(k, generator=generator).to(dtype), torch.randn(n, generator=generator).to(dtype)
    w = quantize(torch.randn(n, k, generator=generator), name)
    return x.to(dtype), residual.to(dtype), gain, w, bias


@pytest.mark.parametrize("plan", PLANS, ids=str)
@pytest.mark.parametrize(
    ("name", "dtype", "m", "n", "k"),
    [
        ("int4_g128", torch.bfloat16, 1, 96, 512), ("nvfp4", torch.bfloat16, 2, 64, 488),
        ("int4_g32_asym", torch.float16, 4, 160, 336), ("int8_channel", torch.float16, 1, 64, 256),
    ],
)  # fmt: skip
def test_norm_and_gate_are_those_of_their_own_kernels(
    plan: config.Stream, name: str, dtype: torch.dtype, m: int, n: int, k: int, run: Callable[..., Tensor]
) -> None:
    x, residual, gain, w, bias = arguments(m, n, k, name, dtype, m + n)
    h = torch.full_like(x, torch.nan)
    normal, added = add_rmsnorm_reference(x, residual, gain, 1e-5)
    alone = run(normal, w, bias, plan)
    assert torch.equal(run(x, w, bias, plan, cuda.Around(gain, 1e-5, residual, h, False)), alone)
    assert torch.equal(h, added)
    y = run(x, w, bias, plan, cuda.Around(gain, 1e-5, residual, h, True))
    assert torch.equal(y, silu_mul_reference(alone))
    RMSNORM_LINEAR.agreement.check(y, RMSNORM_LINEAR.reference(x, residual, gain, 1e-5, w, bias, True)[0], name)


def test_no_residual_leaves_x_as_it_is_and_rows_may_lie_apart(run: Callable[..., Tensor]) -> None:
    x, _, gain, w, _ = arguments(4, 64, 256, "mxfp4", torch.bfloat16, 5)
    wide = torch.cat([torch.full_like(x, torch.nan), x], 1)
    normal, _ = add_rmsnorm_reference(x, None, gain, 1e-5)
    y = run(wide[:, 256:], w, None, PLANS[0], cuda.Around(gain, 1e-5, None, None, False))
    assert torch.equal(y, run(normal, w, None, PLANS[0]))
    assert y[0].abs().max() > 0
    assert not y[1].any()


@pytest.mark.parametrize(
    ("source", "before", "after"),
    [
        ("stream.cu", "return of_unit / pairs * half", "return 0 * half"),
        ("around.cuh", "warp < WARPS; ++warp", "warp < WARPS - 1; ++warp"),
        (
            "stream.cu",
            "rows.add(blockIdx.x ? nullptr : p.h, red, p.K);\n  __syncthreads();",
            "rows.add(p.h, red, p.K);",
        ),
    ],
)
def test_what_is_broken_on_purpose_is_found(
    source: str, before: str, after: str, sources: Path, run: Callable[..., Tensor], tmp_path: Path
) -> None:
    shutil.copytree(sources, tmp_path / "changed")
    text = (sources / source).read_text()
    assert before in text
    (tmp_path / "changed" / source).write_text(text.replace(before, after))
    x, residual, gain, w, _ = arguments(1, 64, 512, "int4_g128", torch.bfloat16, 9)
    around = cuda.Around(gain, 1e-5, residual, torch.empty_like(x), True)
    y = run(x, w, None, PLANS[0], around)
    assert not torch.equal(run(x, w, None, PLANS[0], around, tmp_path / "changed"), y)
