"""Rows on disk: they come back as they were, belong to one survey only, and are never half written."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest

from nybble.errors import BadInput
from nybble.files import write_whole
from nybble.survey import Original, Row, store
from nybble.survey.rows import Identity
from nybble.survey.store import Store

IDENTITY = Identity("0.1", "2.13", "m", ["m.gguf 5 7"], "t", "ab", 4096, 1024, 0, "a cpu", "auto")
ORIGINAL = Original(8.4, 40.0, 1000, "float32", "bfloat16", 500, 210)
ROW = Row("W4A16", "rtn", 4.125, 600, 8.5, 0.01, 0.99, 80.0, "native", "a kernel", 2.0, 0.001, 12.5)


def opened(path: Path, identity: Identity = IDENTITY, force: bool = False) -> Store:
    """A store that is open."""
    made = Store(path, identity)
    made.open(force)
    return made


def test_rows_come_back(tmp_path: Path) -> None:
    first = opened(tmp_path / "deep" / "out")
    assert first.original() is None
    assert first.row("W4A16", "rtn") is None
    first.save_original(ORIGINAL)
    first.save(ROW)
    again = opened(tmp_path / "deep" / "out")
    assert again.original() == ORIGINAL
    assert again.row("W4A16", "rtn") == ROW
    assert again.row("W4A16", "gptq") is None


def test_what_was_disturbed_is_measured_again(tmp_path: Path) -> None:
    first = opened(tmp_path)
    first.save_original(replace(ORIGINAL, busy=True))
    first.save(replace(ROW, busy=True))
    again = opened(tmp_path)
    assert (again.original(), again.row("W4A16", "rtn")) == (None, None)
    again.save(ROW)
    assert again.row("W4A16", "rtn") == ROW


@pytest.mark.parametrize("field", list(Identity.__dataclass_fields__))
def test_another_survey_is_not_mixed_in(tmp_path: Path, field: str) -> None:
    opened(tmp_path).save(ROW)
    value = getattr(IDENTITY, field)
    other = replace(IDENTITY, **{field: value + 1 if isinstance(value, int) else value + type(value)("x")})
    with pytest.raises(BadInput, match=rf"holds another survey \({field}: .*--out.*--force"):
        opened(tmp_path, other)
    assert opened(tmp_path).row("W4A16", "rtn") == ROW


def test_force_starts_over_and_removes_nothing_else(tmp_path: Path) -> None:
    opened(tmp_path).save(ROW)
    bystander = tmp_path / "notes.json"
    bystander.write_text("{}")
    (tmp_path / store.RESULT).write_text("{}")
    fresh = opened(tmp_path, replace(IDENTITY, tokens=5), force=True)
    assert fresh.row("W4A16", "rtn") is None
    assert bystander.exists()
    assert not (tmp_path / store.RESULT).exists()


def test_opening_writes_nothing(tmp_path: Path) -> None:
    opened(tmp_path / "new" / "out")
    assert list(tmp_path.iterdir()) == []
    opened(tmp_path / "new" / "out", replace(IDENTITY, tokens=5))


def test_results_without_rows_are_not_overwritten(tmp_path: Path) -> None:
    (tmp_path / store.RESULT).write_text("{}")
    with pytest.raises(BadInput, match="holds another survey"):
        opened(tmp_path)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"):
        opened(tmp_path / "file")
    with pytest.raises(BadInput, match="cannot be written"):
        opened(tmp_path / "file" / "below")


@pytest.mark.parametrize("damage", ["{", "[]", '{"scheme": "W4A16"}', "\x00"])
def test_a_damaged_row_is_named(tmp_path: Path, damage: str) -> None:
    found = opened(tmp_path)
    found.save_original(ORIGINAL)
    (tmp_path / store.ROWS / "W4A16.rtn.json").write_text(damage)
    with pytest.raises(BadInput, match=r"W4A16\.rtn\.json.*--force"):
        found.row("W4A16", "rtn")


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.json"
    write_whole(path, "old")

    def fail(*args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(BadInput, match="No space left"):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["x.json"]


def test_json_has_no_infinities(tmp_path: Path) -> None:
    store.write_json(tmp_path / "x.json", {"a": math.inf, "b": [math.nan, 1.5], "c": (2,)})
    assert json.loads((tmp_path / "x.json").read_text()) == {"a": None, "b": [None, 1.5], "c": [2]}


def test_a_fingerprint_sees_what_changes_a_model(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_text("a")
    (tmp_path / "README.md").write_text("a")
    before = store.fingerprint(tmp_path)
    (tmp_path / "README.md").write_text("more")
    assert store.fingerprint(tmp_path) == before
    weights.write_text("ab")
    assert store.fingerprint(tmp_path) != before
    assert store.fingerprint(weights) == [line for line in store.fingerprint(tmp_path) if "model" in line]
