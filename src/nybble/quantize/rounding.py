"""Which neighbour a value goes to, in torch, and where random draws come from.

`outward` is the twin of the rule in formats/exact.py. Draws come from Philox4x32-10 (Salmon et al., SC 2011), a
counter-based generator: value i of a tensor uses word i mod 4 of the block with counter i // 4 under the key
(seed, stream). The same seed gives the same bits on every device, in any order of evaluation, and nothing global
is touched.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nybble.errors import UnknownName
from nybble.formats.exact import ROUNDINGS

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF


def philox(counter: Tensor, key: tuple[int, int]) -> Tensor:
    """Philox4x32-10.

    Args:
        counter: int64 [n, 4], each entry a 32-bit word.
        key: two 32-bit words.

    Returns:
        int64 [n, 4], each entry a uniform 32-bit word.
    """
    c0, c1, c2, c3 = counter.unbind(-1)
    k0, k1 = (k & _WORD for k in key)
    for _ in range(_ROUNDS):
        # int64 products wrap modulo 2^64, so that both 32-bit halves are right.
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = (p1 >> 32) & _WORD ^ c1 ^ k0, p1 & _WORD, (p0 >> 32) & _WORD ^ c3 ^ k1, p0 & _WORD
        k0, k1 = (k0 + _WEYL[0]) & _WORD, (k1 + _WEYL[1]) & _WORD
    return torch.stack([c0, c1, c2, c3], dim=-1)


def uniform(shape: tuple[int, ...], seed: int, device: torch.device | str = "cpu", start: int = 0) -> Tensor:
    """Draws in [0, 1) with 24 bits, float32 of `shape`; `start` is the index of the first value in its tensor."""
    count = int(torch.Size(shape).numel())
    first, last = start // 4, (start + count + 3) // 4
    index = torch.arange(first, last, dtype=torch.int64, device=device)
    zero = torch.zeros_like(index)
    words = philox(torch.stack([index & _WORD, index >> 32, zero, zero], dim=-1), (seed & _WORD, seed >> 32))
    words = words.flatten()[start - 4 * first :][:count]
    return ((words >> 8).to(torch.float32) * 2.0**-24).view(shape)


def check(rounding: str) -> None:
    """Refuse a rounding that does not exist."""
    if rounding not in ROUNDINGS:
        raise UnknownName("rounding", rounding, ROUNDINGS)


def outward(rounding: str, t: Tensor, odd: Tensor, negative: Tensor, u: Tensor | None) -> Tensor:
    """Whether each value goes to its outer neighbour (bool); the definition is formats/exact.py.

    Args:
        rounding: one of formats.exact.ROUNDINGS.
        t: how far the value lies on the way outward, in [0, 1).
        odd: whether the inner neighbour's code is odd.
        negative: whether the value is below zero.
        u: the draws in [0, 1) of the stochastic modes, else None.
    """
    match rounding:
        case "nearest":
            return (t > 0.5) | ((t == 0.5) & odd)
        case "toward_zero":
            return torch.zeros_like(t, dtype=torch.bool)
        case "down":
            return negative & (t > 0)
        case "up":
            return ~negative & (t > 0)
    if u is None:
        raise ValueError(f"rounding {rounding!r} needs draws")
    if rounding == "stochastic":
        return u < t
    # t has up to 24 bits and the threshold 9: float64 adds them exactly.
    return (t.double() + (2 * torch.floor(256 * u.double()) + 1) / 512 >= 1) & (t > 0)
