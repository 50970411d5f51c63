"""judge: a problem, a candidate, a verdict."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from nybble.errors import BadInput, UnknownName
from nybble.judge.checks import Check, all_checks
from nybble.judge.isolate import Candidate, CandidateError, Ended, Limits, Zygote
from nybble.judge.op_problem import open_problem
from nybble.judge.problem import Problem, split
from nybble.judge.timing import BASELINES
from nybble.judge.trial import Refused, Trial
from nybble.judge.verdict import Finding, Verdict, decide

_ENOUGH = 30.0  # seconds after which one finding against a candidate suffices


def judge(
    problem: str,
    candidate: str,
    *,
    device: str = "cpu",
    seed: int | None = None,
    baselines: Sequence[str] = ("eager",),
    checks: Sequence[str] | None = None,
    own_kernels: bool = False,
    limits: Limits | None = None,
    rounds: int = 8,
    stop: bool = False,
    zygote: Zygote | None = None,
) -> Verdict:
    """Judge a candidate.

    Args:
        problem: FILE.py with Model, get_inputs and get_init_inputs; FILE.py:FUNCTION or MODULE:FUNCTION beside a
            get_inputs; or op:NAME, one of nybble's ops. It is trusted: it runs in this process.
        candidate: FILE.py with ModelNew, FILE.py:NAME or MODULE:NAME. It runs in a process of its own. device: "cpu"
        or "cuda". seed: of a verdict to be had again; None draws one after the candidate was imported. baselines: of
        "eager", "compile", "graph": what the candidate's speed is compared with. checks: names of the only checks to
        run; None runs all but those that are run on request. Without "timed" there is no speed. own_kernels: handing
        the work to the framework is cheating. limits: time, memory, files, output and processes of the candidate.
        rounds: of timing. stop: with the first finding against the candidate; otherwise every check has its say within
        half a minute. zygote: a running starter of candidates, to save its start (about two seconds) when judging many.

    Returns:
        The verdict; whatever the candidate does, it is a verdict and not an exception.

    Raises:
        BadInput: the problem cannot be read, or there is no such candidate file.
        UnknownName: a baseline or check that does not exist.
    """
    begun = time.monotonic()
    asked = chosen(checks)
    for name in baselines:
        if name not in BASELINES:
            raise UnknownName("baseline", name, BASELINES)
    task = open_problem(problem, device)
    path, name = split(candidate, task.name if not isinstance(task.make, type) else "ModelNew")
    if path.endswith(".py"):
        if not Path(path).is_file():
            raise BadInput(f"{path}: no such file")
        path = str(Path(path).resolve())
    with _starter(zygote, device) as starter:
        process = Candidate(starter, str(Path(path).parent) if path.endswith(".py") else "", limits or Limits())
        trial = Trial(
            task, process, path, name, device, own_kernels=own_kernels, rounds=rounds, baselines=tuple(baselines),
            foreign=_foreign(task) - {path},
        )  # fmt: skip
        findings = ask_all(trial, asked, seed, stop)
    status = decide(findings)
    race = trial.race if status == "correct" else None
    return Verdict(
        status, tuple(findings), trial.seed, problem, candidate, device,
        speeds=race.speeds() if race else (), ratios=race.ratios() if race else {},
        roofline=race.share if race else None, resolution=race.resolution if race else 0.0,
        seconds=time.monotonic() - begun,
    )  # fmt: skip


def chosen(names: Sequence[str] | None) -> list[Check]:
    """The checks of these names, in the order in which they run; None: all but those run on request."""
    known = all_checks()
    for name in names or ():
        if name not in {check.name for check in known}:
            raise UnknownName("check", name, [check.name for check in known])
    return [check for check in known if (not check.optional if names is None else check.name in names)]


@contextmanager
def _starter(given: Zygote | None, device: str) -> Iterator[Zygote]:
    if given is not None:
        yield given
        return
    own = Zygote(device)
    try:
        yield own
    finally:
        own.close()


def _foreign(problem: Problem) -> frozenset[str]:
    file = getattr(problem.module, "__file__", None)
    return frozenset([str(Path(file).resolve())] if file else [])


def ask_all(trial: Trial, checks: list[Check], seed: int | None, stop: bool) -> list[Finding]:
    """The checks' findings. The candidate's process ends with them, whatever happened."""
    findings: list[Finding] = []
    threads, begun = torch.get_num_threads(), time.monotonic()
    torch.set_num_threads(1)  # the reference's sums are then the same on every machine and every run
    try:
        with trial.candidate:
            try:
                trial.load()
                trial.seed = secrets.randbits(53) if seed is None else seed
                trial.problem.build(trial.seed)
                trial.build()
                for check in checks:
                    findings += _one(trial, check)
                    trial.failed = decide(findings) != "correct"
                    if trial.failed and (stop or time.monotonic() - begun > _ENOUGH):
                        break
            except Refused as refusal:
                findings.append(refusal.finding)
            except CandidateError as error:
                evidence = {"message": error.message, "at": error.trace}
                findings.append(Finding("load", "crashed", f"the candidate raises {error.kind}", evidence))
            except Ended as end:
                what = f"the candidate {_sentence(end)}"
                findings.append(Finding("alive", end.how, what, trial.candidate.last_words()))
    finally:
        torch.set_num_threads(threads)
    return findings


def _one(trial: Trial, check: Check) -> list[Finding]:
    try:
        found = list(check.run(trial))
    except CandidateError as error:
        what = f"the candidate raises {error.kind}"
        found = [Finding(check.name, "wrong", what, {"message": error.message, "at": error.trace})]
    return found or [Finding(check.name, "ok", check.about)]


def _sentence(end: Ended) -> str:
    return end.why if end.how == "crashed" else f"gave {end.why}"
