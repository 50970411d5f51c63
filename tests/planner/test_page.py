"""What docs/why/planner.md states in code prints what it says."""

from __future__ import annotations

import re

import pytest

import house

PAGE = (house.ROOT / "docs" / "why" / "planner.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("block", BLOCKS)
def test_blocks_print_their_comments(block: str, capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(block, "planner.md", "exec"), {"__name__": "page"})
    expected = "".join(f"{line[2:]}\n" for line in block.splitlines() if line.startswith("# "))
    assert capsys.readouterr().out == expected


def test_there_are_blocks() -> None:
    assert len(BLOCKS) == 2
