"""What the race concludes from times, given times: the rules that need no clock, and no GPU, to be tested."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from collection import PROBLEMS
from nybble.judge import Zygote, judge, roofline, timing
from nybble.judge.problem import Problem
from nybble.judge.timing import Race

MS, US = 1e-3, 1e-6


def _race(**parts: Any) -> Race:
    race = Race(
        times={"candidate": [1 * MS] * 5, "eager": [1 * MS] * 5},
        handing={"candidate": [0.1 * MS] * 5, "eager": [0.1 * MS] * 5},
    )
    for name, value in parts.items():
        setattr(race, name, value)
    return race


def test_an_honest_race_says_nothing() -> None:
    race = _race(beside={"candidate": [12 * US] * 5, "eager": [10 * US] * 5}, calls=4)
    assert [*timing._late(race), *timing._elsewhere(race)] == []


def test_work_on_another_stream_is_seen() -> None:
    race = _race(beside={"candidate": [900 * US] * 5, "eager": [10 * US] * 5})
    race.times["candidate"] = [5 * US] * 5
    (finding,) = timing._elsewhere(race)
    assert finding.status == "cheating"
    assert "900 µs" in finding.what


def test_a_slow_synchronisation_of_everybody_is_not_another_stream() -> None:
    race = _race(beside={"candidate": [900 * US] * 5, "eager": [800 * US] * 5})
    race.times["candidate"] = [5 * US] * 5
    assert list(timing._elsewhere(race)) == []


def test_computing_while_handing_over_is_seen() -> None:
    race = _race(calls=4)
    race.times["candidate"], race.handing["candidate"] = [0.01 * MS] * 5, [4.1 * MS] * 5
    (finding,) = timing._late(race)
    assert finding.status == "cheating"
    race.handing["candidate"][2] = 0.2 * MS  # once quick is enough: a busy machine delays, it does not hurry
    assert list(timing._late(race)) == []


@pytest.mark.parametrize(("seconds", "count"), [(1.0, 0), (0.5, 0), (0.39, 1), (1e-6, 1)])
def test_a_time_beyond_the_roofline_is_none(seconds: float, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "bound", lambda *args: roofline.Bound(1e9, 1.0, 1e9, 1e9))
    trial: Any = SimpleNamespace(problem=None, seed=0, device="cpu")
    race = _race()
    race.times["candidate"] = [seconds] * 3
    findings = list(timing._beyond(trial, race))
    assert [f.status for f in findings] == ["invalid measurement"] * count
    assert race.share == pytest.approx(1 / seconds)


def test_ratios_are_of_medians() -> None:
    race = _race()
    race.times = {"candidate": [2 * MS, 1 * MS, 100 * MS], "eager": [4 * MS, 3 * MS, 5 * MS]}
    assert race.ratios() == {"eager": pytest.approx(2.0)}
    assert [s.median for s in race.speeds()] == [pytest.approx(2.0), pytest.approx(4.0)]


def test_bytes_that_do_not_matter_are_not_counted() -> None:
    problem = Problem(str(PROBLEMS / "embedding.py"))
    problem.build(1)
    bound = roofline.bound(problem, 1, "cpu")
    assert bound is not None
    assert bound.flops == 0
    assert bound.nbytes == 64 * 64 * 4  # the rows that are returned, not the table of 1000

    problem = Problem(str(PROBLEMS / "linear_relu.py"))
    problem.build(1)
    bound = roofline.bound(problem, 1, "cpu")
    assert bound is not None
    assert bound.flops == 2 * 64 * 128 * 96
    assert bound.seconds > 0
    assert bound.nbytes >= 64 * 96 * torch.float32.itemsize


def test_a_baseline_that_fails_is_not_the_candidates_fault(zygote: Zygote, tmp_path: Path) -> None:
    """The reference gives up after some calls, in the process of the baseline."""
    lines = ["import torch", "calls = 0", "class Model(torch.nn.Module):", "    def forward(self, x):",
             "        global calls", "        calls += 1",
             "        if __name__ == 'candidate' and calls > 12: raise MemoryError('spent')",
             "        return 2 * x", "class ModelNew(torch.nn.Module):", "    def forward(self, x): return x + x",
             "def get_inputs(): return [torch.randn(8, 9)]"]  # fmt: skip
    (tmp_path / "p.py").write_text("\n".join(lines) + "\n")
    verdict = judge(f"{tmp_path}/p.py", f"{tmp_path}/p.py", zygote=zygote, checks=["timed"], rounds=8, seed=1)
    assert verdict.correct, verdict.text()
    assert "spent" in verdict.text()
    assert not verdict.ratios
