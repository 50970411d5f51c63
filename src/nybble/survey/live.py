"""What a survey shows while it runs: a bar and a table that fills, or plain lines where no terminal watches."""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from nybble.survey.rows import Original, Row, megabytes

HEADINGS = ("scheme", "bits", "MB", "perplexity", "KL", "top-1", "tok/s", "ratio", "plan", "path")


def cells(row: Row) -> tuple[str, ...]:
    """A row as the table shows it."""
    return (
        row.label,
        _number(row.bits_per_weight, ".2f"),
        "–" if row.bytes is None else megabytes(row.bytes),
        _number(row.perplexity, ".2f" if (row.perplexity or 0) < 1e4 else ".1e"),
        _number(row.kl, ".4f"),
        _number(row.top1, ".1%"),
        _number(row.tokens_per_second, ".1f", row.doubt),
        _number(row.speedup, ".2f", row.doubt),
        _number(row.planned, ".2f"),
        row.path if row.path != "refused" else f"refused: {row.why.splitlines()[0]}",
    )


def original_cells(original: Original) -> tuple[str, ...]:
    """The original's line of the table."""
    whole = Row("original", "", original.bits_per_weight, original.bytes, original.perplexity, 0.0, 1.0,
                original.tokens_per_second, "native", speedup=1.0, expected=1.0, busy=original.busy)  # fmt: skip
    return cells(whole)


def _number(value: float | None, form: str, mark: str = "") -> str:
    return "–" if value is None else format(value, form) + mark


class Screen:
    """The display of a survey on a console; a context manager, so that the terminal is itself again afterwards."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
        for number, heading in enumerate(HEADINGS):
            last = number in (0, len(HEADINGS) - 1)
            self._table.add_column(heading, justify="left" if last else "right", no_wrap=number == 0)
        self._bar = Progress(
            BarColumn(24), TextColumn("{task.completed:.0f}/{task.total:.0f}"), TimeElapsedColumn(),
            TextColumn("{task.description}"), console=console, auto_refresh=False,
        )  # fmt: skip
        self._task = self._bar.add_task("", total=None)
        self._live = Live(Group(self._table, self._bar), console=console, auto_refresh=console.is_terminal,
                          refresh_per_second=4, vertical_overflow="visible")  # fmt: skip
        self._last = time.monotonic()

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        if self._console.is_terminal:
            self._bar.update(self._task, visible=False)
            self._live.stop()

    def begin(self, title: str, total: int) -> None:
        """The survey starts."""
        self._bar.update(self._task, total=total)
        self._console.print(f"surveying {title}: {total} schemes", highlight=False)
        if not self._console.is_terminal:
            self._line(HEADINGS)

    def step(self, text: str) -> None:
        """What is being done."""
        self._bar.update(self._task, description=text)

    def original(self, original: Original) -> None:
        """The original's line comes first."""
        self._add(original_cells(original))

    def row(self, row: Row, kept: bool) -> None:
        """A row of the table."""
        shown = cells(row)
        self._add((*shown[:-1], f"{shown[-1]} (kept from an earlier run)") if kept else shown)
        self._bar.advance(self._task)

    def _add(self, shown: tuple[str, ...]) -> None:
        self._table.add_row(*shown)
        if not self._console.is_terminal:
            self._line(shown)

    def _line(self, shown: tuple[str, ...]) -> None:
        widths = (16, 5, 6, 10, 8, 7, 7, 6, 6)
        first, *middle = shown[:-1]
        text = f"{first:<{widths[0]}}" + "".join(f" {c:>{w}}" for c, w in zip(middle, widths[1:], strict=True))
        self._console.print(f"{text}  {shown[-1]}", highlight=False, markup=False, soft_wrap=True)
