"""Narrow products on Hopper: narrow.cu, its shapes and their choice.

A block's tile is 128 rows of W by 256, 192 or 128 tokens. What differs between them is how evenly the tiles of a
product go round over the machine, and how often the operands cross from the L2 cache; the model below weighs the
two, and narrow_tune.py replaces its opinion by a measurement once a shape has been seen.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from nybble.ops import _nvrtc
from nybble.ops.linear.cuda import machine
from nybble.ops.linear.narrow import CHUNK, STEP, Problem, grouped, scales
from nybble.ops.linear.triton import codes8
from nybble.quantize import QuantTensor

SOURCE = Path(__file__).with_name("narrow.cu")
ROWS, CLUSTER, THREADS = 128, 2, 384
_OUT_TOKENS, _OUT_COLUMNS = 32, 64
_ALIGNMENT = 1024
_HANDING_OVER = 35
_POINTER, _INT = ctypes.c_void_p, ctypes.c_int
_SCALES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_FEW_TOKENS = 64  # up to here tiles are mostly empty, and fewer blocks read the weight than memory could feed


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
        return _ALIGNMENT + self.stages * stage + out + 2 * self.tokens * 4 + (2 * self.stages + 1) * 8

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
    fit = [plan for plan in found if plan.shared_bytes(p) <= p.machine.shared_bytes]
    deepest = {plan.tokens: plan for plan in reversed(fit)}
    return sorted(deepest.values(), key=lambda plan: plan.score(p))


def refusal(p: Problem) -> str | None:
    """Why narrow.cu cannot take a problem, or None."""
    if p.machine.capability != (9, 0):
        return f"needs Hopper's wgmma (compute capability 9.0), this is {'.'.join(map(str, p.machine.capability))}"
    if p.dtype not in (torch.bfloat16, torch.float16):
        return f"stores bfloat16 or float16, {p.dtype} was asked for"
    if not p.m or not p.n or not p.k:
        return f"nothing to compute: M = {p.m}, N = {p.n}, K = {p.k}"
    if p.k % 16 or p.n % 8:
        return f"copies rows of whole 16 bytes: K = {p.k} has to be a multiple of 16 and N = {p.n} of 8"
    if p.m <= _FEW_TOKENS:
        return f"pays from {_FEW_TOKENS + 1} tokens on, there are {p.m}"
    return _nvrtc.available()


@cache
def _kernel(defines: tuple[tuple[str, int], ...], device: int) -> _nvrtc.Kernel:
    return _nvrtc.Kernel.load(_nvrtc.build(SOURCE, dict(defines), "90a"), "linear_narrow", machine(device).shared_bytes)


def run(a: QuantTensor, w: QuantTensor, bias: Tensor | None, p: Problem, plan: Plan, y: Tensor) -> None:
    """y [M, N] = a w^T + bias; a [M, K] as a producer gives it, w [N, K] in `layout_for(w.format)`."""
    codes, device = codes8(a), y.device.index
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
    found = {**plan.defines(p), "W_SCALE": _SCALES[w.scale.dtype]}
    kernel = _kernel(tuple(sorted(found.items())), device)
    clusters = min(pairs * token_tiles, p.machine.processors // CLUSTER)
    current = torch.cuda.current_stream(y.device).cuda_stream
    kernel.launch((clusters * CLUSTER, 1), THREADS, plan.shared_bytes(p), arguments, True, current)


def _chunks(p: Problem) -> int:
    """Chunks of columns, with groups a multiple of what the kernel takes in a row: those beyond K are zeros."""
    chunks, row = -(-p.k // CHUNK), max(1, p.group // STEP)
    return -(-chunks // row) * row


def shift(p: Problem) -> int:
    """log2 of the rows of W that share a scale."""
    rows = p.weight.block[0]
    return 31 if rows is None else rows.bit_length() - 1


def _token_scales(a: QuantTensor, p: Problem, plan: Plan) -> tuple[Tensor, int]:
    """(float32 scales [M], or by groups [groups, pitch] with room for whole tiles; pitch)."""
    scale = scales(a, p)
    if not grouped(p.activation):
        return (scale if len(scale) == p.m else scale.expand(p.m, 1)).to(torch.float32).contiguous(), 0
    pitch = -(-p.m // plan.tokens) * plan.tokens
    room = torch.empty((scale.shape[1], pitch), dtype=torch.float32, device=scale.device)
    room[:, : p.m] = scale.t()
    return room, pitch
