"""The judge before a stopwatch: what does not answer its questions is not timed.

    admit("linear", "nybble.ops.linear:linear", "cuda", ["nvfp4-"])

The questions are those about the answer: other values at old and new addresses, poisoned memory, the op's other shapes,
inputs left as they were. They are asked at the sizes of the op's declared cases, which takes a second or two; that the
very output that is timed is right, its benchmark still checks at the size it times. nybble's own code is asked in this
process, which it could leave or spoil: for code that one does not trust there is `nybble judge`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from nybble.errors import Mismatch
from nybble.judge.api import ask_all, chosen
from nybble.judge.isolate import Candidate, CandidateError, Limits
from nybble.judge.op_problem import PREFIX, open_problem
from nybble.judge.problem import split
from nybble.judge.trial import Trial
from nybble.judge.verdict import Verdict, decide
from nybble.judge.worker import Worker

QUESTIONS = ("as_given", "result", "kept", "poison", "fresh", "sensitivity", "shapes", "values")
_FENCE = 256


@dataclass
class Familiar:
    """A candidate that is trusted: its worker answers in this process."""

    worker: Worker
    limits: Limits

    def __enter__(self) -> Familiar:
        return self

    def __exit__(self, *error: object) -> None:
        self.worker.poison(0)

    def ask(
        self, do: str, blobs: Sequence[bytes | memoryview] = (), seconds: float | None = None, **arguments: Any
    ) -> tuple[dict[str, Any], list[bytearray]]:
        """As `Candidate.ask`, without a limit of time."""
        if {"tree", "init"} & arguments.keys():
            arguments["blobs"] = [bytearray(blob) for blob in blobs]
        try:
            answer, back = getattr(self.worker, do)(**arguments)
        except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
            raise CandidateError(type(error).__name__, str(error), "") from error
        return answer, [bytearray(blob) for blob in back]


def admit(op: str, candidate: str, device: str, cases: Sequence[str] = (), seed: int = 0) -> Verdict:
    """The verdict on a candidate that may be timed.

    Args:
        op: the name of one of nybble's ops. candidate: MODULE:FUNCTION with the op's arguments; trusted code. cases:
        words with which the labels of the cases begin that are asked; none: all. seed: of the questions.

    Raises:
        Mismatch: it is not correct; the message is the verdict with its evidence.
    """
    begun, problem = time.monotonic(), f"{PREFIX}{op}/{','.join(cases)}"
    path, name = split(candidate, op)
    familiar = cast(Candidate, Familiar(Worker(device, _FENCE), Limits()))
    trial = Trial(open_problem(problem, device), familiar, path, name, device)
    with torch.random.fork_rng(devices=[]):
        findings = tuple(ask_all(trial, chosen(QUESTIONS), seed, stop=True))
    verdict = Verdict(
        decide(list(findings)), findings, seed, problem, candidate, device, seconds=time.monotonic() - begun
    )
    if not verdict.correct:
        raise Mismatch(f"not timed, since the judge says: {verdict.text()}")
    return verdict
