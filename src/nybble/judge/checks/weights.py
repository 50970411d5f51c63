"""Weights changed after construction must change the result.

Work moved to the import, the constructor or the first call (16) is work not timed: an output computed in advance, a
product of weights folded once. Preparing weights is honest when it follows them (a hook of load_state_dict, a look at
the version counter). So weights get other values in place, the input staying the same at the same address; gains of 1
and biases of 0 become random, which also shows what was left out because it was dead at initialisation (10).
"""

from __future__ import annotations

from collections.abc import Iterator

from nybble.judge import cases
from nybble.judge.problem import Case, seed_of
from nybble.judge.trial import Trial
from nybble.judge.verdict import Finding

KINDS = (10, 16)


def run(trial: Trial) -> Iterator[Finding]:
    """Weights as constructed, others, still others, and the first again."""
    problem, seed = trial.problem, trial.seed
    if not problem.state:
        return iter(())
    inputs = problem.inputs(seed_of(seed, "weights"))
    states = [None, cases.new_state(problem, seed), cases.new_state(problem, seed + 1), None]
    labels = ("weights as constructed", "weights changed in place", "weights changed again", "the first weights again")
    plan = enumerate(zip(labels, states, strict=True))
    return trial.first(trial.judge("weights", Case(label, inputs, s), "w", i > 0) for i, (label, s) in plan)
