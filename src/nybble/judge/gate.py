"""The judge before a stopwatch: what does not answer its questions is not timed.

    admit("linear", "nybble.ops.linear:linear", "cuda", ["nvfp4"])

The questions are those about the answer: other values at old and new addresses, poisoned memory, NaN, the op's other
shapes, inputs left as they were. They are asked at the sizes of the op's declared cases, which takes seconds; that the
very output that is timed is right, its benchmark still checks at the size it times.
"""

from __future__ import annotations

from collections.abc import Sequence

from nybble.errors import Mismatch
from nybble.judge.api import judge
from nybble.judge.op_problem import PREFIX
from nybble.judge.verdict import Verdict

QUESTIONS = ("as_given", "result", "kept", "poison", "fresh", "holes", "sensitivity", "shapes", "values")


def admit(op: str, candidate: str, device: str, cases: Sequence[str] = (), seed: int | None = None) -> Verdict:
    """The verdict of a candidate that may be timed.

    Args:
        op: the name of one of nybble's ops. candidate: MODULE:FUNCTION or FILE.py:NAME with the op's arguments.
        cases: words with which the labels of the cases begin that are asked; none: all. seed: as for `judge`.

    Raises:
        Mismatch: it is not correct; the message is the verdict with its evidence.
    """
    problem = f"{PREFIX}{op}/{','.join(cases)}"
    verdict = judge(problem, candidate, device=device, seed=seed, checks=QUESTIONS, stop=True)
    if not verdict.correct:
        raise Mismatch(f"not timed, since the judge says: {verdict.text()}")
    return verdict
