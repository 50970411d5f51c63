"""What real kernels add to the roofline, measured on two shapes and applied to all others.

A roofline bounds the best kernel; ours have overheads that no row of a machine knows. For one scheme and number of
tokens, two measured shapes, a small and a large one, give a line

    seconds = fixed + slope * roofline

with the roofline free of launches. That is a measurement, not a fit by hand: two numbers from two timings, and every
other shape is held out. Between numbers of tokens that were measured both are interpolated in log M, and beyond them
the nearest line holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Timing:
    """A measured cell: scheme, tokens, shape [N, K], seconds."""

    scheme: str
    m: int
    n: int
    k: int
    seconds: float


@dataclass(frozen=True)
class Line:
    """seconds = fixed + slope * roofline."""

    fixed: float
    slope: float

    def at(self, roofline: float) -> float:
        """Seconds for a roofline without launches."""
        return self.fixed + self.slope * roofline


Lines = Mapping[str, Mapping[int, Line]]
"""Scheme -> tokens -> line."""


def through(small: tuple[float, float], large: tuple[float, float]) -> Line:
    """The line through (roofline, measured) of two shapes; where it would start below zero, the one through zero and
    the large shape."""
    (x0, y0), (x1, y1) = small, large
    slope = (y1 - y0) / (x1 - x0) if x1 > x0 else 0.0
    fixed = y1 - slope * x1
    return Line(fixed, slope) if slope > 0 and fixed >= 0 else Line(0.0, y1 / x1)


def measure(timings: Iterable[Timing], rooflines: Mapping[Timing, float]) -> dict[str, dict[int, Line]]:
    """Lines from timings; of each scheme and number of tokens the smallest and the largest roofline count.

    Args:
        timings: measured cells of the shapes to calibrate with.
        rooflines: the prediction for each, without launches.
    """
    groups: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for timing in timings:
        groups.setdefault((timing.scheme, timing.m), []).append((rooflines[timing], timing.seconds))
    found: dict[str, dict[int, Line]] = {}
    for (scheme, m), points in groups.items():
        found.setdefault(scheme, {})[m] = through(min(points), max(points))
    return found


def line_for(lines: Lines, scheme: str, m: int) -> Line | None:
    """A scheme's line at a number of tokens; None for a scheme that was not measured."""
    known = lines.get(scheme)
    if not known:
        return None
    low, high = (
        max((t for t in known if t <= m), default=min(known)),
        min((t for t in known if t >= m), default=max(known)),
    )
    if low >= high:
        return known[low]
    share = math.log(m / low) / math.log(high / low)
    a, b = known[low], known[high]
    return Line(a.fixed + share * (b.fixed - a.fixed), a.slope + share * (b.slope - a.slope))


def to_json(lines: Lines) -> dict[str, dict[str, dict[str, float]]]:
    """Lines as JSON holds them: scheme -> tokens as text -> the two numbers."""
    return {s: {str(m): {"fixed": x.fixed, "slope": x.slope} for m, x in each.items()} for s, each in lines.items()}


def from_json(found: Mapping[str, Mapping[str, Mapping[str, float]]]) -> dict[str, dict[int, Line]]:
    """The inverse of `to_json`."""
    return {
        scheme: {int(m): Line(float(line["fixed"]), float(line["slope"])) for m, line in each.items()}
        for scheme, each in found.items()
    }
