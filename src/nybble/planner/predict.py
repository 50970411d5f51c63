"""How long a call takes, and what binds it: Tensor-Memory Equilibrium, an extended roofline.

    T = max(alpha F / P, beta Q / B, sum_c gamma_c / P_c) + launches * t        for each step of a route

F operations on multiply units of rate P, Q bytes at bandwidth B, gamma_c instructions of class c on scalar units, t a
launch. Steps follow one another, so their times add. Where products run on the scalar units (no tensor cores, or fp32
beside them), decoding and multiplying take turns, and their terms add too; so do integer products and the rescaling of
their sums for each group (costs.FOLD says why).

The maximum says that a kernel overlaps its three kinds of work perfectly; it bounds the best kernel from below, and a
real one can only be slower. arXiv 2606.06510 calls the first three terms alpha, beta and gamma.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from nybble.costs import Cost, Route
from nybble.errors import Unsupported
from nybble.planner.machines import Machine


@dataclass(frozen=True)
class Terms:
    """The four terms of one step, in seconds, and what the third is spent on; `turns` is its part that takes turns with
    the first."""

    compute: float
    memory: float
    scalar: float
    launch: float
    unit: str
    work: str
    shared: bool
    turns: float = 0.0

    @property
    def seconds(self) -> float:
        """The step's time."""
        beside = self.scalar - self.turns
        busy = self.compute + self.scalar if self.shared else max(self.compute, beside) + self.turns
        return max(busy, self.memory) + self.launch

    @property
    def bound(self) -> str:
        """The largest term, in words."""
        named = {
            self.memory: "memory bandwidth",
            self.scalar: f"{self.work} on scalar units",
            self.compute: f"{self.unit} products",
            self.launch: "launching",
        }
        return named[max(named)]


@dataclass(frozen=True)
class Prediction:
    """What is expected of one route on one machine.

    Attributes:
        machine, route: names.
        native: whether it computes in the format asked for.
        seconds: predicted.
        bound: what binds the longest step.
        steps: the terms of each step.
        from_line: whether `seconds` holds what real kernels were measured to add; otherwise it bounds the best one.
    """

    machine: str
    route: str
    native: bool
    seconds: float
    bound: str
    steps: tuple[Terms, ...]
    from_line: bool = False

    @property
    def roofline(self) -> float:
        """The terms' time without launches."""
        return sum(step.seconds - step.launch for step in self.steps)

    @property
    def path(self) -> str:
        """native or emulated."""
        return "native" if self.native else "emulated"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def terms(cost: Cost, machine: Machine) -> Terms:
    """The terms of one step; the machine has the step's unit."""
    work = "rescaling" if "convert" in cost.gamma and cost.flops else "decoding" if cost.flops else "rounding"
    work = "reconstruction" if "fp64" in cost.gamma or "int32" in cost.gamma else work
    compute = cost.alpha * cost.flops / machine.units[cost.unit] if cost.flops else 0.0
    scalar, turns = (sum(n / machine.scalars[kind] for kind, n in each.items()) for each in (cost.gamma, cost.turns))
    shared = machine.shared or cost.unit == "fp32"
    memory = cost.beta * cost.nbytes / machine.bandwidth
    return Terms(compute, memory, scalar, cost.launches * machine.launch, cost.unit, work, shared, turns)


def lacks(route: Route, machine: Machine) -> str | None:
    """What the machine lacks for a route, or None."""
    units = sorted(route.units - set(machine.units))
    classes = sorted({kind for step in route.steps for kind in step.gamma} - set(machine.scalars))
    if units:
        return f"no {' or '.join(units)} products on {machine.name}"
    return f"no rate for {' or '.join(classes)} instructions on {machine.name}" if classes else None


def predict(route: Route, machine: Machine) -> Prediction:
    """The time of one route, and what binds it.

    Raises:
        Unsupported: the machine lacks a unit.
    """
    missing = lacks(route, machine)
    if missing:
        raise Unsupported(f"{route.name}: {missing}")
    steps = tuple(terms(step, machine) for step in route.steps)
    longest = max(steps, key=lambda step: step.seconds)
    seconds = sum(step.seconds for step in steps)
    return Prediction(machine.name, route.name, route.native, seconds, longest.bound, steps)


SAME = 0.01
"""Predictions nearer than that to each other are equal: no rate of a machine is known better."""


def best(routes: Sequence[Route], machine: Machine, what: str = "this") -> Prediction:
    """The fastest route that the machine can take; a native one is preferred to an emulation as fast (SAME).

    Raises:
        Unsupported: none can be taken, with every one's reason.
    """
    able = [predict(route, machine) for route in routes if lacks(route, machine) is None]
    if not able:
        reasons = {route.name: lacks(route, machine) or "" for route in routes}
        raise Unsupported(f"no way to {what} on {machine.name}", reasons)
    return min(able, key=lambda p: p.seconds * (1.0 if p.native else 1.0 + SAME))


def ratio(routes: Iterable[Route], baseline: Route, machine: Machine) -> float:
    """Speed over a baseline: its time divided by the best route's."""
    return predict(baseline, machine).seconds / best(list(routes), machine).seconds
