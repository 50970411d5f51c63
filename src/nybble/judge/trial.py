"""One candidate before one problem: asking questions and comparing answers. Checks are written in these terms."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nybble.judge import wire
from nybble.judge.agreement import complaint
from nybble.judge.isolate import Candidate, CandidateError
from nybble.judge.problem import Case, Expected, Problem, State, same, seed_of
from nybble.judge.verdict import Finding, Status

POISON_FRESH = 0x80  # glibc hands out bytes 0x7F (3.4e38 as float32, NaN as float16) and fills freed ones with 0x80
_REMEMBERED = 12
_QUICK = 0.03  # seconds


class Refused(Exception):
    """The candidate cannot be set up for this problem; a finding says why."""

    def __init__(self, finding: Finding) -> None:
        self.finding = finding
        super().__init__(finding.what)


@dataclass(frozen=True)
class Answer:
    """What a candidate returned: facts about each output, their values as they were on return."""

    facts: list[dict[str, Any]]
    outputs: list[Any]


@dataclass
class Trial:
    """A candidate's process, the problem, and the seed that questions are drawn from.

    Attributes:
        own_kernels: the candidate must not hand the work to the framework.
        counterparts: the reference's name of a weight -> the candidate's.
        foreign: files that nobody but the judge has business with.
        rounds, baselines: of the timing.
        failed: an earlier check found something against the candidate.
        race: the timing's result, once there is one.
        slowest: seconds of the slowest single call so far, which decides how often one can afford to ask.
    """

    problem: Problem
    candidate: Candidate
    path: str
    name: str
    device: str = "cpu"
    seed: int = 0
    own_kernels: bool = False
    counterparts: dict[str, str] = field(default_factory=dict)
    foreign: frozenset[str] = frozenset()
    rounds: int = 8
    baselines: tuple[str, ...] = ("eager",)
    failed: bool = False
    race: Any = None
    slowest: float = 0.0

    def __post_init__(self) -> None:
        self._past: deque[tuple[str, Expected]] = deque(maxlen=_REMEMBERED)
        self._numbers = itertools.count()
        self._now: State | None = None
        self._called = False

    def load(self) -> None:
        """Import the candidate's file; the seed is not known yet."""
        self.candidate.ask("poison", byte=POISON_FRESH)
        answer, _ = self.candidate.ask(
            "load", path=self.path, name=self.name, seconds=self.candidate.limits.start_seconds
        )
        if "missing" in answer:
            names = ", ".join(str(n) for n in answer.get("names", [])) or "nothing"
            raise Refused(Finding("load", "crashed", f"the candidate has no {self.name!r}; it defines {names}"))

    def build(self, how: str = "eager") -> None:
        """Construct it and give it the reference's weights."""
        blobs: list[bytes | memoryview] = []
        answer, _ = self.candidate.ask(
            "build", blobs, init=wire.pack(self.problem.init, blobs), seed=seed_of(self.seed, "init"),
            function=self.problem.function, how=how, seconds=self.candidate.limits.start_seconds,
        )  # fmt: skip
        self.counterparts = _match(self.problem.state, answer["parameters"])
        lost = [name for name in self.problem.state if name not in self.counterparts and self.problem.state[name].ndim]
        if lost:
            names = ", ".join(lost[:4])
            what = f"the candidate holds no counterpart of {names}: nothing can show that it uses its weights"
            raise Refused(Finding("build", "wrong", what, {"its state": str(answer["parameters"][:8])}))
        self._now = None
        self.set_state(self.problem.state)

    def afford(self, calls: int) -> int:
        """How many calls in a row to make: as many as wished where one takes milliseconds, two where it takes long."""
        return calls if self.slowest < _QUICK else 2

    def set_state(self, state: State) -> None:
        """Weights, in place."""
        if not state or self._now is state:
            return
        blobs: list[bytes | memoryview] = []
        mine = {self.counterparts[k]: v for k, v in state.items() if k in self.counterparts}
        self.candidate.ask("state", blobs, tree=wire.pack(mine, blobs))
        self._now = state

    def put(self, inputs: list[Any], slot: str, in_place: bool = False) -> None:
        """Inputs into a slot, at new addresses or over the old values."""
        blobs: list[bytes | memoryview] = []
        self.candidate.ask("put", blobs, slot=slot, tree=wire.pack(inputs, blobs), in_place=in_place)

    def fetch(self, what: str, index: int = 0) -> Any:
        """Values from the candidate's process."""
        answer, blobs = self.candidate.ask("fetch", what=what, index=index)
        return wire.unpack(answer.get("value"), blobs)

    def answer(self, case: Case, slot: str = "", in_place: bool = False) -> Answer:
        """Ask one question."""
        slot = slot or f"{next(self._numbers) % 2}"
        self.set_state(self.problem.state if case.state is None else case.state)
        self.put(case.inputs, slot, in_place)
        start = time.monotonic()
        limits = self.candidate.limits
        answer, _ = self.candidate.ask(
            "call", slots=[slot], seconds=limits.seconds if self._called else limits.start_seconds
        )
        if self._called:  # the first call may have compiled
            self.slowest = max(self.slowest, time.monotonic() - start)
        self._called = True
        return Answer(list(answer["outputs"][0]), list(self.fetch("outputs")))

    def judge(
        self, check: str, case: Case, slot: str = "", in_place: bool = False, refusal: Status = "wrong"
    ) -> list[Finding]:
        """Ask one question and compare; [] when the reference has no answer or the candidate's agrees.

        Args:
            refusal: what it is when the candidate raises an error instead of answering.
        """
        expected = self.problem.expect(case)
        if expected is None:
            return []
        try:
            answer = self.answer(case, slot, in_place)
        except CandidateError as error:
            what = f"the candidate raises {error.kind} for {case.label}"
            return [Finding(check, refusal, what, {"message": error.message, "at": error.trace})]
        return self.compare(check, case, expected, answer)

    def compare(self, check: str, case: Case, expected: Expected, answer: Answer) -> list[Finding]:
        """What speaks against an answer. One that fits an earlier question is called what it is."""
        found = self._compare(check, case, expected, answer)
        if found:
            earlier = next(
                (label for label, past in self._past if _fits(past, answer) and not _alike(past, expected)), None
            )
            if earlier is not None:
                what = f"the output for {case.label} is the answer to an earlier question ({earlier})"
                found = [Finding(check, "cheating", what, found[0].evidence)]
        self._past.append((case.label, expected))
        return found

    def _compare(self, check: str, case: Case, expected: Expected, answer: Answer) -> list[Finding]:
        count = len(answer.outputs)
        if count != len(expected.budgets):
            return [Finding(check, "wrong", f"{count} outputs for {case.label}, expected {len(expected.budgets)}")]
        for number, (y, allowed, facts) in enumerate(zip(answer.outputs, expected.budgets, answer.facts, strict=True)):
            where = f"output {number} for {case.label}" if count > 1 else f"the output for {case.label}"
            wanted = {
                "dtype": str(allowed.dtype),
                "shape": list(allowed.reference.shape),
                "device": self.device.split(":")[0],
            }
            if not isinstance(y, Tensor):
                return [Finding(check, "wrong", f"{where} is a {facts['type']}, expected a plain torch.Tensor")]
            seen = {"dtype": str(y.dtype), "shape": list(y.shape), "device": facts.get("device", "cpu")}
            if seen != wanted:
                parts = [f"{k} {seen[k]}, expected {wanted[k]}" for k in wanted if seen[k] != wanted[k]]
                return [Finding(check, "wrong", f"{where} has {'; '.join(parts)}")]
            bad = complaint(y, allowed)
            if bad:
                exact = " (small integers: every order of summation gives the same)" if allowed.exact else ""
                return [
                    Finding(
                        check, "wrong", f"{where} is not what the reference gives{exact}", {"case": case.label, **bad}
                    )
                ]
        return []

    def first(self, found: Iterable[list[Finding]]) -> Iterator[Finding]:
        """The findings of the first question that has any: one piece of evidence is enough."""
        return iter(next((f for f in found if f), []))


def _fits(past: Expected, answer: Answer) -> bool:
    pairs = list(zip(answer.outputs, past.budgets, strict=False))
    if len(pairs) != len(past.budgets) or not pairs:
        return False
    return all(
        isinstance(y, Tensor) and y.shape == b.reference.shape and y.dtype == b.dtype and complaint(y, b) is None
        for y, b in pairs
    ) and any(float(b.reference.double().abs().max()) > 0 for _, b in pairs if b.reference.numel())


def _alike(a: Expected, b: Expected) -> bool:
    return all(
        x.reference.shape == y.reference.shape and torch.equal(x.reference, y.reference)
        for x, y in zip(a.budgets, b.budgets, strict=False)
    )


def _match(state: State, parameters: list[list[Any]]) -> dict[str, str]:
    """Counterparts by name and shape; what is left by shape and dtype, in order."""
    theirs = {str(name): (list(shape), str(dtype)) for name, shape, dtype in parameters}
    facts = {name: (list(v.shape), str(v.dtype)) for name, v in state.items()}
    found = {name: name for name, fact in facts.items() if theirs.get(name) == fact}
    free = [name for name in theirs if name not in found.values()]
    for name, fact in facts.items():
        if name not in found and (fit := next((n for n in free if theirs[n] == fact), None)):
            found[name] = fit
            free.remove(fit)
    return found


__all__ = ["Answer", "Refused", "Trial", "same"]
