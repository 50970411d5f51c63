"""embed_token_ as one Triton kernel: a program for each piece of a row; the first of a row notes the token down."""

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
    token, position, tokens, embedding, x, width, capacity, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = piece * BLOCK + tl.arange(0, BLOCK)
    begin(EARLY)
    chosen = tl.load(token + row)
    values = tl.load(embedding + chosen * width + at, at < width, 0.0)
    if piece == 0:
        tl.store(tokens + row * capacity + tl.load(position), chosen)
    tl.store(x + row * width + at, values, at < width)


def _triton(token: Tensor, position: Tensor, tokens: Tensor, embedding: Tensor) -> Tensor:
    batch, width = len(token), embedding.shape[1]
    x = torch.empty((batch, width), dtype=embedding.dtype, device=token.device)
    if x.numel():
        _embed_token_kernel[(triton.cdiv(width, _BLOCK), batch)](
            token, position, tokens, embedding, x, width, tokens.shape[1], _BLOCK, num_warps=4, **early(token.device)
        )
    return x


def _supports(token: Tensor, position: Tensor, tokens: Tensor, embedding: Tensor) -> str | None:
    contiguous = all(t.is_contiguous() for t in (token, tokens, embedding))
    return None if contiguous else "tokens and embedding have to be contiguous"


IMPLEMENTATIONS = (Implementation("embed_token_triton", _triton, _supports, native=True),)
