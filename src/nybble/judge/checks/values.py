"""Values of other distributions than the problem's own.

Tiny, large, negated, shifted, sorted, one-hot, cancelling, rows of different size. A constant, a mean, a table or a
branch left out because the problem's inputs never take it (9, 10) agrees on one distribution only; large and
cancelling values show few bits (11) and a softmax without its maximum. Asked only where the reference gives finite
results.
"""

from __future__ import annotations

from collections.abc import Iterator

from nybble.judge import cases
from nybble.judge.trial import Trial
from nybble.judge.verdict import Finding

KINDS = (9, 10, 11)


def run(trial: Trial) -> Iterator[Finding]:
    """Each distribution once; magnitudes where the reference takes no negative values."""
    questions = cases.redrawn(trial.problem, trial.seed, cases.DRAWS)
    fair = (next((case for case in pair if trial.problem.expect(case) is not None), None) for pair in questions)
    return trial.first(trial.judge("values", case) for case in fair if case is not None)
