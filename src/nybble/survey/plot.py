"""The survey's picture: quality lost against size, and speed beside it.

Native and emulated schemes differ in fill, not only in colour, so that a grey print says the same. Labels are placed
so that none covers another or a point; one that had to move is tied to its point by a line.
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import Any

from nybble.survey.recommend import DEFAULT_MAX_KL
from nybble.survey.rows import Result, Row

Box = tuple[float, float, float, float]  # left, bottom, right, top
_BLUE, _GREY, _RED = "#1c5d99", "#666666", "#b3261e"
_SMALLEST_KL = 1e-6  # a logarithmic axis has no place for an exact copy


def draw(result: Result, max_kl: float | None = None) -> Any:
    """The matplotlib figure of a survey."""
    from matplotlib.figure import Figure

    shown = [row for row in result.rows if row.kl is not None and row.bytes is not None]
    figure = Figure(figsize=(11.5, 0.27 * max(12, len(shown)) + 1.3), layout="constrained", dpi=100)
    left, right = figure.subplots(1, 2, width_ratios=(1.65, 1))
    _speed(right, shown, result)
    _quality(left, shown, result, DEFAULT_MAX_KL if max_kl is None else max_kl)
    figure.canvas.draw()
    _label(left, shown)
    return figure


def svg(result: Result, max_kl: float | None = None) -> str:
    """The picture as an <svg> element that refers to nothing outside itself."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.fonttype": "path", "svg.hashsalt": "nybble"}):
        nothing = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        draw(result, max_kl).savefig(buffer, format="svg", metadata=nothing)
    element = buffer.getvalue()
    element = element[element.index("<svg") :]
    # Inside HTML the namespaces are known, and a page that names no address at all is plainly self-contained.
    return re.sub(r'\s+xmlns(:\w+)?="[^"]*"', "", element)


def _quality(axes: Any, rows: Sequence[Row], result: Result, max_kl: float) -> None:
    for row in rows:
        native, chosen = row.path == "native", _is_chosen(row, result)
        face = _BLUE if native else "white"
        axes.plot(_mb(row), _kl(row), "o", markersize=8, markerfacecolor=face, markeredgecolor=_BLUE, mew=1.6, zorder=3)
        if chosen:
            axes.plot(_mb(row), _kl(row), "o", markersize=16, markerfacecolor="none", markeredgecolor=_RED, mew=1.8)
    axes.set_yscale("log")
    axes.margins(0.12, 0.1)
    original = result.original.bytes / 1e6
    axes.axvline(original, color=_GREY, linestyle="--", linewidth=1)
    axes.text(original, 0.02, f"original: {original:.0f} MB ", transform=axes.get_xaxis_transform(), rotation=90,
              ha="right", va="bottom", color=_GREY, fontsize=9)  # fmt: skip
    axes.axhline(max_kl, color=_RED, linestyle=":", linewidth=1.2)
    axes.text(0.995, max_kl, f"quality limit: KL {max_kl:g}", transform=axes.get_yaxis_transform(), ha="right",
              va="bottom", color=_RED, fontsize=9)  # fmt: skip
    axes.set_title("Quality lost against size: lower left is better", loc="left", fontsize=11)
    axes.set_xlabel("size of all weights, MB")
    axes.set_ylabel("KL divergence from the original, nats a token")
    axes.grid(True, which="major", color="#e4e4e4", linewidth=0.7)
    _legend(axes, result)


def _legend(axes: Any, result: Result) -> None:
    from matplotlib.lines import Line2D

    def mark(face: str, edge: str, size: int) -> Any:
        return Line2D([], [], marker="o", linestyle="", markersize=size, markerfacecolor=face, markeredgecolor=edge)

    names = {"native here": mark(_BLUE, _BLUE, 8), "emulated here": mark("white", _BLUE, 8)}
    if any(_is_chosen(row, result) for row in result.rows):
        names["recommended"] = mark("none", _RED, 13)
    axes.legend(names.values(), names.keys(), loc="upper right", frameon=True, fontsize=9)


def _speed(axes: Any, rows: Sequence[Row], result: Result) -> None:
    timed = sorted((row for row in rows if row.speedup is not None), key=lambda row: row.speedup or 0)
    for place, row in enumerate(timed):
        native = row.path == "native"
        face, hatch = (_BLUE, None) if native else ("white", "////")
        axes.barh(place, row.speedup, color=face, edgecolor=_BLUE, hatch=hatch, height=0.66, linewidth=1)
        axes.text(row.speedup or 0, place, f" {row.speedup:.2f}x", va="center", fontsize=9, zorder=4,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85})  # fmt: skip
    axes.axvline(1, color=_GREY, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(timed)), [row.scheme for row in timed], fontsize=9)
    for tick, row in zip(axes.get_yticklabels(), timed, strict=True):
        if _is_chosen(row, result):
            tick.set(color=_RED, fontweight="bold")
    axes.set_xlim(0, 1.18 * max([1.0, *(row.speedup or 0 for row in timed)]))
    axes.set_ylim(-0.7, max(len(timed), 1) - 0.3)
    axes.set_xlabel("tokens/s at batch 1 over the original's")
    original = result.original.tokens_per_second
    axes.set_title(f"Decoding speed (dashed: original, {original:.1f} tokens/s)", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def _label(axes: Any, rows: Sequence[Row]) -> None:
    """Write each scheme's name beside its point."""
    points = [tuple(axes.transData.transform((_mb(row), _kl(row)))) for row in rows]
    texts = [axes.annotate(row.scheme, (0, 0), xycoords="figure pixels", fontsize=9, zorder=5) for row in rows]
    sizes = [(box.width + 2, box.height) for box in (text.get_window_extent() for text in texts)]
    taken = [_box(axes.get_legend().get_window_extent())]
    taken += [_box(text.get_window_extent()) for text in axes.texts if text not in texts]
    places = place(points, sizes, _box(axes.get_window_extent()), taken)
    back = axes.transData.inverted()
    for text, (x, y), point, size in zip(texts, places, points, sizes, strict=True):
        text.remove()
        near = math.dist((min(max(point[0], x), x + size[0]), y + size[1] / 2), point) < 16
        arrow = None if near else {"arrowstyle": "-", "color": _GREY, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 4}
        axes.annotate(text.get_text(), back.transform(point), back.transform((x, y)), xycoords="data",
                      textcoords="data", fontsize=9, arrowprops=arrow, zorder=5, annotation_clip=False)  # fmt: skip


def place(
    points: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], frame: Box, taken: Sequence[Box] = ()
) -> list[tuple[float, float]]:
    """Lower left corners of labels (sizes in the points' units) that cover neither each other, nor any point or
    `taken` box, and stay within the frame; each as near to its point as the ones before it allow."""
    radius = 7
    occupied = [*taken, *((x - radius, y - radius, x + radius, y + radius) for x, y in points)]
    places: list[tuple[float, float]] = []
    for (x, y), (width, height) in zip(points, sizes, strict=True):
        best, least = (x + radius, y - height / 2), math.inf
        for near, corner in _candidates(x, y, width, height, radius):
            box = (*corner, corner[0] + width, corner[1] + height)
            cost = near + 1e3 * sum(_overlap(box, other) for other in occupied) + 1e3 * _outside(box, frame)
            if cost < least:
                best, least = corner, cost
        places.append(best)
        occupied.append((*best, best[0] + width, best[1] + height))
    return places


def _candidates(
    x: float, y: float, width: float, height: float, radius: float
) -> list[tuple[float, tuple[float, float]]]:
    """(distance, corner) of where a label could stand: right, left, above and below, at growing distance."""
    found = []
    for step in range(14):
        gap = radius + 1 + 9 * step
        rises = [0.0] if step == 0 else [0.0, 0.5 * gap, -0.5 * gap, gap, -gap, 1.8 * gap, -1.8 * gap]
        for rise in rises:
            found.append((gap + abs(rise), (x + gap, y - height / 2 + rise)))
            found.append((gap + abs(rise) + 1, (x - gap - width, y - height / 2 + rise)))
        found.append((gap + 2, (x - width / 2, y + gap)))
        found.append((gap + 2, (x - width / 2, y - gap - height)))
    return found


def _overlap(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _outside(a: Box, frame: Box) -> float:
    return sum(max(0.0, d) for d in (frame[0] - a[0], frame[1] - a[1], a[2] - frame[2], a[3] - frame[3]))


def _box(extent: Any) -> Box:
    return extent.x0, extent.y0, extent.x1, extent.y1


def _is_chosen(row: Row, result: Result) -> bool:
    return result.recommendation is not None and row.scheme == result.recommendation.scheme


def _mb(row: Row) -> float:
    return (row.bytes or 0) / 1e6


def _kl(row: Row) -> float:
    return max(row.kl or 0, _SMALLEST_KL)
