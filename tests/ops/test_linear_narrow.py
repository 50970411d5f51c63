"""Products of narrow operands on the CPU: the layout, what is taken and refused, plans, the measured choice, and the
Triton kernel in Triton's interpreter, whose integer sums are compared bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from conftest import interpreter_loops
from nybble.formats import table
from nybble.ops import _nvrtc
from nybble.ops.linear import LINEAR, gpu, narrow, narrow_cuda, narrow_fp8, narrow_torch, narrow_tune, triton
from nybble.ops.linear.problem import H200
from nybble.quantize import QuantTensor, elements, layouts, quantize

EXACT = (("int8_channel", "int8_token"), ("int4_channel", "int8_token"), ("int4_channel", "int4_token"))
PAIRS = (
    *EXACT, ("int8_channel", "int8_g128"), ("int8_g128", "int8_token"), ("int4_g128", "int8_token"),
    ("int4_g128", "int4_g128"), ("int4_g64", "int4_g64"), ("int4_g32", "int4_g32"), ("int4_g32", "int8_token"),
    ("fp8_channel", "fp8_token"), ("fp8_tensor", "fp8_token"), ("fp8_block128", "fp8_g128"),
    ("fp8_channel", "fp8_g128"), ("fp8_block128", "fp8_token"),
)  # fmt: skip
SHAPES = ((0, 5, 16), (1, 1, 1), (3, 17, 129), (18, 130, 200), (5, 48, 320), (2, 3, 576))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def problem(m: int, n: int, k: int, weight: str, activation: str, **rest: object) -> narrow.Problem:
    return narrow.Problem(m, n, k, table.block(weight), table.block(activation), **rest)  # type: ignore[arg-type]


def multiply(a: QuantTensor, w: QuantTensor, bias: torch.Tensor | None, plan: int = 0) -> torch.Tensor:
    p = narrow.Problem(a.shape[0], *w.shape, w.format, a.format, torch.float32)
    y = torch.full((p.m, p.n), float("nan"))
    triton.run(a, w.to_layout(narrow.layout_for(w.format)), bias, p, triton.plans(p)[plan], y)
    return y


def integers(q: QuantTensor) -> torch.Tensor:
    return elements.decode_int(q.format.element, q.unpack()).double()  # type: ignore[arg-type]


interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or not interpreter_loops(),
    reason="compiled where there is a GPU; Triton 3.6's interpreter takes no computed bound of a loop",
)


@interpreted
@pytest.mark.parametrize(("weight", "activation"), EXACT)
def test_integer_sums_are_exact_and_rescaled_in_the_declared_order(weight: str, activation: str) -> None:
    for m, n, k in SHAPES:
        a, w, bias = quantize(normal(m, k, seed=m), activation), quantize(normal(n, k, seed=n), weight), normal(n)
        sums = integers(a) @ integers(w).t()
        expected = sums.to(torch.float32) * a.scale * w.scales()[0].flatten()
        assert torch.equal(multiply(a, w, bias), expected + bias), (m, n, k)
        assert torch.equal(multiply(a, w, None), expected), (m, n, k)


@interpreted
@pytest.mark.parametrize(("weight", "activation"), PAIRS)
def test_every_pair_agrees_with_the_reference(weight: str, activation: str) -> None:
    for m, n, k in SHAPES:
        x, w, bias = normal(m, k, seed=m), quantize(normal(n, k, seed=n), weight), normal(n)
        args = (x, w, bias, table.block(activation), None)
        LINEAR.check(multiply(quantize(x, activation), w, bias), args, f"{weight} {activation} {m, n, k}")


@interpreted
def test_extreme_codes_rows_of_zeros_and_of_one_outlier() -> None:
    x = normal(6, 129)
    x[1], x[2], x[3], x[4] = 0, 1e36, torch.eye(129)[7] * 1e4, -1e-38
    w = quantize(torch.full((3, 129), -1.0), "int8_channel")
    lowest = QuantTensor(w.format, w.shape, torch.full_like(w.codes, 0x80), w.scale)  # -128 everywhere
    a = quantize(x, "int8_token")
    expected = (integers(a) @ integers(lowest).t()).to(torch.float32) * a.scale * lowest.scale.float().flatten()
    y = multiply(a, lowest, None)
    assert torch.equal(y, expected)
    assert not y[1].any()


@interpreted
def test_plans_do_not_change_a_bit() -> None:
    for weight, activation in (pair for pair in PAIRS if "int" in pair[0]):
        a, w = quantize(normal(70, 200), activation), quantize(normal(40, 200, seed=1), weight)
        assert torch.equal(multiply(a, w, None, 0), multiply(a, w, None, 1)), (weight, activation)


@pytest.mark.parametrize("k", [0, 1, 63, 64, 65, 128, 200])
def test_halves_are_invertible_and_lie_64_columns_apart(k: int) -> None:
    codes = torch.randint(0, 16, (3, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(k))
    packed = narrow.HALVES.pack(codes, 4)
    assert packed.shape == (3, -(-k // 128) * 64)
    assert torch.equal(narrow.HALVES.unpack(packed, (3, k), 4), codes)
    assert layouts.get("halves128") is narrow.HALVES
    if k == 200:
        assert torch.equal(packed[:, 64 + 5], codes[:, 128 + 5] | codes[:, 128 + 69] << 4)


def test_nibbles_of_activations_are_widened() -> None:
    if torch.cuda.is_available():
        pytest.skip("where there is a GPU the kernel is compiled for it")
    for shape in ((3, 7), (2, 64), (0, 8)):
        a = quantize(normal(*shape), "int4_token")
        assert torch.equal(triton.codes8(a).view(torch.int8).double(), integers(a))


@pytest.mark.parametrize(
    ("weight", "activation", "why"),
    [
        ("int8_channel", None, "none were asked for"),
        ("int8_channel", "fp8_token", "int8, int4 or e4m3"),
        ("int3_g64", "int8_token", "int8, int4 or e4m3"),
        ("int4_g128_asym", "int8_token", "zero points"),
        ("nvfp4", "nvfp4", "int8, int4 or e4m3"),
        ("int4_g128", "int4_g64", "one length of group"),
        ("int4_g16", "int8_token", "folds groups"),
        ("fp8_channel", "fp8_block128", "scales of a token"),
        ("mxfp8_e4m3", "mxfp8_e4m3", "e8m0 scales"),
    ],
)
def test_refusals_say_what_was_asked_and_what_is_taken(weight: str, activation: str | None, why: str) -> None:
    assert why in (narrow.refusal(table.block(weight), table.block(activation) if activation else None) or "")


def test_every_pair_of_the_tests_is_taken() -> None:
    assert [pair for pair in PAIRS if narrow.refusal(*map(table.block, pair))] == []


def test_hopper_refuses_with_the_values_seen() -> None:
    big = ("int8_channel", "int8_token")
    for p, why in (
        (problem(64, 4096, 4096, *big), "there are 64"),
        (problem(65, 4096, 24, *big), "K = 24"),
        (problem(65, 9, 32, *big), "N = 9"),
        (problem(0, 8, 32, *big), "M = 0"),
        (problem(65, 8, 32, *big, dtype=torch.float32), "float32"),
    ):
        assert why in (narrow_cuda.refusal(p) or ""), why


def test_fp8s_own_kernel_refuses_other_codes_and_scales_of_other_blocks() -> None:
    assert narrow_fp8.refusal(problem(65, 4096, 4096, "fp8_block128", "fp8_g128")) is None
    for p, why in (
        (problem(64, 4096, 4096, "fp8_block128", "fp8_g128"), "there are 64"),
        (problem(65, 4096, 4096, "int8_channel", "int8_token"), "multiplies FP8"),
        (problem(65, 4096, 4096, "fp8_g128", "fp8_token"), "for 128 rows"),
    ):
        assert why in (narrow_fp8.refusal(p) or ""), why


def test_fp8s_wide_tiles_go_where_they_fill_the_machine() -> None:
    blocks = ("fp8_block128", "fp8_g128")
    assert narrow_fp8.plans(problem(2048, 14336, 4096, *blocks))[0].columns == 256
    # 32 tiles of a pair where 66 pairs are, or 64
    assert narrow_fp8.plans(problem(2048, 1024, 4096, *blocks))[0].columns == 128


@pytest.mark.parametrize(
    ("m", "weight", "activation", "dtype", "chosen"),
    [
        (2048, "fp8_channel", "fp8_token", torch.bfloat16, "linear_narrow_fp8_cuda_sm90"),
        (2048, "fp8_block128", "fp8_g128", torch.bfloat16, "linear_narrow_fp8_cuda_sm90"),
        (1024, "fp8_block128", "fp8_g128", torch.bfloat16, "linear_narrow_torch"),
        (1024, "fp8_block128", "fp8_g128", torch.float16, "linear_narrow_fp8_cuda_sm90"),  # not the library's
        (16, "fp8_channel", "fp8_token", torch.bfloat16, "linear_narrow_torch"),
        (2048, "int8_channel", "int8_token", torch.bfloat16, "linear_narrow_cuda_sm90"),
        (2048, "int4_g128", "int4_g128", torch.bfloat16, "linear_narrow_cuda_sm90"),
    ],
)
@pytest.mark.skipif(_nvrtc.available() is not None, reason=str(_nvrtc.available()))
def test_what_an_h200_is_asked(m: int, weight: str, activation: str, dtype: torch.dtype, chosen: str) -> None:
    p = problem(m, 4096, 4096, weight, activation, dtype=dtype, machine=H200)
    assert next(name for name, kernel in gpu.KERNELS.items() if gpu._refusal(kernel, p) is None) == chosen


def test_the_library_refuses_what_does_not_lie_as_it_wants() -> None:
    rows, blocks = ("fp8_channel", "fp8_token"), ("fp8_block128", "fp8_g128")
    assert narrow_torch.refusal(problem(1, 4096, 4096, *rows)) is None
    assert narrow_torch.refusal(problem(4, 128, 512, *blocks)) is None
    for p, why in (
        (problem(64, 64, 64, "int8_channel", "int8_token"), "multiplies FP8"),
        (problem(64, 64, 64, *rows, dtype=torch.float16), "float16"),
        (problem(64, 40, 64, *rows), "[64, 40, 64]"),
        (problem(0, 64, 64, *rows), "[0, 64, 64]"),
        (problem(64, 128, 576, *blocks), "[64, 128, 576]"),
        (problem(3, 128, 512, *blocks), "[3, 128, 512]"),
        (problem(64, 128, 512, "fp8_block128", "fp8_token"), "scales of rows"),
    ):
        assert why in (narrow_torch.refusal(p) or ""), why


def test_groups_are_those_of_the_formats_and_of_fp8s_sums() -> None:
    assert problem(1, 1, 1, "int8_channel", "int8_token").group == 0
    assert problem(1, 1, 1, "int4_g64", "int8_token").group == 64
    assert problem(1, 1, 1, "fp8_channel", "fp8_token").group == 128
    p = problem(1, 1, 1, "fp8_block128", "fp8_g128", dtype=torch.float16)
    assert p.group == 64
    a = quantize(normal(3, 300), "fp8_g128")
    assert torch.equal(narrow.scales(a, p), a.scale.repeat_interleave(2, 1))
    assert "float32 result" in (narrow.refusal(p.weight, p.activation, torch.float32) or "")


def test_plans_fit_the_machine_and_fill_it_evenly() -> None:
    for weight, activation in PAIRS:
        for m, n, k in ((2048, 4096, 4096), (4096, 4608, 53248), (100, 64, 64)):
            p = problem(m, n, k, weight, activation)
            for kernel in (narrow_cuda, narrow_fp8) if p.float8 else (narrow_cuda,):
                plans = kernel.plans(p)
                assert plans
                assert all(plan.shared_bytes(p) <= p.machine.shared_bytes for plan in plans)
    # 4608 rows by 4096 tokens: five rounds of tiles of 256 tokens, six of 192
    assert narrow_cuda.plans(problem(4096, 4608, 4608, "int8_channel", "int8_token"))[0].tokens == 192
    assert narrow_cuda.plans(problem(2048, 4096, 4096, "int8_channel", "int8_token"))[0].tokens == 256


@pytest.mark.parametrize(("weight", "activation"), PAIRS)
def test_the_kernel_compiles_for_hopper(weight: str, activation: str) -> None:
    from nybble.ops import _nvrtc

    if _nvrtc.available():
        pytest.skip(_nvrtc.available())
    p = problem(2048, 4096, 4096, weight, activation)
    for kernel in (narrow_cuda, narrow_fp8) if p.float8 else (narrow_cuda,):
        for plan in kernel.plans(p):
            defines = {**plan.defines(p), "W_SCALE": 0 if p.weight.scale.name == "bf16" else 2}
            assert _nvrtc.build(kernel.SOURCE, defines, "90a")[:4] == b"\x7fELF"


def test_a_measured_choice_is_kept_and_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NYBBLE_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Some GPU")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    plans = [narrow_cuda.Plan(256, 4), narrow_cuda.Plan(192, 5)]
    kernel = SimpleNamespace(__name__="nybble.ops.linear.some", plans=lambda p: plans)
    asked: list[int] = []

    def time(run: object, plan: narrow_cuda.Plan) -> float:
        asked.append(plan.tokens)
        return float(plan.tokens)

    monkeypatch.setattr(narrow_tune, "_microseconds", time)
    narrow_tune.Choices.of.cache_clear()
    p = problem(2000, 4096, 4096, "int8_channel", "int8_token")
    try:
        assert narrow_tune.choose(kernel, p, lambda plan: None) == plans[1]  # type: ignore[arg-type]
        narrow_tune.Choices.of.cache_clear()  # as a new process would
        assert narrow_tune.choose(kernel, p, lambda plan: None) == plans[1]  # type: ignore[arg-type]
        assert asked == [256, 192]
        file = narrow_tune.Choices.of("Some GPU").path
        assert json.loads(file.read_text())["some: int8_channel x int8_token [2048, 4096, 4096]"]["plan"]
        assert "tokens192-stages5 192.0 us" in str(narrow_tune.Choices.of("Some GPU"))
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        other = problem(3000, 4096, 4096, "int8_channel", "int8_token")
        assert narrow_tune.choose(kernel, other, lambda plan: None) == plans[0]  # type: ignore[arg-type]
        told = narrow_tune.describe(kernel, p, "Some GPU")  # type: ignore[arg-type]
        assert told.splitlines()[1:] == ["  tokens256-stages4  256.0 us", "  tokens192-stages5  192.0 us  runs"]
        told = narrow_tune.describe(kernel, other, "Some GPU")  # type: ignore[arg-type]
        assert told.splitlines()[1:] == ["  tokens256-stages4  runs", "  tokens192-stages5"]
        file.write_text("damaged")
        narrow_tune.Choices.of.cache_clear()
        assert narrow_tune.Choices.of("Some GPU").found == {}
    finally:
        narrow_tune.Choices.of.cache_clear()


def test_products_of_codes_refuse_what_does_not_fit() -> None:
    from nybble.errors import BadInput
    from nybble.ops.linear import gpu

    a, w = quantize(normal(4, 32), "int8_token"), quantize(normal(8, 64), "int8_channel")
    with pytest.raises(BadInput, match="differ in K"):
        gpu.product(a, w)
