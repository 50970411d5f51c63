"""Work that goes on after the call has returned is work that the clock did not see.

A thread or a process of the candidate's own (2), on a GPU another stream (1), fills the output later. Outputs are
copied the moment they are returned and read again after a pause: they must not have changed. Threads that a call
leaves running, and processor time that the candidate's processes use while nothing is asked of them, are seen from
outside in the kernel's own accounts.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from torch import Tensor

from nybble.judge import cases
from nybble.judge.problem import same
from nybble.judge.trial import Trial
from nybble.judge.verdict import Finding

KINDS = (1, 2)
_CALLS, _PAUSE = 8, 0.06
_IDLE = 0.010  # processor seconds that an honest candidate may use in the pause: a pool going to sleep


def run(trial: Trial) -> Iterator[Finding]:
    """A few calls at once, then a look at what still happens."""
    trial.answer(cases.given(trial.problem, trial.seed, "background"), "background 0")
    slots = [f"background {i}" for i in range(trial.afford(_CALLS))]
    for slot in slots:
        trial.put(cases.given(trial.problem, trial.seed, slot).inputs, slot)
    trial.candidate.ask("call", slots=slots[:2])
    time.sleep(_PAUSE)
    before = trial.candidate.threads()
    used = []
    for _ in range(3):
        trial.candidate.ask("call", slots=slots)
        left = trial.candidate.threads() - before
        start = trial.candidate.processor_seconds()
        time.sleep(_PAUSE)
        used.append(trial.candidate.processor_seconds() - start)
        yield from _changed(trial, len(slots) - 1)
        if left:
            what = f"{len(left)} threads that a call started were still running when it had returned"
            yield Finding("background", "cheating", what)
            return
    if min(used) > _IDLE:
        what = f"at least {min(used) * 1e3:.0f} ms of processor time were used after the calls had returned"
        yield Finding("background", "cheating", what, {"pause": f"{_PAUSE * 1e3:.0f} ms, three times"})
    if trial.candidate.children():
        yield Finding("background", "note", f"{len(trial.candidate.children())} child processes are running")


def _changed(trial: Trial, last: int) -> Iterator[Finding]:
    at_return, later = trial.fetch("outputs", last), trial.fetch("later", last)
    pairs = ((a, b) for a, b in zip(at_return, later, strict=True) if isinstance(a, Tensor) and isinstance(b, Tensor))
    if any(not same(a, b) for a, b in pairs):
        yield Finding("background", "cheating", "an output changed after the call had returned")
