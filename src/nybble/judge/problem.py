"""A problem: what is to be computed, by trusted code that runs in the judge's process.

KernelBench's form: a file with `Model`, `get_inputs()` and `get_init_inputs()`; or `file.py:function` and
`package.module:function`, where the module also has `get_inputs()`. Nothing of it reaches a candidate but values.

What may be varied is found by asking the reference: values, weights, shapes and strides for which it gives finite
results are fair questions, others are not asked. Inputs with structure (symmetric, triangular, mostly zero) are only
scaled, for a kernel may rely on structure that the problem states.
"""

from __future__ import annotations

import copy
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nybble.errors import BadInput
from nybble.judge.agreement import Budget, budget
from nybble.judge.wire import to_bytes

State = dict[str, Tensor]
_HEADROOM = 1024.0
UNFAIR = (RuntimeError, ValueError, IndexError, TypeError, NotImplementedError)
"""What a reference raises where it does not take what it is asked: such a question is not put to candidates."""


@dataclass(frozen=True)
class Case:
    """One question: inputs, weights (None: as constructed), whether integers make equality the measure, by what factor
    the budget is wider, where inputs are large, and other inputs that say where not to look: at results that differ
    between them."""

    label: str
    inputs: list[Any]
    state: State | None = None
    exact: bool = False
    wider: float = 1.0
    apart: tuple[list[Any], ...] = ()


@dataclass(frozen=True)
class Expected:
    """The answer: a budget for each output, the inputs as the reference leaves them, whether it returned a sequence."""

    budgets: list[Budget]
    after: list[Any]
    state_after: State
    sequence: bool
    touched: frozenset[int] = field(default_factory=frozenset)


def split(spec: str, default: str) -> tuple[str, str]:
    """(file or module, name) of FILE, FILE:NAME or MODULE:NAME."""
    place, colon, name = spec.rpartition(":")
    return (place, name) if colon and "/" not in name else (spec, default)


def seed_of(seed: int, label: str) -> int:
    """A seed of its own for each purpose, drawn from the verdict's seed."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{label}".encode(), digest_size=8).digest(), "little") >> 1


@contextmanager
def seeded(seed: int) -> Iterator[torch.Generator]:
    """torch's global generator seeded inside the block and as it was after it; gives one of the block's own, too."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield torch.Generator().manual_seed(seed)


class Problem:
    """A loaded problem on a device."""

    # What was asked last: the same question, or the places that the same inputs reach, often follow.
    _last: tuple[Case, Expected | None] | None = None
    _apart: tuple[tuple[list[Any], ...], list[Tensor]] | None = None

    def __init__(self, spec: str, device: str = "cpu") -> None:
        """Import it.

        Raises:
            BadInput: no such file, it does not import, or it lacks a name.
        """
        self.spec, self.device = spec, device
        self.path, self.name = split(spec, "Model")
        self.module = _import(self.path)
        self.make = _named(self.module, self.name, spec)
        self.get_inputs: Callable[[], Any] = _named(self.module, "get_inputs", spec)
        self.get_init: Callable[[], Any] = getattr(self.module, "get_init_inputs", list)
        self.function = not isinstance(self.make, type)
        self.model: Any = None
        self.init: list[Any] = []
        self.state: State = {}

    def build(self, seed: int) -> None:
        """Construct the model; its weights are the ones every candidate gets."""
        with seeded(seed_of(seed, "init")):
            with _told(self.spec, "get_init_inputs()"):
                self.init = list(self.get_init())
            with _told(self.spec, f"{self.name}(*get_init_inputs())"):
                self.model = self.make if self.function else self.make(*copy.deepcopy(self.init))
        if isinstance(self.model, torch.nn.Module):
            self.model.to(self.device).eval()
            self.state = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        self._last = self._apart = None

    def inputs(self, seed: int) -> list[Any]:
        """Fresh inputs as the problem makes them."""
        with seeded(seed), _told(self.spec, "get_inputs()"):
            values = self.get_inputs()
        if not isinstance(values, list | tuple):
            raise BadInput(f"{self.spec}: get_inputs() gave a {type(values).__name__}, expected a list")
        return [v.detach().cpu() if isinstance(v, Tensor) else v for v in values]

    def cost(self, case: Case) -> tuple[float, float] | None:
        """(operations, bytes) that a call must take at least, where the problem knows; None: to be found out."""
        return None

    def extra(self, seed: int) -> list[Case]:
        """Cases that the problem brings along, of other shapes."""
        return []

    def expect(self, case: Case) -> Expected | None:
        """The answer, or None where the reference raises or gives what is not finite: then the question is not fair."""
        if self._last is None or self._last[0] is not case:  # first asked whether it is fair, then what the answer is
            self._last = case, self._expect(case)
        return self._last[1]

    def _expect(self, case: Case) -> Expected | None:
        try:
            native, given, held = self._run(case, upcast=False)
        except UNFAIR:
            return None
        try:
            wide, _, _ = self._run(case, upcast=True)
            shaken, _, _ = self._run(_shaken(case, self.state), upcast=True)
            upcast = True
        except (RuntimeError, ValueError, TypeError, NotImplementedError):
            wide, shaken, upcast = native, native, False
        results = list(zip(_sequence(wide), _sequence(native), _sequence(shaken), strict=True))
        if not all(isinstance(v, Tensor) for row in results for v in row):
            return None
        holes = self._reached(case, upcast)
        if holes:
            results = [tuple(v.masked_fill(h, 0) for v in row) for row, h in zip(results, holes, strict=True)]
        if not all(finite(v) for row in results for v in row[:2]):
            return None
        budgets = [budget(*row, upcast, case.exact, case.wider) for row in results]
        if holes:
            budgets = [replace(b, holes=h) for b, h in zip(budgets, holes, strict=True)]
        touched = frozenset(i for i, v in enumerate(given) if isinstance(v, Tensor) and not same(v, case.inputs[i]))
        return Expected(budgets, given, held, isinstance(native, list | tuple), touched)

    def _reached(self, case: Case, upcast: bool) -> list[Tensor]:
        """For each output the places where it differs between the case's `apart` inputs."""
        if self._apart is None or self._apart[0] is not case.apart:
            runs = [_sequence(self._run(replace(case, inputs=inputs), upcast)[0]) for inputs in case.apart]
            places = [torch.stack([v != rest[0] for v in rest]).any(0) for rest in zip(*runs, strict=True)]
            self._apart = case.apart, places
        return self._apart[1]

    def within(self, case: Case) -> bool:
        """Whether indices among the inputs stay inside what they point into, by trying it on a CPU, which raises where
        they do not: on a GPU that ends every later call of the process."""
        if self.device == "cpu" or not any(isinstance(v, Tensor) and not _calculates(v) for v in case.inputs):
            return True
        try:
            self._run(case, upcast=False, device="cpu")
        except UNFAIR:
            return False
        return True

    def once(self, case: Case) -> Any:
        """The framework's own result in the problem's precision."""
        return self._run(case, upcast=False)[0]

    def try_out(self, case: Case) -> None:
        """Raise BadInput if the reference fails on its own inputs: then no candidate can be asked anything."""
        with _told(self.spec, f"{self.name} on its own inputs"):
            self.once(case)

    def _run(self, case: Case, upcast: bool, device: str | None = None) -> tuple[Any, list[Any], State]:
        """(result, inputs afterwards, state afterwards), nothing of the case or the problem changed."""
        place = device or self.device
        given = [_prepare(v, place, upcast) for v in case.inputs]
        model = self.model if self.function else copy.deepcopy(self.model)
        if isinstance(model, torch.nn.Module):
            model = model.to(place).double() if upcast else model.to(place)
            model.load_state_dict(self.state if case.state is None else case.state)
        with torch.no_grad():
            result = model(*given)
        held = dict(model.state_dict()) if isinstance(model, torch.nn.Module) else {}
        back = [v.cpu() if isinstance(v, Tensor) else v for v in given]
        result = [_bare(v) for v in result] if isinstance(result, list | tuple) else _bare(result)
        return result, back, {k: v.cpu() for k, v in held.items()}


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits, NaN included."""
    return a.shape == b.shape and a.dtype == b.dtype and to_bytes(a) == to_bytes(b)


def _calculates(value: Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex


def _bare(value: Any) -> Any:
    return value.detach() if isinstance(value, Tensor) else value


def _sequence(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def finite(value: Tensor) -> bool:
    """Finite, and not so near to overflow that honest formulas differ in whether they do."""
    if not value.dtype.is_floating_point or value.numel() == 0:
        return True
    return float(value.abs().max()) < torch.finfo(value.dtype).max / _HEADROOM


def _shaken(case: Case, own: State) -> Case:
    """Every floating value moved by up to one float32 rounding, in float64: what no algorithm can be asked to beat."""
    g = torch.Generator().manual_seed(1)

    def shake(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.dtype.is_floating_point:
            return value
        unit = min(torch.finfo(value.dtype).eps, torch.finfo(torch.float32).eps) / 2
        move = (2 * torch.rand(value.shape, generator=g, dtype=torch.float64) - 1).to(value.device)
        return value.double() * (1 + unit * move)

    state = own if case.state is None else case.state
    return Case(case.label, [shake(v) for v in case.inputs], {k: shake(v) for k, v in state.items()})


def _prepare(value: Any, device: str, upcast: bool) -> Any:
    if not isinstance(value, Tensor):
        return copy.deepcopy(value)
    moved = value.detach().clone().to(device)
    return moved.double() if upcast and moved.dtype.is_floating_point else moved


@contextmanager
def _told(spec: str, what: str) -> Iterator[None]:
    """Whatever the problem's own code raises is the problem's fault, and is said so."""
    try:
        yield
    except Exception as error:
        raise BadInput(f"{spec}: {what} raises {type(error).__name__}: {error}") from error


def _import(path: str) -> ModuleType:
    try:
        if not path.endswith(".py"):
            return importlib.import_module(path)
        if not Path(path).is_file():
            raise BadInput(f"{path}: no such file")
        spec = importlib.util.spec_from_file_location(f"nybble_problem_{Path(path).stem}", path)
        if spec is None or spec.loader is None:
            raise BadInput(f"{path} is no Python file")
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    except BadInput:
        raise
    except Exception as error:
        raise BadInput(f"{path} does not import: {type(error).__name__}: {error}") from error
    return module


def _named(module: ModuleType, name: str, spec: str) -> Any:
    if not hasattr(module, name):
        raise BadInput(f"{spec} has no {name!r}; a problem needs Model (or the function named) and get_inputs")
    return getattr(module, name)
