"""rmsnorm_linear on a GPU: the kernel that takes norm and gate in, on every case it takes and beside its three ops."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import nybble
from nybble.models import fed
from nybble.ops import QuantLinear
from nybble.ops.linear import linear
from nybble.ops.rmsnorm import add_rmsnorm
from nybble.ops.rmsnorm_linear import RMSNORM_LINEAR, composed, fuses, rmsnorm_linear
from nybble.ops.silu_mul import silu_mul
from nybble.quantize import QuantTensor

pytestmark = pytest.mark.gpu(capability=(8, 0))
HALVES = (torch.bfloat16, torch.float16)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def weight(n: int, k: int, name: str) -> QuantTensor:
    layer = QuantLinear(nybble.quantize(normal(n, k, seed=1, dtype=torch.float32) * k**-0.5, name))
    return layer.prepare(torch.bfloat16).weight


def identity(k: int, copies: int) -> QuantTensor:
    """A weight whose products are x itself, `copies` times, exactly."""
    w = QuantLinear(nybble.quantize(torch.eye(k, device="cuda").repeat(copies, 1), "mxfp4"))
    return w.prepare(torch.bfloat16).weight


def test_agrees_with_the_reference_on_every_case_it_takes() -> None:
    kernel, served = RMSNORM_LINEAR.implementations("cuda")[0], []
    for label, args in RMSNORM_LINEAR.cases("cuda", HALVES):
        if kernel.supports(*args) is not None:
            continue
        before = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
        y, h = kernel.run(*args)
        expected = RMSNORM_LINEAR.reference(*args)
        RMSNORM_LINEAR.agreement.check(y, expected[0], label)
        assert torch.equal(h, expected[1]), label
        for given, kept in zip(args, before, strict=True):
            assert not isinstance(given, torch.Tensor) or torch.equal(given, kept), "the input is left alone"
        again = kernel.run(*args)
        assert torch.equal(again[0], y), "the same bits when run again"
        served.append(label)
    assert sum("gate" in label for label in served) >= 8
    assert sum("gate" not in label for label in served) >= 8


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("m", [1, 2, 4])
def test_the_norm_and_the_gate_have_the_bits_of_their_own_kernels(m: int, dtype: torch.dtype) -> None:
    """Through identities; only the sum of squares, in another order, may move a value across a rounding."""
    kernel, k = RMSNORM_LINEAR.implementations("cuda")[0], 2048
    x, residual = normal(m, k, seed=2, dtype=dtype), normal(m, k, seed=3, dtype=dtype) * 3
    gain = normal(k, seed=4, dtype=dtype)
    y, h = kernel.run(x, residual, gain, 1e-5, identity(k, 1), None, False)
    expected, added = add_rmsnorm(x, residual, gain, 1e-5)
    assert torch.equal(h, added)
    assert (y == expected).float().mean() > 0.999
    both, _ = kernel.run(x, residual, gain, 1e-5, identity(k, 2), None, True)
    assert torch.equal(both, silu_mul(torch.cat([y, y], -1)))


@pytest.mark.parametrize("name", ["int4_g128", "nvfp4", "int8_channel"])
@pytest.mark.parametrize("m", [1, 3])
def test_a_large_layer_is_nearly_its_three_ops_bit_for_bit(name: str, m: int) -> None:
    x, residual, gain = normal(m, 4096, seed=5), normal(m, 4096, seed=6), normal(4096, seed=7)
    for n, gate, bias in ((6144, False, normal(6144, seed=8)), (28672, True, None)):
        args = (x, residual, gain, 1e-5, weight(n, 4096, name), bias, gate)
        y, h = RMSNORM_LINEAR.implementations("cuda")[0].run(*args)
        expected, added = composed(*args)
        assert torch.equal(h, added)
        assert (y == expected).float().mean() > 0.9
        RMSNORM_LINEAR.agreement.check(y, expected, f"{name}, gate {gate}")
        RMSNORM_LINEAR.agreement.check(y, RMSNORM_LINEAR.reference(*args)[0], f"{name}, gate {gate}")


def test_a_chain_of_early_starts_in_a_graph_has_the_bits_of_single_steps() -> None:
    """Every kernel reads what the last one wrote, and memory is given back between them."""
    k = 2048
    qkv, o = weight(3072, k, "int4_g128"), weight(k, k, "int4_g128")
    gate_up, down = weight(8192, k, "int4_g128"), weight(k, 4096, "int4_g128")
    gains, start = [normal(k, seed=9), normal(k, seed=10)], normal(1, k, seed=11)

    def chain(wait: Any) -> torch.Tensor:
        x: torch.Tensor = start
        residual: torch.Tensor | None = None
        for _ in range(12):
            x, residual = wait(rmsnorm_linear(x, residual, gains[0], 1e-5, qkv))
            x = wait(linear(x[:, :k], o))
            x, residual = wait(rmsnorm_linear(x, residual, gains[1], 1e-5, gate_up, None, True))
            x = wait(linear(x, down))
        return torch.cat([x, residual], -1)

    assert fuses(start, start, gains[0], 1e-5, qkv, None)
    assert fuses(start, start, gains[0], 1e-5, gate_up, None, True)
    for seed in (12, 13, 14):
        start.copy_(normal(1, k, seed=seed))
        expected = chain(lambda made: torch.cuda.synchronize() or made)
        assert torch.equal(chain(lambda made: made), expected)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = chain(lambda made: made)
        for _ in range(3):
            y.fill_(torch.nan)
            graph.replay()
            assert torch.equal(y, expected)


def test_what_it_cannot_take_goes_through_the_three_ops() -> None:
    w, gain = weight(64, 256, "int4_g128"), normal(256)
    wide = normal(20, 512)
    for x in (wide[:0, :256], wide[:1, ::2], wide[:1, 1:257], wide[:9, :256], wide[:, :256], wide[:1, :256].float()):
        args = (x, None, gain.to(x.dtype), 1e-5, w, None, True)
        assert not fuses(*args)
        y, h = rmsnorm_linear(*args)
        RMSNORM_LINEAR.agreement.check(y, RMSNORM_LINEAR.reference(*args)[0], str(x.shape))
        assert torch.equal(h, x)


def test_infinite_rows_and_the_largest_fp16_stay_what_they_are() -> None:
    x = torch.full((3, 512), 6e4, dtype=torch.float16, device="cuda")
    x[0, ::2] *= -1
    x[1, 5], x[2] = torch.inf, 0
    for gate in (False, True):
        args = (x, None, torch.ones_like(x[0]), 1e-5, weight(64, 512, "int4_g128"), None, gate)
        assert fuses(*args)
        RMSNORM_LINEAR.agreement.check(rmsnorm_linear(*args)[0], RMSNORM_LINEAR.reference(*args)[0], f"gate {gate}")


def test_compiles_whole_with_any_number_of_tokens() -> None:
    w, gain = weight(64, 256, "int4_g128"), normal(256)

    def step(x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rmsnorm_linear(x, residual, gain, 1e-5, w, None, True)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (1, 3, 17):
        x, residual = normal(m, 256, seed=m), normal(m, 256, seed=m + 1)
        for got, expected in zip(compiled(x, residual), step(x, residual), strict=True):
            assert torch.equal(got, expected)


def test_the_runners_mlp_takes_both_in() -> None:
    gate_up = QuantLinear(weight(1024, 256, "int4_g128"))
    down = QuantLinear(weight(256, 512, "int4_g128"))
    norm = torch.nn.Module()
    norm.weight, norm.variance_epsilon = normal(256), 1e-5
    x, residual = normal(1, 256, seed=2), normal(1, 256, seed=3)
    made, expected = rmsnorm_linear(x, residual, norm.weight, 1e-5, gate_up.weight, None, True)
    y, h = fed.mlp(gate_up, down, norm, x, residual)
    assert torch.equal(h, expected)
    assert torch.equal(y, down(made))
