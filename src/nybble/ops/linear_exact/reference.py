"""The definition of `linear_exact`: which fused multiply-adds, in which order.

Columns come in runs of 8, dealt in turn to 32 chains: chain c has the columns k with (k // 8) % 32 == c, ascending.

    chain[c] = fma(x[k], w[k], chain[c])      from +0, over its columns in order; fma rounds once, to float32
    total    = total + chain[c]               from +0, c = 0 ... 31
    y        = round(total + bias)            to x's dtype

Why so: a warp that streams a row of weights past, each lane its own 16 bytes, keeps one chain a lane; a tile of many
tokens walks chain after chain and keeps one accumulator an output. Both make these sums, with nothing left over.

The order is a function of K. Columns beyond K may be taken as zeros on both sides: they change at most the sign of a
zero in a chain, and adding that to `total`, which starts at +0 and so never is -0, shows nothing of it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nybble.ops import _promised_linear as shared
from nybble.ops._promised_linear import RUN

CHAINS = 32
SPAN = RUN * CHAINS
"""Columns after which the first chain's turn comes again."""


def linear_exact_reference(x: Tensor, w: shared.Weight, bias: Tensor | None = None) -> Tensor:
    """[..., K] x [N, K] -> [..., N] in x.dtype; arguments as for nybble.ops.linear_exact."""
    wide = shared.values(w).to(torch.float32)
    a, b = chains(shared.rows(x).to(torch.float32)), chains(wide)
    sums = torch.zeros((a.shape[0], b.shape[0], CHAINS), dtype=torch.float32, device=x.device)
    for turn in range(a.shape[1]):
        for column in range(RUN):
            sums = fma(a[:, None, turn, :, column], b[None, :, turn, :, column], sums)
    return finish(sums.unbind(-1), bias, x)


def chains(rows: Tensor) -> Tensor:
    """[rows, K] -> [rows, turns, chains, run], filled up with zeros."""
    k = rows.shape[1]
    turns = -(-k // SPAN)
    return torch.nn.functional.pad(rows, (0, turns * SPAN - k)).view(rows.shape[0], turns, CHAINS, RUN)


def fma(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """fl32(a * b + c) of float32 tensors, rounded once.

    In float64 the product is exact (48 bits) and the sum may not be. Rounding to float32 would then round twice;
    rounding the sum to odd first makes the second rounding right (Boldo and Melquiond, 2008): of the two float64
    numbers around an inexact sum the one with an odd last bit is taken.
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    back = total - product
    error = (product - (total - back)) + (addend - back)  # exact: Knuth's two-sum
    code = total.view(torch.int64)
    away = torch.where((error > 0) == (total > 0), 1, -1)
    even = (code & 1 == 0) & (error != 0) & error.isfinite()
    return torch.where(even, code + away, code).view(torch.float64).to(torch.float32)


def finish(sums: tuple[Tensor, ...], bias: Tensor | None, x: Tensor) -> Tensor:
    """The chains' sums [rows, N] added up in order, plus bias, in x's leading shape and dtype, NaN made canonical."""
    total = torch.zeros_like(sums[0])
    for one in sums:
        total = total + one
    if bias is not None:
        total = total + bias.to(torch.float32)
    y = total.to(x.dtype)
    return y.masked_fill(y.isnan(), torch.nan).view(*x.shape[:-1], total.shape[1])
