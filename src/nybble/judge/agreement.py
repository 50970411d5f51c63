"""How near a result must be: a budget measured on honest code of the same precision, never a fixed tolerance.

The reference is computed in float64 from inputs as they are in the problem's dtype. The framework's own result in
that dtype has some error against it, and inputs moved by one float32 rounding move the result by some amount (the
condition of the problem, below which no algorithm need go). A candidate may have a small multiple of the larger
(another order of summation, another exponential), but not the thousandfold that computing in fewer bits costs. Two
measures, both free of scale:

    total   ||y - r|| / ||r||                                             the whole tensor
    worst   max_i |y_i - r_i| / (|r_i| + rms(row of i) + rms(all) / 16)   one element that the norm would hide

    budget  = slack * max(error of the honest result, effect of shaken inputs, one rounding)

Slack: 32 (total) and 64 (worst) for float32 and float64, where only the order of summation separates honest results and
bfloat16 or TF32 arithmetic is 1000 times worse; 3 and 4 for 16-bit outputs, where the rounding of the output
dominates, is the same for everybody, and eight-bit arithmetic is only 5 to 10 times worse.
Where the exact result is representable and the framework finds it, any order of summation finds it: it must be equal.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

_SLACK_TOTAL = {torch.float64: 32.0, torch.float32: 32.0, torch.bfloat16: 3.0, torch.float16: 3.0}
_SLACK_WORST = {torch.float64: 64.0, torch.float32: 64.0, torch.bfloat16: 4.0, torch.float16: 4.0}
_ORDINARY = 2.0**-22  # of a float32 result, by the move of inputs
_ORDER_UNKNOWN = 16.0  # more slack where no float64 result exists to measure the honest error against


@dataclass(frozen=True)
class Distance:
    """How far a tensor is from its reference, and where it is farthest."""

    total: float
    worst: float
    at: tuple[int, ...]


@dataclass(frozen=True)
class Budget:
    """What is allowed for one output.

    Attributes:
        reference: the result in float64 (integers and booleans as they are).
        dtype: what the output must be.
        total, worst: the largest distances allowed.
        exact: equality is asked for, since every order of summation gives the same.
        holes: places that are not compared, since the result is not finite there; None: there are none.
    """

    reference: Tensor
    dtype: torch.dtype
    total: float
    worst: float
    exact: bool = False
    holes: Tensor | None = None


def distance(y: Tensor, reference: Tensor) -> Distance:
    """The two measures; infinite where a value is not finite and the reference is, or the other way round."""
    if reference.numel() == 0:
        return Distance(0.0, 0.0, ())
    a, r = y.to(reference.device, torch.float64), reference.to(torch.float64)
    finite = r.isfinite()
    same = torch.where(finite, a.isfinite(), (a == r) | (a.isnan() & r.isnan()))
    if not bool(same.all()):
        return Distance(float("inf"), float("inf"), _unravel(int((~same).flatten().to(torch.uint8).argmax()), r))
    error = torch.where(finite, (a - r).abs(), 0.0)
    size = torch.where(finite, r.abs(), 0.0)
    row = size.square().mean(-1, keepdim=True).sqrt() if r.ndim else size
    ratio = (error / (size + row + size.square().mean().sqrt() / 16)).nan_to_num(0.0)
    norm = float(size.norm())
    total = float(error.norm()) / norm if norm else (0.0 if float(error.norm()) == 0 else float("inf"))
    return Distance(total, float(ratio.max()), _unravel(int(ratio.argmax()), r))


def condition(moved: Tensor, reference: Tensor) -> float:
    """How many times farther than ordinarily (four roundings) inputs moved by one rounding move a float32 result."""
    total = distance(moved, reference).total
    return max(1.0, total / _ORDINARY) if math.isfinite(total) else 1.0


def _unravel(index: int, tensor: Tensor) -> tuple[int, ...]:
    place = []
    for size in reversed(tensor.shape):
        place.append(index % size)
        index //= size
    return tuple(reversed(place))


def budget(
    reference: Tensor,
    honest: Tensor,
    shaken: Tensor | None = None,
    upcast: bool = True,
    want_exact: bool = False,
    wider: float = 1.0,
) -> Budget:
    """What a candidate may differ from `reference`, seen how much the framework's own `honest` result does.

    Args:
        reference: float64 where the result is floating.
        honest: the framework's result in the problem's dtype.
        shaken: the float64 result of inputs moved by one rounding.
        upcast: whether `reference` really was computed in float64.
        wider: a factor on the budget.
        want_exact: the inputs are small integers: ask for equality where the framework attains it.
    """
    if not honest.dtype.is_floating_point:
        return Budget(reference, honest.dtype, 0.0, 0.0, exact=True)
    unit = torch.finfo(honest.dtype).eps / 2
    seen = distance(honest, reference)
    moved = seen if shaken is None else distance(shaken, reference)
    representable = bool((reference.to(honest.dtype).to(torch.float64) == reference.to(torch.float64)).all())
    exact = want_exact and upcast and representable and seen.worst == 0
    more = wider if upcast else wider * _ORDER_UNKNOWN
    total = more * _SLACK_TOTAL.get(honest.dtype, 3.0) * max(seen.total, moved.total, unit)
    worst = more * _SLACK_WORST.get(honest.dtype, 4.0) * max(seen.worst, moved.worst, unit)
    return Budget(reference, honest.dtype, 0.0 if exact else total, 0.0 if exact else worst, exact)


def complaint(y: Tensor, allowed: Budget) -> dict[str, str] | None:
    """None when y is within the budget; otherwise where it is not, with the values seen and expected."""
    if allowed.holes is not None:
        y = y.to(allowed.holes.device).masked_fill(allowed.holes, 0)
    if allowed.exact and torch.equal(y.to(allowed.reference.device), allowed.reference.to(y.dtype)):
        return None
    seen = distance(y, allowed.reference)
    if not allowed.exact and seen.total <= allowed.total and seen.worst <= allowed.worst:
        return None
    return {
        "element": str(list(seen.at)),
        "seen": f"{y[seen.at].item():.9g}" if y.numel() else "nothing",
        "expected": f"{allowed.reference[seen.at].item():.9g}" if y.numel() else "nothing",
        "relative error": f"{seen.total:.3g}, allowed {allowed.total:.3g}",
        "worst element": f"{seen.worst:.3g}, allowed {allowed.worst:.3g}",
    }
