"""nybble's own ops as problems: `op:linear` has the reference, the cases and the agreement that the op declares.

`op:linear/nvfp4,mxfp4` has those of its cases whose label begins with one of these words. One case, chosen by the
seed, is the problem's input; its plain tensors are drawn anew for each question, and quantized weights stay. Others of
its cases are asked as other shapes. The candidate is a function with the op's arguments, such as
`nybble.ops.linear:linear` itself or a kernel that wants to replace it.
"""

from __future__ import annotations

import copy
import random
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from nybble.errors import BadInput
from nybble.judge.agreement import Budget, condition
from nybble.judge.problem import UNFAIR, Case, Expected, Problem, finite, same, seed_of
from nybble.ops._declare import Op

PREFIX = "op:"
_ASKED, _LARGE = 16, 64


def open_problem(spec: str, device: str) -> Problem:
    """A file, a function, or one of nybble's ops."""
    return OpProblem(spec, device) if spec.startswith(PREFIX) else Problem(spec, device)


class OpProblem(Problem):
    """An op's declaration in a problem's clothes."""

    def __init__(self, spec: str, device: str = "cpu") -> None:
        place, _, words = spec.removeprefix(PREFIX).partition("/")
        self.spec, self.device, self.path = spec, device, f"nybble.ops.{place}"
        try:
            self.module = import_module(self.path)
        except ImportError as error:
            raise BadInput(f"{spec}: nybble has no such op ({error})") from error
        ops = [value for value in vars(self.module).values() if isinstance(value, Op)]
        if not ops:
            raise BadInput(f"{spec}: {self.path} declares no op")
        self.op, self.name = ops[0], ops[0].name
        self.make = self.op.reference
        self.function, self.model, self.init, self.state = True, self.op.reference, [], {}
        asked = [args for label, args in self.op.cases(device) if label.startswith(tuple(words.split(",")))]
        self.all_cases = [args for args in asked if any(_wide(v) for v in args)]
        if not self.all_cases:
            raise BadInput(f"{spec}: {self.name} declares no case that begins with {words!r}")
        self.given: tuple[Any, ...] = self.all_cases[0]

    def build(self, seed: int) -> None:
        """Choose the case."""
        large = [args for args in self.all_cases if any(_wide(v) and v.numel() >= _LARGE for v in args)]
        self.given = random.Random(seed_of(seed, "case")).choice(large or self.all_cases)
        result = self.op.reference(*copy.deepcopy(self.given))
        odd = [v for v in (result if isinstance(result, list | tuple) else [result]) if not isinstance(v, Tensor)]
        if odd:
            raise BadInput(f"{self.spec}: its result is a {type(odd[0]).__name__}, and answers are compared as tensors")

    def inputs(self, seed: int) -> list[Any]:
        """The case's arguments, its plain floating tensors drawn anew."""
        g = torch.Generator().manual_seed(seed)
        return [_draw(v, g) if _wide(v) else _home(v) for v in self.given]

    def cost(self, case: Case) -> tuple[float, float]:
        """What the op declares."""
        cost = self.op.cost(*case.inputs)
        return cost.flops, cost.nbytes

    def extra(self, seed: int) -> list[Case]:
        """Other cases of the op."""
        draw = random.Random(seed_of(seed, "extra"))
        chosen = draw.sample(range(len(self.all_cases)), min(_ASKED, len(self.all_cases)))
        return [Case(f"case {i} of {self.name}", [_home(v) for v in self.all_cases[i]]) for i in chosen]

    def _expect(self, case: Case) -> Expected | None:
        """The reference's result, with the op's own agreement as the budget: as many times of it as the result of
        float32 moves more than ordinarily when inputs move by a rounding. exp(x) at 10^4 is not known to 2^-18."""
        given = self._there(case.inputs)
        try:
            result: Any = self.op.reference(*given)
            size = self.op.size(*given)
            moves = any(map(_moves, case.inputs))
            other: Any = self.op.reference(*self._there(_moved(case.inputs))) if moves else result
        except UNFAIR:
            return None
        outputs, others = (list(v) if isinstance(v, list | tuple) else [v] for v in (result, other))
        if not all(finite(v) for v in outputs):
            return None
        budgets = [self._budget(v, size, w) for v, w in zip(outputs, others, strict=True)]
        after = [_home(v) for v in given]
        touched = frozenset(
            i for i, v in enumerate(after) if isinstance(v, Tensor) and not same(v, case.inputs[i].cpu())
        )
        return Expected(budgets, after, {}, isinstance(result, list | tuple), touched)

    def _there(self, inputs: list[Any]) -> tuple[Any, ...]:
        return tuple(v.to(self.device, copy=True) if isinstance(v, Tensor) else copy.deepcopy(v) for v in inputs)

    def _budget(self, reference: Tensor, size: float, moved: Tensor) -> Budget:
        norm = float(reference.double().norm())
        limit = self.op.agreement.limits[reference.dtype] * (max(1.0, size / norm) if norm else 1.0)
        if moved is not reference and reference.dtype == torch.float32:
            limit *= condition(moved, reference)
        return Budget(reference.double().cpu(), reference.dtype, limit, float("inf"))


def _wide(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype.is_floating_point and value.numel() > 0


def _moves(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype == torch.float32


def _moved(inputs: list[Any]) -> list[Any]:
    """Every float32 value replaced by its neighbour above or below."""
    g = torch.Generator().manual_seed(1)

    def move(value: Tensor) -> Tensor:
        up = torch.randint(2, value.shape, generator=g, dtype=torch.bool).to(value.device)
        return value.nextafter(torch.where(up, torch.inf, -torch.inf))

    return [move(v) if _moves(v) else v for v in inputs]


def _draw(value: Tensor, g: torch.Generator) -> Tensor:
    """Standard normal, with the strides of the case; an expanded tensor is drawn whole."""
    if 0 in value.stride():
        return torch.randn(value.shape, generator=g).to(value.dtype)
    fresh = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    return fresh.copy_(torch.randn(value.shape, generator=g))


def _home(value: Any) -> Any:
    return value.cpu() if isinstance(value, Tensor) else value
