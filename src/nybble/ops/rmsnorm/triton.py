"""add_rmsnorm as one Triton kernel: a program a row, the row held in registers between its two uses."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.ops._declare import Implementation
from nybble.ops._early import begin, early, touch

_MOST_COLUMNS = 32768


@triton.jit
def _add_rmsnorm_kernel(
    x, residual, weight, y, h, columns,
    eps,
    HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * columns
    at = tl.arange(0, BLOCK)
    inside = at < columns
    touch(weight, columns * (weight.dtype.element_ty.primitive_bitwidth // 8), EARLY, LANES)
    begin(EARLY)
    value = tl.load(x + row + at, inside, 0.0)
    if HAS_RESIDUAL:
        added = value.to(tl.float32) + tl.load(residual + row + at, inside, 0.0).to(tl.float32)
        value = added.to(value.dtype)
    # Before the sum: nothing else has read the weight in this step, and its way from memory would be waited for.
    gain = tl.load(weight + at, inside, 0.0).to(tl.float32)
    if HAS_RESIDUAL:
        tl.store(h + row + at, value, inside)
    wide = value.to(tl.float32)
    scale = 1 / tl.sqrt(tl.sum(wide * wide, 0) / columns + eps)
    scaled = (wide * scale).to(value.dtype).to(tl.float32)
    tl.store(y + row + at, (gain * scaled).to(value.dtype), inside)


def _supports(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> str | None:
    if x.shape[-1] > _MOST_COLUMNS:
        return f"H = {x.shape[-1]} is above {_MOST_COLUMNS}, one block's row"
    if weight.dtype != x.dtype:
        return f"weight is {weight.dtype}, x {x.dtype}"
    return None


def _triton(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    flat = x.contiguous()
    y = torch.empty_like(flat)
    h = flat if residual is None else torch.empty_like(flat)
    columns = flat.shape[-1]
    rows = flat.numel() // columns if columns else 0
    if rows:
        block = triton.next_power_of_2(columns)
        warps = min(16, max(4, block // 512))
        other = flat if residual is None else residual.contiguous()
        _add_rmsnorm_kernel[(rows,)](
            flat, other, weight.contiguous(), y, h, columns, eps, residual is not None, block,
            num_warps=warps, LANES=32 * warps, **early(x.device),
        )  # fmt: skip
    return y, h


IMPLEMENTATIONS = (Implementation("add_rmsnorm_triton", _triton, _supports, native=True),)
