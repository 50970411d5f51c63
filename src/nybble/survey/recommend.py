"""Which scheme to take: a pure function of the rows and the limits.

What someone who deploys a model wants is the fastest model that is still good enough, and the smaller of two equally
fast ones. So: of everything whose KL to the original is within the limit (and whose bytes are, if limited), the
fastest; speeds within 5 % of each other count as equal, since machines are no steadier than that; then the fewest
bytes. The original itself takes part: a scheme that is slower than it has to earn its place by a byte limit.

An emulated scheme dequantizes on every call, so its speed says nothing about the format. It is only ever taken where
a byte limit leaves nothing else, and the reason says so. Speeds that something disturbed decide nothing, and the
reason names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from nybble.survey.rows import ORIGINAL, Original, Recommendation, Row, megabytes

DEFAULT_MAX_KL = 0.02
"""Nats a token; costs about 2 % of perplexity on text that the model itself would write."""

SAME_SPEED = 0.05


def recommend(
    rows: Sequence[Row], original: Original, max_kl: float | None = None, max_bytes: int | None = None
) -> Recommendation:
    """One scheme and one sentence.

    Args:
        rows: the measured schemes, refused ones included.
        original: the original's figures.
        max_kl: the largest KL to accept; None is DEFAULT_MAX_KL.
        max_bytes: the largest size to accept; None is any.
    """
    limit = DEFAULT_MAX_KL if max_kl is None else max_kl
    small = [row for row in rows if row.kl is not None and _fits(row.bytes, max_bytes)]
    good = [row for row in small if row.kl is not None and row.kl <= limit]
    native = [row for row in good if row.path == "native" and row.speedup is not None]
    doubtful = [row for row in native if row.busy]
    steady = [row for row in native if not row.busy]
    keep = _fits(original.bytes, max_bytes)
    best = _fastest(steady, floor=1.0 if keep else 0.0)
    if best is not None:
        advice = Recommendation(best.scheme, _praise(best, original, limit, max_bytes), best.method)
    elif keep:
        advice = Recommendation(ORIGINAL, _keep(small, good, steady, doubtful, original, limit))
    elif good:
        advice = _untold(doubtful or good, original, limit, max_bytes)
    else:
        advice = Recommendation(ORIGINAL, _nothing(rows, small, original, limit, max_bytes))
    return replace(advice, reason=advice.reason + _doubt(doubtful))


def _doubt(rows: Sequence[Row]) -> str:
    """What to add where speeds could have decided otherwise."""
    if not rows:
        return ""
    return (
        f" This may change: something disturbed the machine each time {', '.join(row.label for row in rows)} decoded, "
        f"and a speed measured then does not count. The same command measures it again."
    )


def _fits(size: int | None, limit: int | None) -> bool:
    return size is not None and (limit is None or size <= limit)


def _fastest(rows: Sequence[Row], floor: float) -> Row | None:
    """The smallest of those as fast as the fastest, which is at least as fast as `floor`; None if all are slower."""
    top = max([floor, *(row.speedup or 0 for row in rows)])
    equal = [row for row in rows if (row.speedup or 0) >= top * (1 - SAME_SPEED)]
    return min(equal, key=lambda row: (row.bytes or 0, row.kl or 0)) if equal else None


def _praise(row: Row, original: Original, limit: float, max_bytes: int | None) -> str:
    fitting = f" and {_mb(max_bytes)}" if max_bytes is not None else ""
    return (
        f"{row.label} is {_smaller(row, original)}, decodes {row.speedup:.2f}x as fast as the original "
        f"({row.tokens_per_second:.1f} tokens/s, native) and stays {_cost(row, original)}: "
        f"the fastest within KL {limit:g}{fitting}, and the smallest of those as fast."
    )


def _keep(
    small: Sequence[Row], good: Sequence[Row], native: Sequence[Row], doubtful: Sequence[Row], original: Original,
    limit: float,
) -> str:  # fmt: skip
    if doubtful and not native:
        return f"Keep the original for now: nothing within KL {limit:g} has a native speed that can be trusted."
    if not good:
        nearest = min(small, key=lambda row: row.kl or 0, default=None)
        found = f"; the nearest is {nearest.label}, {_cost(nearest, original)}" if nearest else ""
        return f"Keep the original: no scheme stays within KL {limit:g}{found}. Raise --max-kl to accept more."
    least = min(native or good, key=lambda row: (row.bytes or 0, row.kl or 0))
    speed = f"{least.speedup:.2f}x as fast" if least.speedup is not None else "of unknown speed"
    how = "native" if native else "only emulated here"
    return (
        f"Keep the original: nothing within KL {limit:g} decodes as fast here. If bytes matter more, {least.label} is "
        f"{_smaller(least, original)} and stays {_cost(least, original)}, but is {speed} ({how}); "
        f"--max-bytes asks for it."
    )


def _untold(good: Sequence[Row], original: Original, limit: float, max_bytes: int | None) -> Recommendation:
    """The best of those whose speed says nothing: emulated ones, or native ones that something disturbed."""
    row = min(good, key=lambda row: row.kl or 0)
    speed = f"{row.speedup:.2f}x the original's speed" if row.speedup is not None else "an unknown speed"
    emulated = f"it is emulated here, at {speed}: it saves bytes on disk, not time"
    return Recommendation(
        row.scheme,
        f"{row.label} is the best within KL {limit:g} and {_mb(max_bytes)} ({_smaller(row, original)}, "
        f"{_cost(row, original)}), but {'how fast it is was not seen' if row.busy else emulated}.",
        row.method,
    )


def _nothing(rows: Sequence[Row], small: Sequence[Row], original: Original, limit: float, max_bytes: int | None) -> str:
    measured = [row for row in rows if row.kl is not None]
    if small:
        row = min(small, key=lambda row: row.kl or 0)
        found = f"the best that fits is {row.label}, {_cost(row, original)}"
    elif measured:
        row = min(measured, key=lambda row: row.bytes or 0)
        found = f"the smallest is {row.label} with {_mb(row.bytes)}"
    else:
        found = "no scheme could be measured"
    return (
        f"Nothing satisfies both KL {limit:g} and {_mb(max_bytes)}: {found}; the original has {_mb(original.bytes)}. "
        f"Relax one limit."
    )


def _smaller(row: Row, original: Original) -> str:
    share = (row.bytes or 0) / original.bytes
    return f"{_mb(row.bytes)} instead of {_mb(original.bytes)} ({share:.0%})"


def _cost(row: Row, original: Original) -> str:
    change = (row.perplexity or 0) / original.perplexity - 1
    return f"at KL {row.kl:.2g} (perplexity {row.perplexity:.2f}, {change:+.1%})"


def _mb(size: int | None) -> str:
    return f"{megabytes(size or 0)} MB"
