"""embed_token_: how a decode step begins: the pending tokens are noted down and become vectors.

    tokens[b, p] = token[b],   x[b] = embedding[token[b]]

One small kernel in place of three. The position p is read from device memory, so that one captured graph serves every
step. Reads and writes one row a sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nybble.ops._choose import choose
from nybble.ops._declare import Agreement, Cost, Implementation, Op


def embed_token_(token: Tensor, position: Tensor, tokens: Tensor, embedding: Tensor) -> Tensor:
    """x [B, H]; writes column `position` of `tokens`.

    Args:
        token: int64 [B], each below V.
        position: int32 [1], below S.
        tokens: int64 [B, S].
        embedding: [V, H], float32, bfloat16 or float16.
    """
    args = (token, position, tokens, embedding)
    return choose(EMBED_TOKEN, token.device.type, *args).run(*args)


def embed_token_reference(token: Tensor, position: Tensor, tokens: Tensor, embedding: Tensor) -> Tensor:
    """The definition, in plain torch."""
    tokens.index_copy_(1, position.long(), token[:, None])
    return torch.nn.functional.embedding(token, embedding)


def cases(device: str = "cpu") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments): every dtype, odd widths, wide rows, no sequence, first and last position."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4096, 5), (3, 65, 0), (0, 8, 1), (16, 576, 15), (2, 3000, 7))
    for number, (batch, width, p) in enumerate(shapes):
        dtype = (torch.bfloat16, torch.float32, torch.float16)[number % 3]
        embedding = torch.randn(50, width, generator=generator).to(device, dtype)
        token = torch.randint(0, 50, (batch,), generator=generator).to(device)
        tokens = torch.zeros((batch, 16), dtype=torch.int64, device=device)
        position = torch.tensor([p], dtype=torch.int32, device=device)
        yield f"B{batch}-H{width}-{dtype}", (token, position, tokens, embedding)


def cost(token: Tensor, position: Tensor, tokens: Tensor, embedding: Tensor) -> Cost:
    """Nothing is computed; a row of the embedding is read and written for each sequence."""
    return Cost(0.0, 2.0 * len(token) * embedding.shape[1] * embedding.element_size())


EMBED_TOKEN = Op(
    name="embed_token_",
    reference=embed_token_reference,
    agreement=Agreement({torch.bfloat16: 0.0, torch.float16: 0.0, torch.float32: 0.0}),
    cases=cases,
    cost=cost,
    homes={"cuda": "nybble.ops.embed_token.triton"},
    fallback=Implementation("embed_token_torch", embed_token_reference, native=True),
)
