"""round_columns as one Triton kernel: a warp holds the R columns of 32 outputs in registers.

The torch form launches some fifteen kernels a column, microseconds each, for arithmetic that takes nanoseconds. Here
a column is picked out of the tile by a masked sum (exact: all other terms are zero), and the repair of the columns
after it is one multiply-add on the whole tile. Rounding to a whole number is adding and taking away 1.5 * 2^23, where
float32 has no fractions left.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.formats.spec import ElementFormat, FloatFormat, IntFormat
from nybble.formats.table import FP32
from nybble.ops._declare import Implementation

_BLOCK, _MOST_ROWS = 32, 32
_MAGIC = 1.5 * 2.0**FP32.mantissa_bits


@triton.jit
def _round_columns_kernel(
    columns, upper, scale, zero, errors, n, total, stride_r, stride_c, stride_n, upper_stride_r, upper_stride_c,
    R: tl.constexpr, BR: tl.constexpr, BLOCK: tl.constexpr, HAS_ZERO: tl.constexpr, IS_INT: tl.constexpr,
    LOW: tl.constexpr, HIGH: tl.constexpr, ONE: tl.constexpr, SMALLEST: tl.constexpr, MAGIC: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < total
    output = at % n
    rows = tl.arange(0, BR)
    tile_at = rows[:, None] * stride_r + (at // n * stride_c + output * stride_n)[None, :]
    tile = tl.load(columns + tile_at, (rows[:, None] < R) & inside[None, :], 0.0)
    s = tl.load(scale + at, inside, 1.0)
    z = tl.load(zero + output, inside, 0.0) if HAS_ZERO else s
    for j in range(R):
        w = tl.sum(tl.where(rows[:, None] == j, tile, 0.0), 0)
        x = tl.div_rn(w.to(tl.float32), s)
        if HAS_ZERO:
            x = tl.minimum(tl.maximum(x + MAGIC - MAGIC + z, LOW), HIGH) - z
        elif IS_INT:
            x = (tl.minimum(tl.maximum(x * ONE, LOW), HIGH) + MAGIC - MAGIC) / ONE
        else:
            x = tl.minimum(tl.maximum(x, LOW), HIGH)
            binade = (x.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
            step = tl.maximum(binade, SMALLEST) / ONE
            x = (x / step + MAGIC - MAGIC) * step
        e = (w - (x * s).to(tl.float64)) / tl.load(upper + j * (upper_stride_r + upper_stride_c))
        tl.store(errors + j * total + at, e, inside)
        row = tl.load(upper + j * upper_stride_r + rows * upper_stride_c, (rows > j) & (rows < R), 0.0)
        tile -= row[:, None] * e[None, :]


def _triton(columns: Tensor, upper: Tensor, scale: Tensor, zero_point: Tensor | None, element: ElementFormat) -> Tensor:
    errors = torch.empty(columns.shape, dtype=torch.float64, device=columns.device)
    scale = scale.contiguous()
    total, zero = scale.numel(), scale if zero_point is None else zero_point.contiguous()
    if errors.numel():
        _round_columns_kernel[(triton.cdiv(total, _BLOCK),)](
            columns, upper, scale, zero, errors, columns.shape[-1], total, *columns.stride(), *upper.stride(),
            len(columns), triton.next_power_of_2(len(columns)), _BLOCK, zero_point is not None,
            *_constants(element), _MAGIC, num_warps=1,
        )  # fmt: skip
    return errors


def _constants(element: ElementFormat) -> tuple[bool, float, float, float, float]:
    """IS_INT, LOW, HIGH; ONE: steps in 1 (integers), or in a binade; SMALLEST: the lowest binade with its own step."""
    if isinstance(element, IntFormat):
        return True, float(element.low), float(element.high), 2.0**element.fraction_bits, 0.0
    if isinstance(element, FloatFormat):
        return False, float(element.min), float(element.max), 2.0**element.mantissa_bits, 2.0**element.min_exponent
    raise TypeError(f"{element.name}: neither an integer nor a float")


def _supports(
    columns: Tensor, upper: Tensor, scale: Tensor, zero_point: Tensor | None, element: ElementFormat
) -> str | None:
    if len(columns) > _MOST_ROWS:
        return f"{len(columns)} columns at once are more than the {_MOST_ROWS} that registers hold"
    if isinstance(element, IntFormat) or (isinstance(element, FloatFormat) and element.mantissa_bits):
        return None
    return f"{element.name} follows no formula: its values are searched in a table"


IMPLEMENTATIONS = (Implementation("round_columns_triton", _triton, _supports, native=True),)
