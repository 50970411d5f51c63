"""Small integers, for which every order of summation gives the same: the result must be equal.

With inputs and weights of 0 and 1, or of -3 to 3, sums of products are exact in the accumulator of every honest
kernel. One lost product, a half-precision accumulator, an approximate reciprocal shows as a difference, with no
tolerance to hide in (11). Asked where the framework's own result is exact; elsewhere the usual budget holds.
"""

from __future__ import annotations

from collections.abc import Iterator

from nybble.judge import cases
from nybble.judge.trial import Trial
from nybble.judge.verdict import Finding

KINDS = (11,)


def run(trial: Trial) -> Iterator[Finding]:
    """Both distributions."""
    questions = cases.redrawn(trial.problem, trial.seed, cases.EXACT_DRAWS, exact=True)
    fair = (next((case for case in pair if trial.problem.expect(case) is not None), None) for pair in questions)
    return trial.first(trial.judge("exact", case) for case in fair if case is not None)
