"""A plan as text and as a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from nybble.errors import BadInput, Unsupported
from nybble.planner.machines import Machine
from nybble.planner.plan import ORIGINAL, Plan, Row, of_linear
from nybble.planner.shapes import Model

_SAMPLES = tuple(round(2 ** (i / 4)) for i in range(53))
"""Numbers of tokens the picture samples: 1 to 8192, four to an octave."""


def machine_lines(row: Machine) -> list[str]:
    """A machine's figures, each measured one with its date."""

    def figure(name: str, value: float, unit: str) -> str:
        mark = f"  measured {row.measured[name]}" if name in row.measured else ""
        return f"  {name:<10} {value:>10.4g} {unit}{mark}"

    lines = [f"{row.name}: {row.title}", figure("memory", row.memory / 2**30, "GiB")]
    lines += [figure("bandwidth", row.bandwidth / 1e9, "GB/s"), figure("launch", row.launch * 1e6, "us")]
    lines += [figure(unit, rate / 1e12, "T/s") for unit, rate in row.units.items()]
    scalars = ", ".join(f"{kind} {rate / 1e12:.3g}" for kind, rate in row.scalars.items())
    lines += [f"  scalar     {scalars} T/s"]
    return [*lines, f"  source     {row.source}", *(f"  uncertain  {note}" for note in row.uncertain)]


def cells(plan: Plan) -> tuple[list[str], list[list[str]]]:
    """The table: headings, and a row a scheme."""
    tokens = sorted({row.tokens for row in plan.rows})
    head = ["scheme", "weights", "path", *(f"M={m}" for m in tokens), "bound by"]
    body = []
    for name, size in plan.weight_bytes.items():
        mine = [row for row in plan.rows if row.scheme == name]
        fits = "" if plan.fits(name) else " too large"
        speeds = [_speed(row, bounds_only=bool(plan.machine["lines"]) and not row.from_line) for row in mine]
        bounds = " | ".join(dict.fromkeys(row.bound or row.why for row in mine))
        body.append([name, f"{size / 2**30:.2f} GiB{fits}", mine[0].path, *speeds, bounds])
    return head, body


def _speed(row: Row, bounds_only: bool) -> str:
    """Time and speed; a bound among real times is marked as one."""
    if row.seconds is None or row.speedup is None:
        return "-"
    least, most = (">", "<") if bounds_only else ("", "")
    return f"{least}{_time(row.seconds)} {most}{row.speedup:.2f}x"


def _time(seconds: float) -> str:
    unit, factor = next((u, f) for u, f in (("us", 1e6), ("ms", 1e3), ("s", 1.0)) if seconds * f < 1000 or u == "s")
    return f"{seconds * factor:.3g} {unit}"


def closing(plan: Plan) -> list[str]:
    """What stands under the table."""
    used = f"{plan.cache_bytes / 2**30:.2f} GiB of keys and values; {plan.budget / 2**30:.1f} GiB to fill"
    mixed = [f"model: {plan.sentence}"] if plan.sentence else []
    mixed += [_grain(plan)] if plan.groups else []
    measured = plan.machine["measured"]
    origin = f"measured: {', '.join(f'{k} ({v})' for k, v in measured.items())}" if measured else "peaks of the table"
    meaning = "Predictions bound the best kernel"
    if plan.machine["lines"]:
        meaning = "Times hold what our linears were measured to add; > and < mark bounds where that is not known"
    rates = f"rates of {plan.machine['name']}: {origin}. {meaning}; linears only; `nybble survey` measures quality."
    return [used, *(verdict.sentence for verdict in plan.verdicts), *mixed, rates]


def _grain(plan: Plan) -> str:
    """Which groups integer products can afford."""
    shortest = next(iter(plan.groups.values()))
    worth = f"{shortest} columns or more" if shortest else "a whole row"
    return (
        f"groups: {', '.join(plan.groups)} rescale on scalar units; here that takes less time than "
        f"the products for groups of {worth} (planner/granularity.py)."
    )


Seconds = Callable[[str, int], float]


def seconds_of(model: Model, machine: Machine) -> Seconds:
    """What predicts a scheme's time over all linears at a number of tokens."""
    return lambda name, m: sum(x.count * of_linear(m, x.n, x.k, name, machine).seconds for x in model.linears)


def curves(names: Sequence[str], seconds: Seconds) -> dict[str, list[tuple[int, float]]]:
    """(M, seconds) of each scheme that the machine can run."""
    found: dict[str, list[tuple[int, float]]] = {}
    for name in names:
        try:
            found[name] = [(m, seconds(name, m)) for m in sorted(set(_SAMPLES))]
        except Unsupported:
            continue
    return found


def crossovers(found: Mapping[str, list[tuple[int, float]]], seconds: Seconds) -> list[tuple[str, str, int, float]]:
    """(fastest before, fastest from here on, M, seconds) wherever the fastest scheme changes by more than 1 %."""
    changes: list[tuple[str, str, int, float]] = []
    best, before = "", 0
    for i, (m, _) in enumerate(next(iter(found.values()), [])):
        top = min(found, key=lambda name: found[name][i][1])
        best = best or top
        if found[top][i][1] < 0.99 * found[best][i][1]:
            low, high = before, m  # the change lies between
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if seconds(top, middle) < 0.99 * seconds(best, middle) else (middle, high)
            changes.append((best, top, high, seconds(top, high)))
            best = top
        before = m
    return changes


def picture(path: Path, model: Model, machine: Machine, names: Sequence[str]) -> None:
    """Time against M, one line a scheme, the points where another scheme becomes the fastest marked.

    Raises:
        BadInput: the file cannot be written, or its ending is no picture's.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    seconds = seconds_of(model, machine)
    found = curves(names, seconds)
    figure = Figure(figsize=(9, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    native = {n for n in found if all(of_linear(1, x.n, x.k, n, machine).native for x in model.linears)}
    for i, (name, line) in enumerate(found.items()):
        style: dict[str, Any] = {"color": "black", "lw": 2.5} if name == ORIGINAL else {"color": f"C{(i - 1) % 10}"}
        style["ls"] = ":" if name not in native else "-" if i <= 10 else "--"
        axes.plot(*zip(*line, strict=True), label=name if name in native else f"{name} (emulated)", **style)
    for before, after, m, at in crossovers({name: line for name, line in found.items() if name in native}, seconds):
        axes.plot(m, at, "o", color="black", ms=7, mfc="white", zorder=5)
        axes.annotate(f"from M = {m}: {after}\ninstead of {before}", (m, at), xytext=(24, 6), fontsize=8,
                      textcoords="offset points", arrowprops={"arrowstyle": "-", "lw": 0.6}, zorder=6,
                      bbox={"boxstyle": "round", "fc": "white", "ec": "0.8"})  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks([4**i for i in range(7)], [str(4**i) for i in range(7)])
    axes.margins(y=0.12)
    axes.set_yscale("log")
    axes.set_xlabel("tokens at once, M")
    axes.set_ylabel("predicted seconds, all linears")
    axes.set_title(f"{model.name} on {machine.title}")
    axes.grid(which="both", alpha=0.2)
    axes.legend(fontsize=8, ncols=2)
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: no picture can be written there: {error}") from error
