"""What the judge says: one word, every finding with its evidence, the seed that replays it, and only then the speed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["ok", "note", "wrong", "cheating", "invalid measurement", "crashed", "timed out"]
# Where findings differ, the first of these is the verdict.
_ORDER: tuple[Status, ...] = ("cheating", "timed out", "crashed", "wrong", "invalid measurement")


@dataclass(frozen=True)
class Finding:
    """What one check saw.

    Attributes:
        check: the check's name.
        status: "ok" and "note" do not change the verdict; the others are verdicts.
        what: a sentence a person can act on.
        evidence: which case, call, input or element, what was expected and what was seen.
    """

    check: str
    status: Status
    what: str
    evidence: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Speed:
    """Times of one subject on the judge's clock, milliseconds a call.

    Attributes:
        name: "candidate" or the baseline's name.
        median: of the rounds.
        low, high: the quartiles.
        rounds: how many.
    """

    name: str
    median: float
    low: float
    high: float
    rounds: int


@dataclass(frozen=True)
class Verdict:
    """The judgement of a candidate.

    Attributes:
        status: correct, wrong, cheating, invalid measurement, crashed or timed out.
        findings: of every check that ran, in order.
        seed: gives the same questions again, and so the same verdict.
        problem, candidate, device: what was judged where.
        speeds: candidate first, then the baselines; empty unless the status is correct.
        ratios: baseline -> its median over the candidate's.
        roofline: the share of the machine's measured ceiling, None where it was not measured.
        resolution: milliseconds of an empty round trip, contained in every time; 0 where the device's clock was read.
        seconds: what the judgement cost.
    """

    status: str
    findings: tuple[Finding, ...]
    seed: int
    problem: str
    candidate: str
    device: str
    speeds: tuple[Speed, ...] = ()
    ratios: Mapping[str, float] = field(default_factory=dict)
    roofline: float | None = None
    resolution: float = 0.0
    seconds: float = 0.0

    @property
    def correct(self) -> bool:
        """Whether it is."""
        return self.status == "correct"

    @property
    def against(self) -> list[Finding]:
        """The findings that speak against the candidate."""
        return [f for f in self.findings if f.status in _ORDER]

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        return {"correct": self.correct, **asdict(self)}

    def text(self) -> str:
        """The verdict as lines for a terminal."""
        lines = [f"{self.status.upper()}  {self.candidate}", f"  for {self.problem} on {self.device}, seed {self.seed}"]
        shown = self.against + [f for f in self.findings if f.status == "note"]
        for finding in shown:
            lines.append(f"\n  {finding.status}: {finding.what}  [{finding.check}]")
            lines += [f"    {key}: {_indented(value)}" for key, value in finding.evidence.items()]
        passed = [f.check for f in self.findings if f.status == "ok"]
        lines += ["", f"  held: {', '.join(passed)}"] if passed else []
        lines += [self._speed_lines()] if self.speeds else []
        return "\n".join([*lines, f"\n  {self.seconds:.1f} s; again with --seed {self.seed}"])

    def _speed_lines(self) -> str:
        lines = []
        for speed in self.speeds:
            ratio = f", {self.ratios[speed.name]:.2f}x the candidate's" if speed.name in self.ratios else ""
            spread = f"quartiles {speed.low:.4g} to {speed.high:.4g}, {speed.rounds} rounds"
            lines.append(f"  {speed.name:<10} {speed.median:.4g} ms ({spread}){ratio}")
        if self.ratios:
            best = min(self.ratios, key=lambda name: self.ratios[name])
            lines.append(f"  speed-up: {self.ratios[best]:.2f}x over the best baseline ({best})")
        if self.roofline is not None:
            lines.append(f"  {self.roofline:.0%} of this machine's roofline")
        if self.resolution:
            lines.append(f"  an empty call takes {self.resolution:.2g} ms, contained in every time")
        return "\n" + "\n".join(lines)


def decide(findings: list[Finding]) -> str:
    """The verdict's word."""
    seen = {finding.status for finding in findings}
    return next((word for word in _ORDER if word in seen), "correct")


def _indented(value: str) -> str:
    return value.replace("\n", "\n      ")
