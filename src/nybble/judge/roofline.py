"""The least time a problem can take on this machine: what must be computed and moved, over ceilings measured here.

    bound = max(operations / peak operations, bytes / peak bandwidth)

Operations are those of the reference's matrix products and convolutions. Bytes are the outputs' and those inputs' and
weights' of which every sampled element matters: a gather need not read its whole table. On a CPU the bandwidth is
that of a block of the same size, which a cache may hold; on a GPU it is the memory's, since caches are emptied before
each timed call.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from nybble.judge.problem import Case, Expected, Problem, seed_of

# A measured ceiling is no law: a CPU's caches and its neighbours' load move it. Beyond this, a time is no measurement.
MARGIN = {"cpu": 2.5, "cuda": 1.1}
_SAMPLES = 3


@dataclass(frozen=True)
class Bound:
    """Operations and bytes that the problem needs, and the ceilings."""

    flops: float
    nbytes: float
    flops_per_second: float
    bytes_per_second: float

    @property
    def seconds(self) -> float:
        """The least time."""
        return max(self.flops / self.flops_per_second, self.nbytes / self.bytes_per_second)

    def sentence(self) -> str:
        """The parts, for a person."""
        return (
            f"{self.flops / 1e6:.3g} million operations at {self.flops_per_second / 1e9:.3g} G/s, "
            f"{self.nbytes / 1e6:.3g} MB at {self.bytes_per_second / 1e9:.3g} GB/s"
        )


def bound(problem: Problem, seed: int, device: str) -> Bound | None:
    """The bound for the problem's own inputs; None where the reference has no answer."""
    case = Case("roofline", problem.inputs(seed_of(seed, "roofline")))
    expected = problem.expect(case)
    if expected is None or not expected.budgets:
        return None
    dtype = expected.budgets[0].dtype
    known = problem.cost(case)
    if known is not None:
        return Bound(*known, _peak_flops(device, dtype), _peak_bytes(device, known[1]))
    out = sum(b.reference.numel() * b.dtype.itemsize for b in expected.budgets)
    needed = [v for i, v in enumerate(case.inputs) if isinstance(v, Tensor) and _all_matter(problem, case, expected, i)]
    needed += [v for k, v in problem.state.items() if _all_matter(problem, case, expected, k)]
    nbytes = float(out + sum(v.numel() * v.element_size() for v in needed))
    return Bound(_flops(problem, case), nbytes, _peak_flops(device, dtype), _peak_bytes(device, nbytes))


def _flops(problem: Problem, case: Case) -> float:
    with FlopCounterMode(display=False) as counter:
        problem.once(case)
    return float(counter.get_total_flops())


def _all_matter(problem: Problem, case: Case, before: Expected, which: int | str) -> bool:
    """Whether each of a few sampled elements of an input (its number) or a weight (its name) changes the result."""
    value = case.inputs[which] if isinstance(which, int) else problem.state[which]
    if not value.dtype.is_floating_point or value.numel() == 0:
        return False
    g = torch.Generator().manual_seed(value.numel())
    places = torch.randint(value.numel(), (_SAMPLES,), generator=g).tolist()
    return all(any(_changes(problem, case, before, which, at, sign) for sign in (8.0, -8.0)) for at in places)


def _changes(problem: Problem, case: Case, before: Expected, which: int | str, at: int, sign: float) -> bool:
    """Whether the result is another when one element is made large."""
    value = case.inputs[which] if isinstance(which, int) else problem.state[which]
    other = value.detach().clone().contiguous()
    other.view(-1)[at] = sign * float(other.abs().max()) + sign
    inputs = [other if i == which else v for i, v in enumerate(case.inputs)]
    state = {**problem.state, which: other} if isinstance(which, str) else None
    after = problem.expect(Case("sampled", inputs, state))
    if after is None:
        return False
    return any(not torch.equal(a.reference, b.reference) for a, b in zip(before.budgets, after.budgets, strict=True))


@lru_cache(maxsize=16)
def _peak_flops(device: str, dtype: torch.dtype) -> float:
    """The best of a few square products in the dtype and in float32."""
    n = 8192 if device != "cpu" else 384
    kinds = {dtype if dtype.is_floating_point else torch.float32, torch.float32}
    best = 0.0
    for kind in kinds:
        a = torch.randn(n, n, device=device).to(kind)
        best = max(best, 2.0 * n**3 / _best(lambda a=a: a @ a, device))  # type: ignore[misc]
    return best


def _peak_bytes(device: str, nbytes: float) -> float:
    # A power of two at least as small as the problem, so that the cache is as near as it can be to the kernel.
    size = 1 << max(12, int(max(nbytes, 1.0)).bit_length() - 2) if device == "cpu" else 1 << 30
    return _copy_rate(device, size)


@lru_cache(maxsize=32)
def _copy_rate(device: str, size: int) -> float:
    a = torch.zeros(size // 8, dtype=torch.float64, device=device)
    b = torch.ones_like(a)
    repeats = max(1, (1 << 22) // size) if device == "cpu" else 1

    def copies() -> None:
        for _ in range(repeats):
            b.copy_(a)

    return 2.0 * size * repeats / _best(copies, device)


def _best(run: Callable[[], Any], device: str) -> float:
    def once() -> float:
        start = time.perf_counter()
        run()
        if device != "cpu":
            torch.cuda.synchronize(device)
        return time.perf_counter() - start

    once()
    return min(once() for _ in range(15))
