"""Predictions for the H200 beside measurements: written first, compared afterwards.

    python benchmarks/planner.py predict            write results/h200/predictions.json from measured ceilings alone
    python benchmarks/planner.py compare [FILE …]   hold results/h200/linear*.json against it

A cell is (op, format, shape, M). What must hold: 80 % of the cells within 20 %, and in 95 % of (shape, M) the scheme
predicted fastest within 5 % of the one measured fastest. Shapes that no constant was ever looked at with are held out
and listed apart. Nothing is fitted: the constants are machine.json's and those that nybble/costs.py explains.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nybble.errors import Unsupported
from nybble.planner import here, plan
from nybble.planner.machines import TABLE, Machine, with_measured

RESULTS = Path(__file__).resolve().parent / "results" / "h200"
PREDICTIONS = RESULTS / "predictions.json"
SEEN = ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192))
"""Shapes whose times stood in the notes that this planner was written with."""
HELD_OUT = (
    (6144, 4096),
    (8192, 8192),
    (8192, 28672),
    (13824, 4608),
    (4608, 12288),
    (5120, 5120),
    (27648, 5120),
    (2048, 2048),
)
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
WITHIN, CELLS, NEAR, WINNERS = 0.20, 0.80, 0.05, 0.95


def h200() -> Machine:
    """The H200's row with the ceilings measured on it."""
    found = here.load(RESULTS / "machine.json")
    if found is None:
        raise SystemExit(f"no {RESULTS / 'machine.json'}: run `nybble machine --measure` there first")
    return with_measured(TABLE["h200"], found["ceilings"], found["date"])


def microseconds(scheme: str, n: int, k: int, m: int, machine: Machine) -> float | None:
    """The prediction of a cell; None where the machine refuses."""
    try:
        return plan.of_linear(m, n, k, scheme, machine).seconds * 1e6
    except Unsupported:
        return None


def predict() -> dict[str, Any]:
    """Every cell of the grid."""
    machine = h200()
    cells = {
        f"{scheme} {n}x{k} M={m}": round(us, 3)
        for scheme in (plan.ORIGINAL, *plan.DEFAULT_SCHEMES)
        for n, k in (*SEEN, *HELD_OUT)
        for m in TOKENS
        if (us := microseconds(scheme, n, k, m, machine)) is not None
    }
    return {"written": "2026-11-30", "machine": "results/h200/machine.json", "unit": "us", "cells": cells}


@dataclass(frozen=True)
class Cell:
    """A measured cell with its prediction, in microseconds."""

    scheme: str
    n: int
    k: int
    m: int
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Predicted over measured, less one."""
        return self.predicted / self.measured - 1


def measured(paths: Iterable[Path]) -> Iterator[tuple[str, int, int, int, float]]:
    """(scheme, N, K, M, us) of result files: rows with scheme or format, shape or n and k, m, and us."""
    for path in paths:
        for row in json.loads(path.read_text(encoding="utf-8")).get("rows", []):
            n, k = (row["n"], row["k"]) if "n" in row else row["shape"]
            us = row.get("us", row.get("microseconds"))
            name = row.get("scheme", row.get("format"))
            if us and name:
                yield str(name), int(n), int(k), int(row["m"]), float(us)


def cells(paths: Iterable[Path], machine: Machine) -> list[Cell]:
    """Measured cells that have a prediction."""
    found = []
    for scheme, n, k, m, us in measured(paths):
        predicted = microseconds(scheme, n, k, m, machine)
        if predicted is not None:
            found.append(Cell(scheme, n, k, m, us, predicted))
    return found


def winners(found: Iterable[Cell]) -> list[tuple[tuple[int, int, int], str, str, float]]:
    """For each (N, K, M): the scheme predicted fastest, the one measured fastest, and what the first costs over it."""
    groups: dict[tuple[int, int, int], list[Cell]] = {}
    for cell in found:
        groups.setdefault((cell.n, cell.k, cell.m), []).append(cell)
    answer = []
    for key, group in groups.items():
        if len(group) > 1:
            told, best = min(group, key=lambda c: c.predicted), min(group, key=lambda c: c.measured)
            answer.append((key, told.scheme, best.scheme, told.measured / best.measured - 1))
    return answer


def summary(found: list[Cell]) -> dict[str, float]:
    """The shares that must hold, and the median error."""
    won = winners(found)
    return {
        "cells": len(found),
        "within": sum(abs(c.error) <= WITHIN for c in found) / len(found) if found else 0.0,
        "choices": len(won),
        "right": sum(loss <= NEAR for *_, loss in won) / len(won) if won else 0.0,
        "median_error": statistics.median(c.error for c in found) if found else 0.0,
    }


def main() -> int:
    """Write or compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("predict", "compare"))
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args()
    if options.what == "predict":
        PREDICTIONS.write_text(json.dumps(predict(), indent=1) + "\n", encoding="utf-8")
        return 0
    paths = options.files or sorted(RESULTS.glob("linear*.json"))
    found = cells(paths, h200())
    if not found:
        print("no measured cells with a prediction", file=sys.stderr)
        return 1
    for title, some in {
        "all": found,
        "seen shapes": [c for c in found if (c.n, c.k) in SEEN],
        "held-out shapes": [c for c in found if (c.n, c.k) not in SEEN],
        **{f"scheme {s}": [c for c in found if c.scheme == s] for s in dict.fromkeys(c.scheme for c in found)},
        **{f"M = {m}": [c for c in found if c.m == m] for m in sorted({c.m for c in found})},
    }.items():
        s = summary(some)
        print(f"{title:24} {s['cells']:4.0f} cells, {s['within']:4.0%} within {WITHIN:.0%} (median error "
              f"{s['median_error']:+.0%}); fastest right in {s['right']:4.0%} of {s['choices']:.0f}")  # fmt: skip
    for cell in sorted(found, key=lambda c: -abs(c.error))[:10]:
        print(f"  {cell.scheme} {cell.n}x{cell.k} M={cell.m}: {cell.predicted:.1f} us, measured {cell.measured:.1f}")
    total = summary(found)
    return int(total["within"] < CELLS or total["right"] < WINNERS)


if __name__ == "__main__":
    sys.exit(main())
