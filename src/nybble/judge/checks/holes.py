"""A value that is not finite must not change results that it does not reach.

One element of an input becomes NaN or infinite. The results that do not depend on it, in other rows, must be what they
are without it: a kernel that gives up, stops early or lets one row reach another fails (9, 10). Which they are the
reference says, asked with other finite values in that place. The results that do depend on it are not compared, for
honest kernels differ: a maximum of hardware drops a NaN, the framework's keeps it.
"""

from __future__ import annotations

from collections.abc import Iterator

from nybble.judge import cases
from nybble.judge.isolate import CandidateError
from nybble.judge.trial import Trial
from nybble.judge.verdict import Finding

KINDS = (9, 10)


def run(trial: Trial) -> Iterator[Finding]:
    """One question for each input and each such value."""
    refused = []
    for case in cases.holed(trial.problem, trial.seed):
        expected = trial.problem.expect(case)
        if expected is None or all(b.holes is None or bool(b.holes.all()) for b in expected.budgets):
            continue
        try:
            answer = trial.answer(case)
        except CandidateError as error:
            refused.append(f"{case.label} ({error})")
            continue
        found = trial.compare("holes", case, expected, answer)
        if found:
            yield found[0]
            return
    if refused:
        yield Finding("holes", "note", f"refuses values that are not finite: {refused[0]}")
