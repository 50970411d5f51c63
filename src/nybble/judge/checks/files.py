"""The candidate must not look for the answer: not in the problem's file, not in the judge's memory.

The seeds of the questions are drawn after its import and exist in another process; what is left is to read the
problem, its reference, or /proc (19). Files opened outside Python's own folders and the candidate's are recorded as
they are opened. Reading the problem's file or another process is cheating; writing outside is stopped by the kernel
where it can, and wrong.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from nybble.judge.trial import Trial
from nybble.judge.verdict import Finding

KINDS = (19,)


def run(trial: Trial) -> Iterator[Finding]:
    """Read the record."""
    events = [event.partition(" ")[::2] for event in trial.candidate.events]
    foreign = sorted({path for mode, path in events if mode == "read" and _not_its_business(path, trial)})
    if foreign:
        yield Finding("files", "cheating", f"read {', '.join(foreign[:4])}")
    written = sorted({path for mode, path in events if mode == "write"})
    if written:
        yield Finding("files", "wrong", f"tried to write outside its folder: {', '.join(written[:4])}")
    own = trial.candidate.own.rstrip("/") + "/"
    others = sorted({path for mode, path in events if mode == "read" and not path.startswith(own)} - set(foreign))
    if others:
        yield Finding("files", "note", f"read {', '.join(others[:4])}")


def _not_its_business(path: str, trial: Trial) -> bool:
    process = re.match(r"/proc/(\d+)/", path)
    return path in trial.foreign or (process is not None and int(process[1]) != trial.candidate.pid)
