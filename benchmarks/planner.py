"""Predictions for the H200 beside measurements: written first, compared afterwards.

    python benchmarks/planner.py predict            write results/h200/predictions.json from measured ceilings alone
    python benchmarks/planner.py compare [FILE …]   hold what `nybble bench linear` left in results/h200 against it

A cell is (op, format, shape, M). What must hold: 80 % of the cells within 20 %, and in 95 % of (shape, M) the scheme
predicted fastest within 5 % of the one measured fastest. Two predictions are compared:

    peak    from machine.json's ceilings and what nybble/costs.py counts; it bounds the best kernel
    lines   the same, with each scheme's overheads at each M measured on two shapes (ANCHORS); those are left out of
            the figures, so that every shape counted is held out
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nybble.errors import Unsupported
from nybble.planner import here, plan
from nybble.planner.lines import Lines, Timing, measure
from nybble.planner.machines import TABLE, Machine, with_measured
from nybble.quantize.schemes import SCHEMES

RESULTS = Path(__file__).resolve().parent / "results" / "h200"
PREDICTIONS = RESULTS / "predictions.json"
SEEN = ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192))
"""Shapes of which some times were known when this planner was written."""
ANCHORS = ((4096, 4096), (28672, 8192))
"""The smallest and the largest of them: the lines are measured on these two, chosen before any comparison."""
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
LINEAR_FALLBACK = "linear_dequantize"
WITHIN, CELLS, NEAR, WINNERS = 0.20, 0.80, 0.05, 0.95


def h200() -> Machine:
    """The H200's row with the ceilings measured on it."""
    found = here.load(RESULTS / "machine.json")
    if found is None:
        raise SystemExit(f"no {RESULTS / 'machine.json'}: run `nybble machine --measure` there first")
    return with_measured(TABLE["h200"], found["ceilings"], found["date"])


WRITTEN = (
    plan.ORIGINAL, "W8A16", "FP8A16", "MXFP8A16", "W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "MXFP8",
    "W4A16", "W4A16_ASYM", "NVFP4A16", "MXFP4A16", "W4A8", "W4A4", "NVFP4", "MXFP4",
)  # fmt: skip
"""The schemes that the planner knew when the predictions were written."""

RETHOUGHT = ("W4A8", "W4A4")
"""Written when rescaling of integer sums was taken to overlap with products. That they take turns was measured later
(activations.json), and the planner has followed; the file keeps what was written, and no figure here is taken from it.
"""


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
        for scheme in WRITTEN
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


def scheme_of(name: str, activation: str | None = None) -> str | None:
    """The scheme that a result's row is of: by its own name, or by its weight's and its activation's format."""
    if name == plan.ORIGINAL or name in SCHEMES:
        return name
    wanted = (name, activation or None)
    formats = {s.name: (s.weight.name, s.activation.name if s.activation else None) for s in SCHEMES.values()}
    return next((scheme for scheme, pair in formats.items() if pair == wanted), None)


def measured(paths: Iterable[Path]) -> list[Timing]:
    """The fastest time of each cell in what `nybble bench linear` wrote: cuBLAS and our native kernels, not rivals'."""
    best: dict[tuple[str, int, int, int], float] = {}
    for path in paths:
        found = json.loads(path.read_text(encoding="utf-8"))
        rows = found.get("rows") if isinstance(found, dict) else None
        for row in rows if isinstance(rows, list) else []:
            kernel = str(row.get("kernel", ""))
            ours = kernel == "cublas" or (kernel.startswith("linear_") and kernel != LINEAR_FALLBACK)
            ours &= row.get("x", plan.ORIGINAL) == plan.ORIGINAL  # predictions are of bf16 inputs
            name = scheme_of(str(row.get("format")), row.get("activation")) if ours else None
            for scheme, us in ((name, row.get("us")), (plan.ORIGINAL, row.get("cublas_us"))):
                if scheme and us:
                    key = (scheme, int(row["m"]), int(row["n"]), int(row["k"]))
                    best[key] = min(best.get(key, float("inf")), float(us))
    return [Timing(*key, us * 1e-6) for key, us in best.items()]


def result_files() -> list[Path]:
    """Every file of results/h200 that can hold measurements of linears."""
    return sorted(path for path in RESULTS.glob("*.json") if path.name not in ("machine.json", PREDICTIONS.name))


def cells(timings: Iterable[Timing], machine: Machine, lines: Lines | None = None) -> list[Cell]:
    """Measured cells with their prediction, by the peaks or by lines."""
    found = []
    for t in timings:
        predicted = microseconds(t.scheme, t.n, t.k, t.m, machine)
        if lines is not None and predicted is not None:
            own = plan.of_linear(t.m, t.n, t.k, t.scheme, replace(machine, lines=lines))
            predicted = own.seconds * 1e6 if own.from_line else None
        if predicted is not None:
            found.append(Cell(t.scheme, t.n, t.k, t.m, t.seconds * 1e6, predicted))
    return found


def calibrate(timings: Iterable[Timing], machine: Machine) -> Lines:
    """Lines from the anchors among the timings."""
    anchors = [t for t in timings if (t.n, t.k) in ANCHORS]
    return measure(anchors, {t: plan.of_linear(t.m, t.n, t.k, t.scheme, machine).roofline for t in anchors})


def winners(found: Iterable[Cell]) -> list[tuple[tuple[int, int, int], str, str, float]]:
    """For each (N, K, M): the scheme that the planner tells to take, the one measured fastest, and what the first costs
    over it. As in a plan's verdict the original is kept unless something is predicted to be plan.PAYS faster."""
    groups: dict[tuple[int, int, int], list[Cell]] = {}
    for cell in found:
        groups.setdefault((cell.n, cell.k, cell.m), []).append(cell)
    answer = []
    for key, group in groups.items():
        if len(group) > 1:
            told, best = min(group, key=lambda c: c.predicted), min(group, key=lambda c: c.measured)
            base = next((c for c in group if c.scheme == plan.ORIGINAL), None)
            if base is not None and base.predicted < (1 + plan.PAYS) * told.predicted:
                told = base
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
    timings = measured(options.files or result_files())
    machine = h200()
    held_out = [t for t in timings if (t.n, t.k) not in ANCHORS]
    peak, lines = cells(timings, machine), cells(held_out, machine, calibrate(timings, machine))
    if not peak:
        print("no measured cells with a prediction", file=sys.stderr)
        return 1
    show("peak", peak)
    show("lines", lines)
    total = summary(lines)
    return int(total["within"] < CELLS or total["right"] < WINNERS)


def show(title: str, found: list[Cell]) -> None:
    """Shares that must hold, over all cells and by shape, scheme and M; then the worst cells."""
    parts = {
        "all": found,
        **{f"{n}x{k}": [c for c in found if (c.n, c.k) == (n, k)] for n, k in dict.fromkeys((c.n, c.k) for c in found)},
        **{s: [c for c in found if c.scheme == s] for s in dict.fromkeys(c.scheme for c in found)},
        **{f"M = {m}": [c for c in found if c.m == m] for m in sorted({c.m for c in found})},
    }
    for part, some in parts.items():
        s = summary(some)
        right = f"; fastest right in {s['right']:4.0%} of {s['choices']:.0f}" if s["choices"] else ""
        print(f"{title:5} {part:16} {s['cells']:4.0f} cells, {s['within']:4.0%} within {WITHIN:.0%}, median error "
              f"{s['median_error']:+.0%}{right}")  # fmt: skip
    for cell in sorted(found, key=lambda c: -abs(c.error))[:8]:
        print(
            f"      {cell.scheme} {cell.n}x{cell.k} M={cell.m}: {cell.predicted:.1f} us, measured {cell.measured:.1f}"
        )


if __name__ == "__main__":
    sys.exit(main())
