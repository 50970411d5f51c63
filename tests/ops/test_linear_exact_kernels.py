"""linear_exact's CUDA kernels run on the CPU, thread by thread: every plan gives the bits of the CPU twin.

Their loads are PTX, for which plain copies are put in (tests/cuda_on_cpu.py runs the rest). Asynchronous copies happen
at once, so that waiting for them is not tested here.
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
import nybble
from nybble.ops.linear_exact import cuda, linear_exact
from nybble.ops.linear_exact.cuda import Stream, Tile
from same import same_bits

pytestmark = pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="g++ is not installed")
BOTH = [Stream(4, 4, 2), Tile(4)]
PLANS = [Stream(1, 1, 8), Stream(1, 2, 4), Stream(4, 4, 2), Stream(8, 4, 2), Tile(2), Tile(4), Tile(8), Tile(8, 16, 1)]
CHANGES = [
    ("stream.cu", "for (int c = 0; c < CHAINS; ++c)", "for (int c = CHAINS - 1; c >= 0; --c)"),
    ("tile.cu", "__fmaf_rn(a[m], b[n], sum[m][n])", "__fadd_rn(__fmul_rn(a[m], b[n]), sum[m][n])"),
]
HELPERS = """
using std::min;
#define __fmaf_rn(a, b, c) std::fma(a, b, c)
struct float4 { float x, y, z, w; };
static float4 shared_memory[1 << 14];
static inline unsigned long long __cvta_generic_to_shared(const void *p) { return (char *)p - (char *)shared_memory; }
static inline void to_shared(unsigned to, const char *from, int bytes, bool there) {
  there ? std::memcpy((char *)shared_memory + to, from, bytes) : std::memset((char *)shared_memory + to, 0, bytes);
}
static inline unsigned short bfloat_of(float f) {
  const unsigned u = __float_as_uint(f);
  return u + 0x7FFF + (u >> 16 & 1) >> 16;
}
#define __syncwarp __syncthreads
"""
READ = "  std::memcpy(to, from, 4 * WORDS);\n}\n"
COPY = """  for (int i = 0; i * 16 < BYTES; ++i)
    to_shared(to + i * 16 * THREADS, from + i * 16, BYTES < 16 ? BYTES : 16, there);
}
"""


def plain(source: str) -> str:
    """A kernel's source with plain C++ for its PTX."""
    source = re.sub(r"(void read_once\(.*?\{\n).*?\n\}\n", rf"\g<1>{READ}", source, flags=re.S)
    source = re.sub(r"(void read_shared_by_many\(.*?\{\n).*?\n\}\n", rf"\g<1>{READ}", source, flags=re.S)
    source = re.sub(r"(void copy\(.*?\{\n).*?\n\}\n", rf"\g<1>{COPY}", source, flags=re.S)
    source = re.sub(r"asm\(\"\{ \.reg \.b16 h;.*?: \"r\"\((.*?)\)\);\n", r"to[i] = half_float(\1);\n", source)
    for kind, function in (("bf16", "bfloat_of"), ("f16", "float_half")):
        source = re.sub(rf"asm\(\"cvt\.rn\.{kind}\.f32 .*?\);", f"half = {function}(total);", source)
    source = re.sub(r"asm volatile\(\"cp\.async\.\w+_group.*?\);", "", source)
    return source.replace("extern __shared__ float4 shared[];", "float4 *shared = shared_memory;")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The kernels with plain C++ for their PTX."""
    folder = tmp_path_factory.mktemp("linear_exact")
    for path in Path(cuda.__file__).parent.glob("*.cu*"):
        (folder / path.name).write_text(plain(path.read_text()).replace("#pragma once\n", f"#pragma once\n{HELPERS}"))
    return folder


class Kernel:
    """Stands in for a loaded kernel."""

    def __init__(self, folder: Path, plan: Any, defines: tuple[tuple[str, Any], ...]) -> None:
        self.source, self.name, self.defines = folder / plan.source.name, plan.name, defines

    def launch(self, grid: tuple[int, int], threads: int, shared: int, argument: Any, *rest: Any) -> None:
        cuda_on_cpu.run(self.source, self.name, self.defines, grid, threads, argument)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, sources: Path) -> Callable[..., Tensor]:
    """cuda.run with kernels that run here."""
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))

    def here(x: Tensor, w: Any, bias: Tensor | None, plan: Any, folder: Path = sources) -> Tensor:
        monkeypatch.setattr(cuda, "_kernel", lambda chosen, shared, defines, device: Kernel(folder, chosen, defines))
        return cuda.run(x, w, bias, plan)

    return here


def scattered(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    """Normal numbers times powers of two up to 2^9 either way."""
    generator = torch.Generator().manual_seed(seed)
    powers = torch.exp2(torch.randint(-9, 10, shape, generator=generator).float())
    return (torch.randn(shape, generator=generator) * powers).to(dtype)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_every_plan_has_the_bits_of_the_twin(plan: Any, run: Callable[..., Tensor]) -> None:
    for m, n, k in ((1, 3, 7), (33, 17, 264), (5, 130, 300)):
        x, w = (scattered(rows, k, dtype=torch.bfloat16, seed=rows) for rows in (m, n))
        bias = scattered(n, dtype=torch.bfloat16, seed=3) if m == 33 else None
        same_bits(run(x, w, bias, plan), linear_exact(x, w, bias), f"{plan}, M {m}, N {n}, K {k}")


@pytest.mark.parametrize("plan", BOTH, ids=str)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_kinds_have_the_bits_of_the_twin(dtype: torch.dtype, plan: Any, run: Callable[..., Tensor]) -> None:
    x, w = (scattered(rows, 300, dtype=dtype, seed=rows) for rows in (9, 20))
    same_bits(run(x, w, None, plan), linear_exact(x, w), f"{plan}, {dtype}")


@pytest.mark.parametrize("plan", BOTH, ids=str)
@pytest.mark.parametrize("name", ["int8_channel", "int4_g128", "int4_g32_asym"])
def test_integer_weights_have_the_bits_of_the_twin(name: str, plan: Any, run: Callable[..., Tensor]) -> None:
    q = nybble.quantize(scattered(20, 384, dtype=torch.float32, seed=4), name)
    x = scattered(9, 384, dtype=torch.bfloat16, seed=5)
    same_bits(run(x, q, None, plan), linear_exact(x, q), f"{plan}, {name}")


@pytest.mark.parametrize(("source", "before", "after"), CHANGES)
def test_an_order_changed_on_purpose_is_found(
    source: str, before: str, after: str, sources: Path, run: Callable[..., Tensor], tmp_path: Path
) -> None:
    shutil.copytree(sources, tmp_path / "changed")
    text = (sources / source).read_text()
    assert before in text
    (tmp_path / "changed" / source).write_text(text.replace(before, after))
    x, w = (scattered(rows, 600, dtype=torch.float32, seed=rows) for rows in (4, 40))  # 16 bits would hide it
    plan = BOTH[source == "tile.cu"]
    assert not torch.equal(run(x, w, None, plan, tmp_path / "changed"), linear_exact(x, w))
