"""FP8 products by the libraries that torch brings: cuBLAS and CUTLASS through `torch._scaled_mm`.

Where their layouts fit they are the fastest that was measured here for FP8. Their fast accumulation is left off: it
keeps about fourteen bits over all of K, and a sum of 8,192 products of one sign came out 16 % small (H200, torch 2.11).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nybble.ops.linear.narrow import CHUNK, Problem, grouped
from nybble.quantize import QuantTensor

_ROW_BYTES, _BLOCKS_TOGETHER, _TOKENS_TOGETHER = 16, 4, 4


@dataclass(frozen=True)
class Plan:
    """There is nothing to choose: the library does."""


def plans(p: Problem) -> list[Plan]:
    """The one there is."""
    return [Plan()]


def refusal(p: Problem) -> str | None:
    """Why the library is not asked, or None."""
    if not p.float8 or p.dtype != torch.bfloat16:
        return f"multiplies FP8 with results in bfloat16; asked for {p.weight.name} and {p.dtype}"
    if p.machine.capability != (9, 0):
        return f"was tried on compute capability 9.0 only, this is {'.'.join(map(str, p.machine.capability))}"
    if not p.m or not p.n or not p.k or p.k % _ROW_BYTES or p.n % _ROW_BYTES:
        return f"takes K and N in multiples of {_ROW_BYTES} and at least one token; [{p.m}, {p.n}, {p.k}]"
    blocks = grouped(p.weight), grouped(p.activation)
    if blocks == (False, False):
        return None
    if blocks != (True, True) or (p.weight.block, p.activation.block) != ((CHUNK, CHUNK), (1, CHUNK)):
        return (
            f"takes scales of rows, or of {CHUNK} x {CHUNK} with 1 x {CHUNK}; not {p.weight.name} x {p.activation.name}"
        )
    if p.n % CHUNK or p.k % (CHUNK * _BLOCKS_TOGETHER) or p.m % _TOKENS_TOGETHER:
        whole = (_TOKENS_TOGETHER, CHUNK, CHUNK * _BLOCKS_TOGETHER)
        return f"takes M, N and K with blocks in multiples of {whole}; [{p.m}, {p.n}, {p.k}]"
    return None


def run(a: QuantTensor, w: QuantTensor, bias: Tensor | None, p: Problem, plan: Plan, y: Tensor) -> None:
    """y [M, N] = a w^T + bias."""
    x, weight = a.codes.view(torch.float8_e4m3fn).view(p.m, p.k), w.codes.view(torch.float8_e4m3fn)
    x_scale, w_scale = (q.scale.view(-1, q.scale.shape[-1]).to(torch.float32) for q in (a, w))
    if grouped(p.weight):
        x_scale, w_scale = x_scale.t().contiguous().t(), w_scale.t()
        torch._scaled_mm(x, weight.t(), x_scale, w_scale, out_dtype=p.dtype, use_fast_accum=False, out=y)
        if bias is not None:
            y += bias
        return
    x_scale, w_scale = x_scale.expand(p.m, 1).contiguous(), w_scale.expand(p.n, 1).contiguous().t()
    bias = None if bias is None else bias.to(p.dtype)
    torch._scaled_mm(x, weight.t(), x_scale, w_scale, bias=bias, out_dtype=p.dtype, use_fast_accum=False, out=y)
