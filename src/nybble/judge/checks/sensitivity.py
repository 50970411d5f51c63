"""Every input and every weight must count as much as it does in the reference.

An input whose share of the result is below the tolerance can be left out unseen: a bias that is zero, a term with a
small factor (9, 10). So each tensor in turn is enlarged until the reference's result depends on it, and the question
is asked then.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from nybble.judge import cases
from nybble.judge.agreement import distance
from nybble.judge.problem import Case, Expected, Problem, seed_of
from nybble.judge.trial import Trial
from nybble.judge.verdict import Finding

KINDS = (9, 10)
_FACTORS = (4.0, 64.0, 1024.0)
_ENOUGH = 0.1  # relative change of the reference's result that makes a tensor count


def run(trial: Trial) -> Iterator[Finding]:
    """One question for each floating tensor."""
    return trial.first(trial.judge("sensitivity", case) for case in questions(trial.problem, trial.seed))


def questions(problem: Problem, seed: int) -> Iterator[Case]:
    """For each input and weight the smallest enlargement that the reference's result shows."""
    inputs = problem.inputs(seed_of(seed, "sensitivity"))
    state = cases.new_state(problem, seed)
    plain = problem.expect(Case("plain", inputs, state))
    if plain is None:
        return
    for number, value in enumerate(inputs):
        if isinstance(value, Tensor) and value.dtype.is_floating_point:
            options = (
                Case(f"input {number} times {f:g}", [f * v if i == number else v for i, v in enumerate(inputs)], state)
                for f in _FACTORS
            )
            yield from _counts(problem, plain, options)
    for name, value in state.items():
        if value.dtype.is_floating_point:
            options = (Case(f"weight {name} times {f:g}", inputs, {**state, name: f * value}) for f in _FACTORS)
            yield from _counts(problem, plain, options)


def _counts(problem: Problem, plain: Expected, options: Iterator[Case]) -> Iterator[Case]:
    last = None
    for case in options:
        expected = problem.expect(case)
        if expected is None:
            break
        last = case
        pairs = zip(expected.budgets, plain.budgets, strict=True)
        if any(a.dtype.is_floating_point and distance(a.reference, b.reference).total > _ENOUGH for a, b in pairs):
            break
    if last is not None:
        yield last
