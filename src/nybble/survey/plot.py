"""The survey's picture: quality lost against size, and speed beside it.

Native and emulated schemes differ in fill, not only in colour, so that a grey print says the same. Labels are placed
so that none covers another or a point; one that had to move is tied to its point by a line.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from typing import Any

from nybble.survey.recommend import DEFAULT_MAX_KL
from nybble.survey.rows import Result, Row, megabytes

Box = tuple[float, float, float, float]  # left, bottom, right, top
_BLUE, _GREY, _FAINT, _RED = "#1c5d99", "#666666", "#b0b0b0", "#b3261e"
_RADIUS, _GAP = 7, 13  # of a point, and from a point to its label, in pixels
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
        axes.plot(_mb(row), _kl(row), "o", markersize=8, markerfacecolor=face, markeredgecolor=_BLUE, mew=1.6,
                  zorder=4 if native else 3)  # fmt: skip
        if chosen:
            axes.plot(_mb(row), _kl(row), "o", markersize=16, markerfacecolor="none", markeredgecolor=_RED, mew=1.8)
    for scheme in dict.fromkeys(row.scheme for row in rows):  # what methods buy: one line down
        mine = [row for row in rows if row.scheme == scheme]
        axes.plot([_mb(row) for row in mine], [_kl(row) for row in mine], color=_BLUE, linewidth=1, zorder=2)
    axes.set_yscale("log")
    axes.margins(0.12, 0.1)
    original = result.original.bytes / 1e6
    axes.axvline(original, color=_GREY, linestyle="--", linewidth=1)
    axes.text(original, 0.02, f"original: {megabytes(result.original.bytes)} MB ", rotation=90, color=_GREY,
              transform=axes.get_xaxis_transform(), ha="right", va="bottom", fontsize=9)  # fmt: skip
    axes.axhline(max_kl, color=_RED, linestyle=":", linewidth=1.2)
    axes.text(0.01, max_kl, f"quality limit: KL {max_kl:g}", transform=axes.get_yaxis_transform(), ha="left",
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
    width = 1.18 * max([1.0, *(max(row.speedup or 0, row.planned or 0) for row in timed)])
    for place, row in enumerate(timed):
        colour = _FAINT if row.busy else _BLUE
        face, hatch = (colour, None) if row.path == "native" else ("white", "////")
        axes.barh(place, row.speedup, color=face, edgecolor=colour, hatch=hatch, height=0.66, linewidth=1)
        end, mark = row.speedup or 0, row.planned or 0
        end = mark + 0.02 * width if -0.02 * width < mark - end < 0.16 * width else end  # the label beyond the diamond
        axes.text(end, place, f" {row.speedup:.2f}x{row.doubt}", va="center", fontsize=9, zorder=4,
                  bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6, "alpha": 0.85})  # fmt: skip
    planned = [(row.planned, place) for place, row in enumerate(timed) if row.planned is not None]
    if planned:
        axes.plot(*zip(*planned, strict=True), "D", color=_GREY, markersize=4.5, zorder=5, label="planned")
        axes.legend(loc="lower right", bbox_to_anchor=(1.02, 0.985), fontsize=9, handletextpad=0.1, frameon=False)
    axes.axvline(1, color=_GREY, linestyle="--", linewidth=1)
    axes.set_yticks(range(len(timed)), [row.label for row in timed], fontsize=9)
    for tick, row in zip(axes.get_yticklabels(), timed, strict=True):
        if _is_chosen(row, result):
            tick.set(color=_RED, fontweight="bold")
    axes.set_xlim(0, width)
    axes.set_ylim(-0.7, max(len(timed), 1) - 0.3)
    axes.set_xlabel(f"tokens/s at batch 1 over the original's ({result.original.tokens_per_second:.1f})")
    axes.set_title("Decoding speed: longer is better", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)


def _label(axes: Any, rows: Sequence[Row]) -> None:
    """Write each scheme's name beside its point."""
    points = [tuple(axes.transData.transform((_mb(row), _kl(row)))) for row in rows]
    texts = [axes.annotate(_name(row), (0, 0), xycoords="figure pixels", fontsize=9) for row in rows]
    sizes = [(box.width, box.height) for box in (text.get_window_extent() for text in texts)]
    taken = [_box(axes.get_legend().get_window_extent())]
    taken += [_box(text.get_window_extent()) for text in axes.texts if text not in texts]
    places = place(points, sizes, _box(axes.get_window_extent()), taken)
    back = axes.transData.inverted()
    for text, (x, y), point, (width, height) in zip(texts, places, points, sizes, strict=True):
        text.remove()
        near = abs(y + height / 2 - point[1]) < height / 2 and min(abs(x - point[0]), abs(x + width - point[0])) < 20
        if not near:
            end = (x - 2 if x > point[0] else x + width + 2, y + height / 2)
            line = back.transform([point, end])
            axes.plot(line[:, 0], line[:, 1], color=_GREY, linewidth=0.7, zorder=2, scalex=False, scaley=False)
        where = back.transform((x, y + height / 2))
        axes.annotate(text.get_text(), where, fontsize=9, va="center", zorder=5, annotation_clip=False,
                      bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3, "alpha": 0.85})  # fmt: skip


def _name(row: Row) -> str:
    """A row's label, and what its method cost."""
    cost = row.quantize_seconds
    return row.label if row.method == "rtn" or cost is None else f"{row.label}, {cost / 60:.1f} min"


def place(
    points: Sequence[tuple[float, float]], sizes: Sequence[tuple[float, float]], frame: Box, taken: Sequence[Box] = ()
) -> list[tuple[float, float]]:
    """Lower left corners of labels (sizes in the points' units) that cover neither each other nor any point.

    A label stands to the right of its point. Labels that would collide form a group and stand in one column beside
    all of the group's points, in the order of their height, so that the lines to the points do not cross. A group
    whose column leaves the frame or meets a `taken` box stands on the left.
    """
    groups = [[i] for i in range(len(points))]
    while True:
        boxes = {i: box for group in groups for i, box in _column(group, points, sizes, frame, taken).items()}
        pair = _collision(groups, boxes, points)
        if pair is None:
            return [boxes[i][:2] for i in range(len(points))]
        a, b = pair
        groups[a] += groups.pop(b)


def _column(
    group: Sequence[int],
    points: Sequence[tuple[float, float]],
    sizes: Sequence[tuple[float, float]],
    frame: Box,
    taken: Sequence[Box],
) -> dict[int, Box]:
    """The boxes of a group's labels in one column."""
    order = sorted(group, key=lambda i: points[i][1])
    bottoms = _spread([points[i][1] - sizes[i][1] / 2 for i in order], [sizes[i][1] for i in order], frame)
    gap = _GAP if len(group) == 1 else 2 * _GAP
    right, left = max(points[i][0] for i in group) + gap, min(points[i][0] for i in group) - gap
    sides = [
        {i: (x, y, x + sizes[i][0], y + sizes[i][1]) for i, y in zip(order, bottoms, strict=True) for x in (at(i),)}
        for at in (lambda i: right, lambda i: left - sizes[i][0])
    ]

    def cost(boxes: dict[int, Box]) -> float:
        return sum(_overlap(b, t) for b in boxes.values() for t in taken) + sum(
            _outside(b, frame) for b in boxes.values()
        )

    return min(sides, key=cost)


def _spread(bottoms: Sequence[float], heights: Sequence[float], frame: Box) -> list[float]:
    """Ascending bottoms moved apart so that nothing overlaps, as a whole where they were, inside the frame if it is
    high enough."""
    found: list[float] = []
    for bottom, height in zip(bottoms, heights, strict=True):
        found.append(max(bottom, found[-1] + height) if found else bottom)
    drift = sum(found) / len(found) - sum(bottoms) / len(bottoms)
    low, high = frame[1] - (found[0] - drift), frame[3] - (found[-1] - drift + heights[-1])
    return [bottom - drift + max(0.0, low) + min(0.0, high) for bottom in found]


def _collision(
    groups: Sequence[Sequence[int]], boxes: dict[int, Box], points: Sequence[tuple[float, float]]
) -> tuple[int, int] | None:
    """The first two groups of which a label covers a label or a point."""
    marks = [(x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS) for x, y in points]
    for a, first in enumerate(groups):
        for b in range(a + 1, len(groups)):
            second = groups[b]
            pairs = [(boxes[i], other) for i in first for j in second for other in (boxes[j], marks[j])]
            pairs += [(boxes[j], marks[i]) for i in first for j in second]
            if any(_overlap(one, other) for one, other in pairs):
                return a, b
    return None


def _overlap(a: Box, b: Box) -> float:
    return max(0.0, min(a[2], b[2]) - max(a[0], b[0])) * max(0.0, min(a[3], b[3]) - max(a[1], b[1]))


def _outside(a: Box, frame: Box) -> float:
    return sum(max(0.0, d) for d in (frame[0] - a[0], frame[1] - a[1], a[2] - frame[2], a[3] - frame[3]))


def _box(extent: Any) -> Box:
    return extent.x0, extent.y0, extent.x1, extent.y1


def _is_chosen(row: Row, result: Result) -> bool:
    return result.recommendation is not None and result.recommendation.names(row)


def _mb(row: Row) -> float:
    return (row.bytes or 0) / 1e6


def _kl(row: Row) -> float:
    return max(row.kl or 0, _SMALLEST_KL)
