"""Memory that nobody has written must not reach the result.

Fresh and freed memory is filled with a byte pattern, and the same question is asked under two patterns: a kernel that
leaves a part unwritten, and passes because old memory still holds the right values (5), or reads past an end (14),
gives them away. On the CPU glibc fills for us (M_PERTURB); on a GPU the free blocks of torch's pool are filled, and
compute-sanitizer can be run on top (sanitizer.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from nybble.judge import cases
from nybble.judge.trial import POISON_FRESH, Trial
from nybble.judge.verdict import Finding

KINDS = (5, 14)
_OTHER = 0x2B  # fresh bytes 0xD4, freed ones 0x2B: finite numbers of other sizes than the usual pattern's


def run(trial: Trial) -> Iterator[Finding]:
    """The same question under two patterns, twice each, so that the second call meets the first one's memory."""
    for round_, byte in enumerate((POISON_FRESH, _OTHER, POISON_FRESH)):
        trial.candidate.ask("poison", byte=byte)
        case = cases.given(trial.problem, trial.seed, f"fresh memory, filled, round {round_}")
        found = trial.judge("poison", case, "poison")
        if found:
            yield from found
            break
    trial.candidate.ask("poison", byte=POISON_FRESH)
