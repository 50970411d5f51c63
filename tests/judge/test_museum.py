"""Every cheat is caught, by the check that is there for it; every honest kernel is let through.

One seed here; benchmarks/judge.py runs twenty, and writes docs/why/judge.md.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from collection import Exhibit, exhibits
from nybble.judge import Verdict
from nybble.judge.checks import all_checks

CHEATS, HONEST = exhibits("cheats"), exhibits("honest")
BY_LABEL = {e.label: e for e in [*CHEATS, *HONEST]}
CAUGHT = ("wrong", "cheating", "invalid measurement")  # a crash catches nothing
CPU_KINDS = {*range(2, 14), 16, 18, 19}

# A cheat that the check alone, without the others, must catch.
ALONE = {
    "problem": "k10_dead_task.One",
    "as_given": "k11_precision.Bfloat16",
    "result": "k03_lazy.Subclass",
    "kept": "k08_spoils.Scratch",
    "poison": "k05_stale.Tail",
    "values": "k10_dead_branch.Copy",
    "exact": "k11_precision.OneLost",
    "sensitivity": "k10_dead_term.Line",
    "holes": "k10_gives_up.Zeros",
    "fresh": "k06_cache.Version",
    "weights": "k16_in_advance.Folded",
    "shapes": "k12_shape.Padded",
    "background": "k02_background.Queue",
    "timed": "k07_noop.After",
    "own_kernels": "k13_library.Fallback",
    "patched": "k18_baseline.NoLibrary",
    "files": "k19_reads.Arguments",
}


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda e: e.label)
def test_a_cheat_is_caught(cheat: Exhibit, verdict_on: Callable[..., Verdict]) -> None:
    verdict = verdict_on(cheat, stop=True, rounds=6)
    assert verdict.status in CAUGHT, verdict.text()
    assert not verdict.speeds


@pytest.mark.parametrize("kernel", HONEST, ids=lambda e: e.label)
def test_an_honest_kernel_is_let_through(kernel: Exhibit, verdict_on: Callable[..., Verdict]) -> None:
    verdict = verdict_on(kernel)
    assert verdict.correct, verdict.text()
    assert [speed.name for speed in verdict.speeds] == ["candidate", "eager"]
    assert verdict.ratios["eager"] > 0
    assert verdict.seconds < 60


@pytest.mark.parametrize("check", ALONE)
def test_a_check_catches_its_cheat_alone(check: str, verdict_on: Callable[..., Verdict]) -> None:
    assert verdict_on(BY_LABEL[ALONE[check]], checks=[check], rounds=8).status in CAUGHT


def test_the_museum_is_complete() -> None:
    kinds = [e.kind for e in CHEATS]
    assert {kind for kind in CPU_KINDS if kinds.count(kind) < 2} == set()
    assert len(HONEST) >= 30
    usual = [check for check in all_checks() if not check.optional]
    assert {check.name for check in usual} == set(ALONE)
    assert all(BY_LABEL[ALONE[check.name]].kind in check.kinds for check in usual)
    gpu = [e.kind for e in exhibits("cheats", "cuda")]
    assert {kind for kind in range(1, 20) if kinds.count(kind) + gpu.count(kind) < 2} == set()
