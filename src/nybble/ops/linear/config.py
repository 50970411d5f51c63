"""Which kernel a weight-only product runs with: a pure function from a description to scored candidates.

    choose(Problem(m=16, n=4096, k=4096, format=…)).plan        print(choose(…)) lists all of them, cheapest first

Nothing here touches a GPU, so a choice can be explained for a machine that is not there. The score is a model in
microseconds, its constants fitted to an H200 (benchmarks/results/h200): bytes over bandwidth or work over what a
processor does in a microsecond, whichever is longer, at the pace of the most loaded processor, plus what starting,
meeting and a second pass cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import product

from nybble.formats.spec import BlockFormat
from nybble.ops.linear.macros import COLUMNS, ROWS, describe, lane_scale_bytes, tile_refusal

STREAM_TOKENS = 32
"""The most tokens that stream.cu takes at once; more go through it in passes."""
_BLOCK_ROWS = 64
_AVERAGED = 64
_SUM_STRIDE = 20  # stream.cu's RED_STRIDE
_ALIGNMENT, _BARRIERS = 1024, 256
_REGISTERS = 65536
_PER_MICROSECOND = 1755.0  # cycles, under load
_IN_FLIGHT = 48000  # bytes that a processor must have under way to use the memory fully
_MMA_TOKENS = 16  # go through mma rather than wgmma
_FROM_L2 = 46  # bytes that a processor gets from the L2 cache in a cycle, while all of them fetch
_RING = 64 * 1024  # bytes of a processor's rings that hide the memory's latency
_DENSE_TFLOPS = 5.7  # of cuBLAS in bf16, a processor
_MOST_BLOCKS = 65535  # along y
_STAGED = 29000.0  # bytes of x that a block of stream.cu stages in a microsecond


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


@dataclass(frozen=True)
class Stream:
    """How stream.cu is instantiated and launched; the letters are explained there.

    Attributes:
        mt, rt, wn, wk, stages: the kernel's MT, RT, WN, WK and STAGES.
        slices: parts into which K is split over blocks.
    """

    mt: int
    rt: int
    wn: int
    wk: int
    stages: int
    slices: int = 1

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 32 * self.wn * self.wk

    def defines(self, m: int) -> dict[str, int]:
        """The macros that instantiate the kernel for up to m tokens."""
        return {"MT": self.mt, "RT": self.rt, "TOKENS": self.kept(m), "WN": self.wn, "WK": self.wk,
                "STAGES": self.stages}  # fmt: skip

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
        """Blocks along rows and along slices: one a processor at most, evenly loaded."""
        units, room = self.units(p), max(1, p.machine.processors // self.slices)
        return -(-units // -(-units // room)), self.slices

    def needed_bytes(self, p: Problem) -> int:
        """Shared memory that a block uses: the ring, the sums of two units, the table, and x."""
        d, warps, m = describe(p.format), self.wn * self.wk, min(p.m, 8 * self.mt)
        slot = d["TILE_BYTES"] + 32 * (_lane(lane_scale_bytes(p.format, p.fp16)) + _lane(d["ZERO_BYTES"]))
        sums = 2 * warps * self.rt * self.kept(m) * _SUM_STRIDE * 4
        x = m * (self.slice_chunks(p) * 2 * COLUMNS + 16)
        return self.stages * warps * self.rt * slot + sums + d["TABLE_BYTES"] + x

    def shared_bytes(self, p: Problem) -> int:
        """What a block asks for: more than half of what there is, so that no second block shares its processor.

        With overlapping launches two would: the next kernel's blocks, started early, would fill the places left on
        half of the processors and leave the others empty (measured: twice the time).
        """
        return max(self.needed_bytes(p), p.machine.shared_bytes // 2 + 1024)

    def refusal(self, p: Problem) -> str | None:
        """Why it cannot run, or None."""
        if self.needed_bytes(p) > p.machine.shared_bytes:
            return f"needs {self.needed_bytes(p)} bytes of shared memory, there are {p.machine.shared_bytes}"
        return "slices without columns" if self.slices > p.chunks else None

    def score(self, p: Problem) -> float:
        """Predicted microseconds."""
        passes, m = -(-p.m // (8 * self.mt)), min(p.m, 8 * self.mt)
        units, (rows, _) = self.units(p), self.grid(p)
        walked = -(-units // rows)  # units of the most loaded block
        steps = walked * -(-self.slice_chunks(p) // self.wk)
        work = self.rt * (_DECODE[describe(p.format)["CODE"]] + 24 * self.mt) + 24 * self.mt + 80
        issue = steps * self.wn * self.wk / 4 * work / _PER_MICROSECOND * 1.3
        load = walked * rows / units  # against an even one
        d = describe(p.format)
        held = (
            d["TILE_BYTES"] // 32 + lane_scale_bytes(p.format, p.fp16) + d["ZERO_BYTES"]
        )  # bytes of a tile that a lane holds
        flying = (self.stages - 1) * self.threads * self.rt * held
        lean = 1 + 0.15 * max(0.0, 1 - flying / _IN_FLIGHT)
        crowded = 1.35 if self.rt > 1 and held > 40 else 1.0  # two such tiles leave too few registers
        weights = crowded * lean * max(p.memory_time * load, issue, steps * 600 / _PER_MICROSECOND)
        tokens = m * self.slice_chunks(p) * 2 * COLUMNS / _STAGED
        second = 1.2 + 2 * self.slices * m * p.n * 4 / 3.5e6 if self.slices > 1 else 0.0
        fill = 1.2e-5 * self.stages * self.threads * self.rt * describe(p.format)["TILE_BYTES"] / 32
        return passes * (1.2 + fill + tokens + weights + 0.06 * walked + second)


_DECODE = {0: 88, 1: 102, 2: 150, 3: 230}  # instructions for a tile by the kind of element


@dataclass(frozen=True)
class Tile:
    """How tile.cu is instantiated and launched.

    Attributes:
        groups: warpgroups of a block along the rows.
        tokens, wgmmas: tokens of one wgmma, and how many of them side by side; 16 tokens go through mma instead.
        stages: what of `split` chunks of 128 columns is in shared memory at once.
        cluster: blocks among which K is split.
        split: warpgroups of a block along K, which take chunks in turn.
        tiles: times 64 rows that a warpgroup owns.
    """

    groups: int
    tokens: int
    wgmmas: int
    stages: int
    cluster: int = 1
    split: int = 1
    tiles: int = 1

    @property
    def rows(self) -> int:
        """Rows of the weight that a block owns."""
        return _BLOCK_ROWS * self.groups * self.tiles

    @property
    def warpgroups(self) -> int:
        """Warpgroups of a block that compute."""
        return self.groups * self.split

    @property
    def threads(self) -> int:
        """Threads of a block."""
        return 128 * self.warpgroups + 128

    @property
    def registers(self) -> int:
        """What consumers raise their registers to when sums fill most of them: all that the block was started with."""
        return {2: 240, 3: 160, 4: 112}.get(self.warpgroups, 0) if self.tokens * self.wgmmas >= 128 else 0

    @property
    def used(self) -> int:
        """Registers of a thread when the kernel starts: more tokens, more sums."""
        return 56 + self.tokens * self.tiles if self.tokens <= 64 else _REGISTERS // self.threads

    @property
    def registers_fit(self) -> bool:
        """Whether sums, operands and addresses fit the registers that consumers get."""
        tokens = self.tokens * self.wgmmas
        return tokens <= 64 or (tokens == 128 and self.warpgroups < 4) or (tokens == 256 and self.warpgroups == 2)

    def defines(self, m: int) -> dict[str, int]:
        """The macros that instantiate the kernel."""
        return {"ROW_GROUPS": self.groups, "SPLIT": self.split, "RT": self.tiles, "TOKENS_N": self.tokens,
                "TOKENS_B": self.wgmmas, "STAGES": self.stages, "CLUSTER": self.cluster,
                "REGISTERS": self.registers}  # fmt: skip

    def slice_chunks(self, p: Problem) -> int:
        """Column chunks of a block."""
        return -(-p.chunks // self.cluster)

    def token_tiles(self, p: Problem) -> int:
        """Tiles of tokens."""
        return -(-p.m // (self.tokens * self.wgmmas))

    def grid(self, p: Problem) -> tuple[int, int]:
        """Blocks: tiles of rows times tiles of tokens times the cluster."""
        return -(-p.n // self.rows) * self.token_tiles(p) * self.cluster, 1

    def needed_bytes(self, p: Problem) -> int:
        """Shared memory that a block uses: the ring, or the sums that take its place."""
        d, tokens = describe(p.format), self.tokens * self.wgmmas
        weights = 4 * (d["TILE_BYTES"] + 8 * (d["SCALE_BYTES"] + d["ZERO_BYTES"]))
        ring = self.stages * self.split * (tokens * 2 * COLUMNS + self.groups * self.tiles * weights)
        return _ALIGNMENT + _BARRIERS + max(ring, self.split * tokens * (self.rows + 4) * 4)

    def shared_bytes(self, p: Problem) -> int:
        """What a block asks for: so much that no more blocks share a processor than an even spread puts there.

        Otherwise blocks that start while the previous kernel still runs would crowd on the processors it has left.
        """
        even = -(-self.grid(p)[0] // p.machine.processors)
        return max(self.needed_bytes(p), p.machine.shared_bytes // (even + 1) + 1024)

    def refusal(self, p: Problem) -> str | None:
        """Why it cannot run, or None."""
        if p.machine.capability[0] != 9:
            return f"wgmma exists on compute capability 9.0, not on {'.'.join(map(str, p.machine.capability))}"
        if self.needed_bytes(p) > p.machine.shared_bytes:
            return f"needs {self.needed_bytes(p)} bytes of shared memory, there are {p.machine.shared_bytes}"
        if self.cluster * self.split > p.chunks:
            return "slices without columns"
        if p.k < _AVERAGED:
            return f"its roundings of the weight need more than K = {p.k} terms to average out"
        return tile_refusal(p.format, p.fp16, p.usual)

    def _processors(self, p: Problem) -> int:
        """Multiprocessors that clusters can use: those of four leave some of every graphics cluster's idle."""
        return p.machine.processors if self.cluster <= 2 else p.machine.processors * 10 // 11

    def _round(self, p: Problem, resident: int) -> float:
        """Cycles in which every warpgroup of `resident` blocks takes one chunk."""
        units = resident * self.warpgroups * self.tiles  # of 64 rows x 128 columns
        decode = _DECODE[describe(p.format)["CODE"]] / _DECODE[0]
        if self.tokens == _MMA_TOKENS:
            shared = 30 / (self.groups * self.tiles) + (265 if self.tiles == 1 else 246) * (1 + decode) / 2
            return max(420.0 + 150 * (self.tiles - 1), units * shared)
        tokens = self.tokens * self.wgmmas
        fetched = 4 * describe(p.format)["TILE_BYTES"] + tokens * 2 * COLUMNS / self.groups  # of a unit, from L2
        work = 225 * decode + tokens * (2.2 + 0.007 * tokens)
        return max(130 / units + units * work, units * fetched / _FROM_L2)

    def score(self, p: Problem) -> float:
        """Predicted microseconds."""
        blocks, tokens, processors = self.grid(p)[0], self.tokens * self.wgmmas, self._processors(p)
        fitting = min(p.machine.shared_bytes // self.needed_bytes(p), _REGISTERS // (self.threads * self.used))
        resident = max(1, min(fitting, -(-blocks // processors)))
        rounds = -(-blocks // (processors * resident))
        slow = 1.03 if resident > 1 else 1.0
        slow *= (
            1.06
            if resident * self.needed_bytes(p) < _RING or (self.stages < 5 and _MMA_TOKENS < tokens <= 128)
            else 1.0
        )
        busy = rounds * -(-self.slice_chunks(p) // self.split) * self._round(p, resident) * slow / _PER_MICROSECOND
        end = 2.6 + tokens * self.warpgroups * self.tiles / 250
        meeting = 0.6 + 0.004 * self.cluster * tokens if self.cluster > 1 else 0.0
        return max(busy, p.memory_time * 1.15) + end + meeting


@dataclass(frozen=True)
class Widen:
    """widen.cu, then cuBLAS."""

    threads: int = 128

    def shared_bytes(self, p: Problem) -> int:
        """Shared memory of a block: of each warp a tile on its way in and one on its way out, and the table."""
        d = describe(p.format)
        slot = d["TILE_BYTES"] + 32 * (_lane(d["SCALE_BYTES"]) + _lane(d["ZERO_BYTES"]))
        return d["TABLE_BYTES"] + self.threads // 32 * (slot + ROWS * (2 * COLUMNS + 16))

    def grid(self, p: Problem) -> tuple[int, int]:
        """Blocks along columns and along rows."""
        return p.chunks, -(-p.n // _BLOCK_ROWS)

    def refusal(self, p: Problem) -> str | None:
        """Why it cannot run, or None."""
        if p.fp16:
            return "a weight with its scales can lie beyond fp16"
        return f"N = {p.n} has too many rows for a grid" if self.grid(p)[1] > _MOST_BLOCKS else None

    def score(self, p: Problem) -> float:
        """Predicted microseconds."""
        dense, speed = 2e-6 * p.n * p.k, p.machine.terabytes_per_second
        product = 2e-6 * p.m * p.n * p.k / (_DENSE_TFLOPS * p.machine.processors)
        return 1.5 + 1.1 * (p.memory_time + dense / speed) + 4.0 + max(product, 1.1 * dense / speed)


Plan = Stream | Tile | Widen


@dataclass(frozen=True)
class Choice:
    """Scored candidates, cheapest first: (predicted microseconds, plan)."""

    problem: Problem
    scored: tuple[tuple[float, Plan], ...]

    @property
    def plan(self) -> Plan:
        """The one that runs."""
        return self.scored[0][1]

    def __str__(self) -> str:
        p = self.problem
        head = f"x[{p.m}, {p.k}] @ W[{p.n}, {p.k}]^T, {p.format.name}, {'fp16' if p.fp16 else 'bf16'}"
        return "\n".join([head, *(f"  {time:8.2f} us  {plan}" for time, plan in self.scored)])


_GRIDS = {
    1: ((2, 1, 16), (1, 1, 16), (2, 2, 8), (1, 2, 8), (2, 4, 4)),
    2: ((2, 4, 4), (1, 4, 4), (1, 2, 8)),
    4: ((1, 4, 4), (1, 2, 8), (1, 2, 4)),
}
"""Token tiles -> (row tiles, warps over rows, warps over columns) that did well."""


_WARPGROUPS = ((1, 1), (1, 2), (1, 4), (2, 1), (2, 2), (3, 1), (4, 1))
"""Of a block of tile.cu: along the rows, and along K."""


def candidates(p: Problem) -> Iterator[Plan]:
    """Every way to run the kernels that is worth considering, whether it fits or not."""
    most = next(t for t in _GRIDS if 8 * t >= min(p.m, STREAM_TOKENS))
    # More slices than four, and fewer tokens at once than there are, only help where x would not fit otherwise.
    for mt, slices, stages in product([t for t in _GRIDS if t <= most], (1, 2, 4, 8, 16, 32), (2, 3, 4)):
        if slices <= 4 or p.k > 16384:
            # Four warps over rows only pay where each has several tokens' sums to keep.
            yield from (Stream(mt, rt, wn, wk, stages, slices) for rt, wn, wk in _GRIDS[mt] if wn < 4 or p.m > 2)
    widths = [(n, b) for n, b in ((16, 1), (32, 1), (64, 1), (128, 1), (128, 2)) if n * b < 2 * p.m or n == 16]
    for (groups, split), (n, b), stages, cluster, tiles in product(
        _WARPGROUPS, widths[-3:], (5, 8, 3), (1, 2, 4), (1, 2)
    ):
        plan = Tile(groups, n, b, stages, cluster, split, tiles)
        # Splitting K is for filling the machine; beyond two blocks a processor it only adds meetings.
        crowded = cluster > 1 and plan.grid(p)[0] > 2 * p.machine.processors
        if plan.registers_fit and not crowded and (tiles == 1 or n == _MMA_TOKENS):
            yield plan
    yield Widen()


@lru_cache(maxsize=4096)
def choose(p: Problem) -> Choice:
    """The candidates that can run, scored; raises ValueError where none can."""
    fit = [c for c in candidates(p) if c.refusal(p) is None]
    if not fit:
        raise ValueError(f"no plan fits: {next(candidates(p)).refusal(p)}")
    return Choice(p, tuple(sorted(((c.score(p), c) for c in fit), key=lambda pair: pair[0])))


def _lane(size: int) -> int:
    """Bytes that a lane's `size` bytes take in stream.cu's ring: none, or at least the 4 of a copy."""
    return max(4, size) if size else 0
