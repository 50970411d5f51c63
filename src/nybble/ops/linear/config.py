"""Which kernel a weight-only product runs with: a pure function from a description to scored candidates.

    choose(Problem(m=16, n=4096, k=4096, format=…)).plan        print(choose(…)) lists all of them, cheapest first

Nothing here touches a GPU, so a choice can be explained for a machine that is not there. problem.py describes what is
asked, plans_few.py and plans_many.py the kernels' shapes and their scores.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from nybble.ops.linear.plans_few import Stream
from nybble.ops.linear.plans_many import MMA_TOKENS, OUT_TOKENS, Tile, Walk, Widen
from nybble.ops.linear.problem import H200, Machine, Problem

__all__ = [
    "H200",
    "OUT_TOKENS",
    "Choice",
    "Machine",
    "Plan",
    "Problem",
    "Stream",
    "Tile",
    "Walk",
    "Widen",
    "candidates",
    "choose",
]

STREAM_TOKENS = 32
"""The most tokens that stream.cu takes at once; more go through it in passes."""

Plan = Stream | Tile | Walk | Widen


@dataclass(frozen=True)
class Choice:
    """Scored candidates, cheapest first: (predicted microseconds, plan)."""

    problem: Problem
    scored: tuple[tuple[float, Plan], ...]

    @property
    def plan(self) -> Plan:
        """The one that runs."""
        return self.scored[0][1]

    def __str__(self) -> str:
        p = self.problem
        head = f"x[{p.m}, {p.k}] @ W[{p.n}, {p.k}]^T, {p.format.name}, {'fp16' if p.fp16 else 'bf16'}"
        return "\n".join([head, *(f"  {time:8.2f} us  {plan}" for time, plan in self.scored)])


_SLICED = {
    1: ((2, 1, 16), (1, 1, 16), (2, 2, 8), (1, 2, 8), (2, 4, 4)),
    2: ((2, 4, 4), (1, 4, 4), (1, 2, 8)),
    4: ((1, 4, 4), (1, 2, 8), (1, 2, 4)),
}
"""Token tiles -> (row tiles, warps over rows, warps over columns) that did well where K is split over blocks."""
_WARPS = 16
"""Of a processor, in one block or two."""


def _blocks(p: Problem, places: int) -> Iterator[tuple[int, int, int]]:
    """(row tiles, warps over rows, warps over columns) of blocks that have all of K.

    Between two units of rows a block's warps meet. Among the widths is therefore the one with which every block has a
    single unit: warps over rows for all the tiles that an even spread gives it.
    """
    room = _WARPS // places
    for rt in (1, 2):
        share = -(-p.tiles // (p.machine.processors * places * rt))
        for wn in sorted({1, 2, 4, 8, 16, share}):
            if wn <= room:
                most = room // wn
                even = max(wk for wk in range(1, most + 1) if p.chunks % wk == 0)
                yield from ((rt, wn, wk) for wk in sorted({most, even}) if 8 * wn * wk >= 5 * room)


_WARPGROUPS = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))
"""Of a block of tile.cu: along the rows, and along K."""


def candidates(p: Problem) -> Iterator[Plan]:
    """Every way to run the kernels that is worth considering, whether it fits or not."""
    most = next(t for t in _SLICED if 8 * t >= min(p.m, STREAM_TOKENS))
    # More slices than four, and fewer tokens at once than there are, only help where x would not fit otherwise.
    for mt, slices, stages in product([t for t in _SLICED if t <= most], (1, 2, 4, 8, 16, 32), (2, 3, 4, 5)):
        if slices == 1 and mt < 4:
            yield from (Stream(mt, *grid, stages) for grid in _blocks(p, 1))
            if p.m <= 8:  # smaller blocks, two to a processor: one starts while the other ends
                yield from (Stream(1, *grid, stages, places=2) for grid in _blocks(p, 2))
        elif slices <= 4 or p.k > 16384:
            yield from (Stream(mt, *grid, stages, slices) for grid in _SLICED[mt])
    widths = [(n, b) for n, b in ((16, 1), (32, 1), (64, 1), (128, 1), (128, 2)) if n * b < 2 * p.m or n == 16]
    for (groups, split), (n, b), stages, cluster, tiles in product(
        _WARPGROUPS, widths[-3:], (5, 8, 3), (1, 2, 4), (1, 2)
    ):
        plan = Tile(groups, n, b, stages, cluster, split, tiles)
        # Splitting K is for filling the machine; beyond two blocks a processor it only adds meetings.
        crowded = cluster > 1 and plan.grid(p)[0] > 2 * p.machine.processors
        if plan.registers_fit and not crowded and (tiles == 1 or n == MMA_TOKENS):
            yield plan
    if p.m > STREAM_TOKENS:
        for walk in (Walk(256, 5, 3, True), Walk(256, 5, 3, False), Walk(128, 8, 3, True), Walk(128, 8, 3, False)):
            # Fewer tiles than clusters would leave some of these idle.
            if walk.tokens < 2 * p.m and (walk.even or walk.tiles(p) >= p.machine.processors // 2):
                yield walk
    yield Widen()


@lru_cache(maxsize=4096)
def choose(p: Problem) -> Choice:
    """The candidates that can run, scored; raises ValueError where none can."""
    fit = [c for c in candidates(p) if c.refusal(p) is None]
    if not fit:
        raise ValueError(f"no plan fits: {next(candidates(p)).refusal(p)}")
    return Choice(p, tuple(sorted(((c.score(p), c) for c in fit), key=lambda pair: pair[0])))
