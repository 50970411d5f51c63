"""A problem whose answer does not depend on what it is given grades nothing.

Some tasks are dead: a softmax over one element, a mean that a normalisation has just removed, a result that is zero
whatever comes in. A kernel that returns the constant is right, and its speed says nothing (cheat 10, by the task's
fault). The question goes to the reference alone: two draws of inputs and weights whose results differ by no more than
rounding make the measurement invalid, whoever answered.
"""

from __future__ import annotations

from collections.abc import Iterator

from nybble.judge import cases
from nybble.judge.agreement import complaint
from nybble.judge.problem import Case, seed_of
from nybble.judge.trial import Trial
from nybble.judge.verdict import Finding

KINDS = (10,)


def run(trial: Trial) -> Iterator[Finding]:
    """Ask the reference twice."""
    first = cases.given(trial.problem, trial.seed, "problem 1")
    one = trial.problem.expect(first)
    if one is None:
        trial.problem.try_out(first)
        what = "the reference gives no finite answer to the problem's own inputs"
        yield Finding("problem", "invalid measurement", what)
        return
    other = Case(
        "other", trial.problem.inputs(seed_of(trial.seed, "problem 2")), cases.new_state(trial.problem, trial.seed)
    )
    two = trial.problem.expect(other)
    if two is None or not one.budgets:
        return
    dead = all(
        a.reference.shape == b.reference.shape and complaint(b.reference.to(b.dtype), a) is None
        for a, b in zip(one.budgets, two.budgets, strict=True)
    )
    if dead:
        what = "the reference gives the same result for other inputs and other weights: nothing can be graded here"
        yield Finding("problem", "invalid measurement", what)
