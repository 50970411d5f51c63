"""Clocks, comparisons and switches of the framework must be what they were before the candidate came.

In the candidate's process there is no clock and no comparison to cheat, so a replaced time.perf_counter,
torch.allclose or torch.cuda.synchronize (4) gains nothing here; it shows the intent, and elsewhere it would gain
everything. Turned switches (threads, oneDNN, matmul precision) slow a rival that shares the process, or lower the
precision of everything (18).
"""

from __future__ import annotations

from collections.abc import Iterator

from nybble.judge import cases
from nybble.judge.trial import Trial
from nybble.judge.verdict import Finding

KINDS = (4, 18)
_CALLS = 4  # that a replacement may wait for, where no other check has called


def run(trial: Trial) -> Iterator[Finding]:
    """A few calls, then compare identities taken before the import with those of now."""
    for i in range(_CALLS):
        trial.answer(cases.given(trial.problem, trial.seed, f"patched {i}"))
    answer, _ = trial.candidate.ask("patched")
    if answer["names"]:
        yield Finding("patched", "cheating", f"replaced: {', '.join(map(str, answer['names']))}")
    if answer["switches"]:
        yield Finding(
            "patched", "cheating", f"turned switches of the process: {'; '.join(map(str, answer['switches']))}"
        )
