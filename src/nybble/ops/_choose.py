"""Which implementation runs: the first willing one. `explain` says which, and why not the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from nybble.errors import Unsupported
from nybble.ops._declare import Implementation, Op
from nybble.ops._promise import demand


@dataclass(frozen=True)
class Candidate:
    """One line of an explanation: an implementation, whether it is the one that runs, and why not."""

    name: str
    native: bool
    chosen: bool
    reason: str

    @property
    def path(self) -> str:
        """native, emulated or refused."""
        return ("native" if self.native else "emulated") if not self.reason else "refused"


def choose(op: Op, device: str, *args: Any) -> Implementation:
    """The first implementation willing to serve these arguments; Unsupported with every reason where none is.

    Inside a promise (_promise.py) an op that does not make it is refused.
    """
    demand(op.name, op.promise, args)
    candidates = op.implementations(device)
    for candidate in candidates:
        if candidate.supports(*args) is None:
            return candidate
    reasons = {candidate.name: candidate.supports(*args) or "" for candidate in candidates}
    raise Unsupported(f"no implementation of {op.name} serves this call on {device}", reasons)


def explain(op: Op, device: str, *args: Any) -> list[Candidate]:
    """Every implementation in order of preference, the chosen one marked, the others with the reason."""
    lines: list[Candidate] = []
    for candidate in op.implementations(device):
        reason = candidate.supports(*args) or ""
        chosen = not reason and not any(line.chosen for line in lines)
        lines.append(Candidate(candidate.name, candidate.native, chosen, reason))
    return lines
