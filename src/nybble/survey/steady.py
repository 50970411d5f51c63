"""Speeds that can be trusted: models that raced while something disturbed the machine race again.

A disturbance costs more than its share. The threads of a product wait for each other, some hundred times a token, so
that a program that takes a processor away for milliseconds makes all of them wait: one more busy thread on two cores
made tokens of 24 ms last anything from 48 ms to 3 s, and ratios from 0.02 to 51 of what are 0.15 and 1.4 when quiet.

Two witnesses are heard. The times themselves: on a quiet machine a model's turns in a race agree, and the original,
which runs in every race, is as fast as in the others of the survey. That holds on every system, for GPUs, and for
causes that no kernel counts: a neighbour behind the hypervisor, a processor that gets hot. It fails where a disturbance
lasts: among races that all go wrong some turns agree by chance. So, where the system tells it (Linux does, in
containers too), the time that threads were ready and had no processor is asked for: 0.01 of the time on a quiet
machine, 0.3 and more with a rival.

What else systems count was worse. A load average takes a minute to notice and another to forget, and is the host's in
a container; a process's own processor time is near all of it only while threads spin (0.58 on a quiet machine with
OMP_WAIT_POLICY=passive); involuntary switches were fewer with a rival (170 a second) than in good runs (520).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from torch import Tensor, nn

from nybble.machine import DISTURBED, longest_wait, waited
from nybble.models.decode import Speed, race
from nybble.survey.rows import ORIGINAL, Row

TURNS = 1.25
"""How many times as slow as in its fastest turn a model may be over all. One slow turn of three hardly moves a median,
and on a quiet machine a first turn was up to 1.27 as slow."""

ELSEWHERE = 1.5
"""The same for the original in one race and in the survey's best: minutes lie between them, in which a processor's
clock may change (1.27 in a survey of a quiet machine), and any real rival makes it twice as slow."""

REPEATS, PATIENCE = 8, 120.0
"""How often a race is run again, and for how many seconds in a whole survey: longer than half a minute of other work,
and no more than that on a machine that is never quiet."""


@dataclass
class Referee:
    """Holds a survey's races.

    Attributes:
        fastest: the original's time of a token at its best so far, in seconds.
        patience: seconds left for races that are run again.
    """

    fastest: float = math.inf
    patience: float = PATIENCE

    def race(
        self, models: Mapping[str, nn.Module], prompt: Tensor, again: Callable[[], None]
    ) -> tuple[dict[str, Speed], bool]:
        """(speeds, whether they are not to be trusted): of the first race that nothing disturbed, or of the last.

        Args:
            models, prompt: as `race` takes them; the original is called ORIGINAL.
            again: called before a race is run again.

        Raises:
            Mismatch, BadInput: as `race` does.
        """
        for repeats in reversed(range(REPEATS + 1)):
            begin, before = time.perf_counter(), waited()
            speeds = race(models, prompt)
            seconds = time.perf_counter() - begin
            kept = longest_wait(before, waited())
            if ORIGINAL in speeds:
                self.fastest = min(self.fastest, speeds[ORIGINAL].seconds)
            disturbed = kept > DISTURBED * seconds or _disagree(speeds, self.fastest)
            if not disturbed or not repeats or self.patience <= 0:
                break
            self.patience -= seconds
            again()
        return speeds, disturbed


def _disagree(speeds: Mapping[str, Speed], fastest: float) -> bool:
    """Whether a model's turns do, or the original's speed with that of other races."""
    if any(speed.seconds > TURNS * min(speed.turns) for speed in speeds.values()):
        return True
    return ORIGINAL in speeds and speeds[ORIGINAL].seconds > ELSEWHERE * fastest


def reviewed(rows: Sequence[Row]) -> list[Row]:
    """The rows, those marked busy too in whose races the original was slow beside what later ones showed of it."""
    best = max((row.beside for row in rows if row.beside is not None), default=0.0)
    return [replace(row, busy=row.busy or (row.beside is not None and row.beside * ELSEWHERE < best)) for row in rows]
