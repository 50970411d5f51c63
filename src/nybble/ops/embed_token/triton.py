"""embed_token_ as one Triton kernel: a program for each piece of a row, the first ones with the rest on top."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.ops._declare import Implementation
from nybble.ops._early import begin, early

_BLOCK = 1024


@triton.jit
def _embed_token_kernel(
    token, position, tokens, embedding, tables, x, rotary, width, capacity,
    D2: tl.constexpr, BD2: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = piece * BLOCK + tl.arange(0, BLOCK)
    begin(EARLY)
    chosen = tl.load(token + row)
    values = tl.load(embedding + chosen * width + at, at < width, 0.0)
    if piece == 0:
        where = tl.load(position).to(tl.int64)
        tl.store(tokens + row * capacity + where, chosen)
        if row == 0:
            d = tl.arange(0, BD2)
            tl.store(rotary + d, tl.load(tables + where * D2 + d, d < D2, 0.0), d < D2)
    tl.store(x + row * width + at, values, at < width)


def _triton(
    token: Tensor, position: Tensor, tokens: Tensor, embedding: Tensor, tables: Tensor
) -> tuple[Tensor, Tensor]:
    batch, width, d2 = len(token), embedding.shape[1], 2 * tables.shape[2]
    x = torch.empty((batch, width), dtype=embedding.dtype, device=token.device)
    if not batch:
        return x, tables.index_select(0, position)[0]
    rotary = torch.empty(tables.shape[1:], dtype=tables.dtype, device=token.device)
    _embed_token_kernel[(triton.cdiv(width, _BLOCK), batch)](
        token, position, tokens, embedding, tables, x, rotary, width, tokens.shape[1],
        d2, triton.next_power_of_2(d2), _BLOCK, num_warps=4, **early(token.device),
    )  # fmt: skip
    return x, rotary


def _supports(token: Tensor, position: Tensor, tokens: Tensor, embedding: Tensor, tables: Tensor) -> str | None:
    contiguous = all(t.is_contiguous() for t in (token, tokens, embedding, tables))
    return None if contiguous else "tokens, embedding and tables have to be contiguous"


IMPLEMENTATIONS = (Implementation("embed_token_triton", _triton, _supports, native=True),)
