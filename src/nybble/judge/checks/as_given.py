"""The problem's own inputs, freshly drawn, must give the reference's result.

The seed of the draw comes into being after the candidate was imported, and the reference lives in another process:
neither a table made for known seeds (19), nor memory left behind by the reference (5), nor a constant (9) helps.
An error larger than honest code of this precision makes is a downgrade of precision (11).
"""

from __future__ import annotations

from collections.abc import Iterator

from nybble.judge import cases
from nybble.judge.trial import Trial
from nybble.judge.verdict import Finding

KINDS = (5, 9, 11, 19)


def run(trial: Trial) -> Iterator[Finding]:
    """Three draws."""
    labels = ("the problem's inputs", "a second draw", "a third draw")
    return trial.first(trial.judge("as_given", cases.given(trial.problem, trial.seed, label)) for label in labels)
