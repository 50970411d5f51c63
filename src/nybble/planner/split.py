"""One linear over two unequal workers: shares of its outputs, chosen from timings of both at once.

What each worker does alone says little, since they share memory, power and caches: the share is found by timing the
concurrent split itself, against the unsplit call in turns. It is probed at the start and then locked; probing now and
then under memory pressure throws out the very pages that the running mode needs (arXiv 2607.22785). Drift of the
locked time starts a new probe. On a GPU the host's share is 0, and `by_rates` says so.
"""

from __future__ import annotations

import statistics
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from nybble.planner import simulate

COARSE = (0.1, 0.2, 0.3, 0.4, 0.5)
FINE = 0.05
PAYS = 0.02
"""A split has to be so much faster than none, as a median of pairs, to be taken."""

FINALISTS = 3
"""Shares that are timed again, against each other: neighbours differ by less than a few pairs can tell."""

HANDOVERS = 20
"""A linear shorter than so many hand-overs to the second worker is not split: what it gains is lost in the barrier."""


@dataclass(frozen=True)
class Choice:
    """A share, what it gains over no split, and why.

    Attributes:
        share: of the outputs, for the second worker; 0 is no split.
        gain: unsplit time over split time.
        reason: a sentence.
        timed: share -> gain of each that was tried.
    """

    share: float
    gain: float
    reason: str
    timed: dict[float, float] = field(default_factory=dict)


class Worker:
    """A thread that does what it is handed, one thing at a time."""

    def __init__(self) -> None:
        self._work: Callable[[], None] | None = None
        self._error: BaseException | None = None
        self._given, self._done = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._loop, daemon=True)
        self._thread.start()

    def start(self, work: Callable[[], None]) -> None:
        """Hand over work; returns at once."""
        self._done.clear()
        self._work = work
        self._given.set()

    def wait(self) -> None:
        """Return when the work is done; raises what it raised."""
        self._done.wait()
        if self._error is not None:
            error, self._error = self._error, None
            raise error

    def close(self) -> None:
        """End the thread."""
        self._work = None
        self._given.set()
        self._thread.join()

    def _loop(self) -> None:
        while True:
            self._given.wait()
            self._given.clear()
            if self._work is None:
                return
            try:
                self._work()
            except BaseException as error:  # noqa: BLE001 - wait() raises it where it was asked for
                self._error = error
            self._done.set()


Product = Callable[[Tensor, Tensor], Tensor]


def split_linear(x: Tensor, w: Tensor, share: float, worker: Worker, products: tuple[Product, Product]) -> Tensor:
    """x [M, K] times w [N, K]^T, the last outputs by the worker.

    Args:
        x, w: the operands; x is complete when this is called.
        share: of the outputs, for the worker.
        worker: who does them.
        products: (ours, the worker's), each (x, rows of w) -> [M, rows].

    Returns:
        [M, N], all of it written: the call returns when both are done.
    """
    cut = w.shape[0] - round(share * w.shape[0])
    if cut == w.shape[0]:
        return products[0](x, w)
    y = torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device)

    def theirs() -> None:
        y[:, cut:] = products[1](x, w[cut:])

    worker.start(theirs)
    try:
        y[:, :cut] = products[0](x, w[:cut])
    finally:
        worker.wait()
    return y


def choose(time: Callable[[float], float], rounds: int = 7, shares: Sequence[float] = COARSE) -> Choice:
    """The share to lock.

    Args:
        time: runs the call with a share, both workers at once, and returns its seconds.
        rounds: pairs of each share with the unsplit call, in turns, so that drift meets both.
        shares: the coarse grid; its best is refined by FINE to either side.
    """
    timed = {share: _gain(time, share, rounds) for share in shares}
    top = max(timed, key=lambda s: timed[s])
    for share in (top - FINE, top + FINE):
        if 0 < share < 1 and share not in timed:
            timed[share] = _gain(time, share, rounds)
    share = _fastest(time, sorted(timed, key=lambda s: timed[s])[-FINALISTS:], 4 * rounds)
    gain = _gain(time, share, 2 * rounds)  # again: the best of many is partly luck
    if gain < 1 + PAYS:
        return Choice(0.0, 1.0, f"no split: the best share, {share:.0%}, gains {gain - 1:+.1%}", timed)
    return Choice(share, gain, f"{share:.0%} on the second worker gains {gain - 1:+.1%}", timed)


def _fastest(time: Callable[[float], float], shares: Sequence[float], rounds: int) -> float:
    """The share with the least median time, each once a round and the first one turning."""
    times: dict[float, list[float]] = {share: [] for share in shares}
    for i in range(rounds):
        for j in range(len(shares)):
            share = shares[(i + j) % len(shares)]
            times[share].append(time(share))
    return min(shares, key=lambda s: statistics.median(times[s]))


def _gain(time: Callable[[float], float], share: float, rounds: int) -> float:
    """The median over pairs of unsplit time / split time, the order of a pair turning each time."""
    ratios = []
    for i in range(rounds):
        first, second = (0.0, share) if i % 2 else (share, 0.0)
        times = {first: time(first)}
        times[second] = time(second)
        ratios.append(times[0.0] / times[share])
    return statistics.median(ratios)


class Lock:
    """Probe at the start, keep the share, probe again on drift: `share` is what to run with, `saw` what it took."""

    def __init__(self, probe: Callable[[], Choice], drift: float = 0.2, window: int = 16) -> None:
        self._probe, self._drift, self._window = probe, drift, window
        self.probes = 0
        self._again()

    def _again(self) -> None:
        self.choice = self._probe()
        self.probes += 1
        self._recent: list[float] = []
        self._usual: float | None = None

    @property
    def share(self) -> float:
        """What to run with."""
        return self.choice.share

    def saw(self, seconds: float) -> None:
        """One run's time. The first window sets what is usual; a window whose median is off by the drift probes."""
        self._recent.append(seconds)
        if len(self._recent) < self._window:
            return
        median = statistics.median(self._recent)
        self._recent = []
        if self._usual is None:
            self._usual = median
        elif abs(median / self._usual - 1) > self._drift:
            self._again()


def by_rates(pair: simulate.Pair, flops: float, nbytes: float, linears: int = 1) -> Choice:
    """The share by simulation, for machines that are not at hand."""
    alone = simulate.seconds(pair, 0.0, flops, nbytes, linears)
    if alone < HANDOVERS * pair.barrier * linears:
        handed = pair.barrier * 1e6
        return Choice(
            0.0, 1.0, f"share 0: a linear takes {alone / linears * 1e6:.0f} us alone, handing over {handed:.0f} us"
        )
    share, gain = simulate.best_share(pair, flops, nbytes, linears)
    if gain < 1 + PAYS:
        rate = pair.second / pair.alone
        return Choice(
            0.0, 1.0, f"share 0: the second unit has {rate:.1%} of the first's rate; splitting gains {gain - 1:+.1%}"
        )
    return Choice(share, gain, f"{share:.0%} on the second unit gains {gain - 1:+.1%}")
