"""silu_mul as one Triton kernel: a program for each piece of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.ops._declare import Implementation
from nybble.ops._early import begin, early

_BLOCK = 1024


@triton.jit
def gated(gate, up):
    """silu(gate) * up, each rounded to their dtype; float32 between."""
    wide = gate.to(tl.float32)
    silu = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    return (silu * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu_mul_kernel(x, y, columns, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    begin(EARLY)
    gate = tl.load(x + row * 2 * columns + at, inside, 0.0)
    up = tl.load(x + row * 2 * columns + columns + at, inside, 0.0)
    tl.store(y + row * columns + at, gated(gate, up), inside)


def _triton(x: Tensor) -> Tensor:
    flat = x.contiguous()
    columns = flat.shape[-1] // 2
    y = torch.empty((*flat.shape[:-1], columns), dtype=x.dtype, device=x.device)
    if y.numel():
        grid = (triton.cdiv(columns, _BLOCK), y.numel() // columns)
        _silu_mul_kernel[grid](flat, y, columns, _BLOCK, **early(x.device))
    return y


def _supports(x: Tensor) -> str | None:
    rows = x.numel() // max(x.shape[-1], 1)
    return f"{rows} rows are more than a grid holds" if rows > 65535 else None


IMPLEMENTATIONS = (Implementation("silu_mul_triton", _triton, _supports, native=True),)
