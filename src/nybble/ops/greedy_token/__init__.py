"""greedy_token_: how a decode step ends: the largest logit's index becomes the pending token, the position moves on.

    token[b] = argmax(logits[b])       of equal ones the lowest index; a NaN counts as the largest
    position += 1

Comparing rounds nothing, so any order gives the same. Bytes: the logits, once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nybble.ops._choose import choose
from nybble.ops._declare import Agreement, Cost, Implementation, Op
from nybble.ops.token_exact import argmax_cases, argmax_exact_reference


def greedy_token_(logits: Tensor, token: Tensor, position: Tensor, turns: Tensor | None = None) -> Tensor:
    """`token` itself, int64 [B], after the change.

    Args:
        logits: [B, V], float32, bfloat16 or float16, V at least 1.
        token: int64 [B], overwritten.
        position: int32 [1], raised by one.
        turns: int32, at least B of them, all 0 before and after every call; calls that may run at the same time need
            their own. None makes them.
    """
    args = (logits, token, position, turns)
    return choose(GREEDY_TOKEN, logits.device.type, *args).run(*args)


def greedy_token_reference(logits: Tensor, token: Tensor, position: Tensor, turns: Tensor | None = None) -> Tensor:
    """The definition, in plain torch."""
    position.add_(1)
    return token.copy_(argmax_exact_reference(logits))


def cases(device: str = "cpu") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments): those of argmax_exact, and more logits than one program takes, the largest twice."""
    generator = torch.Generator().manual_seed(0)
    many = torch.randn(2, 70001, generator=generator).to(torch.bfloat16)
    many[0, [69999, 70000]] = 9.0
    for label, (logits, *_) in [*argmax_cases(device), ("2x70001-torch.bfloat16", (many.to(device),))]:
        token = torch.full((len(logits),), -1, dtype=torch.int64, device=device)
        yield label, (logits, token, torch.tensor([7], dtype=torch.int32, device=device))


def cost(logits: Tensor, *rest: Tensor | None) -> Cost:
    """A comparison a logit, read once."""
    return Cost(float(logits.numel()), float(logits.numel() * logits.element_size()))


GREEDY_TOKEN = Op(
    name="greedy_token_",
    reference=greedy_token_reference,
    agreement=Agreement({torch.int64: 0.0}),
    cases=cases,
    cost=cost,
    homes={"cuda": "nybble.ops.greedy_token.triton"},
    fallback=Implementation("greedy_token_torch", greedy_token_reference, native=True),
)
