"""Questions beyond the one the problem shows: other values, weights, shapes, strides; each from a seed.

Every function gives cases that are candidates for asking; `Problem.expect` then says which the reference answers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Generator, Tensor

from nybble.judge.problem import Case, Problem, State, seed_of

_SAMPLE = 1 << 14
Draw = Callable[[Tensor, Generator], Tensor]


def given(problem: Problem, seed: int, label: str = "as given") -> Case:
    """The problem's own inputs, freshly drawn."""
    return Case(label, problem.inputs(seed_of(seed, label)))


def structured(value: Tensor) -> bool:
    """Whether a tensor's values follow a pattern that a kernel may rely on: symmetric, many zeros, few values."""
    if value.numel() < 2 or not value.dtype.is_floating_point:
        return True
    if value.ndim >= 2 and value.shape[-1] == value.shape[-2] > 1 and torch.equal(value, value.mT):
        return True
    places = torch.randint(value.numel(), (min(value.numel(), _SAMPLE),), generator=torch.Generator().manual_seed(0))
    sample = value.reshape(-1)[places].double()
    return float((sample == 0).double().mean()) > 1 / 16 or sample.unique().numel() < min(sample.numel(), 1024) / 8


def _normal(v: Tensor, g: Generator) -> Tensor:
    return torch.randn(v.shape, generator=g)


def _one_hot(v: Tensor, g: Generator) -> Tensor:
    rows = v.reshape(-1, v.shape[-1]) if v.ndim else v.reshape(1, 1)
    at = torch.randint(rows.shape[1], (rows.shape[0], 1), generator=g)
    return torch.zeros(rows.shape).scatter_(1, at, 1.0).reshape(v.shape)


def _cancel(v: Tensor, g: Generator) -> Tensor:
    """Neighbours along the last axis that cancel but for a thousandth."""
    x = torch.randn(v.shape, generator=g)
    half = x[..., : x.shape[-1] // 2]
    x[..., half.shape[-1] : 2 * half.shape[-1]] = -half + 1e-3 * torch.randn(half.shape, generator=g)
    return x


DRAWS: dict[str, Draw] = {
    "normal": _normal,
    "tiny": lambda v, g: 1e-3 * v.float(),
    "large": lambda v, g: 1e3 * v.float(),
    "negated": lambda v, g: -v.float(),
    "shifted": lambda v, g: v.float() + 3.0,
    "sorted": lambda v, g: v.float().sort(-1)[0] if v.ndim else v.float(),
    "one hot": _one_hot,
    "cancelling": _cancel,
    "rows of different size": lambda v, g: _normal(v, g) * (10.0 ** _row_exponents(v, g)),
}
_FOR_RANGE = ("large", "rows of different size")
KEEPS_STRUCTURE = ("tiny", "large", "negated")
EXACT_DRAWS: dict[str, Draw] = {
    "zeros and ones": lambda v, g: torch.randint(2, v.shape, generator=g).float(),
    "small integers": lambda v, g: torch.randint(-3, 4, v.shape, generator=g).float(),
}


def _row_exponents(v: Tensor, g: Generator) -> Tensor:
    shape = (*v.shape[:-1], 1) if v.ndim else ()
    return torch.randint(-2, 3, shape, generator=g).float()


def redrawn(problem: Problem, seed: int, draws: dict[str, Draw], exact: bool = False) -> Iterator[list[Case]]:
    """For each distribution the case, and the same with magnitudes for a reference that takes no negative values."""
    base = problem.inputs(seed_of(seed, "base"))
    plain = not any(structured(v) for v in base if isinstance(v, Tensor) and v.dtype.is_floating_point)
    for name, draw in draws.items():
        if not plain and name not in KEEPS_STRUCTURE:
            continue
        g = torch.Generator().manual_seed(seed_of(seed, name))
        values = [draw(v, g).to(v.dtype) if _floating(v) else v for v in base]
        state = integer_state(problem, g) if exact else None
        wider = _wider(values) if name in _FOR_RANGE else 1.0
        yield [
            Case(name, values, state, exact, wider),
            Case(f"{name}, magnitudes", [v.abs() if _floating(v) else v for v in values], state, exact, wider),
        ]


def _wider(values: list[Any]) -> float:
    """exp(x - c) has an error of one rounding of x, however it is made: large inputs ask for range, not precision."""
    return max([1.0, *(float(v.abs().max()) / 8 for v in values if _floating(v) and v.numel())])


def new_state(problem: Problem, seed: int) -> State:
    """Other weights: values in another order and half as large again; constants (bias 0, gain 1) become random."""
    g = torch.Generator().manual_seed(seed_of(seed, "state"))
    return {name: _other_weight(v, g) for name, v in problem.state.items()}


def _other_weight(value: Tensor, g: Generator) -> Tensor:
    if not value.dtype.is_floating_point or value.numel() == 0:
        return value.clone()
    flat = value.cpu().float().reshape(-1)
    if bool((flat == flat[0]).all()):
        fresh = (
            flat * (0.5 + torch.rand(flat.shape, generator=g))
            if flat[0]
            else 0.5 * torch.randn(flat.shape, generator=g)
        )
    else:
        fresh = 1.5 * flat[torch.randperm(flat.numel(), generator=g)]
    return fresh.reshape(value.shape).to(value.dtype)


def integer_state(problem: Problem, g: Generator) -> State:
    """Weights of -1, 0 and 1."""
    draw = lambda v: torch.randint(-1, 2, v.shape, generator=g).to(v.dtype)  # noqa: E731 - used once, in the next line
    return {k: draw(v) if v.dtype.is_floating_point else v.clone() for k, v in problem.state.items()}


def shapes(problem: Problem, seed: int, most: int = 6) -> Iterator[Case]:
    """Sizes next to the given ones, primes and 1: every axis that has a size changes together."""
    yield from problem.extra(seed)
    base = problem.inputs(seed_of(seed, "shapes"))
    tensors = [v for v in base if isinstance(v, Tensor)]
    if any(structured(v) for v in tensors if v.dtype.is_floating_point):
        return
    g = torch.Generator().manual_seed(seed_of(seed, "resample"))
    sizes = sorted({n for v in tensors for n in v.shape if n > 1})
    asked = 0
    for new in (lambda n: n - 1, lambda n: n + 1, _prime_below, lambda n: 1):
        for old in sizes:
            if asked == most:
                return
            case = Case(f"size {old} → {new(old)}", [_resized(v, old, new(old), g) for v in base])
            if problem.within(case) and problem.expect(case) is not None:
                asked += 1
                yield case


def no_rows(problem: Problem, seed: int) -> Case | None:
    """The first axis of the first input of size 0, with every axis that has its size; None without such an axis."""
    base = problem.inputs(seed_of(seed, "no rows"))
    rows = next((v.shape[0] for v in base if isinstance(v, Tensor) and v.ndim and v.shape[0] > 0), None)
    if rows is None:
        return None
    g = torch.Generator().manual_seed(0)
    case = Case(f"size {rows} → 0", [_resized(v, rows, 0, g) for v in base])
    return case if problem.within(case) else None


def holed(problem: Problem, seed: int) -> Iterator[Case]:
    """One element of an input NaN, infinite, minus infinite; the places that it reaches are left out."""
    base = problem.inputs(seed_of(seed, "holed"))
    for number, value in enumerate(base):
        if not _floating(value) or structured(value):
            continue
        g = torch.Generator().manual_seed(seed_of(seed, f"hole {number}"))
        at, top = int(torch.randint(value.numel(), (1,), generator=g)), 8.0 * float(value.abs().max())
        with_one = lambda x: [_replaced(v, at, x) if i == number else v for i, v in enumerate(base)]  # noqa: E731, B023
        apart = tuple(with_one(x) for x in (float(value.reshape(-1)[at]), top, -top))
        for special in ("nan", "inf", "-inf"):
            yield Case(f"one element of input {number} {special}", with_one(float(special)), apart=apart)


def _replaced(value: Tensor, at: int, new: float) -> Tensor:
    other = value.clone().contiguous()
    other.view(-1)[at] = new
    return other


def _resized(v: Any, old: int, new: int, g: Generator) -> Any:
    if not isinstance(v, Tensor) or not v.numel():
        return v
    shape = [new if n == old else n for n in v.shape]
    flat = v.reshape(-1)
    count = int(torch.tensor(shape).prod()) if shape else 1
    return flat[torch.randint(flat.numel(), (count,), generator=g)].reshape(shape)


def _prime_below(n: int) -> int:
    prime = (m for m in range(n - 2, 1, -1) if all(m % d for d in range(2, int(m**0.5) + 1)))
    return next(prime, 1)


def strides(problem: Problem, seed: int) -> Iterator[Case]:
    """The same values in other places: transposed storage, every second element, rows with a gap."""
    base = problem.inputs(seed_of(seed, "strides"))
    for name, lay in (
        ("transposed storage", _transposed),
        ("every second element", _second),
        ("rows with gaps", _gaps),
    ):
        yield Case(name, [lay(v) if isinstance(v, Tensor) and v.ndim else v for v in base])


def _transposed(v: Tensor) -> Tensor:
    return v.transpose(-1, -2).contiguous().transpose(-1, -2) if v.ndim >= 2 else v


def _second(v: Tensor) -> Tensor:
    wide = torch.zeros((*v.shape[:-1], 2 * v.shape[-1]), dtype=v.dtype)
    wide[..., ::2] = v
    return wide[..., ::2]


def _gaps(v: Tensor) -> Tensor:
    wide = torch.zeros((*v.shape[:-1], v.shape[-1] + 8), dtype=v.dtype)
    wide[..., : v.shape[-1]] = v
    return wide[..., : v.shape[-1]]


def _floating(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point
