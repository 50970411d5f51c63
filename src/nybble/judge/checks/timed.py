"""What is timed is checked: a random part of the outputs, and the last.

A kernel that computes while it is watched and returns its old output afterwards (7), that answers first and computes
when its output is fetched (4), or whose time no machine could reach (15) shows here. The speeds that a verdict
reports are those of these very calls.
"""

from __future__ import annotations

from collections.abc import Iterator

from nybble.judge import timing
from nybble.judge.trial import Trial
from nybble.judge.verdict import Finding

KINDS = (1, 4, 7, 15)


def run(trial: Trial) -> Iterator[Finding]:
    """The race; its result stays with the trial."""
    trial.race = timing.race(trial)
    return iter(trial.race.findings)
