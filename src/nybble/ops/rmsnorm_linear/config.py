"""When the norm and the gate go into the product's kernel: a pure function from a description to a printable choice.

    choose(Problem(m=1, n=28672, k=4096, format=…), gate=True)

What a kernel of its own costs was measured by leaving it out of the decode step of an 8B model (LOG.md, "Whole models
on the H200"). It is less than the two microseconds that it takes: the next product's weights are on their way
meanwhile. In the product's kernel a norm costs every block the reading of the residual and the gain, and a reduction,
for each token; a gate costs nothing to speak of, but a unit of rows must have both its halves.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from nybble.ops.linear import config as products
from nybble.ops.linear.config import Problem, Stream

NORM_KERNEL, GATE_KERNEL = 1.5, 0.4
"""Microseconds that a step gains where a norm or a gate has no kernel of its own."""
NORM = 0.3
"""Microseconds that normalizing 4,096 columns of one token adds to every block."""


@dataclass(frozen=True)
class Choice:
    """A plan of stream.cu with its predicted microseconds, and those of the ops one after the other."""

    plan: Stream
    fused: float
    apart: float

    @property
    def pays(self) -> bool:
        """Whether one kernel is faster."""
        return self.fused < self.apart


@lru_cache(maxsize=4096)
def choose(p: Problem, gate: bool) -> Choice:
    """The best plan that can take a norm (and a gate) in; raises ValueError where there is none."""
    streams = [plan for plan in products.candidates(p) if isinstance(plan, Stream)]
    fit = [plan for plan in streams if plan.surrounded(p, gate) is None]
    if not fit:
        raise ValueError(f"no plan has room for the norm: {streams[0].surrounded(p, gate)}")
    plan = min(fit, key=lambda plan: plan.score(p))
    fused = plan.score(p) + NORM * p.m * p.k / 4096
    apart = products.choose(p).scored[0][0] + NORM_KERNEL + GATE_KERNEL * gate
    return Choice(plan, fused, apart)
