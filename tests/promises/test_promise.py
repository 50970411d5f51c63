"""The context of a promise: what it refuses, how it nests, that it survives exceptions and stays in its task."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import nybble
from nybble.errors import BadInput, UnknownName, Unsupported
from nybble.ops import _promise, silu_mul
from nybble.ops._promise import covers, demand, in_force, promise


def test_the_stronger_covers_the_weaker() -> None:
    order = _promise.ORDER
    assert [[covers(a, b) for b in order] for a in order] == [[j <= i for j in range(4)] for i in range(4)]


def test_an_op_without_the_promise_is_refused_by_name_with_the_nearest() -> None:
    q = nybble.quantize(torch.randn(8, 32), "int8_channel")
    with promise("cross-machine"):
        with pytest.raises(Unsupported, match=r"^linear makes no promise and cross-machine was asked for; .*exact"):
            nybble.ops.linear(torch.randn(1, 32), q)
        with pytest.raises(Unsupported, match=r"^silu_mul makes no promise .* silu_mul_exact"):
            silu_mul.silu_mul(torch.randn(2, 8))
    nybble.ops.linear(torch.randn(1, 32), q)


def test_leaves_no_trace_after_an_exception() -> None:
    with pytest.raises(ZeroDivisionError), promise("batch-invariant"):
        raise ZeroDivisionError
    assert in_force() == "none"
    nn.Linear(2, 2)(torch.ones(1, 2))


def test_nested_promises_keep_the_strongest_and_restore_what_was() -> None:
    with promise("batch-invariant") as outer:
        with promise("cross-machine") as inner:
            with promise("run-to-run") as innermost:
                assert (outer, inner, innermost) == ("batch-invariant", "cross-machine", "cross-machine")
            assert in_force() == "cross-machine"
        assert in_force() == "batch-invariant"


def test_belongs_to_one_thread() -> None:
    linear, x = nn.Linear(4, 4), torch.ones(1, 4)
    with promise("cross-machine"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(in_force).result() == "none"
        assert pool.submit(linear, x).result().shape == (1, 4)


def test_belongs_to_one_task() -> None:
    seen = {}

    async def inside(started: asyncio.Event, leave: asyncio.Event) -> None:
        with promise("cross-machine"):
            started.set()
            await leave.wait()
            seen["inside"] = in_force()

    async def both() -> None:
        started, leave = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(inside(started, leave))
        await started.wait()
        seen["outside"] = in_force()
        nn.Linear(2, 2)(torch.ones(1, 2))
        leave.set()
        await task

    asyncio.run(both())
    assert seen == {"inside": "cross-machine", "outside": "none"}


@pytest.mark.parametrize("module", [nn.Linear(4, 4), nn.LayerNorm(4), nn.Softmax(-1), nn.Dropout(0.5), nn.GELU()])
def test_modules_of_torch_that_compute_are_refused(module: nn.Module) -> None:
    with promise("batch-invariant"), pytest.raises(Unsupported, match=f"^{type(module).__name__} makes no promise"):
        nn.Sequential(nn.Identity(), module)(torch.ones(1, 4))


def test_modules_that_round_nothing_pass() -> None:
    with promise("cross-machine"):
        nn.Sequential(nn.Embedding(3, 4), nn.ReLU(), nn.Dropout(0.5).eval(), nn.Flatten())(torch.tensor([[1]]))


def test_a_quantized_module_is_refused_as_its_op() -> None:
    layer = nybble.quantize_(nn.Sequential(nn.Linear(32, 8)), "W8A16", ignore=[])
    with promise("cross-machine"), pytest.raises(Unsupported, match=r"^linear makes no promise"):
        layer(torch.ones(1, 32))


def test_refuses_autocast_on_entry_and_inside() -> None:
    with torch.autocast("cpu"), pytest.raises(BadInput, match="autocast is switched on for cpu"), promise("run-to-run"):
        pass
    with promise("cross-machine"), torch.autocast("cpu"), pytest.raises(BadInput, match="autocast"):
        demand("linear_exact", "cross-machine", ())
    assert in_force() == "none"


def test_refuses_flushing_to_zero() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormal numbers")
    try:
        with pytest.raises(BadInput, match="set_flush_denormal"), promise("cross-machine"):
            pass
    finally:
        torch.set_flush_denormal(False)


def test_refuses_float64() -> None:
    with promise("cross-machine"), pytest.raises(BadInput, match=r"^rmsnorm_exact: float64 \(2, 3\)"):
        demand("rmsnorm_exact", "cross-machine", (torch.ones(2, 3, dtype=torch.float64),))


def test_an_unknown_promise_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="batch-invariant"), promise("batch_invariant"):  # type: ignore[arg-type]
        pass
