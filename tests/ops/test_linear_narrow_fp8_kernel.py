"""narrow_fp8.cu on a CPU (hopper_on_cpu.py): every kind of scales, both widths, tails, several orders of events, and
that a stage which is given back too early, or too late, is noticed."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import pytest
import torch

from hopper_on_cpu import COMPILER, Box, Standstill, run
from nybble.errors import Mismatch
from nybble.formats import table
from nybble.ops.linear import LINEAR, narrow, narrow_fp8, narrow_hopper
from nybble.quantize import quantize

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++")
SOURCE = narrow_fp8.SOURCE.read_text()


class Arguments(ctypes.Structure):
    _fields_ = [("x", Box), ("w", Box), *narrow_fp8._Arguments._fields_[2:]]


@dataclass(frozen=True)
class Case:
    weight: str
    activation: str
    shape: tuple[int, int, int]
    plan: narrow_fp8.Plan
    dtype: torch.dtype = torch.bfloat16
    bias: bool = True
    clusters: int = 1


BLOCKS, ROWS = ("fp8_block128", "fp8_g128"), ("fp8_channel", "fp8_token")
WIDE, SLIM = narrow_fp8.Plan(256, 4), narrow_fp8.Plan(128, 6)
CASES = (
    Case(*BLOCKS, (129, 264, 576), WIDE),
    Case(*BLOCKS, (65, 40, 1024), SLIM, bias=False),
    Case(*BLOCKS, (257, 264, 320), WIDE, torch.float16, clusters=3),
    Case(*ROWS, (65, 520, 192), WIDE, clusters=2),
    Case("fp8_tensor", "fp8_token", (66, 136, 320), SLIM, torch.float16),
    Case("fp8_channel", "fp8_g128", (130, 136, 512), SLIM),
    Case("fp8_block128", "fp8_token", (80, 264, 208), WIDE),
)


def check(case: Case, source: str = SOURCE, seed: int = 0) -> None:
    m, n, k = case.shape
    generator = torch.Generator().manual_seed(m + n + k)
    x = torch.randn(m, k, generator=generator).to(case.dtype)
    bias = torch.randn(n, generator=generator).to(case.dtype) if case.bias else None
    w, a = quantize(torch.randn(n, k, generator=generator), case.weight), quantize(x, case.activation)
    p = narrow.Problem(m, n, k, w.format, a.format, case.dtype)
    w_scale, x_scale = narrow.scales(w, p).contiguous(), narrow.scales(a, p).contiguous()
    y = torch.full((m + 1, n), float("nan"), dtype=case.dtype)
    argument = Arguments(
        Box.of(a.codes, narrow_hopper.ROWS), Box.of(w.codes, case.plan.columns // 2), w_scale.data_ptr(),
        x_scale.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(), m, n, -(-k // narrow.CHUNK),
        -(-m // 256), -(-n // case.plan.columns), (w_scale if narrow.grouped(w.format) else x_scale).shape[1],
        narrow_hopper.shift(p),
    )  # fmt: skip
    defines = {**case.plan.defines(p), "W_SCALE": narrow_hopper.SCALES[w.scale.dtype]}
    shared = case.plan.shared_bytes(p)
    run(source, narrow_fp8.SOURCE.parent, "linear_narrow_fp8", defines, argument, case.clusters, shared, seed)
    LINEAR.check(y[:m], (x, w, bias, table.block(case.activation), None), str(case))
    assert y[m:].isnan().all()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_agrees_with_the_reference(case: Case) -> None:
    check(case)


def test_the_order_of_events_does_not_matter() -> None:
    for seed in range(1, 5):
        check(CASES[1], seed=seed)


def test_a_stage_that_is_given_back_too_early_is_noticed() -> None:
    wait, back = "      wgmma_wait<0>();\n", "        if (lane < CLUSTER) arrive_at(empty, lane);\n"
    assert wait in SOURCE
    assert back in SOURCE
    early = SOURCE.replace(back, "").replace(wait, f"      if (i + 1 == PRODUCTS)\n{back}{wait}")
    with pytest.raises(Mismatch):
        check(CASES[1], early)


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("        if (lane < CLUSTER) arrive_at(empty, lane);\n", "all threads wait"),
        ("        barrier_arrive(memory.full(turn.stage));\n", "all threads wait"),
    ],
)
def test_an_arrival_that_is_missing_is_noticed(line: str, why: str) -> None:
    assert line in SOURCE
    with pytest.raises(Standstill, match=why):
        check(CASES[1], SOURCE.replace(line, ""))
