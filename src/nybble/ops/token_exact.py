"""The next token from logits, the same on every machine: the largest, or a draw from an explicit seed.

argmax_exact takes the largest logit; of equal ones the lowest index, and a NaN counts as the largest. Comparing rounds
nothing, so any order does.

sample_exact draws from softmax(logits / temperature) without a sum that could round:

    w_v = floor(exp((z_v - max z) / temperature) * 2^40)        an integer, with the exponential of _exact
    W_v = w_0 + … + w_v                                         integers, exact in any order
    token = first v with W_v > u * W_last                       u of 31 bits from Philox4x32-10

u comes from the counter (position) under the key (seed), so a sequence's draws depend on its seed and the positions
alone, not on the batch, and can be repeated from the middle. Probabilities below 2^-40 of the largest are never drawn.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nybble.errors import BadInput
from nybble.ops._choose import choose
from nybble.ops._declare import Agreement, Cost, Implementation, Op
from nybble.ops._exact.arithmetic import check_dtype, exp
from nybble.quantize.rounding import philox

_WORD, _DRAW_BITS = 0xFFFFFFFF, 31
_UNIT = 2.0**40


def argmax_exact(logits: Tensor) -> Tensor:
    """int64 [B] for logits [B, V], V at least 1: the largest, of equal ones the first; promise: cross-machine."""
    _check("argmax_exact", logits)
    return choose(ARGMAX_EXACT, logits.device.type, logits).run(logits)


def argmax_exact_reference(logits: Tensor) -> Tensor:
    """The definition: plain torch, comparisons only."""
    largest = (logits == logits.amax(-1, keepdim=True)) | logits.isnan()
    index = torch.arange(logits.shape[-1], device=logits.device).expand_as(largest)
    return index.masked_fill(~largest, logits.shape[-1]).amin(-1)


def sample_exact(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """int64 [B]: a token for each row of logits [B, V]; promise: cross-machine.

    Args:
        logits: float32, bfloat16 or float16; finite, or -inf for tokens that are forbidden.
        temperature: float32 [B], above 0.
        seeds: int64 [B], a sequence's own.
        positions: int32 or int64 [B], not negative: which draw of that sequence this is.

    Raises:
        BadInput: shapes or dtypes that do not fit.
    """
    _check("sample_exact", logits)
    each = (temperature, seeds, positions)
    if any(t.shape != logits.shape[:1] for t in each) or temperature.dtype != torch.float32:
        shapes = ", ".join(f"{t.dtype} {tuple(t.shape)}" for t in each)
        raise BadInput(f"sample_exact: temperature, seeds and positions for logits {tuple(logits.shape)} are {shapes}")
    args = (logits, *each)
    return choose(SAMPLE_EXACT, logits.device.type, *args).run(*args)


def sample_exact_reference(logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """The definition: plain torch, integers where it sums."""
    z = logits.to(torch.float32)
    weights = exp((z - z.amax(-1, keepdim=True)) / temperature[:, None]).mul_(_UNIT).to(torch.int64)
    sums = weights.cumsum(-1)
    total, mask = sums[:, -1], (1 << _DRAW_BITS) - 1
    u = _draws(seeds, positions.to(torch.int64))
    # u * total / 2^31 in two parts, neither of which reaches 2^63.
    bound = u * (total >> _DRAW_BITS) + (u * (total & mask) >> _DRAW_BITS)
    return (sums <= bound[:, None]).sum(-1)


def _draws(seeds: Tensor, positions: Tensor) -> Tensor:
    """31 uniform bits a row. The seed goes into the counter, since a key is the same for all rows."""
    words = torch.stack([positions & _WORD, positions >> 32, seeds & _WORD, (seeds >> 32) & _WORD], -1)
    return philox(words, (0, 0))[:, 0] >> 1


def _check(name: str, logits: Tensor) -> None:
    check_dtype(name, logits)
    if logits.ndim != 2 or logits.shape[1] < 1:
        raise BadInput(f"{name} takes logits [B, V] with V at least 1, got {tuple(logits.shape)}")


def argmax_cases(device: str = "cpu") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments): ties in every row, one token, no rows, infinities and NaN."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns, dtype in ((3, 1000, torch.bfloat16), (2, 1, torch.float16), (0, 5, torch.float32)):
        z = torch.randn(rows, columns, generator=generator).to(dtype)
        yield f"{rows}x{columns}-{dtype}", (z.round().to(device),)
    z = torch.tensor([[0.0, torch.inf, torch.nan, torch.nan], [-torch.inf] * 4, [-0.0, 0.0, -0.0, -1.0]])
    yield "special", (z.to(device),)


def sample_cases(device: str = "cpu") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments): every dtype, hot and cold, forbidden tokens, large seeds and positions, no rows."""
    generator = torch.Generator().manual_seed(0)
    for rows, columns, dtype in ((3, 1000, torch.bfloat16), (2, 1, torch.float16), (0, 5, torch.float32),
                                 (4, 4097, torch.float32)):  # fmt: skip
        z = (torch.randn(rows, columns, generator=generator) * 4).to(dtype)
        z[:, 1::7] = -torch.inf
        heat = torch.linspace(0.3, 1.7, rows) if rows else torch.empty(0)
        seeds = torch.arange(rows) * 0x123456789AB - 2
        at = torch.arange(rows) * 0x1FFFFFFFF
        yield f"{rows}x{columns}-{dtype}", tuple(t.to(device) for t in (z, heat, seeds, at))


def cost(logits: Tensor, *rest: Tensor) -> Cost:
    """An operation or two a logit, read once."""
    return Cost(2.0 * logits.numel(), float(logits.numel() * logits.element_size()))


def _op(name: str, reference: Any, cases: Any) -> Op:
    everywhere = Implementation(f"{name}_torch", reference, native=True)
    bits = Agreement({torch.int64: 0.0})
    return Op(name, reference, bits, cases, cost, homes={}, fallback=everywhere, promise="cross-machine")


ARGMAX_EXACT = _op("argmax_exact", argmax_exact_reference, argmax_cases)
SAMPLE_EXACT = _op("sample_exact", sample_exact_reference, sample_cases)
