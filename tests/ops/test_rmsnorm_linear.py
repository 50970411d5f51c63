"""rmsnorm_linear: its definition, when the kernel takes the norm and the gate in, and what the runner makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounter

from nybble.errors import BadInput
from nybble.formats import table
from nybble.models import fed
from nybble.ops import QuantLinear, _nvrtc
from nybble.ops.linear import config as products
from nybble.ops.linear import cuda, macros
from nybble.ops.rmsnorm_linear import RMSNORM_LINEAR, config, fuses, rmsnorm_linear
from nybble.ops.rmsnorm_linear.cuda import unfit
from nybble.quantize import quantize

INT4 = table.block("int4_g128")


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(n: int, k: int, seed: int = 1) -> QuantLinear:
    bias = torch.nn.Parameter(normal(n, seed=seed + 1), requires_grad=False)
    return QuantLinear(quantize(normal(n, k, seed=seed), "int4_g32"), bias)


def test_the_ops_one_after_the_other_are_the_definition() -> None:
    served = 0
    for label, args in RMSNORM_LINEAR.cases():
        y, h = rmsnorm_linear(*args)
        expected = RMSNORM_LINEAR.reference(*args)
        RMSNORM_LINEAR.agreement.check(y, expected[0], label)
        assert torch.equal(h, expected[1])
        served += "gate" in label
    assert served >= 20


def test_what_does_not_fit_is_said() -> None:
    x, gain, w = normal(2, 64), normal(64), quantize(normal(33, 64), "int4_g32")
    for args, words in (
        ((x, None, gain[:32], 1e-5, w), r"gain is torch.float32 \(32,\)"),
        ((x, None, gain.half(), 1e-5, w), "gain is torch.float16"),
        ((x, x[:1], gain, 1e-5, w), r"residual is torch.float32 \(1, 64\)"),
        ((x, None, gain, 1e-5, w, None, True), r"equal parts; the weight \[N, K\] is \(33, 64\)"),
        ((normal(2, 63), None, gain[:63], 1e-5, w), "x must end in 64"),
    ):
        with pytest.raises(BadInput, match=words):
            rmsnorm_linear(*args)


def test_what_the_kernel_does_not_read_is_said() -> None:
    x, gain = torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.bfloat16)
    w = quantize(normal(48, 64), "int4_g32")
    assert unfit(x, x, gain, w, gate=False) is None
    assert "24 rows each" in unfit(x, x, gain, w, gate=True)
    assert "8 columns" in unfit(x[:, :60], None, gain[:60], w, gate=False)
    assert "x (2, 32) with strides (64, 2)" in unfit(x[:, ::2], None, gain[:32], w, gate=False)
    assert "residual" in unfit(x, torch.zeros(65, 2, dtype=x.dtype)[:64].t(), gain, w, gate=False)
    assert "one piece" in unfit(x, torch.zeros(2, 128, dtype=x.dtype)[:, :64], gain, w, gate=False)


@pytest.mark.parametrize("name", ["int4_g128", "nvfp4", "mxfp4", "int8_channel"])
def test_one_token_takes_norm_and_gate_in_with_the_plan_of_the_product(name: str) -> None:
    for n, gate in ((6144, False), (28672, True)):
        p = products.Problem(1, n, 4096, table.block(name))
        choice = config.choose(p, gate)
        assert choice.pays
        assert choice.plan == products.choose(p).plan


@pytest.mark.parametrize("m", [2, 3, 4])
def test_a_few_tokens_do(m: int) -> None:
    # At four tokens the product's own plan, twelve warps, would hold eight pieces of rows a thread.
    assert config.choose(products.Problem(m, 6144, 4096, INT4), False).pays == (m < 4)
    assert config.choose(products.Problem(m, 28672, 4096, INT4), True).pays


def test_many_tokens_and_long_rows_do_not() -> None:
    one = products.Problem(1, 4096, 4096, INT4)
    split = config.choose(replace(one, n=512, k=14336), False)
    assert products.choose(replace(one, n=512, k=14336)).plan.slices > 1
    assert not split.pays
    for m in (5, 16, 64):
        with pytest.raises(ValueError, match="pieces of rows, 4 at most"):
            config.choose(replace(one, m=m), False)
    with pytest.raises(ValueError, match="no plan has room"):
        config.choose(replace(one, k=65536), False)
    single = products.Stream(1, 1, 1, 16, 3)
    assert "none for up" in str(single.surrounded(one, gate=True))
    assert "4 slices" in str(replace(single, slices=4).surrounded(one, gate=False))


@pytest.mark.skipif(_nvrtc.available() is not None, reason=str(_nvrtc.available()))
@pytest.mark.parametrize("arch", ["80", "89", "90a", "100a", "120a"])
def test_compiles_everywhere(arch: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NYBBLE_CACHE", str(tmp_path))
    for name, m, n, gate, fp16 in (("int4_g128", 1, 28672, True, False), ("nvfp4", 2, 6144, False, True)):
        p = products.Problem(m, n, 4096, table.block(name), fp16)
        plan = config.choose(p, gate).plan
        defines = {**macros.defines(p.format, fp16), **plan.defines(m)}
        defines |= {"NORM": m, "PIECES": plan.pieces(p), "GATE": int(gate)}
        assert _nvrtc.build(cuda._STREAM, defines, arch).startswith(b"\x7fELF")


@pytest.mark.parametrize("gate", [False, True])
def test_compiles_without_breaks(gate: bool) -> None:
    one, gain, counter = layer(32, 64), normal(64), CompileCounter()

    def step(x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return rmsnorm_linear(x, residual, gain, 1e-5, one.weight, one.bias, gate)

    compiled = torch.compile(step, backend=counter, fullgraph=True, dynamic=True)
    for m in (1, 7, 3):
        x, residual = normal(m, 64, seed=m), normal(m, 64, seed=m + 1)
        for given in (residual, None):
            for got, expected in zip(compiled(x, given), step(x, given), strict=True):
                assert torch.equal(got, expected)


def test_the_custom_op_passes_opcheck() -> None:
    x, w = normal(3, 64), quantize(normal(32, 64), "nvfp4")
    args = (
        x,
        x + 1,
        x[0].clone(),
        1e-5,
        w.codes,
        w.scale,
        w.tensor_scale,
        None,
        None,
        "nvfp4",
        "dense",
        [32, 64],
        True,
    )
    torch.library.opcheck(torch.ops.nybble.rmsnorm_linear.default, args, test_utils=("test_schema", "test_faketensor"))


def test_nothing_is_taken_in_where_no_kernel_does_so() -> None:
    one = layer(32, 64)
    assert not fuses(normal(1, 64), None, normal(64), 1e-5, one.weight, one.bias)


@pytest.mark.parametrize("residual", [None, normal(2, 64, seed=7)], ids=["first", "later"])
def test_the_runner_hands_norm_and_gate_to_the_product(
    residual: torch.Tensor | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate_up, down, x = layer(96, 64), layer(64, 48, seed=3), normal(2, 64)
    norm = torch.nn.Module()
    norm.weight, norm.variance_epsilon = torch.nn.Parameter(normal(64, seed=5)), 1e-5
    expected = (*fed.mlp(gate_up, down, norm, x, residual), *fed.normed(gate_up, norm, x, residual))
    asked: list[bool] = []

    def taken(*args: Any) -> bool:
        asked.append(args[-1])
        return True

    monkeypatch.setattr(fed, "fuses", taken)
    monkeypatch.setattr(fed, "add_rmsnorm", lambda *args: pytest.fail("a norm of its own"))
    monkeypatch.setattr(fed, "silu_mul", lambda *args: pytest.fail("a gate of its own"))
    got = (*fed.mlp(gate_up, down, norm, x, residual), *fed.normed(gate_up, norm, x, residual))
    assert all(map(torch.equal, got, expected))
    assert asked == [True, False]
    gate_up.register_forward_hook(lambda *args: None)
    monkeypatch.undo()
    assert torch.equal(fed.mlp(gate_up, down, norm, x, residual)[0], expected[0])
