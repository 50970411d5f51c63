"""Units that share a memory, simulated event by event, for machines that are not at hand.

A task needs so many operations of its unit and so many bytes; both run at once. Bytes go at an equal share of one
bandwidth among the tasks that still have some. A unit takes its tasks in order, each when those it waits for are done.
That is enough to say when splitting one linear over two units pays (arXiv 2607.22785): prefill is bound by operations,
which add up; decode is bound by bytes, which do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Task:
    """Work for one unit.

    Attributes:
        unit: which.
        flops, nbytes: operations, and bytes through the shared memory.
        delay: seconds before it starts, once it may.
        after: indices of the tasks it waits for.
    """

    unit: str
    flops: float = 0.0
    nbytes: float = 0.0
    delay: float = 0.0
    after: tuple[int, ...] = ()


class _Running:
    """What is left of a task."""

    def __init__(self, index: int, task: Task) -> None:
        self.index, self.left = index, [task.delay, task.flops, task.nbytes]

    def rates(self, speed: float, share: float) -> list[float]:
        return [1.0, 0.0, 0.0] if self.left[0] > 0 else [0.0, speed, share]


def run(tasks: Sequence[Task], speeds: Mapping[str, float], bandwidth: float) -> list[float]:
    """When each task ends, in seconds.

    Args:
        tasks: in the order in which their units take them.
        speeds: unit -> operations a second.
        bandwidth: bytes a second, shared.
    """
    queues = {unit: [i for i, task in enumerate(tasks) if task.unit == unit] for unit in speeds}
    ends: dict[int, float] = {}
    active: dict[str, _Running] = {}
    now = 0.0
    while len(ends) < len(tasks):
        for unit, queue in queues.items():
            if unit not in active and queue and all(i in ends for i in tasks[queue[0]].after):
                active[unit] = _Running(queue[0], tasks[queue.pop(0)])
        if not active:
            raise ValueError("tasks wait for each other")
        hungry = sum(a.left[0] <= 0 and a.left[2] > 0 for a in active.values())
        rates = {unit: a.rates(speeds[unit], bandwidth / max(1, hungry)) for unit, a in active.items()}
        now += (step := min(_next(active[unit].left, rates[unit]) for unit in active))
        for unit, a in list(active.items()):
            a.left = [max(0.0, x - r * step) if x > r * step * (1 + 1e-12) else (x if r == 0 else 0.0)
                      for x, r in zip(a.left, rates[unit], strict=True)]  # fmt: skip
            if not any(a.left):
                ends[active.pop(unit).index] = now
    return [ends[i] for i in range(len(tasks))]


def _next(left: Sequence[float], rates: Sequence[float]) -> float:
    """Seconds until something of a task is used up; 0 for an empty one."""
    times = [x / r for x, r in zip(left, rates, strict=True) if x > 0 and r > 0]
    return min(times, default=0.0)


@dataclass(frozen=True)
class Pair:
    """Two units on one memory, and what handing a linear to both costs.

    Attributes:
        first, second: operations a second while both are busy.
        alone: of the first unit on its own.
        bandwidth: bytes a second that both share.
        barrier: seconds to release both and join them again, for each linear.
        unpack: share of the second unit's time that goes into unpacking weights.
    """

    first: float
    second: float
    alone: float
    bandwidth: float
    barrier: float = 0.0
    unpack: float = 0.0


def seconds(pair: Pair, share: float, flops: float, nbytes: float, linears: int = 1) -> float:
    """Time of so many equal linears with that share of their outputs on the second unit.

    Args:
        pair: the units.
        share: 0 is all on the first.
        flops, nbytes: of all linears together.
        linears: how many.
    """
    each, moved = flops / linears, nbytes / linears
    if share == 0:
        chain = [Task("first", each, moved, after=(i - 1,) if i else ()) for i in range(linears)]
        return run(chain, {"first": pair.alone}, pair.bandwidth)[-1]
    tasks: list[Task] = []
    for i in range(linears):
        after = (2 * i - 2, 2 * i - 1) if i else ()
        tasks.append(Task("first", each * (1 - share), moved * (1 - share), pair.barrier, after))
        tasks.append(Task("second", each * share, moved * share, pair.barrier, after))
    speeds = {"first": pair.first, "second": pair.second * (1 - pair.unpack)}
    return max(run(tasks, speeds, pair.bandwidth)[-2:])


SHARES = tuple(i / 100 for i in range(0, 62, 2))


def best_share(pair: Pair, flops: float, nbytes: float, linears: int = 1, kept: float = 0.0) -> tuple[float, float]:
    """(share, gain over the first unit alone) of the fastest split; (0, 1) where none is faster.

    `kept` are operations beside the linears (attention) that stay on the first unit, whatever the share.
    """
    times = {share: seconds(pair, share, flops, nbytes, linears) + kept / pair.alone for share in SHARES}
    share = min(times, key=lambda s: times[s])
    return share, times[0.0] / times[share]


def lazy_graph(pair: Pair, share: float, flops: float, layers: int, eager: bool) -> float:
    """Gain of splitting every layer of a chain, in a lazy graph or with its inputs made first.

    In a lazy graph the second unit is told that its input is ready when the first unit's submitted work is over, and
    that includes the first unit's own part: the two parts run one after the other.
    """
    tasks: list[Task] = []
    for i in range(layers):
        joined = (2 * i - 2, 2 * i - 1) if i else ()
        tasks.append(Task("first", flops * (1 - share), after=joined))
        tasks.append(Task("second", flops * share, after=joined if eager else (*joined, 2 * i)))
    speeds = {"first": pair.first, "second": pair.second}
    return layers * flops / pair.alone / max(run(tasks, speeds, pair.bandwidth)[-2:])


@dataclass(frozen=True)
class Mode:
    """One way to run a step: its time when its pages are in memory, and how many bytes of them there are."""

    seconds: float
    pages: float


def paged(modes: Mapping[str, Mode], memory: float, disk: float, steps: int, every: int | None) -> float:
    """Mean seconds a step when modes compete for memory; the mode used least recently loses its pages.

    Args:
        modes: name -> Mode.
        memory: bytes that their pages share.
        disk: bytes a second at which pages come back.
        steps: how many.
        every: after so many steps each other mode is probed once, for as long as it runs; None probes each once at
            the start and never again.
    """
    resident = dict.fromkeys(modes, 0.0)
    total = 0.0

    def step(name: str) -> float:
        missing = modes[name].pages - resident[name]
        resident[name] = modes[name].pages
        excess = sum(resident.values()) - memory
        for other in sorted(modes, key=lambda n: n == name):
            if other != name and excess > 0:
                lost = min(resident[other], excess)
                resident[other] -= lost
                excess -= lost
        return modes[name].seconds + max(0.0, missing) / disk

    for name in modes:
        step(name)  # the probe at the start, which either policy pays
    chosen = min(modes, key=lambda n: modes[n].seconds)
    step(chosen)
    for i in range(steps):
        probe = every is not None and i % every == every - 1
        total += step(next(n for n in modes if n != chosen)) if probe else step(chosen)
    return total / steps if steps else math.nan
