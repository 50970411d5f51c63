"""docs/why/judge.md states what benchmarks/results/cpu/judge.json holds, and every check and cheat is in it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import house
from collection import exhibits
from nybble.judge.checks import all_checks

PAGE = house.ROOT / "docs" / "why" / "judge.md"


def test_the_document_is_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = importlib.util.spec_from_file_location("judge_benchmark", house.ROOT / "benchmarks" / "judge.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    copy = tmp_path / "judge.md"
    copy.write_text(PAGE.read_text())
    monkeypatch.setattr(module, "PAGE", copy)
    module.write(module.Store().rows)
    assert copy.read_text() == PAGE.read_text(), "run: python benchmarks/judge.py --only-write"


def test_everything_is_in_it() -> None:
    text = PAGE.read_text()
    assert [check.name for check in all_checks() if f"| `{check.name}` |" not in text] == []
    assert [e.label for e in exhibits("cheats") if f"| {e.label.split('_', 1)[1]} |" not in text] == []
