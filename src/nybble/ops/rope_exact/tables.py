"""Rotary positions as tables of float32, the same on every machine because they are made of integers.

    angle(p, i) = p * f_i,   f_i = theta^(-2i / D)        for position p and pair i (Su et al., arXiv 2104.09864)

Libraries differ in the last bits of pow, cos and sin. Here f_i comes from `decimal`, whose exp and ln are rounded
correctly to the digits asked for; cos f_i and sin f_i from their series in fixed point with 128 bits; and the next
position from the one before by one complex multiplication in fixed point. Its error after 2^20 positions is 2^-107, so
rounding to float32 is the only one that is ever seen. (transformers multiplies p with f_i in float32 first, which is
wrong by up to p 2^-25 radians; these tables are not.)

The tables are made once, on the host, and moved to the device as data; a fingerprint holds their hash.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Context, Decimal, localcontext
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from nybble.errors import Unsupported

_BITS = 128
_ONE = 1 << _BITS
_DIGITS = 60
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")


def rope_tables(head_dim: int, positions: int, rope: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """(cos, sin), float32 [positions, head_dim / 2], on the CPU.

    Args:
        head_dim: even.
        positions: how many, from 0.
        rope: "rope_theta" and "rope_type" as in a transformers configuration, with the type's own settings.

    Raises:
        Unsupported: a type other than default, linear and llama3, an odd head_dim, or a partial rotation.
    """
    kind = rope.get("rope_type", "default")
    if kind not in ("default", "linear", "llama3"):
        raise Unsupported(f"rotary positions of type {kind!r} have no exact tables; default, linear and llama3 have")
    if head_dim % 2 or rope.get("partial_rotary_factor", 1.0) != 1.0:
        raise Unsupported(f"rotary positions take whole heads of an even size, got {head_dim} and {dict(rope)}")
    names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
    settings = tuple((name, str(rope[name])) for name in names if name in rope)
    cos, sin = _tables(head_dim, positions, kind, str(rope["rope_theta"]), settings)
    return cos.clone(), sin.clone()


@lru_cache(maxsize=4)
def _tables(
    head_dim: int, positions: int, kind: str, theta: str, settings: tuple[tuple[str, str], ...]
) -> tuple[Tensor, Tensor]:
    given = {name: Decimal(value) for name, value in settings}
    with localcontext(Context(prec=_DIGITS)):
        exponents = (Decimal(-2 * i) / head_dim for i in range(head_dim // 2))
        frequencies = [_scaled((Decimal(theta).ln() * e).exp(), kind, given) for e in exponents]
        starts = [_cos_sin(int(f * _ONE)) for f in frequencies]
    columns = [_rotations(cos, sin, positions) for cos, sin in starts]
    pairs = torch.tensor(columns, dtype=torch.float64).view(head_dim // 2, positions, 2)
    cos, sin = pairs.to(torch.float32).permute(2, 1, 0).contiguous()
    return cos, sin


def _scaled(frequency: Decimal, kind: str, given: Mapping[str, Decimal]) -> Decimal:
    """A frequency as a model with a longer context than it was first trained on turns it."""
    if kind == "default":
        return frequency
    factor = given["factor"]
    if kind == "linear":
        return frequency / factor
    low, high = given["low_freq_factor"], given["high_freq_factor"]
    turns = given["original_max_position_embeddings"] * frequency / (2 * _PI)
    share = min(max((turns - low) / (high - low), Decimal(0)), Decimal(1))
    return (1 - share) * frequency / factor + share * frequency


def _cos_sin(angle: int) -> tuple[int, int]:
    """cos and sin of an angle in radians, in fixed point, by their series."""
    cos, sin, term, k = 0, 0, _ONE, 0
    while term:
        sign = -1 if k & 2 else 1
        if k & 1:
            sin += sign * term
        else:
            cos += sign * term
        k += 1
        term = (term * angle >> _BITS) // k
    return cos, sin


def _rotations(cos: int, sin: int, positions: int) -> list[float]:
    """[cos 0, sin 0, cos a, sin a, cos 2a, …] as doubles, from cos a and sin a."""
    real, imaginary, found = _ONE, 0, []
    for _ in range(positions):
        found += [real / _ONE, imaginary / _ONE]
        real, imaginary = (real * cos - imaginary * sin) >> _BITS, (real * sin + imaginary * cos) >> _BITS
    return found
