"""New values at old addresses, and old shapes at new addresses: the answer must follow the values.

Outputs remembered by pointer, by object, by shape or by a few sampled elements (6) and a captured graph that goes on
reading the first input's memory (17) answer an earlier question. Values are overwritten where they lie, through
another view of the storage, so that neither address nor identity nor version counter moves; corners keep their
values; then one element changes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nybble.judge import cases
from nybble.judge.problem import Case, seed_of
from nybble.judge.trial import Trial
from nybble.judge.verdict import Finding

KINDS = (6, 17)


def run(trial: Trial) -> Iterator[Finding]:
    """Questions at one address, then at another, then at the first again."""
    problem, seed = trial.problem, trial.seed
    draws = [problem.inputs(seed_of(seed, f"fresh {i}")) for i in range(4)]
    g = torch.Generator().manual_seed(seed_of(seed, "fresh places"))
    plan = [
        ("new inputs", draws[0], "a", False),
        ("other values at the same address", draws[1], "a", True),
        ("other values in the middle, corners kept", _mixed(draws[1], draws[2], g), "a", True),
        ("one element changed in place", _nudged(draws[1], g), "a", True),
        ("the same shape at a new address", draws[3], "b", False),
        ("other values at the first address", draws[2], "a", True),
        ("earlier values at the second address", draws[0], "b", True),
    ]
    return trial.first(trial.judge("fresh", Case(label, values), slot, at) for label, values, slot, at in plan)


def _mixed(old: list[Any], new: list[Any], g: torch.Generator) -> list[Any]:
    """Half of the elements new, at random, but for the first and last ones."""
    return [_mix(a, b, g) if _wide(a) else a for a, b in zip(old, new, strict=True)]


def _mix(old: Tensor, new: Tensor, g: torch.Generator) -> Tensor:
    take = torch.rand(old.numel(), generator=g) < 0.5
    take[: min(64, old.numel() // 4)] = False
    take[-min(64, old.numel() // 4) :] = False
    return torch.where(take.reshape(old.shape), new, old)


def _nudged(values: list[Any], g: torch.Generator) -> list[Any]:
    """The same but for one element of each floating input, which becomes as large as the largest."""
    out = []
    for value in values:
        if _wide(value) and value.dtype.is_floating_point and not cases.structured(value):
            flat = value.clone().reshape(-1)
            at = int(torch.randint(flat.numel() // 4, flat.numel() // 2 + 1, (1,), generator=g))
            flat[at] = flat.abs().max() if flat[at] < flat.abs().max() else flat[at] / 2
            value = flat.reshape(value.shape)
        out.append(value)
    return out


def _wide(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() >= 8
