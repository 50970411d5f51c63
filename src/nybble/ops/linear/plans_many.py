"""How many tokens run: shapes of tile.cu's and walk.cu's blocks, the way through cuBLAS, and what they cost."""

from __future__ import annotations

import math
from dataclasses import dataclass

from nybble.ops.linear.macros import COLUMNS, ROWS, describe, sums_take_scale, tile_refusal
from nybble.ops.linear.problem import PER_MICROSECOND, Problem, lane

MMA_TOKENS = 16
"""Go through mma rather than wgmma."""
_BLOCK_ROWS = 64
_AVERAGED = 64
_ALIGNMENT, _BARRIERS, _LOOKUP = 1024, 256, 2048
_REGISTERS = 65536
_FROM_L2 = 46  # bytes that a processor gets from the L2 cache in a cycle, while all of them fetch
_RING = 64 * 1024  # bytes of a processor's rings that hide the memory's latency
_DENSE_TFLOPS = 5.7  # of cuBLAS in bf16, a processor
_AGAIN = 10.0  # microseconds between one round of tile.cu's blocks and the next
_WARM_TFLOPS, _WARM = 5.2, 1000.0  # the same where it runs for longer than so many microseconds, and power binds
_MOST_BLOCKS = 65535  # along y
_PAIR, _BAND = 2, 8  # blocks of a cluster of walk.cu; tiles of tokens that it goes over together
_L2 = 50e6  # bytes of the L2 cache, for which a band's tokens can be too many
OUT_TOKENS = 32
"""What walk.cu stores at once, by 64 rows."""
_LEAST_CHUNKS = 4  # of a tile are worth a cluster of walk.cu


def hopper_refusal(p: Problem) -> str | None:
    """Why weights decoded in registers for wgmma cannot serve a problem, or None."""
    if p.machine.capability[0] != 9:
        return f"wgmma exists on compute capability 9.0, not on {'.'.join(map(str, p.machine.capability))}"
    if p.k < _AVERAGED:
        return f"its roundings of the weight need more than K = {p.k} terms to average out"
    return tile_refusal(p.format, p.fp16, p.usual)


@dataclass(frozen=True)
class _Pace:
    """What a chunk of 64 rows costs by the kind of weight.

    Attributes:
        decode: work on the elements in tile.cu, in that of 4-bit integers; mma_decode: the same for 16 tokens.
        alone, mma_alone: cycles of a chunk that only another warpgroup's would fill.
        again: microseconds between one round of tile.cu's blocks and the next, up to 64 tokens.
        walk: cycles of a block of walk.cu beyond those of 4-bit integers, with 256 tokens and with 128.
    """

    decode: float
    mma_decode: float
    alone: float = 130.0
    mma_alone: float = 420.0
    again: float = 0.0
    walk: tuple[float, float] = (0.0, 0.0)


# 8-bit floats whose scales the sums take, and tables; fitted to benchmarks/results/h200/linear-nf4-fp8block.json.
_SUMS = _Pace(1.27, 1.52, 310.0, 620.0, 2.0, (305.0, 615.0))
_LOOK_UPS = _Pace(1.99, 3.35, 230.0, 1100.0, 2.0, (420.0, 595.0))
_DECODE = {0: 88, 1: 102, 2: 150, 3: 230}  # instructions for a tile of 16 × 128 by the kind of element
_TABLE_FILLED = 1.05  # microseconds that a block of widen.cu takes to fill its table


def _pace(p: Problem) -> _Pace:
    if sums_take_scale(p.format):
        return _SUMS
    found = describe(p.format)
    decode = _DECODE[found["CODE"]] / _DECODE[0]
    return _LOOK_UPS if found["TABLE_BYTES"] else _Pace(decode, decode)


def _around(p: Problem) -> int:
    """Bytes of shared memory beside a kernel's rings: barriers, a table of values, and what aligning them leaves."""
    return _BARRIERS + (2 * _LOOKUP if describe(p.format)["TABLE_BYTES"] else _ALIGNMENT)


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
        return _around(p) + max(ring, self.split * tokens * (self.rows + 4) * 4)

    def shared_bytes(self, p: Problem) -> int:
        """What a block asks for: so much that no more blocks share a processor than an even spread puts there.

        Otherwise blocks that start while the previous kernel still runs would crowd on the processors it has left.
        """
        even = -(-self.grid(p)[0] // p.machine.processors)
        return max(self.needed_bytes(p), p.machine.shared_bytes // (even + 1) + 1024)

    def refusal(self, p: Problem) -> str | None:
        """Why it cannot run, or None."""
        if self.needed_bytes(p) > p.machine.shared_bytes:
            return f"needs {self.needed_bytes(p)} bytes of shared memory, there are {p.machine.shared_bytes}"
        if self.cluster * self.split > p.chunks:
            return "slices without columns"
        return hopper_refusal(p)

    def _processors(self, p: Problem) -> int:
        """Multiprocessors that clusters can use: those of four leave some of every graphics cluster's idle."""
        return p.machine.processors if self.cluster <= 2 else p.machine.processors * 10 // 11

    def _round(self, p: Problem, resident: int) -> float:
        """Cycles in which every warpgroup of `resident` blocks takes one chunk."""
        units = resident * self.warpgroups * self.tiles  # of 64 rows x 128 columns
        pace = _pace(p)
        if self.tokens == MMA_TOKENS:
            shared = 30 / (self.groups * self.tiles) + (265 if self.tiles == 1 else 246) * (1 + pace.mma_decode) / 2
            return max(pace.mma_alone + 150 * (self.tiles - 1), units * shared)
        tokens = self.tokens * self.wgmmas
        fetched = 4 * describe(p.format)["TILE_BYTES"] + tokens * 2 * COLUMNS / self.groups  # of a unit, from L2
        work = 225 * pace.decode + tokens * (2.2 + (0.007 if tokens <= 64 else 0.0043) * tokens)
        return max(pace.alone / units + units * work, units * fetched / _FROM_L2)

    def score(self, p: Problem) -> float:
        """Predicted microseconds."""
        blocks, tokens, processors = self.grid(p)[0], self.tokens * self.wgmmas, self._processors(p)
        fitting = min(p.machine.shared_bytes // self.needed_bytes(p), _REGISTERS // (self.threads * self.used))
        resident = max(1, min(fitting, -(-blocks // processors)))
        rounds = -(-blocks // (processors * resident))
        slow = 1.03 if resident > 1 else 1.0
        slow *= (
            1.06 if resident * self.needed_bytes(p) < _RING or (self.stages < 5 and MMA_TOKENS < tokens <= 128) else 1.0
        )
        busy = rounds * -(-self.slice_chunks(p) // self.split) * self._round(p, resident) * slow / PER_MICROSECOND
        busy *= _DENSE_TFLOPS / _WARM_TFLOPS if busy > _WARM else 1.0
        again = _AGAIN if p.m > 64 else _pace(p).again
        end = (3.2 if tokens == MMA_TOKENS else 2.6) + tokens * self.warpgroups * self.tiles / 250
        end += again * (rounds - 1) / resident
        meeting = 0.6 + 0.004 * self.cluster * tokens if self.cluster > 1 else 0.0
        meeting += 0.3 if self.split > 1 and self.tokens > MMA_TOKENS else 0.0
        return max(busy, p.memory_time * 1.1) + end + meeting


@dataclass(frozen=True)
class Widen:
    """widen.cu, then cuBLAS."""

    threads: int = 128

    def shared_bytes(self, p: Problem) -> int:
        """Shared memory of a block: of each warp a tile on its way in and one on its way out, and the table."""
        d = describe(p.format)
        slot = d["TILE_BYTES"] + 32 * (lane(d["SCALE_BYTES"]) + lane(d["ZERO_BYTES"]))
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
        product *= _DENSE_TFLOPS / _WARM_TFLOPS if product > _WARM else 1.0
        filled = _TABLE_FILLED if describe(p.format)["TABLE_BYTES"] else 0.0
        tables = filled * math.prod(self.grid(p)) / p.machine.processors
        return 4.0 + tables + 1.5 * (p.memory_time + dense / speed) + max(product, 1.1 * dense / speed)


@dataclass(frozen=True)
class Walk:
    """How walk.cu is instantiated and launched.

    Attributes:
        tokens: of a tile.
        x_stages, w_stages: the rings' stages: of 64 columns of x, of 128 of the weight.
        even: whether the last tiles are dealt out evenly, cut along K, rather than one to a cluster.
    """

    tokens: int
    x_stages: int
    w_stages: int
    even: bool = True

    threads = 384
    rows = 128

    def defines(self, m: int) -> dict[str, int]:
        """The macros that instantiate the kernel."""
        return {"TOKENS": self.tokens, "X_STAGES": self.x_stages, "W_STAGES": self.w_stages}

    def pairs(self, p: Problem) -> int:
        """Tiles of a cluster's rows."""
        return -(-p.n // (_PAIR * self.rows))

    def token_tiles(self, p: Problem) -> int:
        """Tiles of tokens."""
        return -(-p.m // self.tokens)

    def tiles(self, p: Problem) -> int:
        """Tiles of a cluster."""
        return self.pairs(p) * self.token_tiles(p)

    def clusters(self, p: Problem) -> int:
        """Clusters that walk: no more than there is work for."""
        work = self.tiles(p) * (max(1, p.chunks // _LEAST_CHUNKS) if self.even else 1)
        return min(p.machine.processors // _PAIR, work)

    def shared_tiles(self, p: Problem) -> int:
        """Tiles that are dealt out evenly: what whole rounds leave over, and the last of those."""
        tiles, clusters = self.tiles(p), self.clusters(p)
        return 0 if not self.even or tiles % clusters == 0 else tiles - max(0, tiles // clusters - 1) * clusters

    def grid(self, p: Problem) -> tuple[int, int]:
        """Blocks."""
        return self.clusters(p) * _PAIR, 1

    def shared_bytes(self, p: Problem) -> int:
        """Shared memory of a block: both rings, what is being stored, barriers."""
        d = describe(p.format)
        weights = 2 * 4 * (d["TILE_BYTES"] + 8 * (d["SCALE_BYTES"] + d["ZERO_BYTES"]))
        return _around(p) + self.x_stages * self.tokens * COLUMNS + 4 * OUT_TOKENS * COLUMNS + self.w_stages * weights

    def refusal(self, p: Problem) -> str | None:
        """Why it cannot run, or None."""
        if p.n % 8:
            return f"stores rows of whole 16 bytes: N = {p.n} has to be a multiple of 8"
        if self.shared_bytes(p) > p.machine.shared_bytes:
            return f"needs {self.shared_bytes(p)} bytes of shared memory, there are {p.machine.shared_bytes}"
        return hopper_refusal(p)

    def score(self, p: Problem) -> float:
        """Predicted microseconds."""
        tiles, clusters, shared = self.tiles(p), self.clusters(p), self.shared_tiles(p)
        most = -(-tiles * p.chunks // clusters) if shared else -(-tiles // clusters) * p.chunks
        narrow = self.tokens < 256
        busy = most * (8.2 * self.tokens + 250 + 20 * narrow + _pace(p).walk[narrow]) / PER_MICROSECOND
        busy *= 1.05 if 2 * min(p.m, _BAND * self.tokens) * p.k > _L2 else 1.0
        busy *= _DENSE_TFLOPS / _WARM_TFLOPS if busy > _WARM else 1.0
        pieces = -(-p.chunks // most) + 1 if shared else 0  # of a tile that is cut
        end = -(-most // p.chunks) * 0.004 * self.tokens + pieces * (0.5 + 0.006 * self.tokens)
        return max(busy, p.memory_time * 1.15) + 4.0 + end
