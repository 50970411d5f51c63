"""greedy_token_ as one Triton kernel: pieces of a row, and whoever ends last compares their winners.

A logit and its index are one integer: the float's bits in the order of floats above, the index counted backwards
below, so that the largest integer is the answer.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.ops._declare import Implementation
from nybble.ops._early import begin, early

_BLOCK = 2048
_MOST_PIECES = 1024  # compared by one program


@triton.jit
def _greedy_token_kernel(
    logits, token, position, turns, winners, columns,
    PIECES: tl.constexpr, BP: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = piece * BLOCK + tl.arange(0, BLOCK)
    begin(EARLY)
    value = tl.load(logits + row * columns + at, at < columns, -float("inf")).to(tl.float32) + 0.0  # -0 is 0
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(value == value, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    best = tl.max((order.to(tl.int64) << 32) | (0x7FFFFFFF - at), 0)
    tl.store(winners + row * PIECES + piece, best)
    tl.debug_barrier()  # stored before the number is taken
    if tl.atomic_add(turns + row, 1) == PIECES - 1:
        p = tl.arange(0, BP)
        best = tl.max(tl.load(winners + row * PIECES + p, p < PIECES, best, cache_modifier=".cg"), 0)
        tl.store(token + row, 0x7FFFFFFF - (best & 0x7FFFFFFF))
        tl.store(turns + row, 0)
        if row == 0:
            tl.store(position, tl.load(position) + 1)


def _triton(logits: Tensor, token: Tensor, position: Tensor, turns: Tensor | None = None) -> Tensor:
    batch, columns = logits.shape
    if not batch:
        position.add_(1)
        return token
    pieces = triton.cdiv(columns, _BLOCK)
    winners = torch.empty((batch, pieces), dtype=torch.int64, device=logits.device)
    turns = torch.zeros(batch, dtype=torch.int32, device=logits.device) if turns is None else turns
    _greedy_token_kernel[(pieces, batch)](
        logits.contiguous(), token, position, turns, winners, columns,
        pieces, triton.next_power_of_2(pieces), _BLOCK, num_warps=4, **early(logits.device),
    )  # fmt: skip
    return token


def _supports(logits: Tensor, token: Tensor, position: Tensor, turns: Tensor | None = None) -> str | None:
    if logits.shape[1] > _MOST_PIECES * _BLOCK:
        return f"V = {logits.shape[1]} is above {_MOST_PIECES * _BLOCK}"
    return None if token.is_contiguous() else "token has to be contiguous"


IMPLEMENTATIONS = (Implementation("greedy_token_triton", _triton, _supports, native=True),)
