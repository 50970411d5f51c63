"""linear_invariant on NVIDIA GPUs, 16-bit weights: one Triton kernel, sixteen columns after the other, no split over K.

Tiles differ in size by the number of tokens, and that does not show: whatever the tile, an output is one accumulator
to which the tensor cores add the products of columns 0-15, then 16-31, …; on Hopper mma (16 tokens) and wgmma (64 and
more) round alike, in every bit of the float32 sums (2026-11-30, 65,536 sums of each of six kinds, eight tile shapes;
tests/gpu/test_promises_linear.py checks it again). A tile's columns beyond K are zeros, which add nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from nybble.ops import _promised_linear as shared
from nybble.ops._declare import Implementation
from nybble.ops.linear_invariant import quantized

_GROUP = 8  # tiles of tokens that go through the outputs together
_OLDEST = (8, 0)
_HALVES = (torch.bfloat16, torch.float16)


@triton.jit(do_not_specialize=["m"])  # one compilation for every number of tokens
def _linear_invariant_kernel(
    x, w, bias, y, m, n, k, x_row,
    HAS_BIAS: tl.constexpr, FEW: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    # GROUP tiles of tokens go through all outputs together: what they read of x and w stays in L2.
    tiles, of_outputs = tl.cdiv(m, BM), tl.cdiv(n, BN)
    group = tl.program_id(0) // (GROUP * of_outputs)
    height = min(tiles - group * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * of_outputs)
    token0, row0 = (group * GROUP + within % height) * BM, (within // height) * BN
    rows, tokens, columns = row0 + tl.arange(0, BN), token0 + tl.arange(0, BM), tl.arange(0, BK)
    total = tl.zeros((BM, BN), tl.float32)
    for column in range(0, k, BK):
        if FEW:  # the copy engine is slow where most of a box lies outside
            inside = (tokens < m)[:, None] & (column + columns < k)[None, :]
            a = tl.load(x + tokens[:, None] * x_row + (column + columns)[None, :], inside, 0.0)
        else:
            a = x.load([token0, column])
        b = w.load([row0, column])
        total = tl.dot(a, b.T, total)
    total += tl.load(bias + rows, rows < n, 0.0).to(tl.float32)[None, :] if HAS_BIAS else 0.0
    at = tokens.to(tl.int64)[:, None] * n + rows[None, :]
    tl.store(y + at, total.to(y.dtype.element_ty), (tokens < m)[:, None] & (rows < n)[None, :])


@dataclass(frozen=True)
class Tiles:
    """A tile's tokens, outputs and columns, its warps, and how many tiles of operands are under way."""

    tokens: int
    outputs: int
    columns: int
    warps: int
    stages: int

    @property
    def shared_bytes(self) -> int:
        """Shared memory of a block, about."""
        return 2 * self.columns * (self.tokens + self.outputs) * self.stages + 1024


_FEW = 16
_WIDE = 8192
"""Outputs from which on tiles of 64 or 128 of them fill the processors."""


def plans(m: int, n: int) -> tuple[Tiles, ...]:
    """What may run for m tokens and n outputs, in order of preference; later ones need less shared memory."""
    if m <= _FEW:
        best = Tiles(_FEW, 64, 128, 4, 4 if n <= 2 * _WIDE else 3) if n > _WIDE else Tiles(_FEW, 16, 256, 2, 4)
    elif m <= 64:
        best = Tiles(64, 128, 64, 4, 5) if n > _WIDE else Tiles(64, 32, 128, 4, 5)
    elif m <= 256:
        best = Tiles(128, 128, 64, 4, 4) if n > _WIDE else Tiles(128, 64, 64, 4, 4)
    else:
        best = Tiles(256, 128, 64, 8, 4)
    return best, Tiles(64, 64, 64, 4, 3)


def run(
    x: Tensor, w: Tensor, bias: Tensor | None, tiles: Tiles | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """x [..., K] times w^T plus bias in x's dtype, or in `dtype`, by `tiles` or by what `plans` prefers."""
    n, k = w.shape
    rows, weight = shared.whole_runs(shared.rows(x)), shared.whole_runs(w)
    m = len(rows)
    y = torch.empty((*x.shape[:-1], n), dtype=dtype or x.dtype, device=x.device)
    room = torch.cuda.get_device_properties(x.device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    t = tiles or next(plan for plan in plans(m, n) if plan.shared_bytes <= room)
    grid = (triton.cdiv(m, t.tokens) * triton.cdiv(n, t.outputs),)
    with torch.cuda.device(x.device):
        _linear_invariant_kernel[grid](
            rows if t.tokens == _FEW else TensorDescriptor.from_tensor(rows, [t.tokens, t.columns]),
            TensorDescriptor.from_tensor(weight, [t.outputs, t.columns]),
            y if bias is None else bias.contiguous(), y, m, n, k, rows.stride(0),
            bias is not None, t.tokens == _FEW, t.tokens, t.outputs, t.columns, _GROUP,
            num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
    return y


def _supports(x: Tensor, w: shared.Weight, bias: Tensor | None) -> str | None:
    if not isinstance(w, Tensor):
        return f"the weight is {w.format.name}"
    if x.dtype not in _HALVES or w.dtype != x.dtype:
        return f"takes bfloat16 or float16 for both operands, got {x.dtype} and {w.dtype}"
    if x.numel() == 0 or w.shape[0] == 0:
        return f"nothing to compute: x is {tuple(x.shape)}, the weight {tuple(w.shape)}"
    if torch.cuda.get_device_capability(x.device) < _OLDEST:
        return f"needs compute capability 8.0, this is {torch.cuda.get_device_capability(x.device)}"
    return None


IMPLEMENTATIONS = (
    Implementation("linear_invariant_w16_triton", run, _supports, native=True),
    *quantized.IMPLEMENTATIONS,
)
