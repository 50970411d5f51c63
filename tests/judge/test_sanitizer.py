"""The check that runs compute-sanitizer, with a stand-in for the tool: what is started, and what its end means."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from collection import exhibits
from nybble.judge import Verdict

KERNEL = next(e for e in exhibits("honest") if e.label == "linear_relu.Plain")
TOOL = """#!/bin/sh
echo "========= STAND-IN $1 $2"
shift 4
"$@"
echo "========= Invalid __global__ read of size 4 bytes"
exit {code}
"""


def _tool(folder: Path, code: str) -> None:
    (folder / "compute-sanitizer").write_text(TOOL.format(code=code))
    (folder / "compute-sanitizer").chmod(0o755)


@pytest.mark.parametrize(
    ("code", "status", "said"),
    [("77", "wrong", "Invalid __global__ read"), ("$?", "correct", ""), ("3", "correct", "exit code 3")],
)
def test_what_the_tool_says(
    code: str,
    status: str,
    said: str,
    verdict_on: Callable[..., Verdict],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _tool(tmp_path, code)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    verdict = verdict_on(KERNEL, checks=["sanitizer"])
    assert verdict.status == status, verdict.text()
    assert said in verdict.text()


def test_without_the_tool_it_is_a_note(verdict_on: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert "not run" in verdict_on(KERNEL, checks=["sanitizer"]).text()


def test_it_runs_on_request_only(verdict_on: Callable[..., Verdict]) -> None:
    assert "sanitizer" not in {f.check for f in verdict_on(KERNEL).findings}
