"""What is returned must be a plain tensor that holds its values.

A tensor subclass can compute when it is looked at, after the clock has stopped (3). So the type is asked without
running any of its code: it must be torch.Tensor itself, strided, on the device, with memory behind it. Returning an
input's own memory, where the reference returns new memory, is told, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from nybble.judge import cases
from nybble.judge.trial import Trial
from nybble.judge.verdict import Finding

KINDS = (3,)


def run(trial: Trial) -> Iterator[Finding]:
    """Look at the outputs of one call."""
    case = cases.given(trial.problem, trial.seed, "result")
    expected = trial.problem.expect(case)
    if expected is None:
        return
    answer = trial.answer(case, "result")
    for number, facts in enumerate(answer.facts):
        if not facts["tensor"]:
            lazy = "Tensor" in facts["type"] or "tensor" in facts["type"]
            what = f"output {number} is a {facts['type']}, not a plain torch.Tensor" + (
                ": it could compute when read" * lazy
            )
            yield Finding("result", "cheating" if lazy else "wrong", what)
        elif facts["layout"] != "torch.strided" or (facts["null"] and not facts["empty"]):
            yield Finding("result", "cheating", f"output {number} has no memory behind it ({facts['layout']})")
        elif facts["device"] != trial.device.split(":")[0]:
            yield Finding("result", "wrong", f"output {number} is on {facts['device']}, expected {trial.device}")
        elif facts["input"] and not facts["empty"] and number not in expected.touched:
            yield Finding("result", "note", f"output {number} lies in an input's memory")
