"""How long groups have to be so that rescaling hides behind the products: granularity chosen by machine.

With one scale for every g columns each output pays, once a group, a conversion, a product of two scales and a
multiply-add on scalar units (costs.FOLD), while the tensor cores do g multiply-adds for it. Both units work side by
side, so what counts is the ratio of the two times,

    exposed = c rho / g        c rho: scalar seconds of a group over the tensor cores' seconds of a multiply-add

Below 1 the rescale hides; above it the product takes that many times as long. rho, tensor over scalar rate, differs
eightfold between machines (L40S 8, RTX 3090 16, H200 30, A100 64), and with it the shortest group that costs nothing.
The observation is APEX4's (arXiv 2606.08761); the model and its instruction counts are ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from nybble import costs
from nybble.errors import Unsupported
from nybble.planner.machines import Machine

GROUPS = (32, 64, 128)


def unit_of(machine: Machine) -> str:
    """Where the products of 4-bit codes run: int4 where it exists, else int8, widened in registers.

    Raises:
        Unsupported: the machine has neither.
    """
    for unit in ("int4", "int8"):
        if unit in machine.units:
            return unit
    raise Unsupported(f"{machine.name} has no integer products")


def rho(machine: Machine) -> float:
    """Tensor-core rate over scalar rate, both in operations a second (a multiply-add is two)."""
    return machine.units[unit_of(machine)] / (2 * machine.scalars["float"])


def exposed(machine: Machine, group: int) -> float:
    """Scalar seconds over tensor-core seconds of one group of one output; above 1 the rescale is what takes time."""
    scalar = sum(count / machine.scalars[kind] for kind, count in costs.FOLD.items())
    return scalar / (2 * group / machine.units[unit_of(machine)])


def slowdown(machine: Machine, group: int) -> float:
    """How many times as long a product with groups takes as one with a scale for every row, when products bind it."""
    return max(1.0, exposed(machine, group))


def choose(machine: Machine, groups: Sequence[int] = GROUPS) -> int | None:
    """The shortest of `groups` whose rescale hides on this machine; None where only scales of whole rows do."""
    return next((group for group in sorted(groups) if exposed(machine, group) < 1), None)
