"""Speed, on the judge's clock, of outputs that were checked.

The clock is here, in another process than the candidate. A round gives every subject (the candidate and each
baseline, each in a process of its own) the same fresh values, written over the old ones, says "go", and stops the
clock when the answer comes. Then a few outputs, chosen only now, and the last one are fetched and compared. Rounds of
all subjects alternate in random order, so that a busy machine hits all alike, and ratios are of medians.

Times contain an empty round trip (about 0.1 ms; it is measured and reported), divided by the calls of a round. A call
is never repeated on the same values within a round: that would pay a cache. A subject that returns the same memory
each time makes rounds of one call, since only its last output can be looked at.

On a GPU the device's clock is read as well; see gpu.py.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from nybble.judge import roofline
from nybble.judge.isolate import Candidate, CandidateError, Ended, Limits
from nybble.judge.problem import Case, seed_of
from nybble.judge.trial import Answer, Trial
from nybble.judge.verdict import Finding, Speed, Status

BASELINES = ("eager", "compile", "graph")
_WORTH = 2e-3  # seconds that a round should last, if enough inputs fit
_FEWEST, _PATIENCE = 3, 8.0  # rounds in any case; seconds after which no further one is begun
_AGAIN = 12  # rounds more, before work out of sight is called cheating
_MOST_CALLS, _MOST_BYTES = 16, 64 << 20
_BURST, _LOOKED_AT = 6, 6
_WARM_CALLS, _WARM_SECONDS = 320, 0.5  # before the rounds: what changes after a hundred calls has then changed
_BESIDE, _BESIDE_SHARE = 10e-6, 0.25  # seconds, and of the time of a call: how much longer the device may be busy
_FEWEST_CALLS, _LONG = 4, 0.05  # calls in a row at least, unless one takes that many seconds
# Handing over outputs may take this many times a baseline's processor time, and this share of a round's work more.
_LATE_RATIO, _LATE_SHARE = 3.0, 0.5


@dataclass
class Race:
    """What the rounds gave.

    Attributes:
        times: subject -> seconds a call, one a round.
        handing: subject -> processor seconds that it used from the answer to the arrival of the outputs.
        calls: in a round.
        findings: what spoke against the candidate meanwhile.
        beside: on a GPU, subject -> seconds for which the device outlasted the timed stream, the median of each round.
    """

    times: dict[str, list[float]] = field(default_factory=dict)
    handing: dict[str, list[float]] = field(default_factory=dict)
    findings: list[Finding] = field(default_factory=list)
    beside: dict[str, list[float]] = field(default_factory=dict)
    calls: int = 1
    resolution: float = 0.0
    share: float | None = None

    def speeds(self) -> tuple[Speed, ...]:
        """Medians and quartiles in milliseconds, the candidate first."""
        return tuple(_speed(name, [1e3 * t for t in times]) for name, times in self.times.items())

    def ratios(self) -> dict[str, float]:
        """Each baseline's median over the candidate's."""
        medians = {name: statistics.median(times) for name, times in self.times.items()}
        return {name: value / medians["candidate"] for name, value in medians.items() if name != "candidate"}


def race(trial: Trial) -> Race:
    """Time the candidate beside the baselines, checking what it returns while it is timed."""
    result = Race()
    with ExitStack() as stack:
        subjects = {"candidate": trial}
        for name in trial.baselines:
            started = _baseline(trial, name, stack)
            if isinstance(started, Finding):
                result.findings.append(started)
            else:
                subjects[name] = started
        _each(subjects, subjects, result, lambda name, subject: _settle(trial, subject))
        result.findings += _burst(trial)
        calls = result.calls = _calls(trial, subjects, result)
        draw = random.Random(seed_of(trial.seed, "race"))
        start = time.monotonic()
        for number in range(trial.rounds + 1 + _AGAIN):  # the first is a warm-up, checked like the others
            if number > trial.rounds and not any([*_late(result), *_elsewhere(result)]):
                break  # further ones only where a busy machine may have made it look like a cheat
            if number > _FEWEST and time.monotonic() - start > _PATIENCE:
                break
            inputs = [trial.problem.inputs(seed_of(trial.seed, f"race {number} {i}")) for i in range(calls)]
            once = partial(_round, trial, inputs, number, draw, result)
            _each(draw.sample(list(subjects), len(subjects)), subjects, result, once)
        result.resolution = 1e3 * _empty(trial) if trial.device == "cpu" else 0.0
    for kept in (result.times, result.handing):
        kept.update({name: times[1:] for name, times in kept.items()})
    result.times = {name: result.times[name] for name in subjects}
    result.findings += [*_late(result), *_elsewhere(result), *_beyond(trial, result)]
    return result


def _settle(trial: Trial, subject: Trial) -> None:
    subject.candidate.ask("poison", byte=0)
    subject.set_state(trial.problem.state)


def _each(order: Iterable[str], subjects: dict[str, Trial], result: Race, do: Callable[[str, Trial], object]) -> None:
    """`do` with each subject; a baseline that fails leaves the race, the candidate's failure is the caller's."""
    for name in list(order):
        try:
            do(name, subjects[name])
        except (CandidateError, Ended) as error:
            if name == "candidate":
                raise
            result.findings.append(_absent(name, error, subjects.pop(name).candidate))


def _baseline(trial: Trial, name: str, stack: ExitStack) -> Trial | Finding:
    """The reference itself as a subject: eager, compiled, or as a CUDA graph."""
    path = str(Path(trial.problem.path).resolve()) if trial.problem.path.endswith(".py") else trial.problem.path
    if name == "graph" and trial.device == "cpu":
        return Finding("timed", "note", "the baseline 'graph' does not run here: CUDA graphs need a GPU")
    try:
        process = stack.enter_context(Candidate(trial.candidate.zygote, str(Path(path).parent), Limits()))
        subject = replace(trial, candidate=process, path=path, name=trial.problem.name)
        subject.load()
        subject.build(name)
        subject.put(trial.problem.inputs(seed_of(trial.seed, "calibrate")), "r0")
        subject.candidate.ask("timed", slots=["r0"], seconds=process.limits.start_seconds)  # compiles or captures
    except (CandidateError, Ended) as error:
        return _absent(name, error, process)
    return subject


def _absent(name: str, error: Exception, process: Candidate) -> Finding:
    return Finding("timed", "note", f"the baseline {name!r} does not run here: {error}", process.last_words())


def _burst(trial: Trial) -> list[Finding]:
    """Calls close upon each other, each copied on return: the same buffer again is fine, an old answer is not."""
    count = trial.afford(_BURST)
    inputs = [trial.problem.inputs(seed_of(trial.seed, f"burst {i}")) for i in range(count)]
    slots = [f"r{i}" for i in range(count)]
    for slot, values in zip(slots, inputs, strict=True):
        trial.put(values, slot)
    trial.candidate.ask("call", slots=slots)
    return [
        f for i in range(count) for f in _compare(trial, inputs[i], trial.fetch("outputs", i), f"call {i} of a burst")
    ][:1]


def _calls(trial: Trial, subjects: dict[str, Trial], result: Race) -> int:
    """Calls in a round: enough for the clock, each on inputs of its own. Every subject has made many calls by then."""
    case = trial.problem.inputs(seed_of(trial.seed, "calibrate"))
    nbytes = sum(v.nbytes for v in case if isinstance(v, Tensor))
    fits = max(1, min(_MOST_CALLS, _MOST_BYTES // max(1, nbytes)))
    slots = [f"r{i}" for i in range(max(2, fits))]
    seconds, shared = [], []

    def look(name: str, subject: Trial) -> None:
        for slot in slots:
            subject.put(case, slot)
        subject.candidate.ask("timed", slots=slots[:2], seconds=subject.candidate.limits.start_seconds)
        seconds.append(_go(subject, 2) / 2)
        shared.append(bool(subject.candidate.ask("shared")[0]["shared"]))

    def warm(name: str, subject: Trial) -> None:
        for _ in range(int(min(_WARM_CALLS, _WARM_SECONDS / max(seconds))) // len(slots)):
            subject.candidate.ask("timed", slots=slots)

    _each(subjects, subjects, result, look)
    _each(subjects, subjects, result, warm)
    slowest = max(seconds)
    return 1 if any(shared) else min(fits, max(_FEWEST_CALLS if slowest < _LONG else 1, round(_WORTH / slowest)))


def _go(subject: Trial, calls: int) -> float:
    slots = [f"r{i}" for i in range(calls)]
    start = time.perf_counter()
    subject.candidate.ask("timed", slots=slots)
    return time.perf_counter() - start


def _on_device(subject: Trial, calls: int, name: str, result: Race) -> float:
    """The median of the device's times."""
    answer, _ = subject.candidate.ask("device_times", slots=[f"r{i}" for i in range(calls)])
    device, beside = ([1e-3 * float(t) for t in answer[part]] for part in ("device", "beside"))
    result.beside.setdefault(name, []).append(statistics.median(beside))
    return statistics.median(device)


def _empty(trial: Trial) -> float:
    return statistics.median(_go(trial, 0) for _ in range(9))


def _round(
    trial: Trial, inputs: list[list[Any]], number: int, draw: random.Random, result: Race, name: str, subject: Trial
) -> None:
    for i, values in enumerate(inputs):
        subject.put(values, f"r{i}", in_place=True)
    taken = (
        _go(subject, len(inputs)) / len(inputs)
        if trial.device == "cpu"
        else _on_device(subject, len(inputs), name, result)
    )
    chosen = sorted({len(inputs) - 1, *(draw.randrange(len(inputs)) for _ in range(trial.afford(_LOOKED_AT)))})
    used = subject.candidate.processor_seconds()
    outputs = {i: subject.fetch("outputs", i) for i in chosen}
    result.handing.setdefault(name, []).append(subject.candidate.processor_seconds() - used)
    result.times.setdefault(name, []).append(taken)
    if name == "candidate" and not any(f.status != "note" for f in result.findings):
        for i, values in outputs.items():
            result.findings += _compare(trial, inputs[i], values, f"timed call {i} of round {number}")


def _compare(trial: Trial, inputs: list[Any], values: Any, label: str) -> list[Finding]:
    case = Case(label, inputs)
    expected = trial.problem.expect(case)
    if expected is None:
        return []
    facts = [{"type": type(v).__name__, "device": trial.device.split(":")[0]} for v in values]
    found = trial.compare("timed", case, expected, Answer(facts, values))
    word: Status = "wrong" if trial.failed else "cheating"
    return [
        replace(
            f, status=word, what=f"{f.what}, though it was right when it was not timed" * (word == "cheating") or f.what
        )
        for f in found
    ]


def _late(result: Race) -> Iterator[Finding]:
    """Whether handing outputs over costs what computing them costs: then the work was done after the answer."""
    honest = [(used, t) for name in result.times if name != "candidate"
              for used, t in zip(result.handing[name], result.times[name], strict=True)]  # fmt: skip
    if not honest:
        return
    seen, usual = min(result.handing["candidate"]), statistics.median(used for used, _ in honest)
    work = result.calls * statistics.median(t for _, t in honest)
    if seen > _LATE_RATIO * usual + _LATE_SHARE * work:
        more = f"handing them over takes {seen * 1e3:.2f} ms of processor time, with a baseline {usual * 1e3:.2f} ms"
        yield Finding("timed", "cheating", f"outputs are computed when they are read: {more}")


def _elsewhere(result: Race) -> Iterator[Finding]:
    """Whether the device went on after the stream that was timed had ended: then the work was on another."""
    honest = [t for name, times in result.beside.items() if name != "candidate" for t in times]
    if not honest:
        return
    mine, usual = statistics.median(result.beside["candidate"]), statistics.median(honest)
    if mine > 2 * usual + _BESIDE and mine > _BESIDE_SHARE * statistics.median(result.times["candidate"]):
        more = f"{mine * 1e6:.0f} µs longer than the timed stream, with a baseline {usual * 1e6:.0f} µs"
        what = f"work on another stream: the device works {more}"
        yield Finding("timed", "cheating", what)


def _beyond(trial: Trial, result: Race) -> Iterator[Finding]:
    """Whether the time is shorter than the machine can do what the problem asks."""
    bound = roofline.bound(trial.problem, trial.seed, trial.device)
    if bound is None:
        return
    median = statistics.median(result.times["candidate"])
    result.share = bound.seconds / median
    if result.share > roofline.MARGIN[trial.device.split(":")[0]]:
        what = f"{median * 1e3:.4g} ms a call is {result.share:.1f} times this machine's roofline: it is none"
        yield Finding("timed", "invalid measurement", what, {"roofline": bound.sentence()})


def _speed(name: str, milliseconds: list[float]) -> Speed:
    ordered = sorted(milliseconds)
    quartile = lambda q: ordered[min(len(ordered) - 1, int(q * len(ordered)))]  # noqa: E731 - twice in the next line
    return Speed(name, statistics.median(ordered), quartile(0.25), quartile(0.75), len(ordered))
