"""quantize_rows' CUDA kernel has the bits of the definition, thread by thread on a CPU and as it is on a GPU.

On a CPU its conversions to E4M3 are those for GPUs without such an instruction, and the gate is left out, whose
exponential is the GPU's own.
"""

from __future__ import annotations

import importlib
import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import cuda_on_cpu
from nybble.formats import table
from nybble.ops import _nvrtc
from nybble.ops.quantize_rows import CASE_FORMATS, PROLOGUES, QUANTIZE_ROWS
from nybble.ops.silu_mul import SILU_MUL
from nybble.quantize import QuantTensor

cuda: Any = importlib.import_module("nybble.ops.quantize_rows.cuda")
gpu: Any = importlib.import_module("nybble.ops.quantize_rows.gpu")
ROOT = Path(__file__).parents[2]
HALVES = (torch.bfloat16, torch.float16)
FORMATS = (*CASE_FORMATS, "int4_g32", "mxint8", "mxfp8_e5m2", "ue5m3fp4")
Args = tuple[Any, ...]


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch on the CPU."""
    if cuda_on_cpu.COMPILER is None:
        pytest.skip("g++ is not installed")

    def start(x: Any, given: Any, blocks: int, threads: int, argument: Any) -> None:
        cuda_on_cpu.run(cuda.SOURCE, "quantize_rows", given, (blocks, 1), threads, argument)

    monkeypatch.setattr(cuda, "launch", start)


def same(q: QuantTensor, expected: QuantTensor, label: str) -> None:
    """The same bytes; in a block that holds NaN or infinity, NaN."""
    ours, theirs = q.dequantize(torch.float32), expected.dequantize(torch.float32)
    assert torch.equal(ours.isnan(), theirs.isnan()), label
    assert torch.equal(q.scale.nan_to_num(-1), expected.scale.nan_to_num(-1)), label
    if expected.tensor_scale is not None:
        assert torch.equal(q.tensor_scale, expected.tensor_scale), label
    finite = theirs.isfinite()
    assert torch.equal(q.unpack()[finite], expected.unpack()[finite]), label


def check(args: Args, label: str) -> None:
    """The kernel against the separate passes; the gate is taken from silu_mul's own kernel."""
    x, fmt, prologue, residual, gain, eps, amax, hadamard = args
    reason = cuda.unfit(x, fmt, prologue, residual, gain, amax)
    assert reason is None, f"{label}: {reason}"
    before = x.clone()
    q, h = cuda.run(*args)
    if prologue == "silu_mul":
        args = (SILU_MUL.implementations("cuda")[0].run(x), fmt, "plain", None, None, 0.0, amax, hadamard)
    expected, added = QUANTIZE_ROWS.reference(*args)
    same(q, expected, label)
    assert torch.equal(x.view(torch.int16), before.view(torch.int16)), "the input is left alone"
    if residual is not None:
        assert torch.equal(h, added), label


def arguments(
    name: str, prologue: str, m: int, k: int, hadamard: int, device: str, dtype: torch.dtype, seed: int = 0
) -> Args:
    """Rows of random numbers, zeros and one outlier, inside a wider tensor where seeds are odd."""
    generator = torch.Generator().manual_seed(seed)
    width = 2 * k if prologue == "silu_mul" else k
    x = torch.randn(m, width + 16, generator=generator)
    x[0], x[m - 1, 3] = 0, 100
    x = x.to(device, dtype)
    x = x[:, 8 : width + 8] if seed % 2 else x[:, :width].contiguous()
    normal = prologue == "rmsnorm"
    residual = torch.randn(m, k, generator=generator).to(device, dtype) if normal and seed % 4 < 2 else None
    gain = torch.randn(k, generator=generator).to(device, dtype) if normal else None
    fmt = table.block(name)
    amax = torch.tensor(3.0, device=device) if fmt.tensor_scale else None
    return x, fmt, prologue, residual, gain, 1e-5 if normal else 0.0, amax, hadamard


def magnitudes(dtype: torch.dtype, device: str) -> torch.Tensor:
    """Every fifth magnitude of the dtype as the largest of a block of 32, zeros of both signs among the others."""
    largest = torch.arange(0, int(torch.tensor(float("inf"), dtype=dtype).view(torch.int16)), 5, dtype=torch.int16)
    largest = largest.view(dtype)[: len(largest) // 8 * 8]
    generator = torch.Generator().manual_seed(1)
    x = (largest[:, None].float() * (torch.rand(len(largest), 32, generator=generator) * 2 - 1)).to(dtype)
    x[:, 3], x[:, 4], x[:, 20] = largest, -0.0, 0.0
    return x.view(-1, 256).to(device)


@pytest.mark.parametrize("name", ["int8_token", "fp8_g128", "int4_g32", "nvfp4", "mxfp4", "mxint8", "ue5m3fp4"])
def test_the_bits_of_the_definition(name: str, on_cpu: None) -> None:
    calls = (("plain", 2, 16, 16), ("rmsnorm", 3, 144, 0), ("plain", 1, 640, 128), ("rmsnorm", 2, 672, 32))
    for seed, (prologue, m, k, hadamard) in enumerate(calls):
        args = arguments(name, prologue, m, k, hadamard, "cpu", HALVES[seed // 2], seed)
        check(args, f"{name} {calls[seed]}")


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_size_of_a_block(name: str, dtype: torch.dtype, on_cpu: None) -> None:
    fmt = table.block(name)
    for amax in (1e-30, 3.0, 1e30) if fmt.tensor_scale else (None,):
        largest = None if amax is None else torch.tensor(amax)
        check((magnitudes(dtype, "cpu"), fmt, "plain", None, None, 0.0, largest, 0), f"{name}, {amax}")


def test_long_rows_and_several_blocks_a_row(on_cpu: None) -> None:
    for name, prologue, k, hadamard in (
        ("int8_token", "rmsnorm", 14336, 16), ("nvfp4", "plain", 8320, 0), ("mxfp4", "plain", 4608, 128),
    ):  # fmt: skip
        check(arguments(name, prologue, 2, k, hadamard, "cpu", torch.bfloat16), f"{name} {k}")
    for width in (16, 512, 4096, 4608, 14336, 53248, 65536):
        for whole in (True, False):
            threads, sets, chunks = cuda.cut(width, whole)
            assert threads % 32 == 0
            assert threads <= 512
            assert threads * sets * chunks * cuda.COLUMNS >= width
            assert whole <= (chunks == 1)


def test_nan_and_infinity_stay_in_their_block(on_cpu: None) -> None:
    x = torch.randn(4, 256, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    x[1, 7], x[2, 150] = float("nan"), float("-inf")
    for name in ("int8_token", "fp8_g128", "nvfp4", "mxfp4"):
        fmt = table.block(name)
        check((x, fmt, "plain", None, None, 0.0, torch.tensor(3.0) if fmt.tensor_scale else None, 0), name)


def test_refusals_say_what_was_seen() -> None:
    x, fmt = torch.zeros(4, 64, dtype=torch.bfloat16), table.block("int8_token")
    assert cuda.unfit(x, fmt, "plain", None, None, None) is None
    assert "float32" in cuda.unfit(x.float(), fmt, "plain", None, None, None)
    assert "(4, 60)" in cuda.unfit(x[:, :60], fmt, "plain", None, None, None)
    assert "x with strides (64, 1)" in cuda.unfit(x[:, 1:49], fmt, "plain", None, None, None)
    assert "residual with strides (1, 4)" in cuda.unfit(x, fmt, "rmsnorm", x.view(64, 4).t(), x[0], None)
    assert "tensor_amax" in cuda.unfit(x, table.block("nvfp4"), "plain", None, None, None)
    assert "nf4" in cuda.unfit(x, table.block("nf4_g64"), "plain", None, None, None)


def test_the_first_choice_is_what_was_faster() -> None:
    record = json.loads((ROOT / "benchmarks/results/h200/producers.json").read_text())
    times: dict[Args, dict[str, float]] = {}
    for row in record["rows"]:
        case = (row["format"], row["prologue"], row["m"], row["k"], row["rotation"])
        times.setdefault(case, {})[row["kernel"]] = row["us"]
    assert {case[0] for case in times} == set(gpu.TIMED)
    for (name, prologue, *_), us in times.items():
        residual = torch.zeros(1) if prologue == "add_rmsnorm" else None
        reason = gpu.slower(table.block(name), prologue.removeprefix("add_"), residual)
        chosen = us[gpu.KERNELS[reason is None].name]
        assert chosen <= 1.03 * min(us.values()), f"{name} after {prologue}: {us}"
    assert "int4_token was not timed" in str(gpu.slower(table.block("int4_token"), "plain", None))


@pytest.mark.skipif(_nvrtc.available() is not None, reason=str(_nvrtc.available()))
@pytest.mark.parametrize("arch", ["80", "89", "90a", "100a", "120a"])
def test_compiles_everywhere(arch: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NYBBLE_CACHE", str(tmp_path))
    native = int(arch.rstrip("a")) >= 89
    asked = [("int8_token", "rmsnorm", True, 16), ("fp8_g128", "silu_mul", False, 0), ("nvfp4", "plain", False, 32)]
    given = [cuda.defines(table.block(name), False, pro, res, h, 4096, native)[0] for name, pro, res, h in asked]
    with ThreadPoolExecutor(2) as pool:
        cubins = pool.map(lambda one: _nvrtc.build(cuda.SOURCE, dict(one), arch), given)
        assert all(cubin.startswith(b"\x7fELF") for cubin in cubins)


@pytest.mark.gpu(capability=(8, 0))
@pytest.mark.parametrize("name", FORMATS)
def test_the_bits_of_the_separate_passes_on_a_gpu(name: str) -> None:
    shapes = ((70, 1152, 128), (3, 640, 32), (9, 4608, 16), (2, 16, 0))
    for seed, prologue in enumerate(2 * PROLOGUES):
        m, k, hadamard = shapes[seed % len(shapes)]
        label = f"{name}-{prologue}-{m}x{k}-h{hadamard}"
        check(arguments(name, prologue, m, k, hadamard, "cuda", HALVES[seed // 2 % 2], seed), label)


@pytest.mark.gpu(capability=(8, 0))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_size_of_a_block_on_a_gpu(dtype: torch.dtype) -> None:
    for name in FORMATS:
        fmt = table.block(name)
        for amax in (1e-30, 3.0, 1e30) if fmt.tensor_scale else (None,):
            largest = None if amax is None else torch.tensor(amax, device="cuda")
            check((magnitudes(dtype, "cuda"), fmt, "plain", None, None, 0.0, largest, 0), f"{name}, {amax}")


@pytest.mark.gpu(capability=(8, 0))
def test_long_rows_on_a_gpu() -> None:
    for name, prologue, k in (
        ("int8_token", "rmsnorm", 14336), ("fp8_token", "plain", 53248), ("nvfp4", "silu_mul", 14336),
        ("mxfp4", "rmsnorm", 65536),
    ):  # fmt: skip
        check(arguments(name, prologue, 5, k, 16, "cuda", torch.bfloat16, 1), f"{name} {prologue} {k}")


@pytest.mark.gpu(capability=(8, 0))
def test_a_graph_replays_with_new_inputs() -> None:
    args = arguments("nvfp4", "plain", 40, 512, 16, "cuda", torch.bfloat16)
    cuda.run(*args)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, _ = cuda.run(*args)
    args[0].copy_(torch.randn_like(args[0]))
    graph.replay()
    same(q, QUANTIZE_ROWS.reference(*args)[0], "replayed")
