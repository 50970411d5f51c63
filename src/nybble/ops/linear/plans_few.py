"""How stream.cu runs: shapes of its blocks and what they cost."""

from __future__ import annotations

from dataclasses import dataclass

from nybble.ops.linear.macros import COLUMNS, describe, lane_scale_bytes
from nybble.ops.linear.problem import PER_MICROSECOND, Problem, lane

PIECE_COLUMNS = 8
"""around.cuh's: the columns that a thread reads at once, 16 bytes."""
_RESERVED = 1024  # bytes of shared memory that the system takes for every block
_SUM_STRIDE = 20  # stream.cu's RED_STRIDE
_IN_FLIGHT = 40000  # bytes that a processor must have under way to use the memory fully
_STAGED = 23000.0  # bytes of x that a block of stream.cu stages in a microsecond
_DECODE = {0: 88, 1: 102, 2: 180, 3: 340}  # instructions for a tile by the kind of element, and what they wait for
_MOST_PIECES = 4  # of all tokens that a thread may hold


@dataclass(frozen=True)
class Stream:
    """How stream.cu is instantiated and launched; the letters are explained there.

    Attributes:
        mt, rt, wn, wk, stages: the kernel's MT, RT, WN, WK and STAGES.
        slices: parts into which K is split over blocks.
        places: blocks that share a processor.
    """

    mt: int
    rt: int
    wn: int
    wk: int
    stages: int
    slices: int = 1
    places: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.wn * self.wk

    def defines(self, m: int) -> dict[str, int]:
        """The macros that instantiate the kernel for up to m tokens."""
        return {"MT": self.mt, "RT": self.rt, "TOKENS": self.kept(m), "WN": self.wn, "WK": self.wk,
                "STAGES": self.stages, "PLACES": self.places}  # fmt: skip

    def kept(self, m: int) -> int:
        """Columns of the products that are kept: all, but for one or two tokens only two of the eight."""
        return 2 if m <= 2 and self.mt == 1 else 8 * self.mt

    def slice_chunks(self, p: Problem) -> int:
        """Column chunks of a block."""
        return -(-p.chunks // self.slices)

    def units(self, p: Problem) -> int:
        """Units of rows that blocks walk over."""
        return -(-p.tiles // (self.wn * self.rt))

    def grid(self, p: Problem) -> tuple[int, int]:
        """Blocks along rows and along slices: one a place at most, evenly loaded."""
        units, room = self.units(p), max(1, p.machine.processors * self.places // self.slices)
        return -(-units // -(-units // room)), self.slices

    def needed_bytes(self, p: Problem) -> int:
        """Shared memory that a block uses: the ring, the sums of two units, the table, and x."""
        d, warps, m = describe(p.format), self.wn * self.wk, min(p.m, 8 * self.mt)
        slot = d["TILE_BYTES"] + 32 * (lane(lane_scale_bytes(p.format, p.fp16)) + lane(d["ZERO_BYTES"]))
        sums = 2 * warps * self.rt * self.kept(m) * _SUM_STRIDE * 4
        x = m * (self.slice_chunks(p) * 2 * COLUMNS + 16)
        return self.stages * warps * self.rt * slot + sums + d["TABLE_BYTES"] + x

    def shared_bytes(self, p: Problem) -> int:
        """What a block asks for: so much that no more than `places` share its processor, more than half for one.

        With overlapping launches two would: the next kernel's blocks, started early, would fill the places left on
        half of the processors and leave the others empty (measured: twice the time).
        """
        return max(self.needed_bytes(p), p.machine.shared_bytes // (self.places + 1) + 1024)

    def refusal(self, p: Problem) -> str | None:
        """Why it cannot run, or None."""
        room = (p.machine.shared_bytes + _RESERVED) // self.places - _RESERVED
        if self.needed_bytes(p) > room:
            return f"needs {self.needed_bytes(p)} bytes of shared memory, there are {room}"
        if self.places > 1 and self.grid(p)[0] <= p.machine.processors:
            return f"no processor would have a second one of {self.grid(p)[0]} blocks"
        return "slices without columns" if self.slices > p.chunks else None

    def pieces(self, p: Problem) -> int:
        """Pieces of a row that a thread holds where the kernel normalizes x."""
        return -(-p.chunks * COLUMNS // (PIECE_COLUMNS * self.threads))

    def surrounded(self, p: Problem, gate: bool) -> str | None:
        """Why it cannot run with a norm before it (and a gate after it), or None."""
        refusal = self.refusal(p)
        if refusal is None and self.slices > 1:
            refusal = f"{self.slices} slices of K: no block has whole rows to normalize"
        if refusal is None and p.m * self.pieces(p) > _MOST_PIECES:
            refusal = f"a thread would hold {p.m * self.pieces(p)} pieces of rows, {_MOST_PIECES} at most"
        if refusal is None and gate and self.wn * self.rt % 2:
            refusal = f"{self.wn * self.rt} tile of rows a unit: none for up beside the one for the gate"
        return refusal

    def score(self, p: Problem) -> float:
        """Predicted microseconds."""
        passes, m, d = -(-p.m // (8 * self.mt)), min(p.m, 8 * self.mt), describe(p.format)
        units, (rows, _) = self.units(p), self.grid(p)
        sharing = -(-rows // p.machine.processors)  # blocks of the fullest processor
        walked = -(-units // rows)  # units of the most loaded block
        steps = walked * -(-self.slice_chunks(p) // self.wk)
        work = self.rt * (_DECODE[d["CODE"]] + 34 * self.mt) + 4.6 * self.mt + 54
        issue = sharing * steps * self.wn * self.wk / 4 * work / PER_MICROSECOND * 1.3
        load = sharing * walked * min(rows, p.machine.processors) / units  # against an even one
        # bytes of a tile that a lane holds
        held = d["TILE_BYTES"] // 32 + lane_scale_bytes(p.format, p.fp16) + d["ZERO_BYTES"]
        flying = sharing * (self.stages - 1) * self.threads * self.rt * held
        lean = 1 + 0.087 * max(0.0, 1 - flying / _IN_FLIGHT)
        weights = lean * max(p.memory_time * load, issue, steps * 600 / PER_MICROSECOND)
        tokens = m * self.slice_chunks(p) * 2 * COLUMNS / _STAGED * (1 + 0.74 * (sharing - 1))
        second = 0.91 + 2 * self.slices * m * p.n * 4 / 3.5e6 if self.slices > 1 else 0.0
        fill = 5.8e-6 * self.stages * self.threads * self.rt * d["TILE_BYTES"] / 32
        return passes * (1.7 + fill + tokens + weights + 0.33 * walked + second)
