"""Equality bit by bit, and the inputs that ops with the promise cross-machine are held to besides their cases."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from nybble.ops.rope_exact import rope_tables

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits(t: torch.Tensor) -> torch.Tensor:
    """A tensor's bits as integers on the CPU."""
    return t.detach().cpu().contiguous().view(_BITS[t.element_size()])


def same_bits(y: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    """Raise AssertionError with the first difference."""
    assert (y.shape, y.dtype) == (expected.shape, expected.dtype), what
    wrong = (bits(y) != bits(expected)).flatten().nonzero().flatten()
    if len(wrong):
        n = int(wrong[0])
        seen = float(y.detach().cpu().flatten()[n]), float(expected.detach().cpu().flatten()[n])
        raise AssertionError(f"{what}: {len(wrong)} of {y.numel()} values differ, first {n}: {seen[0]!r}, {seen[1]!r}")


def results(y: Any) -> tuple[torch.Tensor, ...]:
    """What an op returned, as a tuple."""
    return y if isinstance(y, tuple) else (y,)


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments of their own, strides kept where tensors are not contiguous."""
    return tuple(a.clone() if isinstance(a, torch.Tensor) and a.is_contiguous() else a for a in args)


def special(dtype: torch.dtype, *shape: int, seed: int = 0) -> torch.Tensor:
    """Values of every magnitude of a dtype: any bits but NaN's and infinity's, then a few of those."""
    generator = torch.Generator().manual_seed(seed)
    width = 32 if dtype == torch.float32 else 16
    codes = torch.randint(-(2 ** (width - 1)), 2 ** (width - 1), shape, generator=generator)
    x = codes.to(_BITS[width // 8]).view(dtype)
    return torch.where(x.isfinite(), x, torch.ones((), dtype=dtype))


def specials(name: str, dtype: torch.dtype, device: str = "cpu") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments) of the op `name`: all magnitudes, subnormals, infinities, NaN."""
    x = special(dtype, 4, 96)
    odd = x.clone()
    odd[0, :3] = torch.tensor([torch.nan, torch.inf, -torch.inf]).to(dtype)
    odd[1, 5], odd[2, 70] = torch.inf, -torch.inf
    small = (torch.randn(4, 96, generator=torch.Generator().manual_seed(1)) * 2.0**-120).to(dtype)
    for label, values in (("every magnitude", x), ("infinities and NaN", odd), ("tiny", small)):
        yield (
            f"{label}, {dtype}",
            tuple(a.to(device) if isinstance(a, torch.Tensor) else a for a in _arguments(name, values, dtype)),
        )


def _arguments(name: str, x: torch.Tensor, dtype: torch.dtype) -> tuple[Any, ...]:
    if name == "add_rmsnorm_exact":
        return x, x.flip(-1), special(dtype, 96, seed=2), 1e-5
    if name == "silu_mul_exact":
        return (x,)
    caches = x.repeat(1, 6).view(2, 1, 72, 16).contiguous(), x.flip(0).repeat(1, 6).view(2, 1, 72, 16).contiguous()
    rows = torch.tensor([0, 1, 1, 0], dtype=torch.int32)
    at = torch.tensor([71, 64, 3, 0], dtype=torch.int32)
    if name == "attention_exact":
        return x.view(4, 6, 16)[:, :2], *caches, rows, at
    return x, *rope_tables(16, 72, {"rope_theta": 10000.0}), *caches, rows, at
