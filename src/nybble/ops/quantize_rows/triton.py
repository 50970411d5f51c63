"""quantize_rows as one Triton kernel.

A row is cut into at most three pieces whose lengths are powers of two (14336 = 8192 + 4096 + 2048), so that few lanes
idle; where a scale or a mean spans the row, one program holds all of it in registers between its uses, and memory is
read once. Formats with blocks and no normalization need no more than a block at a time: there a program takes one
piece of a row.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.formats.spec import BlockFormat
from nybble.ops._declare import Implementation
from nybble.ops.quantize_rows import empty_results, width_of
from nybble.ops.quantize_rows.triton_codes import (
    block_scale,
    divide,
    element_code,
    facts,
    magnitude_bits,
    refusal,
    tensor_scale,
)
from nybble.ops.silu_mul.triton import gated
from nybble.quantize import QuantTensor, scales
from nybble.quantize.layouts import DENSE

_MOST_COLUMNS = 65536  # a row in the registers of the largest block
_VALUES_A_THREAD = 32
_PIECES = (4096, 2048, 1024, 512)
_PROLOGUES = {"plain": 0, "rmsnorm": 1, "silu_mul": 2}


@triton.jit
def _load(x, residual, h, start, columns, PROLOGUE: tl.constexpr, RESIDUAL: tl.constexpr, P: tl.constexpr):
    """A piece of what the prologue is fed: gated, or with the residual added and written."""
    at = start + tl.arange(0, P)
    inside = at < columns
    v = tl.load(x + at, inside, 0.0)
    if PROLOGUE == 2:
        v = gated(v, tl.load(x + columns + at, inside, 0.0))
    if RESIDUAL:
        v = (v.to(tl.float32) + tl.load(residual + at, inside, 0.0).to(tl.float32)).to(v.dtype)
        tl.store(h + at, v, inside)
    return v


@triton.jit
def _squares(v, P: tl.constexpr):
    """The sum of squares: of eight neighbours as a tree in float32, then in float64."""
    wide = v.to(tl.float32)
    square = wide * wide
    for i in tl.static_range(3):
        a, b = tl.split(tl.reshape(square, (P >> (i + 1), 2)))
        square = a + b
    return tl.sum(square.to(tl.float64), 0)


@triton.jit
def _normal(v, gain, inverse, start, columns, P: tl.constexpr):
    at = start + tl.arange(0, P)
    scaled = (v.to(tl.float32) * inverse).to(v.dtype).to(tl.float32)
    return (tl.load(gain + at, at < columns, 0.0).to(tl.float32) * scaled).to(v.dtype)


@triton.jit
def _rotate(v, SIZE: tl.constexpr, P: tl.constexpr):
    """v H / sqrt(SIZE) in blocks: sums and differences of neighbours 1, 2, 4, … apart."""
    wide = v.to(tl.float32)
    for i in tl.static_range(7):
        if (1 << i) < SIZE:
            pairs = tl.permute(tl.reshape(wide, (P // (2 << i), 2, 1 << i)), (0, 2, 1))
            a, b = tl.split(pairs)
            wide = tl.reshape(tl.permute(tl.join(a + b, a - b), (0, 2, 1)), (P,))
    return (wide * (SIZE**-0.5)).to(v.dtype)


@triton.jit
def _store(
    q, v, codes, start, columns, code_bytes,
    BITS: tl.constexpr, E_MANTISSA: tl.constexpr, E_BIAS: tl.constexpr, E_MAX: tl.constexpr, E_STEPS: tl.constexpr,
    MACHINE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Write the codes of a piece of quotients, two to a byte where they are short."""
    found = element_code(q, v, BITS, E_MANTISSA, E_BIAS, E_MAX, E_STEPS, MACHINE)
    if BITS == 8:
        at = start + tl.arange(0, P)
        tl.store(codes + at, found.to(tl.uint8), at < columns)
    else:
        low, high = tl.split(tl.reshape(found, (P // 2, 2)))
        at = start // 2 + tl.arange(0, P // 2)
        tl.store(codes + at, ((low & 0xF) | (high << 4)).to(tl.uint8), at < code_bytes)


@triton.jit
def _row(
    v, e, codes, start, columns, code_bytes,
    BITS: tl.constexpr, E_MANTISSA: tl.constexpr, E_BIAS: tl.constexpr, E_MAX: tl.constexpr, E_MIN: tl.constexpr,
    E_STEPS: tl.constexpr, S_MANTISSA: tl.constexpr, MACHINE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Codes of a piece of a row that has one scale."""
    q = divide(v, e, 0, E_MANTISSA, E_MAX, E_MIN, S_MANTISSA, MACHINE)
    _store(q, v, codes, start, columns, code_bytes, BITS, E_MANTISSA, E_BIAS, E_MAX, E_STEPS, MACHINE, P)


@triton.jit
def _blocks(
    v, codes, scale, start, columns, code_bytes, scale_columns, encode, decode,
    BLOCK: tl.constexpr, BITS: tl.constexpr, E_MANTISSA: tl.constexpr, E_BIAS: tl.constexpr, E_MAX: tl.constexpr,
    E_MIN: tl.constexpr, E_STEPS: tl.constexpr, S_MANTISSA: tl.constexpr, S_BIAS: tl.constexpr, S_MAX: tl.constexpr,
    S_FLOOR: tl.constexpr, S_NAN: tl.constexpr, S_TOP: tl.constexpr, S_MOST: tl.constexpr, TARGET: tl.constexpr,
    MACHINE: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """Scales and codes of a piece whose blocks each have a scale."""
    blocks = tl.reshape(v, (P // BLOCK, BLOCK))
    stored, e = block_scale(
        tl.max(magnitude_bits(blocks), 1), encode, decode,
        E_MAX, S_MANTISSA, S_BIAS, S_MAX, S_FLOOR, S_NAN, S_TOP, S_MOST, TARGET, MACHINE,
    )  # fmt: skip
    at = start // BLOCK + tl.arange(0, P // BLOCK)
    tl.store(scale + at, stored.to(scale.dtype.element_ty), at < scale_columns)
    q = tl.reshape(divide(blocks, e[:, None], BLOCK, E_MANTISSA, E_MAX, E_MIN, S_MANTISSA, MACHINE), (P,))
    _store(q, v, codes, start, columns, code_bytes, BITS, E_MANTISSA, E_BIAS, E_MAX, E_STEPS, MACHINE, P)


@triton.jit
def _quantize_rows_kernel(
    x, residual, gain, h, codes, scale, tensor_amax, tensor,
    x_stride, residual_stride, columns, code_bytes, scale_columns, chunks, eps,
    PROLOGUE: tl.constexpr, RESIDUAL: tl.constexpr, HADAMARD: tl.constexpr, MACHINE: tl.constexpr,
    P0: tl.constexpr, P1: tl.constexpr, P2: tl.constexpr,
    BLOCK: tl.constexpr, BITS: tl.constexpr, E_MANTISSA: tl.constexpr, E_BIAS: tl.constexpr, E_MAX: tl.constexpr,
    E_MIN: tl.constexpr, E_STEPS: tl.constexpr, S_MANTISSA: tl.constexpr, S_BIAS: tl.constexpr, S_MAX: tl.constexpr,
    S_FLOOR: tl.constexpr, S_NAN: tl.constexpr, S_TOP: tl.constexpr, S_MOST: tl.constexpr, TARGET: tl.constexpr,
    MOST: tl.constexpr,
):  # fmt: skip
    row, start = (tl.program_id(0) // chunks).to(tl.int64), tl.program_id(0) % chunks * P0
    x += row * x_stride
    residual += row * residual_stride
    h += row * columns
    codes += row * code_bytes
    scale += row * scale_columns
    s1, s2 = start + P0, start + P0 + P1
    v0 = _load(x, residual, h, start, columns, PROLOGUE, RESIDUAL, P0)
    if P1 > 0:
        v1 = _load(x, residual, h, s1, columns, PROLOGUE, RESIDUAL, P1)
    if P2 > 0:
        v2 = _load(x, residual, h, s2, columns, PROLOGUE, RESIDUAL, P2)
    if PROLOGUE == 1:
        total = _squares(v0, P0)
        if P1 > 0:
            total += _squares(v1, P1)
        if P2 > 0:
            total += _squares(v2, P2)
        mean = tl.div_rn(total.to(tl.float32), columns * 1.0)
        inverse = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
        v0 = _normal(v0, gain, inverse, start, columns, P0)
        if P1 > 0:
            v1 = _normal(v1, gain, inverse, s1, columns, P1)
        if P2 > 0:
            v2 = _normal(v2, gain, inverse, s2, columns, P2)
    if HADAMARD > 0:
        v0 = _rotate(v0, HADAMARD, P0)
        if P1 > 0:
            v1 = _rotate(v1, HADAMARD, P1)
        if P2 > 0:
            v2 = _rotate(v2, HADAMARD, P2)
    encode, decode = 1.0, 1.0
    if TARGET > 0:
        encode, decode = tensor_scale(tl.load(tensor_amax), TARGET, MOST)
        if tl.program_id(0) == 0:
            tl.store(tensor, decode)
    if BLOCK == 0:
        largest = tl.max(magnitude_bits(v0), 0)
        if P1 > 0:
            largest = tl.maximum(largest, tl.max(magnitude_bits(v1), 0))
        if P2 > 0:
            largest = tl.maximum(largest, tl.max(magnitude_bits(v2), 0))
        stored, e = block_scale(largest, encode, decode, E_MAX, S_MANTISSA, S_BIAS, S_MAX, S_FLOOR, S_NAN, S_TOP,
                                S_MOST, TARGET, MACHINE)  # fmt: skip
        tl.store(scale, stored)
        _row(v0, e, codes, start, columns, code_bytes,
             BITS, E_MANTISSA, E_BIAS, E_MAX, E_MIN, E_STEPS, S_MANTISSA, MACHINE, P0)  # fmt: skip
        if P1 > 0:
            _row(v1, e, codes, s1, columns, code_bytes,
                 BITS, E_MANTISSA, E_BIAS, E_MAX, E_MIN, E_STEPS, S_MANTISSA, MACHINE, P1)  # fmt: skip
        if P2 > 0:
            _row(v2, e, codes, s2, columns, code_bytes,
                 BITS, E_MANTISSA, E_BIAS, E_MAX, E_MIN, E_STEPS, S_MANTISSA, MACHINE, P2)  # fmt: skip
    else:
        _blocks(v0, codes, scale, start, columns, code_bytes, scale_columns, encode, decode,
                BLOCK, BITS, E_MANTISSA, E_BIAS, E_MAX, E_MIN, E_STEPS, S_MANTISSA, S_BIAS, S_MAX, S_FLOOR, S_NAN,
                S_TOP, S_MOST, TARGET, MACHINE, P0)  # fmt: skip
        if P1 > 0:
            _blocks(v1, codes, scale, s1, columns, code_bytes, scale_columns, encode, decode,
                    BLOCK, BITS, E_MANTISSA, E_BIAS, E_MAX, E_MIN, E_STEPS, S_MANTISSA, S_BIAS, S_MAX, S_FLOOR, S_NAN,
                    S_TOP, S_MOST, TARGET, MACHINE, P1)  # fmt: skip
        if P2 > 0:
            _blocks(v2, codes, scale, s2, columns, code_bytes, scale_columns, encode, decode,
                    BLOCK, BITS, E_MANTISSA, E_BIAS, E_MAX, E_MIN, E_STEPS, S_MANTISSA, S_BIAS, S_MAX, S_FLOOR, S_NAN,
                    S_TOP, S_MOST, TARGET, MACHINE, P2)  # fmt: skip


def pieces(columns: int, least: int) -> tuple[int, int, int]:
    """At most three powers of two, none below `least`, that cover a row of `columns`; the last may reach beyond."""
    found: list[int] = []
    left = columns
    while left >= least and len(found) < 2:
        found.append(1 << left.bit_length() - 1)
        left -= found[-1]
    if left:
        found.append(max(least, triton.next_power_of_2(left)))
    while len(found) > 1 and found[-1] == found[-2]:
        found[-2:] = [2 * found[-1]]
    first, second, third, *_ = [*found, 0, 0, 0]
    return first, second, third


@lru_cache(maxsize=256)
def _launch(fmt: BlockFormat, width: int, whole_row: bool, hadamard: int) -> tuple[tuple[int, int, int], int, int]:
    """(pieces of a program, programs a row, warps a program)."""
    least = max(fmt.block[1] or 0, hadamard, 16)
    if whole_row:
        cut, chunks = pieces(width, least), 1
    else:
        size = min(_PIECES, key=lambda p: -(-width // p) * p)
        cut, chunks = (size, 0, 0), -(-width // size)
    warps = 1 << min(5, max(0, (sum(cut) // (32 * _VALUES_A_THREAD)).bit_length() - 1))
    return cut, chunks, warps


@lru_cache(maxsize=64)
def _facts(fmt: BlockFormat) -> dict[str, Any]:
    return facts(fmt)


def _machine(device: torch.device) -> int:
    """0: the interpreter, whose multiply-add rounds twice; 1: a GPU; 2: one that converts to E4M3 by itself."""
    if device.type != "cuda":
        return 0
    return 2 if torch.cuda.get_device_capability(device) >= (8, 9) else 1


def _supports(
    x: Tensor, fmt: BlockFormat, prologue: str, residual: Tensor | None, gain: Tensor | None, eps: float,
    tensor_amax: Tensor | None, hadamard: int,
) -> str | None:  # fmt: skip
    width = width_of(x, prologue)
    if width > _MOST_COLUMNS:
        return f"K = {width} is above {_MOST_COLUMNS}, one block's row"
    return refusal(fmt, tensor_amax)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Where Triton shall launch: it looks at the current device, not at its arguments'."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _matrix(x: Tensor) -> Tensor:
    """[..., K] as [M, K] with neighbours of a row next to each other."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] == 1 else rows.contiguous()


def _triton(
    x: Tensor, fmt: BlockFormat, prologue: str, residual: Tensor | None, gain: Tensor | None, eps: float,
    tensor_amax: Tensor | None, hadamard: int,
) -> tuple[QuantTensor, Tensor]:  # fmt: skip
    width, codes, scale, tensor, h = empty_results(x, fmt, prologue, residual)
    if codes.numel():
        flat, added = _matrix(x), _matrix(x if residual is None else residual)
        cut, chunks, warps = _launch(fmt, width, fmt.block[1] is None or prologue == "rmsnorm", hadamard)
        stored = scale.view(torch.int16) if scale.dtype == torch.bfloat16 else scale
        with on(x.device):
            _quantize_rows_kernel[(flat.shape[0] * chunks,)](
                flat, added, flat if gain is None else gain.contiguous(), h, codes, stored,
                flat if tensor_amax is None else tensor_amax, stored if tensor is None else tensor,
                flat.stride(0), added.stride(0), width, codes.shape[-1], scale.shape[-1], chunks, eps,
                _PROLOGUES[prologue], residual is not None, hadamard, _machine(x.device), *cut, **_facts(fmt),
                MOST=scales.MAX_ENCODE, num_warps=warps, enable_fp_fusion=False,
            )  # fmt: skip
    elif tensor_amax is not None and (second := scales.tensor_scale(fmt.rule, fmt, tensor_amax)) is not None:
        tensor = second.decode
    return QuantTensor(fmt, (*x.shape[:-1], width), codes, scale, tensor, None, DENSE, x.dtype), h


IMPLEMENTATIONS = (Implementation("quantize_rows_triton", _triton, _supports, native=True),)
