"""add_rmsnorm as one Triton kernel: a program a row, the row held in registers between its two uses."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.ops._declare import Implementation
from nybble.ops._early import begin, early, fetch, fetching, spare, touch

_MOST_COLUMNS = 32768


@triton.jit
def _row(
    x, residual, weight, y, h, row, columns, eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, BLOCK)
    inside = at < columns
    touch(weight, columns * (weight.dtype.element_ty.primitive_bitwidth // 8), EARLY, LANES)
    begin(EARLY)
    value = tl.load(x + row + at, inside, 0.0)
    if HAS_RESIDUAL:
        added = value.to(tl.float32) + tl.load(residual + row + at, inside, 0.0).to(tl.float32)
        value = added.to(value.dtype)
    # Before the sum, which would otherwise be followed by a wait for memory.
    gain = tl.load(weight + at, inside, 0.0).to(tl.float32)
    if HAS_RESIDUAL:
        tl.store(h + row + at, value, inside)
    wide = value.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(wide * wide, 0) / columns + eps)
    scaled = (wide * scale).to(value.dtype).to(tl.float32)
    tl.store(y + row + at, (gain * scaled).to(value.dtype), inside)


@triton.jit
def _add_rmsnorm_kernel(
    x, residual, weight, y, h, rows, columns, eps,
    ahead, ahead_bytes, step, pieces,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, KIND: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < rows:
        _row(x, residual, weight, y, h, program.to(tl.int64) * columns, columns, eps, HAS_RESIDUAL, BLOCK, EARLY, LANES)
    elif KIND:
        fetch(ahead, ahead_bytes, step, program - rows, pieces, KIND, LANES)


def _supports(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, ahead: Tensor | None = None
) -> str | None:
    if x.shape[-1] > _MOST_COLUMNS:
        return f"H = {x.shape[-1]} is above {_MOST_COLUMNS}, one block's row"
    if weight.dtype != x.dtype:
        return f"weight is {weight.dtype}, x {x.dtype}"
    return None


def _triton(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float, ahead: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    flat = x.contiguous()
    y = torch.empty_like(flat)
    h = flat if residual is None else torch.empty_like(flat)
    columns = flat.shape[-1]
    rows = flat.numel() // columns if columns else 0
    if rows:
        block = triton.next_power_of_2(columns)
        warps = min(16, max(4, block // 512))
        other = flat if residual is None else residual.contiguous()
        _add_rmsnorm_kernel[(rows + spare(ahead, x.device),)](
            flat, other, weight.contiguous(), y, h, rows, columns, eps, HAS_RESIDUAL=residual is not None, BLOCK=block,
            num_warps=warps, **early(x.device), **fetching(ahead, x.device, warps),
        )  # fmt: skip
    return y, h


IMPLEMENTATIONS = (Implementation("add_rmsnorm_triton", _triton, _supports, native=True),)
