"""What a choice of kernel depends on: the product and the machine.

The scores of the plans (plans_few.py, plans_many.py) are a model in microseconds, its constants fitted to an H200
(benchmarks/results/h200): bytes over bandwidth or work over what a processor does in a microsecond, whichever is
longer, at the pace of the most loaded processor, plus what starting, meeting and a second pass cost.
"""

from __future__ import annotations

from dataclasses import dataclass

from nybble.formats.spec import BlockFormat
from nybble.ops.linear.macros import COLUMNS, ROWS

PER_MICROSECOND = 1755.0
"""Cycles, under load."""


@dataclass(frozen=True)
class Machine:
    """What the choice depends on: capability, multiprocessors, shared memory of a block, memory bandwidth."""

    capability: tuple[int, int]
    processors: int
    shared_bytes: int
    terabytes_per_second: float


H200 = Machine((9, 0), 132, 227 * 1024, 4.27)


@dataclass(frozen=True)
class Problem:
    """A product x[M, K] @ W[N, K]^T with activations in bf16 or fp16."""

    m: int
    n: int
    k: int
    format: BlockFormat
    fp16: bool = False
    machine: Machine = H200
    usual: bool = True
    """Whether the largest scale lies where shortcuts are exact (macros.usual_scales)."""

    @property
    def tiles(self) -> int:
        """Tiles of 16 rows."""
        return -(-self.n // ROWS)

    @property
    def chunks(self) -> int:
        """Chunks of 128 columns."""
        return -(-self.k // COLUMNS)

    @property
    def memory_time(self) -> float:
        """Microseconds to read the weight once."""
        per_row = self.k * self.format.bits_per_value(max(1, self.n), max(1, self.k)) / 8
        return self.n * per_row / self.machine.terabytes_per_second / 1e6


def lane(size: int) -> int:
    """Bytes that a lane's `size` bytes take in stream.cu's ring: none, or at least the 4 of a copy."""
    return max(4, size) if size else 0
