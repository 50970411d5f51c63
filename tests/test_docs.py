"""Generated documents say what the tables say."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

import house
from nybble.formats import names


@pytest.fixture(scope="module")
def document() -> ModuleType:
    spec = importlib.util.spec_from_file_location("document", house.ROOT / "tools" / "document.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_documents_are_current(document: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    assert document.main(["--check"]) == 0, capsys.readouterr().out


def test_a_stale_document_is_told(document: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(document, "DOCUMENTS", {"formats.md": lambda: "something else"})
    assert document.main(["--check"]) == 1
    assert (house.ROOT / "docs" / "formats.md").read_text(encoding="utf-8") != "something else"


def test_every_format_has_a_row(document: ModuleType) -> None:
    text = document.formats()
    assert [name for name in names() if f"| `{name}` |" not in text] == []


@pytest.mark.parametrize(
    ("value", "text"), [(448.0, "448"), (2.0**-127, "2^-127"), (61440.0, "61,440"), (0.25, "0.25")]
)
def test_numbers(document: ModuleType, value: float, text: str) -> None:
    assert document.number(value) == text
