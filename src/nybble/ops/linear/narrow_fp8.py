"""FP8 products on Hopper: narrow_fp8.cu, its two shapes and their choice.

W has a scale for every 128 × 128 block or for whole rows, x for every 1 × 128 or for whole rows. A block's tile is 128
tokens by 256 or 128 rows of W, a pair's 256 by as many; the narrower is for products whose wide tiles go unevenly.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nybble.ops import _nvrtc
from nybble.ops.linear import narrow_hopper
from nybble.ops.linear.narrow import CHUNK, STEP, Problem, grouped, scales
from nybble.ops.linear.narrow_hopper import ALIGNMENT, CLUSTER, ROWS, deepest, launch, shift
from nybble.quantize import QuantTensor

SOURCE = Path(__file__).with_name("narrow_fp8.cu")
_OUT = 16 * 1024  # bytes that are being stored
_HANDING_OVER = 60  # columns' time that a chunk costs beside its products; from two measurements at equal rounds


class _Arguments(ctypes.Structure):
    """narrow_fp8.cu's Arguments; the tensor maps' alignment of 64 bytes rounds the size up."""

    _fields_ = [
        *((name, ctypes.c_uint64 * 16) for name in ("x", "w")),
        *((name, ctypes.c_void_p) for name in ("w_scale", "x_scale", "bias", "y")),
        *((name, ctypes.c_int) for name in ("m", "n", "chunks", "pairs", "tiles", "groups", "w_shift", "padding")),
    ]


@dataclass(frozen=True)
class Plan:
    """How narrow_fp8.cu is instantiated: rows of W in a tile, stages of the ring."""

    columns: int
    stages: int

    def defines(self, p: Problem) -> dict[str, int]:
        """The macros that instantiate the kernel, scales' dtype left out."""
        return {
            "COLUMNS": self.columns, "STAGES": self.stages, "FOLD": p.group // STEP,
            "X_GROUPED": int(grouped(p.activation)), "W_GROUPED": int(grouped(p.weight)),
            "Y_FP16": int(p.dtype == torch.float16),
        }  # fmt: skip

    def shared_bytes(self, p: Problem) -> int:
        """Shared memory of a block: the ring with its scales and barriers, what is being stored, columns' factors."""
        scaled = grouped(p.activation) or grouped(p.weight)
        products = self.columns // ROWS * (CHUNK // p.group)
        stage = (ROWS + self.columns) * CHUNK + scaled * products * ROWS * 4 + 2 * 8
        return ALIGNMENT + self.stages * stage + _OUT + 4 * self.columns * 4

    def tiles(self, p: Problem) -> int:
        """Tiles of a cluster: two blocks' tokens times the rows of W."""
        return -(-p.m // (CLUSTER * ROWS)) * -(-p.n // self.columns)

    def score(self, p: Problem) -> float:
        """Predicted time, in the time of a column's chunk: rounds of tiles over the machine, each with a cost that does
        not shrink with the tile."""
        rounds, chunks = -(-self.tiles(p) // (p.machine.processors // CLUSTER)), -(-p.k // CHUNK)
        return rounds * (chunks * (self.columns + _HANDING_OVER) + self.columns)


def plans(p: Problem) -> list[Plan]:
    """Both ways to run the kernel, best by the model first."""
    found = [Plan(c, s) for c in (256, 128) for s in (6, 5, 4)]
    return deepest(found, p, lambda plan: plan.columns)


def refusal(p: Problem) -> str | None:
    """Why narrow_fp8.cu cannot take a problem, or None."""
    if not p.float8:
        return f"multiplies FP8; asked for {p.weight.name}"
    if grouped(p.weight) and p.weight.block[0] != ROWS:
        return f"takes scales of W that change along K for {ROWS} rows; {p.weight.name} has {p.weight.block}"
    return narrow_hopper.refusal(p)


def run(a: QuantTensor, w: QuantTensor, bias: Tensor | None, p: Problem, plan: Plan, y: Tensor) -> None:
    """y [M, N] = a w^T + bias; a [M, K] as a producer gives it."""
    codes = a.codes.view(p.m, p.k)
    w_scale, x_scale = scales(w, p).contiguous(), scales(a, p).to(torch.float32)
    if not grouped(p.activation) and len(x_scale) != p.m:
        x_scale = x_scale.expand(p.m, 1)
    x_scale = x_scale.contiguous() if x_scale.data_ptr() % 16 == 0 else x_scale.clone()
    bias = None if bias is None else bias.to(p.dtype).contiguous()
    pairs, tiles = -(-p.m // (CLUSTER * ROWS)), -(-p.n // plan.columns)
    arguments = _Arguments(
        _nvrtc.tensor_map(codes.data_ptr(), (p.m, p.k), p.k, (ROWS, CHUNK), False, 1),
        _nvrtc.tensor_map(w.codes.data_ptr(), (p.n, p.k), p.k, (plan.columns // CLUSTER, CHUNK), False, 1),
        w_scale.data_ptr(), x_scale.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(),
        p.m, p.n, -(-p.k // CHUNK), pairs, tiles, (w_scale if grouped(p.weight) else x_scale).shape[1],
        shift(p),
    )  # fmt: skip
    launch(SOURCE, plan, p, w, arguments, y)
