"""Narrow products anywhere Triton compiles, of any size: the portable partner of narrow_cuda.py.

One kernel for every pair of formats that narrow.py names. Where scales cover whole rows the sums stay in int32 until
the end; otherwise, and for FP8, whose products the tensor cores of Hopper add up to fourteen bits only, each group's
sums are added up in float32. A weight of four bits comes in the layout HALVES: a mask gives sixteen times the columns
of the high halves, a shift those of the low ones, and both meet x's columns as they lie.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.ops.linear.narrow import CHUNK, Problem, grouped, scales
from nybble.quantize import QuantTensor

_BAND = 8
_WIDENED = 2048  # bytes a program widens
_FP8_SINCE = (8, 9)


@dataclass(frozen=True)
class Plan:
    """A tile of tokens by rows of W, and how the compiler is to schedule it."""

    tokens: int
    rows: int
    columns: int
    warps: int
    stages: int


@triton.jit(do_not_specialize=["m", "groups", "w_shift", "x_step", "pieces"])
def _narrow_kernel(
    x, w, x_scale, w_scale, bias, y, m, n, k, w_row, groups, w_shift, x_step, pieces,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, NIBBLES: tl.constexpr,
    FLOAT8: tl.constexpr, W_GROUPED: tl.constexpr, X_GROUPED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BAND: tl.constexpr,
):  # fmt: skip
    """y[M, N] = x[M, K] w[N, K]^T, rescaled. COLUMNS are those of a dot, of one group where GROUP > 0."""
    token_tiles, row_tiles = tl.cdiv(m, TOKENS), tl.cdiv(n, ROWS)
    tile = tl.program_id(0)
    band = tile // (row_tiles * BAND)
    width = min(token_tiles - band * BAND, BAND)
    within = tile % (row_tiles * BAND)
    t = (band * BAND + within % width) * TOKENS + tl.arange(0, TOKENS)
    r = (within // width) * ROWS + tl.arange(0, ROWS)
    c = tl.arange(0, COLUMNS)
    x_at = x + (t % m).to(tl.int64)[:, None] * k  # rows beyond the end are other rows once more: never stored
    w_at = w + (r % n).to(tl.int64)[:, None] * w_row
    s_at = (r % n) // w_shift * (groups if W_GROUPED else 1)
    kind: tl.constexpr = tl.float32 if FLOAT8 else tl.int32
    sums = tl.zeros((TOKENS, ROWS), kind)
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for piece in range(pieces):
        if NIBBLES:
            # COLUMNS bytes hold as many columns in their low halves, and in their high ones those 64 further on.
            first = piece * COLUMNS // 64 * 128 + piece * COLUMNS % 64
            codes = tl.load(w_at + (piece * COLUMNS + c)[None, :])
            low, high = (codes << 4).to(tl.int8), codes & -16
            x_low = tl.load(x_at + (first + c)[None, :], mask=(first + c)[None, :] < k, other=0)
            x_high = tl.load(x_at + (first + 64 + c)[None, :], mask=(first + 64 + c)[None, :] < k, other=0)
            sums = tl.dot(x_low, low.T, sums, out_dtype=kind)
            if GROUP == 32 or GROUP == 64:
                total += _scaled(
                    sums, x_scale, w_scale, t, m, s_at, first // GROUP, groups, x_step, W_GROUPED, X_GROUPED
                )
                sums = tl.zeros((TOKENS, ROWS), kind)
            sums = tl.dot(x_high, high.T, sums, out_dtype=kind)
            group = (first + 64) // (GROUP if GROUP else 1)
        else:
            columns = piece * COLUMNS + c
            a = tl.load(x_at + columns[None, :], mask=columns[None, :] < k, other=0)
            b = tl.load(w_at + columns[None, :], mask=columns[None, :] < k, other=0)
            if FLOAT8:
                a, b = a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True)
            sums = tl.dot(a, b.T, sums, out_dtype=kind)
            group = piece * COLUMNS // (GROUP if GROUP else 1)
        if GROUP:
            total += _scaled(sums, x_scale, w_scale, t, m, s_at, group, groups, x_step, W_GROUPED, X_GROUPED)
            sums = tl.zeros((TOKENS, ROWS), kind)
    if not GROUP:
        total = sums.to(tl.float32)
    if NIBBLES:
        total *= 0.0625
    if not X_GROUPED:
        total *= tl.load(x_scale + t % m)[:, None]
    if not W_GROUPED:
        total *= tl.load(w_scale + s_at).to(tl.float32)[None, :]
    if HAS_BIAS:
        total += tl.load(bias + r % n).to(tl.float32)[None, :]
    at = y + t.to(tl.int64)[:, None] * n + r[None, :]
    tl.store(at, total.to(y.dtype.element_ty), mask=(t < m)[:, None] & (r < n)[None, :])


@triton.jit
def _scaled(
    sums, x_scale, w_scale, t, m, s_at, group, groups, x_step, W_GROUPED: tl.constexpr, X_GROUPED: tl.constexpr
):
    """A group's sums times its scales, in float32; a group beyond the last one has sums of zero."""
    scaled = sums.to(tl.float32)
    group = min(group, groups - 1)
    if X_GROUPED:
        scaled *= tl.load(x_scale + (t % m) * x_step + group)[:, None]
    if W_GROUPED:
        scaled *= tl.load(w_scale + s_at + group).to(tl.float32)[None, :]
    return scaled


@triton.jit(do_not_specialize=["count"])
def _widen_kernel(packed, codes, count, BLOCK: tl.constexpr):
    """Two's complement nibbles, the even one low, to int8."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    pair = tl.load(packed + at, mask=at < count, other=0)
    tl.store(codes + 2 * at, (pair << 4).to(tl.int8) >> 4, mask=at < count)
    tl.store(codes + 2 * at + 1, pair >> 4, mask=at < count)


def codes8(a: QuantTensor) -> Tensor:
    """[M, K] codes of activations, a byte each: int8, or e4m3's bits."""
    codes = a.codes.view(-1, a.codes.shape[-1])
    if a.format.element.bits == 8:
        return codes
    wide = torch.empty((codes.shape[0], 2 * codes.shape[1]), dtype=torch.uint8, device=codes.device)
    grid = (-(-codes.numel() // _WIDENED),)
    if codes.numel():
        _widen_kernel[grid](codes.view(torch.int8), wide.view(torch.int8), codes.numel(), BLOCK=_WIDENED)
    return wide[:, : a.shape[-1]].contiguous()


def plans(p: Problem) -> list[Plan]:
    """Tiles worth trying, the model's favourite first: few tokens want many blocks, many tokens large tiles."""
    columns = p.group if p.group in (32, 64) else CHUNK
    columns = min(columns, CHUNK // 2) if p.nibbles else columns
    if p.m <= 64:
        tokens, few_rows = max(16, 1 << max(p.m - 1, 0).bit_length()), p.n < 64 * p.machine.processors
        return [Plan(tokens, rows, columns, 4, 4) for rows in ((32, 64) if few_rows else (64, 32))]
    if p.m <= 256 or p.group:
        return [Plan(64, 128, columns, 4, 4), Plan(128, 128, columns, 8, 3)]
    return [Plan(128, 128, columns, 4, 3), Plan(128, 256, columns, 8, 3), Plan(64, 128, columns, 4, 4)]


def refusal(p: Problem) -> str | None:
    """Why the kernel cannot take a problem, or None."""
    if p.float8 and p.machine.capability < _FP8_SINCE:
        return f"FP8 products exist from compute capability 8.9 on, this is {p.machine.capability}"
    if max(p.m, 1) * max(p.n, p.k) >= 2**31:
        return f"x [{p.m}, {p.k}] or the result [{p.m}, {p.n}] has 2^31 elements or more"
    return None


def run(a: QuantTensor, w: QuantTensor, bias: Tensor | None, p: Problem, plan: Plan, y: Tensor) -> None:
    """y [M, N] = a w^T + bias; a [M, K] as a producer gives it, w [N, K] in `layout_for(w.format)`."""
    if not p.m or not p.n:
        return
    codes, w_scale, scale = codes8(a), scales(w, p), scales(a, p).to(torch.float32)
    if scale.shape[0] != p.m:
        scale = scale.expand(p.m, -1).contiguous()
    rows = p.weight.block[0] or p.n
    width = w.codes.shape[1] if p.nibbles else p.k
    kind = torch.uint8 if p.float8 else torch.int8
    grid = (-(-p.m // plan.tokens) * -(-p.n // plan.rows),)
    _narrow_kernel[grid](
        codes.view(kind), w.codes.view(kind), scale, w_scale, y if bias is None else bias.contiguous(), y,
        p.m, p.n, p.k, width, (w_scale if grouped(p.weight) else scale).shape[1], rows, scale.shape[1],
        -(-width // plan.columns), TOKENS=plan.tokens, ROWS=plan.rows, COLUMNS=plan.columns,
        GROUP=p.group, NIBBLES=p.nibbles, FLOAT8=p.float8, W_GROUPED=grouped(p.weight),
        X_GROUPED=grouped(p.activation), HAS_BIAS=bias is not None, BAND=_BAND, num_warps=plan.warps,
        num_stages=plan.stages, enable_fp_fusion=False,
    )  # fmt: skip
