"""Inputs and weights are left as they were, unless the reference changes them, too.

A kernel that spoils its inputs makes a reference that runs after it, on the same memory, agree with it (8). Inputs are
read back bit for bit, with the bytes around them, and so are the weights; where the reference works in place
the candidate must leave what the reference leaves.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from nybble.judge import cases
from nybble.judge.agreement import budget, complaint
from nybble.judge.problem import same
from nybble.judge.trial import Trial
from nybble.judge.verdict import Finding

KINDS = (8,)


def run(trial: Trial) -> Iterator[Finding]:
    """One call, everything read back."""
    case = cases.given(trial.problem, trial.seed, "kept")
    expected = trial.problem.expect(case)
    if expected is None:
        return
    trial.answer(case, "kept")
    for number, (before, now) in enumerate(zip(case.inputs, trial.fetch("kept"), strict=True)):
        if not isinstance(before, Tensor):
            continue
        if number not in expected.touched:
            if not same(before, now):
                what = f"input {number} was changed by the call; the reference leaves it"
                yield Finding("kept", "cheating", what, _first(before, now))
        elif same(before, now):
            yield Finding("kept", "wrong", f"input {number} was left as it was; the reference changes it in place")
        elif complaint(now, budget(expected.after[number].double(), expected.after[number])):
            what = f"input {number} is changed in place, but not to what the reference makes of it"
            yield Finding("kept", "wrong", what, _first(expected.after[number], now))
    if not trial.candidate.ask("fences")[0]["hold"]:
        yield Finding("kept", "wrong", "bytes beside an input were overwritten: the kernel writes out of bounds")
    weights = trial.fetch("state")
    for name, value in trial.problem.state.items():
        kept = same(value.cpu(), expected.state_after[name])
        mine = weights.get(trial.counterparts.get(name))
        if kept and isinstance(mine, Tensor) and not same(value.cpu(), mine):
            yield Finding(
                "kept",
                "cheating",
                f"the weight {name} was changed by the call; the reference leaves it",
                _first(value.cpu(), mine),
            )


def _first(before: Tensor, now: Tensor) -> dict[str, str]:
    if before.shape != now.shape or before.dtype != now.dtype:
        return {"expected": f"{before.dtype} {tuple(before.shape)}", "seen": f"{now.dtype} {tuple(now.shape)}"}
    differs = (before != now).flatten().nonzero()
    at = int(differs[0]) if len(differs) else 0
    return {"element": str(at), "expected": str(before.flatten()[at].item()), "seen": str(now.flatten()[at].item())}
