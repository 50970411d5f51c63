"""quantize_rows: every implementation gives the bits of the separate passes.

Without a GPU the kernel runs in Triton's interpreter, whose conversion to bfloat16 cuts bits off instead of rounding:
bfloat16 is for a GPU only.
"""

import importlib

import numpy as np
import pytest
import torch
from torch import Tensor

import nybble
from nybble.errors import BadInput
from nybble.formats import table
from nybble.methods import hadamard
from nybble.ops._declare import Implementation
from nybble.ops.linear import linear
from nybble.ops.quantize_rows import (
    CASE_FORMATS,
    PROLOGUES,
    QUANTIZE_ROWS,
    quantize_rows,
    rmsnorm_quantize,
    silu_mul_quantize,
)
from nybble.ops.quantize_rows.reference import prologue_reference, rotate
from nybble.ops.rmsnorm import ADD_RMSNORM
from nybble.ops.silu_mul import SILU_MUL
from nybble.quantize import QuantTensor

_, KERNEL, FALLBACK = QUANTIZE_ROWS.implementations("cuda")  # the CUDA kernel's tests: test_producers_cuda.py
AMAX = torch.tensor(3.0)


def assert_same(q: QuantTensor, expected: QuantTensor, label: str) -> None:
    """The same bytes; in a block that holds NaN or infinity, NaN."""
    assert (q.format, q.shape, q.layout, q.dtype) == (expected.format, expected.shape, expected.layout, expected.dtype)
    assert q.parts.keys() == expected.parts.keys(), label
    values = expected.dequantize(torch.float32)
    assert torch.equal(q.dequantize(torch.float32).nan_to_num(1e30), values.nan_to_num(1e30)), label
    for name, part in q.parts.items():
        other = expected.parts[name]
        assert (part.shape, part.dtype) == (other.shape, other.dtype), f"{label}: {name}"
        if values.isfinite().all():
            assert torch.equal(part, other), f"{label}: {name}"


def separate(implementation: Implementation, args: tuple) -> tuple[QuantTensor, Tensor]:
    """The separate passes on the same device: the gate by the same kernel, since its exponential is the device's."""
    x, fmt, prologue, *_, amax, rotated = args
    if prologue != "silu_mul" or implementation is QUANTIZE_ROWS.fallback:
        return QUANTIZE_ROWS.reference(*args)
    gate = SILU_MUL.implementations("cuda")[0]
    y = gate.run(x)
    SILU_MUL.agreement.check(y, SILU_MUL.reference(x), gate.name)
    return QUANTIZE_ROWS.reference(y, fmt, "plain", None, None, 0.0, amax, rotated)[0], x


def check_on(implementation: Implementation, name: str, device: str, bf16: bool) -> None:
    """All cases whose labels begin with the name."""
    served = 0
    for label, args in QUANTIZE_ROWS.cases(device):
        if not label.startswith(f"{name}-") or ("bfloat16" in label and not bf16):
            continue
        assert implementation.supports(*args) is None, label
        before = args[0].clone()
        q, h = implementation.run(*args)
        expected, added = separate(implementation, args)
        assert_same(q, expected, label)
        assert torch.equal(h, added), label
        assert torch.equal(args[0], before), "the input is left alone"
        served += 1
    assert served >= 4


@pytest.mark.parametrize("implementation", [KERNEL, FALLBACK], ids=lambda i: i.name)
@pytest.mark.parametrize("name", CASE_FORMATS)
def test_gives_the_bits_of_the_separate_passes(implementation: Implementation, name: str) -> None:
    if implementation is KERNEL and torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU, and do not take tensors of the CPU")
    check_on(implementation, name, "cpu", bf16=implementation is QUANTIZE_ROWS.fallback)


@pytest.mark.gpu(capability=(8, 0))
@pytest.mark.parametrize("prologue", PROLOGUES)
@pytest.mark.parametrize("name", CASE_FORMATS)
def test_gives_the_bits_of_the_separate_passes_on_a_gpu(name: str, prologue: str) -> None:
    check_on(KERNEL, f"{name}-{prologue}", "cuda", bf16=True)


def fused(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c rounded once to float32: every product of two float32 numbers is exact in float64."""
    wide = np.asarray(a, np.float64) * np.asarray(b, np.float64)
    return (wide + c).astype(np.float32)


def hard_rows(device: str, dtype: torch.dtype) -> Tensor:
    """Rows over all magnitudes of the dtype, its smallest and largest numbers and signed zeros among them."""
    generator = torch.Generator().manual_seed(3)
    info = torch.finfo(dtype)
    spread = torch.logspace(-44 if dtype != torch.float16 else -7, 4 if dtype == torch.float16 else 37, 24)
    x = torch.randn(24, 160, generator=generator) * spread[:, None]
    x = x.clamp(info.min, info.max).to(dtype)
    x[:, 1], x[:, 2], x[3], x[4] = 0.0, -0.0, info.max, info.tiny
    x[5, ::2], x[5, 1::2] = info.tiny, -info.smallest_normal / 4
    return x.to(device)


def test_the_smallest_scale_ends_where_float32_is_subnormal() -> None:
    """MXINT8, whose largest element is below 2: the scale 2^-126 begins with blocks of 1.75 * 2^-127."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU, and do not take tensors of the CPU")
    check_smallest_scale("cpu")


@pytest.mark.gpu(capability=(8, 0))
def test_the_smallest_scale_on_a_gpu() -> None:
    check_smallest_scale("cuda")


def check_smallest_scale(device: str) -> None:
    bits = torch.arange(0x300000, 0x900000, 0x10000, dtype=torch.int32, device=device)
    x = torch.cat([bits - 1, bits]).view(torch.float32)[:, None] * torch.ones(32, device=device)
    args = (x, table.block("mxint8"), "plain", None, None, 0.0, None, 0)
    q = KERNEL.run(*args)[0]
    assert_same(q, QUANTIZE_ROWS.reference(*args)[0], "mxint8")
    assert torch.equal(q.scale[:, 0] > 0, x[:, 0] >= 1.75 * 2.0**-127)


def check_hard_rows(device: str, dtype: torch.dtype) -> None:
    x = hard_rows(device, dtype)
    for name in (*CASE_FORMATS, "mxint8"):
        for amax in (1e-30, 3.0, 1e30) if table.block(name).tensor_scale else (None,):
            largest = None if amax is None else torch.tensor(amax, device=device)
            args = (x, table.block(name), "plain", None, None, 0.0, largest, 0)
            assert_same(KERNEL.run(*args)[0], QUANTIZE_ROWS.reference(*args)[0], f"{name}, {amax}")


def test_all_magnitudes() -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU, and do not take tensors of the CPU")
    check_hard_rows("cpu", torch.float32)
    check_hard_rows("cpu", torch.float16)


@pytest.mark.gpu(capability=(8, 0))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_all_magnitudes_on_a_gpu(dtype: torch.dtype) -> None:
    check_hard_rows("cuda", dtype)


def test_the_arithmetic_of_gpus_in_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU divides and encodes with, made of multiply-adds that round once. Conversions to E4M3 by the GPU itself
    stay out: the interpreter's cut bits off."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU, and do not take tensors of the CPU")
    interpreter = importlib.import_module("triton.runtime.interpreter")
    handle, builder = interpreter.TensorHandle, interpreter.InterpreterBuilder
    monkeypatch.setattr(builder, "create_fma", lambda _, a, b, c: handle(fused(a.data, b.data, c.data), c.dtype.scalar))
    monkeypatch.setattr(importlib.import_module("nybble.ops.quantize_rows.triton"), "_machine", lambda _: 1)
    check_hard_rows("cpu", torch.float16)
    check_hard_rows("cpu", torch.float32)
    check_on(KERNEL, "nvfp4-rmsnorm", "cpu", bf16=False)
    check_on(KERNEL, "int8_token-plain", "cpu", bf16=False)


def check_not_finite(device: str, dtype: torch.dtype) -> None:
    x = torch.randn(4, 200, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    x[1, 7], x[2, 150] = float("nan"), float("-inf")
    for name in ("int8_token", "fp8_token", "fp8_g128", "int4_g128", "nvfp4", "mxfp4"):
        fmt = table.block(name)
        args = (x, fmt, "plain", None, None, 0.0, AMAX.to(device) if fmt.tensor_scale else None, 0)
        q = KERNEL.run(*args)[0]
        assert_same(q, QUANTIZE_ROWS.reference(*args)[0], name)
        columns = fmt.block[1] or 200
        bad = q.dequantize(torch.float32).isnan()
        expected = torch.zeros(4, 200, dtype=torch.bool, device=device)
        for row, column in ((1, 7), (2, 150)):
            expected[row, column // columns * columns : column // columns * columns + columns] = True
        assert torch.equal(bad, expected), name


def test_a_block_with_nan_or_infinity_decodes_to_nan() -> None:
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU, and do not take tensors of the CPU")
    check_not_finite("cpu", torch.float16)


@pytest.mark.gpu(capability=(8, 0))
def test_a_block_with_nan_or_infinity_decodes_to_nan_on_a_gpu() -> None:
    check_not_finite("cuda", torch.bfloat16)


@pytest.mark.parametrize("bits", [8, 11])
def test_no_quotient_of_a_short_number_falls_on_the_wrong_side_of_a_tie(bits: int) -> None:
    """What triton_codes.quotient says of bfloat16 and float16: all their mantissas x, all ties t of the elements it
    writes, and all divisors e around x / t; elsewhere a quotient is too far from a tie for its last bits to matter."""
    wholes = np.arange(128) + 0.5  # of eight bits, and of fewer
    floats = np.concatenate([(np.arange(16) + 0.5) / 8, [0.25, 0.75, 2.5, 3.5, 5.0]])  # E4M3's pattern; E2M1
    x = np.arange(1 << bits - 1, 1 << bits).astype(np.float32)[:, None]
    ties = np.concatenate([wholes, floats]).astype(np.float32)
    middle = (x / ties).astype(np.float32)
    for steps in range(-4, 5):
        e = (middle.view(np.int32) + steps).view(np.float32)
        high = np.float32(1) / e
        left = fused(-e, high, np.float32(1))
        low = fused(left, left * high, left * high)
        q = fused(x, high, x * low)
        assert (np.sign(q - ties) == np.sign(x / e - ties)).all()


def test_the_rotation_is_sylvesters() -> None:
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    for size in (16, 32, 128):
        expected = x.double().unflatten(-1, (-1, size)) @ (hadamard.matrix(size) / size**0.5)
        assert float((rotate(x, size).double() - expected.flatten(-2)).norm() / expected.norm()) < 2.0**-22
        assert torch.equal(rotate(x[:, :size], size), rotate(x, size)[:, :size])


def test_the_norm_is_add_rmsnorms() -> None:
    for label, (x, residual, gain, eps) in ADD_RMSNORM.cases():
        y, h = prologue_reference(x, "rmsnorm", residual, gain, eps)
        expected, added = ADD_RMSNORM.reference(x, residual, gain, eps)
        ADD_RMSNORM.agreement.check(y, expected, label)
        assert torch.equal(h, added)


def test_functions_are_the_op() -> None:
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 3, 5, 64, generator=generator).to(torch.bfloat16)
    gain = torch.randn(64, generator=generator).to(torch.bfloat16)
    q = quantize_rows(x, "int8_token", hadamard=16)
    assert_same(q, nybble.quantize(rotate(x, 16), "int8_token"), "plain")
    assert_same(silu_mul_quantize(x, "mxfp4"), nybble.quantize(SILU_MUL.reference(x), "mxfp4"), "silu")
    q, h = rmsnorm_quantize(x, residual, gain, 1e-5, "nvfp4", tensor_amax=AMAX)
    assert torch.equal(h, x + residual)
    y = prologue_reference(x, "rmsnorm", residual, gain, 1e-5)[0]
    assert_same(q, nybble.quantize(y, "nvfp4", tensor_amax=AMAX), "rmsnorm")
    assert rmsnorm_quantize(x, None, gain, 1e-5, "int8_token")[1] is x


def test_a_linear_rounds_its_inputs_by_the_producer() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    w = nybble.quantize(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)), "mxfp4")
    rounded = nybble.quantize(x, "mxfp4").dequantize()
    assert torch.equal(linear(x, w, activation="mxfp4"), linear(rounded, w))
    assert linear(x[0], w, activation="mxfp4").shape == (8,)


class Fed(torch.nn.Module):
    """Every producer, as a graph's nodes."""

    def forward(self, x: Tensor, residual: Tensor, gain: Tensor, amax: Tensor) -> tuple[Tensor, ...]:
        a = quantize_rows(x, "int8_token", hadamard=32)
        b = silu_mul_quantize(x, "fp8_g128")
        c, h = rmsnorm_quantize(x, residual, gain, 1e-5, "nvfp4", tensor_amax=amax)
        return *a.parts.values(), *b.parts.values(), *c.parts.values(), h


def fed(device: str) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    x, residual = torch.randn(2, 5, 256, generator=generator).to(device, torch.bfloat16)
    return x, residual, torch.randn(256, generator=generator).to(device, torch.bfloat16), AMAX.to(device)


def check_compiled(device: str) -> None:
    model, args = Fed(), fed(device)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for got, expected in zip(compiled(*args), model(*args), strict=True):
        assert torch.equal(got, expected)


def test_compiles_to_one_graph() -> None:
    check_compiled("cpu")
    x, residual, gain, amax = fed("cpu")
    for rest in (
        ("int8_token", "plain", None, None, 0.0, None, 16),
        ("nvfp4", "rmsnorm", residual, gain, 1e-5, amax, 0),
    ):
        torch.library.opcheck(torch.ops.nybble.quantize_rows, (x, *rest))


@pytest.mark.gpu(capability=(8, 0))
def test_compiles_and_captures_on_a_gpu() -> None:
    check_compiled("cuda")
    model, args = Fed(), fed("cuda")
    model(*args)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = model(*args)
    args[0].copy_(args[1] * 3)
    graph.replay()
    for mine, expected in zip(got, model(*args), strict=True):
        assert torch.equal(mine, expected)


@pytest.mark.gpu(capability=(8, 0))
def test_large_rows_and_views_on_a_gpu() -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    for columns in (4608, 14336, 53248, 65536):
        wide = torch.randn(70, columns + 8, generator=generator, device="cuda").to(torch.bfloat16)
        for x in (wide[:, 8:], wide[::2, :columns], wide[:, :columns].t().contiguous().t()):
            for name in ("int8_token", "fp8_token", "mxfp4"):
                assert_same(quantize_rows(x, name), nybble.quantize(x, name), f"{name}, {columns}")


def test_refusals_say_what_was_seen() -> None:
    x = torch.ones(2, 48)
    with pytest.raises(BadInput, match="float64"):
        quantize_rows(x.double(), "int8_token")
    with pytest.raises(BadInput, match="fp8_block128"):
        quantize_rows(x, "fp8_block128")
    with pytest.raises(BadInput, match="divides K = 48"):
        quantize_rows(x, "int8_token", hadamard=32)
    with pytest.raises(BadInput, match="even width"):
        silu_mul_quantize(x[:, :3], "int8_token")
    with pytest.raises(BadInput, match=r"gain is torch.float32 \(47,\)"):
        rmsnorm_quantize(x, None, torch.ones(47), 1e-5, "int8_token")
    with pytest.raises(BadInput, match="residual"):
        rmsnorm_quantize(x, x[:1], torch.ones(48), 1e-5, "int8_token")
    fmt = table.block("nvfp4")
    assert "tensor_amax" in str(KERNEL.supports(x, fmt, "plain", None, None, 0.0, None, 0))
    assert "nf4" in str(KERNEL.supports(x, table.block("nf4_g64"), "plain", None, None, 0.0, None, 0))
