"""Narrow products on Hopper: narrow.cu, its shapes and their choice.

A block's tile is 128 rows of W by 256, 192 or 128 tokens. What differs between them is how evenly the tiles of a
product go round over the machine, and how often the operands cross from the L2 cache; the model below weighs the
two, and narrow_tune.py replaces its opinion by a measurement once a shape has been seen.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from nybble.ops import _nvrtc
from nybble.ops.linear.narrow import CHUNK, STEP, Problem, grouped, scales
from nybble.ops.linear.narrow_hopper import ALIGNMENT, CLUSTER, ROWS, deepest, launch, refusal, shift
from nybble.ops.linear.triton import codes8
from nybble.quantize import QuantTensor

__all__ = ["SOURCE", "Plan", "plans", "refusal", "run"]

SOURCE = Path(__file__).with_name("narrow.cu")
_OUT_TOKENS, _OUT_COLUMNS = 32, 64
_HANDING_OVER = 35
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int


class _Arguments(ctypes.Structure):
    """narrow.cu's Arguments; the tensor maps' alignment of 64 bytes rounds the size up."""

    _fields_ = [
        *((name, ctypes.c_uint64 * 16) for name in ("w", "x", "y")),
        *((name, _POINTER) for name in ("w_scale", "x_scale", "bias")),
        *((name, _INT) for name in ("m", "n", "chunks", "pairs", "token_tiles", "groups", "pitch", "w_shift")),
        ("padding", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class Plan:
    """How narrow.cu is instantiated: tokens of a tile, stages of the ring."""

    tokens: int
    stages: int

    def defines(self, p: Problem) -> dict[str, int]:
        """The macros that instantiate the kernel, scales' dtype left out."""
        return {
            "FLOAT8": int(p.float8), "NIBBLES": int(p.nibbles), "TOKENS": self.tokens, "STAGES": self.stages,
            "FOLD": p.group // STEP, "W_GROUPED": int(grouped(p.weight)), "X_GROUPED": int(grouped(p.activation)),
            "W_BLOCKS": int(p.weight.block[0] == ROWS), "Y_FP16": int(p.dtype == torch.float16),
        }  # fmt: skip

    def shared_bytes(self, p: Problem) -> int:
        """Shared memory of a block: the ring, what is being stored, scales, barriers."""
        scales = max(1, CHUNK // p.group) * self.tokens * 4 if grouped(p.activation) else 0
        stage = ROWS * (CHUNK // 2 if p.nibbles else CHUNK) + self.tokens * CHUNK + scales
        out = 4 * _OUT_TOKENS * _OUT_COLUMNS * 2
        return ALIGNMENT + self.stages * stage + out + 2 * self.tokens * 4 + (2 * self.stages + 1) * 8

    def tiles(self, p: Problem) -> int:
        """Tiles of a cluster: two blocks' rows times the tokens."""
        return -(-p.n // (CLUSTER * ROWS)) * -(-p.m // self.tokens)

    def score(self, p: Problem) -> float:
        """Predicted time, in the time of a token's 128 columns: rounds of tiles over the machine, each with a cost that
        does not shrink with the tile (measured: at equal rounds 128 tokens take 12 % more than 256, 192 4 %)."""
        rounds, chunks = -(-self.tiles(p) // (p.machine.processors // CLUSTER)), -(-p.k // CHUNK)
        return rounds * (chunks * (self.tokens + _HANDING_OVER) + 2 * self.tokens)


def plans(p: Problem) -> list[Plan]:
    """Every way to run the kernel that fits, best by the model first."""
    widths = (128,) if p.group else (256, 192, 128)  # two sets of sums and their total fill the registers
    found = [Plan(t, s) for t in widths for s in (6, 5, 4)]
    return deepest(found, p, lambda plan: plan.tokens)


def run(a: QuantTensor, w: QuantTensor, bias: Tensor | None, p: Problem, plan: Plan, y: Tensor) -> None:
    """y [M, N] = a w^T + bias; a [M, K] as a producer gives it, w [N, K] in `layout_for(w.format)`."""
    codes = codes8(a)
    w_scale, (scale, pitch) = scales(w, p), _token_scales(a, p, plan)
    groups = (w_scale if grouped(p.weight) else scales(a, p)).shape[1]
    w_row = p.k if not p.nibbles else w.codes.shape[1]
    w_box = (ROWS, CHUNK // 2 if p.nibbles else CHUNK)
    fp16 = p.dtype == torch.float16
    bias = None if bias is None else bias.to(p.dtype).contiguous()
    pairs, token_tiles = -(-p.n // (CLUSTER * ROWS)), -(-p.m // plan.tokens)
    arguments = _Arguments(
        _nvrtc.tensor_map(w.codes.data_ptr(), (p.n, w_row), w_row, w_box, False, 1),
        _nvrtc.tensor_map(codes.data_ptr(), (p.m, p.k), p.k, (plan.tokens // CLUSTER, CHUNK), False, 1),
        _nvrtc.tensor_map(y.data_ptr(), (p.m, p.n), p.n, (_OUT_TOKENS, _OUT_COLUMNS), fp16),
        w_scale.data_ptr(), scale.data_ptr(), None if bias is None else bias.data_ptr(), p.m, p.n, _chunks(p),
        pairs, token_tiles, groups, pitch, shift(p),
    )  # fmt: skip
    launch(SOURCE, plan, p, w, arguments, y)


def _chunks(p: Problem) -> int:
    """Chunks of columns, with groups a multiple of what the kernel takes in a row: those beyond K are zeros."""
    chunks, row = -(-p.k // CHUNK), max(1, p.group // STEP)
    return -(-chunks // row) * row


def _token_scales(a: QuantTensor, p: Problem, plan: Plan) -> tuple[Tensor, int]:
    """(float32 scales [M], or by groups [groups, pitch] with room for whole tiles; pitch)."""
    scale = scales(a, p)
    if not grouped(p.activation):
        return (scale if len(scale) == p.m else scale.expand(p.m, 1)).to(torch.float32).contiguous(), 0
    pitch = -(-p.m // plan.tokens) * plan.tokens
    room = torch.empty((scale.shape[1], pitch), dtype=torch.float32, device=scale.device)
    room[:, : p.m] = scale.t()
    return room, pitch
