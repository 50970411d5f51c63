"""Other sizes and strides: right, or refused with an error, never silently wrong.

A kernel made for one shape (12) forgets the tail of a block, assumes contiguous memory, or has a table for the shape
it was shown. Sizes one less, one more, prime and 1 are asked wherever the reference takes them, no rows at all, and
the given size with transposed storage, every second element and rows with gaps. An error is a refusal and is noted; a
wrong answer is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator

from nybble.judge import cases
from nybble.judge.trial import Trial
from nybble.judge.verdict import Finding

KINDS = (12,)


def run(trial: Trial) -> Iterator[Finding]:
    """Every question, refusals gathered in one note."""
    refused = []
    problem, seed = trial.problem, trial.seed
    empty = filter(None, [cases.no_rows(problem, seed)])
    for case in [*cases.shapes(problem, seed), *empty, *cases.strides(problem, seed)]:
        found = trial.judge("shapes", case, refusal="note")
        if found and found[0].status != "note":
            yield found[0]
            return
        refused += [(case.label, f) for f in found]
    if refused:
        labels = ", ".join(label for label, _ in refused)
        what = f"refuses {len(refused)} shapes or strides that the reference takes: {labels}"
        yield Finding("shapes", "note", what, refused[0][1].evidence)
