"""Suspicions, one file each: found by being here, run on every candidate, documented by its docstring.

A check module has `KINDS` (the kinds of cheat it is there for, numbered as in docs/why/judge.md) and
`run(trial) -> Iterator[Finding]`, which yields what speaks against the candidate, or notes; nothing when it holds.
Every check has a cheat in tests/cheats that it catches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pkgutil import iter_modules

from nybble.judge.trial import Trial
from nybble.judge.verdict import Finding

# Cheap ones and those that later ones build on first; `timed` and what looks back over the whole trial last.
_FIRST = ("problem", "as_given", "result", "kept", "poison")
_LAST = ("background", "timed", "patched", "files")


@dataclass(frozen=True)
class Check:
    """A suspicion: its name, the kinds it is for, a sentence, whether it runs only when named, and what looks."""

    name: str
    kinds: tuple[int, ...]
    about: str
    optional: bool
    run: Callable[[Trial], Iterator[Finding]]


def all_checks() -> list[Check]:
    """Every check in the order in which they run."""
    names = [module.name for module in iter_modules(__path__)]
    middle = sorted(name for name in names if name not in _FIRST + _LAST)
    return [_load(name) for name in [*_FIRST, *middle, *_LAST]]


def _load(name: str) -> Check:
    module = import_module(f"{__name__}.{name}")
    about = (module.__doc__ or "").split("\n")[0]
    return Check(name, module.KINDS, about, getattr(module, "OPTIONAL", False), module.run)
