"""How long groups have to be for rescaling not to outweigh the products: granularity chosen by machine.

With one scale for every g columns each output pays, once a group, a conversion, a product of two scales and a
multiply-add on scalar units (costs.FOLD), while the tensor cores do g multiply-adds for it. What counts is the ratio
of the two times,

    exposed = c rho / g        c rho: scalar seconds of a group over the tensor cores' seconds of a multiply-add

rho, tensor over scalar rate, differs eightfold between machines (L40S 8, RTX 3090 16, H200 30, A100 64), and with it
the shortest group worth having. A kernel that overlapped both kinds of work perfectly would take max(1, exposed)
times as long as one with a scale for every row, one that took turns 1 + exposed. Ours takes turns, in spite of two
sets of sums: on an H200 W4A4 with groups of 128, 64 and 32 took 2.28, 3.35 and 5.61 times as long (1 + exposed is
1.92, 2.85, 4.70), W4A8 1.86, 2.44 and 3.72 (1.69, 2.39, 3.77). The observation that granularity follows from this
ratio is APEX4's (arXiv 2606.08761); the model and its instruction counts are ours.
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


def exposed(machine: Machine, group: int, both: bool = True) -> float:
    """Scalar seconds over tensor-core seconds of one group of one output; above 1 rescaling takes longer.

    Args:
        machine: where.
        group: columns under one scale.
        both: whether both operands have scales along K; with one of them the product of two scales is saved.
    """
    counts = dict(costs.FOLD) if both else {**costs.FOLD, "float": costs.FOLD["float"] - 1}
    scalar = sum(count / machine.scalars[kind] for kind, count in counts.items())
    return scalar / (2 * group / machine.units[unit_of(machine)])


def slowdown(machine: Machine, group: int, both: bool = True) -> float:
    """How many times as long a product with groups takes as one with a scale for every row, where products bind it and
    rescaling takes turns with them."""
    return 1.0 + exposed(machine, group, both)


def choose(machine: Machine, groups: Sequence[int] = GROUPS) -> int | None:
    """The shortest of `groups` whose rescale takes less time than its products; None: take scales of whole rows."""
    return next((group for group in sorted(groups) if exposed(machine, group) < 1), None)
