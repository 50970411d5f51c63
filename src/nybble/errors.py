"""The errors a user of nybble meets, each carrying what is needed to act on it."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping


class NybbleError(Exception):
    """Base of every error that nybble raises on purpose; the command line prints it and exits with 2."""


class UnknownName(NybbleError, ValueError):
    """A name that no table knows. The message lists the nearest names that exist."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = sorted(known)
        folded = {n.lower(): n for n in names}
        near = [folded[n] for n in difflib.get_close_matches(name.lower(), folded, n=3, cutoff=0.5)]
        hint = f"nearest: {', '.join(near)}" if near else f"known: {', '.join(names)}"
        super().__init__(f"unknown {kind} {name!r}; {hint}")


class BadInput(NybbleError, ValueError):
    """A value that cannot be worked with (a NaN in a weight, a text that is too short); the message names it."""


class Unsupported(NybbleError, NotImplementedError):
    """Nothing fulfils the request on this machine.

    Attributes:
        reasons: each candidate's name with the reason why it refused, values included.
    """

    def __init__(self, what: str, reasons: Mapping[str, str] | None = None) -> None:
        self.reasons = dict(reasons or {})
        super().__init__("\n".join([what, *(f"  {name}: {why}" for name, why in self.reasons.items())]))


class Mismatch(NybbleError):
    """Two results that should agree do not; the message holds the values seen."""


class DamagedFile(NybbleError, OSError):
    """A file that is truncated, corrupt or not what its name says; the message names the file."""
