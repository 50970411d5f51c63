"""What an op declares, and what an implementation of it declares.

An op is a numeric contract: a reference in plain torch, the agreement that every implementation owes it, the cases
tests and benchmarks walk, what it costs. An implementation is a function with the same arguments that says when it
can serve. Modules of implementations are imported when a call first needs their device, so that nothing is probed
or compiled at import.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, Literal

import torch
from torch import Tensor

from nybble import costs
from nybble.errors import Mismatch

Cost = costs.Cost
Promise = Literal["none", "run-to-run", "batch-invariant", "cross-machine"]


@dataclass(frozen=True)
class Agreement:
    """How near to the reference a result must be: ||y - ref|| / ||ref|| at most `limits[dtype of y]`.

    Scale-free. An op may give the size its result has when terms do not cancel; where that is larger than ||ref||
    the error counts against it, since no summation order can do better. Where the reference is not finite the
    result must be the same non-finite value.
    """

    limits: Mapping[torch.dtype, float]

    def distance(self, y: Tensor, reference: Tensor, size: float = 0.0) -> float:
        """||y - ref|| / max(||ref||, size) in float64 over the finite part; infinite where the rest differs."""
        a, b = y.double(), reference.double()
        finite = b.isfinite()
        if not torch.equal(finite, a.isfinite()) or not torch.equal(a[~finite].nan_to_num(), b[~finite].nan_to_num()):
            return float("inf")
        error, size = float((a - b)[finite].norm()), max(float(b[finite].norm()), size)
        return 0.0 if error == 0 else error / size if size else float("inf")

    def check(self, y: Tensor, reference: Tensor, what: str, size: float = 0.0) -> float:
        """The distance; raises Mismatch with shapes and values where it is beyond the limit."""
        if y.shape != reference.shape or y.dtype != reference.dtype:
            raise Mismatch(f"{what}: {y.dtype} {tuple(y.shape)}, expected {reference.dtype} {tuple(reference.shape)}")
        distance, limit = self.distance(y, reference, size), self.limits[y.dtype]
        if not distance <= limit:
            worst = int((y.double() - reference.double()).abs().nan_to_num(float("inf")).argmax())
            seen, expected = float(y.flatten()[worst]), float(reference.flatten()[worst])
            raise Mismatch(
                f"{what}: relative error {distance:.3g}, allowed {limit:.3g}; "
                f"element {worst} of {tuple(y.shape)} is {seen:.6g}, expected {expected:.6g}"
            )
        return distance


@dataclass(frozen=True)
class Implementation:
    """Code that fulfils an op's contract on some machine.

    Attributes:
        name: <operation>_<types>_<granularity>_<suffix>.
        run: takes the op's arguments, returns its result.
        supports: takes the same arguments, returns None when willing, else the reason why not, values included; by
            default it is always willing.
        native: whether it computes in the format; otherwise it is an emulation through wider numbers.
        layout: takes the weight, returns the layout it wants it in (None: any as it is).
        note: what has to be known before relying on it ("compiled, never run"); documents and tables show it.
    """

    name: str
    run: Callable[..., Any]
    supports: Callable[..., str | None] = lambda *args: None
    native: bool = field(kw_only=True)
    layout: Callable[..., Any] = lambda *args: None
    note: str = ""


@dataclass(frozen=True)
class Op:
    """A numeric contract and where its implementations are.

    Attributes:
        name: the op's name.
        reference: the definition in plain torch.
        agreement: what every implementation owes the reference.
        cases: yields (label, arguments) for tests and benchmarks on a device.
        cost: takes the op's arguments, returns a Cost.
        homes: device type -> module whose IMPLEMENTATIONS (in order of preference) serve it.
        fallback: serves everywhere when nothing else is willing.
        promise: what is promised about equal bits.
        size: takes the op's arguments, returns the norm its result has when terms do not cancel (0: it says nothing).
    """

    name: str
    reference: Callable[..., Any]
    agreement: Agreement
    cases: Callable[..., Any]
    cost: Callable[..., Cost]
    homes: Mapping[str, str]
    fallback: Implementation
    promise: Promise = "none"
    size: Callable[..., float] = lambda *args: 0.0

    def check(self, y: Tensor, args: tuple[Any, ...], what: str) -> float:
        """The distance of y from the reference on these arguments; raises Mismatch beyond the agreement."""
        return self.agreement.check(y, self.reference(*args), what, self.size(*args))

    def implementations(self, device: str) -> list[Implementation]:
        """What may serve on a device type, in order of preference."""
        home = self.homes.get(device)
        found = () if home is None else import_module(home).IMPLEMENTATIONS
        return [*found, self.fallback]
