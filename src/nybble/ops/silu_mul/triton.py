"""silu_mul as one Triton kernel: a program for each piece of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.ops._declare import Implementation
from nybble.ops._early import begin, early, fetch, fetching, spare

_BLOCK, _WARPS = 1024, 4
_MOST_PROGRAMS = 2**31 - 1


@triton.jit
def gated(gate, up):
    """silu(gate) * up, each rounded to their dtype; float32 between."""
    wide = gate.to(tl.float32)
    silu = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    return (silu * up.to(tl.float32)).to(gate.dtype)


@triton.jit
def _silu_mul_kernel(
    x, y, programs, columns, ahead, ahead_bytes, step, pieces,
    BLOCK: tl.constexpr, EARLY: tl.constexpr, KIND: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    if program < programs:
        across = tl.cdiv(columns, BLOCK)
        row = (program // across).to(tl.int64)
        at = program % across * BLOCK + tl.arange(0, BLOCK)
        inside = at < columns
        begin(EARLY)
        gate = tl.load(x + row * 2 * columns + at, inside, 0.0)
        up = tl.load(x + row * 2 * columns + columns + at, inside, 0.0)
        tl.store(y + row * columns + at, gated(gate, up), inside)
    elif KIND:
        fetch(ahead, ahead_bytes, step, program - programs, pieces, KIND, LANES)


def _triton(x: Tensor, ahead: Tensor | None = None) -> Tensor:
    flat = x.contiguous()
    columns = flat.shape[-1] // 2
    y = torch.empty((*flat.shape[:-1], columns), dtype=x.dtype, device=x.device)
    if y.numel():
        programs = _programs(x)
        _silu_mul_kernel[(programs + spare(ahead, x.device),)](
            flat, y, programs, columns, BLOCK=_BLOCK, num_warps=_WARPS,
            **early(x.device), **fetching(ahead, x.device, _WARPS),
        )  # fmt: skip
    return y


def _programs(x: Tensor) -> int:
    return x.numel() // x.shape[-1] * -(-x.shape[-1] // 2 // _BLOCK)


def _supports(x: Tensor, ahead: Tensor | None = None) -> str | None:
    if x.numel() and _programs(x) > _MOST_PROGRAMS // 2:
        return f"{tuple(x.shape)} takes more programs than a grid holds"
    return None


IMPLEMENTATIONS = (Implementation("silu_mul_triton", _triton, _supports, native=True),)
