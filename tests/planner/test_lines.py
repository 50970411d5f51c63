"""Lines: what real kernels add to the roofline, from two shapes; and how plans use them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from nybble.planner import here, lines, machines, measure, plan, report
from nybble.planner.lines import Line, Timing
from nybble.planner.shapes import Linear, Model


def test_a_line_goes_through_both_shapes() -> None:
    line = lines.through((1.0, 3.0), (5.0, 11.0))
    assert (line.at(1.0), line.at(5.0), line.at(3.0)) == (3.0, 11.0, 7.0)


@pytest.mark.parametrize("small", [(1.0, 0.5), (1.0, 40.0), (5.0, 11.0)], ids=["below zero", "falling", "one shape"])
def test_a_line_that_makes_no_sense_goes_through_zero(small: tuple[float, float]) -> None:
    assert lines.through(small, (5.0, 11.0)) == Line(0.0, 11.0 / 5.0)


def test_the_smallest_and_the_largest_shape_count() -> None:
    timings = [Timing("W4A16", 1, n, n, seconds) for n, seconds in ((64, 3.0), (128, 99.0), (256, 11.0))]
    rooflines = dict(zip(timings, (1.0, 2.0, 5.0), strict=True))
    assert lines.measure(timings, rooflines) == {"W4A16": {1: Line(1.0, 2.0)}}


def test_between_numbers_of_tokens_lines_are_interpolated_and_beyond_them_they_hold() -> None:
    known = {"W4A16": {1: Line(1.0, 1.0), 16: Line(5.0, 3.0)}}
    assert lines.line_for(known, "W4A16", 4) == Line(3.0, 2.0)
    assert lines.line_for(known, "W4A16", 16) == lines.line_for(known, "W4A16", 500) == Line(5.0, 3.0)
    assert lines.line_for({"W4A16": {8: Line(1.0, 1.0)}}, "W4A16", 1) == Line(1.0, 1.0)
    assert lines.line_for(known, "W8A16", 4) is None


def test_plans_use_lines_and_say_where_they_have_none() -> None:
    slow = {"bf16": {1: Line(1e-6, 1.0)}, "W4A16": {1: Line(0.0, 9.0)}, "W8A16": {1: Line(2e-6, 1.0)}}
    row = replace(machines.get("h200"), lines=slow)
    found = plan.make(Model("x", (Linear("x", 8192, 8192),)), row, [1], ["W4A16", "W8A16", "FP8A16"])
    by = {r.scheme: r for r in found.rows}
    assert [by[s].from_line for s in ("bf16", "W4A16", "W8A16", "FP8A16")] == [True, True, True, False]
    assert by["W4A16"].speedup is not None
    assert by["W4A16"].speedup < 1
    assert found.verdicts[0].scheme == "W8A16"  # FP8A16 may be as fast, but only its bound is known
    assert found.layers == {"x": "W8A16"}
    cells = {row[0]: row for row in report.cells(found)[1]}
    assert cells["FP8A16"][3].startswith(">")
    assert not cells["W8A16"][3].startswith(">")


def test_measured_lines_are_kept_with_the_ceilings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(here, "key", lambda cpu=False: "NVIDIA H200")
    found = {"bf16": {1: Line(1e-6, 1.5)}, "W4A16": {1: Line(2e-6, 1.25), 64: Line(3e-6, 2.0)}}
    measure.save(here.file_for("NVIDIA H200"), "NVIDIA H200", {"bandwidth": 4.2e12}, found)
    assert here.machine().lines == found


def test_timings_rotate_weights_and_leave_out_what_is_not_native(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(measure.ANCHORS, "cpu", ((8, 8), (16, 16)))
    monkeypatch.setitem(measure.TOKENS, "cpu", (1, 2))
    calls: list[tuple[str, int]] = []
    said: list[str] = []

    def prepare(scheme: str, n: int, k: int, m: int) -> list[Callable[[], Any]] | None:
        return None if scheme == "NVFP4" else [lambda i=i: calls.append((scheme, i)) for i in range(3)]

    found = measure.timings(["bf16", "NVFP4", "W8A16"], prepare, "cpu", said.append)
    assert [(t.scheme, t.n, t.m) for t in found] == [
        (s, n, m) for s in ("bf16", "W8A16") for n in (8, 16) for m in (1, 2)
    ]
    assert calls[:4] == [("bf16", 0), ("bf16", 1), ("bf16", 2), ("bf16", 0)]
    assert said == ["NVFP4: no line, nothing native serves"]
    assert measure.timings(["bf16"], prepare, "cpu") == []  # alone it could be compared with nothing


def test_linears_of_this_machine_are_checked_before_they_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    from nybble.cli import plan as command
    from nybble.ops.linear import LINEAR

    works = command._linears("W8A16", 64, 64, 2, "cpu")
    assert works is not None
    assert len(works) == command._MOST_COPIES
    assert torch.equal(works[0](), works[1]())
    assert command._linears("NVFP4A16", 64, 64, 2, "cpu") is None
    checked: list[str] = []
    monkeypatch.setattr(type(LINEAR), "check", lambda self, y, args, what: checked.append(what))
    before = command._quantized.cache_info().misses
    for m in (2, 3):
        command._linears("W8A16", 64, 64, m, "cpu")
    assert len(checked) == 2
    assert command._quantized.cache_info().misses == before + 1, "one weight serves every number of tokens"


def test_lines_end_with_the_time_they_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    assert measure.timings(["bf16", "W8A16"], lambda *cell: [lambda: None], "cpu", said.append, 0.0) == []
    assert said == ["bf16: no line, time is over", "W8A16: no line, time is over"]


@pytest.mark.gpu
@pytest.mark.raw_memory
def test_linears_on_a_gpu_are_timed_in_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unfenced: a captured graph owns its memory."""
    from nybble.cli import plan as command

    monkeypatch.setitem(measure.ANCHORS, "cuda", ((512, 512), (1024, 1024)))
    monkeypatch.setitem(measure.TOKENS, "cuda", (1, 64))
    monkeypatch.setitem(command._PAST_CACHES, "cuda", 1 << 20)
    found = measure.timings(["bf16", "W4A16"], lambda s, n, k, m: command._linears(s, n, k, m, "cuda"), "cuda")
    assert {t.scheme for t in found} == {"bf16", "W4A16"}
    assert all(0 < t.seconds < 1e-3 for t in found)
