"""The judge's own tests can fail: sixteen planted bugs, each of which turns a verdict that a test asks for.

A mutant is a replacement of one function or constant. `FLIPS` names the exhibit whose verdict the museum's tests ask
for, and that the mutant turns: a cheat that is then called correct, or an honest kernel that is then rejected.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from collection import exhibits
from nybble.judge import Verdict, agreement, cases, problem, trial
from nybble.judge.agreement import Budget, Distance
from nybble.judge.checks import kept
from nybble.judge.problem import Case

EXHIBITS = {e.label: e for folder in ("cheats", "honest") for e in exhibits(folder)}
Plant = Callable[[pytest.MonkeyPatch], Any]


def _set(owner: Any, name: str, value: Any) -> Plant:
    return lambda patch: patch.setattr(owner, name, value)


def _slack(value: float) -> Plant:
    tables = (agreement._SLACK_TOTAL, agreement._SLACK_WORST)
    return lambda patch: [patch.setitem(table, torch.float32, value) for table in tables]


def _ignore_in_place(patch: pytest.MonkeyPatch) -> None:
    put = trial.Trial.put
    patch.setattr(trial.Trial, "put", lambda self, inputs, slot, in_place=False: put(self, inputs, slot, False))


def _compare_without_worst(y: torch.Tensor, r: torch.Tensor) -> Distance:
    seen = agreement_distance(y, r)
    return Distance(0.0 if seen.total < 0.05 else seen.total, 0.0, seen.at)


def _forget_state(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cases, "new_state", lambda task, seed: {k: v.clone() for k, v in task.state.items()})


def _shared_seed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(cases, "given", lambda task, seed, label="": Case(label, task.inputs(42)))


def _not_finite_only(task: problem.Problem, case: Case, upcast: bool) -> list[torch.Tensor]:
    return [~task.once(case).isfinite()] if case.apart else []


agreement_distance = agreement.distance

# name -> (checks that run, what is planted, the exhibit whose verdict it turns)
FLIPS: dict[str, tuple[list[str], Plant, str]] = {
    "new values go to new addresses": (["fresh"], _ignore_in_place, "k06_cache.Pointer"),
    "the first weights are given again": (["weights"], _forget_state, "k16_in_advance.Folded"),
    "inputs come from a known seed": (["as_given"], _shared_seed, "k19_reads.Seeds"),
    "float32 gets the slack of 2^18": (
        ["as_given"], _slack(2.0**18),
        "k11_precision.Bfloat16"),
    "a distance below 5 % counts as none": (
        ["as_given"], _set(agreement, "distance", _compare_without_worst), "k11_precision.TensorFloat"),
    "NaN is no difference": (["poison"], _set(trial, "complaint", lambda y, b: None), "k05_stale.Tail"),
    "only the given distribution is asked": (["values"], _set(cases, "DRAWS", {}), "k10_dead_branch.Copy"),
    "sizes are not varied": (["shapes"], _set(cases, "shapes", lambda task, seed: iter(())), "k12_shape.Blocks"),
    "strides are not varied": (["shapes"], _set(cases, "strides", lambda task, seed: iter(())), "k12_shape.Contiguous"),
    "inputs are not compared": (["kept"], _set(kept, "same", lambda a, b: True), "k08_spoils.Zeroes"),
    "no slack for the order of summation": (
        ["as_given"], _slack(0.5),
        "matmul.OneByOne"),
    "equality is asked of every float": (
        ["as_given"], _set(problem, "budget", lambda r, h, *rest: Budget(r, h.dtype, 0.0, 0.0, True)),
        "linear_relu.Blocks"),
    "values that are not finite are not asked": (
        ["holes"], _set(cases, "holed", lambda task, seed: iter(())), "k10_gives_up.Zeros"),
    "no rows are not asked": (["shapes"], _set(cases, "no_rows", lambda task, seed: None), "k12_shape.OneAtLeast"),
    "what a NaN reaches is compared where it is finite": (
        ["holes"], _set(problem.Problem, "_reached", _not_finite_only), "norms.Half"),
    "structure is not respected": (["values"], _set(cases, "structured", lambda v: False), "layers.LowerOnly"),
}  # fmt: skip


@pytest.mark.parametrize("name", FLIPS)
def test_a_mutant_is_noticed(name: str, verdict_on: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch) -> None:
    if name == "new values go to new addresses" and torch.__version__ < "2.13":
        pytest.skip("whether a freed address is given out again is the allocator's choice; torch 2.11's often does not")
    checks, plant, label = FLIPS[name]
    exhibit = EXHIBITS[label]
    assert verdict_on(exhibit, checks=checks).correct == (exhibit.kind == 0)
    plant(monkeypatch)
    assert verdict_on(exhibit, checks=checks).correct == (exhibit.kind != 0)
