"""Elements in torch: float32 values to codes and back, equal to formats/exact.py on every value.

Floats are taken apart by their bits: above the smallest normal of the target the code is a shift of the float32
pattern, below it a multiple of the smallest step. Tables and formats without mantissa bits, for which a shift
cannot see the midpoint, search a list of thresholds.
"""

from __future__ import annotations

import math
from functools import cache
from itertools import pairwise

import torch
from torch import Tensor

from nybble.formats import array
from nybble.formats.spec import ElementFormat, FloatFormat, IntFormat, TableFormat
from nybble.formats.table import FP32
from nybble.quantize.rounding import outward

_SIGN = -0x80000000
_NATIVE = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def native_dtype(fmt: ElementFormat) -> torch.dtype | None:
    """The torch dtype that codes a wide float format; None where codes are held as uint8."""
    return _NATIVE.get(fmt.name)


@cache
def _table(fmt: ElementFormat, device: torch.device) -> Tensor:
    return torch.tensor(array.values(fmt), dtype=torch.float32, device=device)


def decode(fmt: ElementFormat, codes: Tensor) -> Tensor:
    """Float32 values of codes: uint8 for formats of up to 8 bits, the native dtype for fp16, bf16 and fp32."""
    if native_dtype(fmt) is not None:
        return codes.to(torch.float32)
    if isinstance(fmt, IntFormat):
        return decode_int(fmt, codes).to(torch.float32) * 2.0**-fmt.fraction_bits
    return _table(fmt, codes.device).index_select(0, codes.flatten().to(torch.int32)).view(codes.shape)


def decode_int(fmt: IntFormat, codes: Tensor) -> Tensor:
    """The integers (int8, or uint8 for unsigned rows) that uint8 codes stand for."""
    if fmt.low >= 0:
        return codes
    shift = 8 - fmt.bits
    return codes.bitwise_left_shift(shift).view(torch.int8).bitwise_right_shift(shift)


def encode(fmt: ElementFormat, x: Tensor, rounding: str = "nearest", u: Tensor | None = None) -> Tensor:
    """Codes of float32 values, saturating: uint8, or the native dtype for fp16, bf16 and fp32.

    Args:
        fmt: the element format.
        x: float32, free of NaN.
        rounding: one of formats.exact.ROUNDINGS; wide formats round to nearest only.
        u: draws in [0, 1) for the stochastic modes, the shape of x.
    """
    dtype = native_dtype(fmt)
    if dtype is not None:
        if rounding != "nearest":
            raise ValueError(f"{fmt.name} is rounded to nearest only, not {rounding}")
        return x.clamp(fmt.min, fmt.max).to(dtype)
    if isinstance(fmt, IntFormat):
        return _encode_int(fmt, x, rounding, u)
    if isinstance(fmt, FloatFormat) and fmt.mantissa_bits:
        return _encode_float(fmt, x, rounding, u)
    return _encode_searched(fmt, x, rounding, u)


def round_to_int(x: Tensor, rounding: str, u: Tensor | None) -> Tensor:
    """Float32 values rounded to whole numbers, still float32."""
    if rounding == "nearest":
        return x.round()
    a = x.abs()
    whole = a.floor()
    up = outward(rounding, a - whole, whole % 2 == 1, x < 0, u)
    return torch.copysign(whole + up, x)


def _encode_int(fmt: IntFormat, x: Tensor, rounding: str, u: Tensor | None) -> Tensor:
    scaled = (x * 2.0**fmt.fraction_bits).clamp(fmt.low, fmt.high)
    whole = round_to_int(scaled, rounding, u)
    return whole.to(torch.int8).view(torch.uint8) & (fmt.codes - 1) if fmt.low < 0 else whole.to(torch.uint8)


def _encode_float(fmt: FloatFormat, x: Tensor, rounding: str, u: Tensor | None) -> Tensor:
    bits = x.view(torch.int32)
    a = x.abs().clamp_(max=fmt.max)
    pattern = a.view(torch.int32)
    shift = FP32.mantissa_bits - fmt.mantissa_bits
    rebias = (FP32.bias - fmt.bias) << fmt.mantissa_bits
    step = 2.0 ** (fmt.min_exponent - fmt.mantissa_bits)
    tiny = a < 2.0**fmt.min_exponent
    if rounding == "nearest":
        # Adding half a step less one, plus the last kept bit, is round-half-even on the pattern; adding 2^23 steps
        # to a tiny value makes the float32 adder round it to a whole number of steps.
        normal = (pattern + (pattern >> shift & 1) + ((1 << shift - 1) - 1) >> shift) - rebias
        magic = step * 2.0**FP32.mantissa_bits
        below = (a + magic).view(torch.int32) - _pattern(magic)
        magnitude = torch.where(tiny, below, normal)
    else:
        steps = a * (1 / step)
        whole = steps.floor()
        inner = torch.where(tiny, whole.to(torch.int32), (pattern >> shift) - rebias)
        t = torch.where(tiny, steps - whole, (pattern & (1 << shift) - 1).to(torch.float32) * 2.0**-shift)
        magnitude = inner + outward(rounding, t, inner % 2 == 1, bits < 0, u)
    if not fmt.signed:
        return torch.where(bits < 0, 0, magnitude).to(torch.uint8)
    sign = (bits & _SIGN) >> (31 - fmt.magnitude_bits)
    return ((sign & 1 << fmt.magnitude_bits) | magnitude).to(torch.uint8)


@cache
def _pattern(value: float) -> int:
    return int(torch.tensor(value, dtype=torch.float32).view(torch.int32))


def _grid(fmt: ElementFormat) -> list[tuple[float, int]]:
    """(value, code) in ascending order: of the magnitudes where a sign bit stands apart, else of all values."""
    if isinstance(fmt, TableFormat):
        return list(fmt.ranked)
    if not isinstance(fmt, FloatFormat):
        raise TypeError(f"{fmt.name}: no grid for {type(fmt).__name__}")
    return [(float(fmt.magnitude(code)), code) for code in range(fmt.max_code + 1)]


@cache
def _search_tables(fmt: ElementFormat, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Grid values (float64), the float32 thresholds of rounding to nearest, and the codes, by rank."""
    grid = _grid(fmt)
    up_at = []
    for rank, ((low, _), (high, _)) in enumerate(pairwise(grid)):
        middle = (low + high) / 2
        at = torch.tensor(middle, dtype=torch.float32)
        # The upper neighbour starts at the first float32 beyond the midpoint, or on it where its rank is even.
        if float(at) < middle or (float(at) == middle and rank % 2 == 0):
            at = torch.nextafter(at, torch.tensor(math.inf))
        up_at.append(float(at))
    values = torch.tensor([value for value, _ in grid], dtype=torch.float64, device=device)
    thresholds = torch.tensor(up_at, dtype=torch.float32, device=device)
    return values, thresholds, torch.tensor([code for _, code in grid], dtype=torch.uint8, device=device)


def _encode_searched(fmt: ElementFormat, x: Tensor, rounding: str, u: Tensor | None) -> Tensor:
    values, thresholds, codes = _search_tables(fmt, x.device)
    signed = fmt.sign_magnitude
    y = x.abs() if signed else x
    if rounding == "nearest":
        rank = torch.bucketize(y, thresholds, right=True, out_int32=True)
    else:
        exact = y.double().clamp(float(values[0]), float(values[-1]))
        below = (torch.bucketize(exact, values, right=True) - 1).clamp_(0, len(values) - 2)
        inward = exact < 0
        inner, outer = values[below + inward.long()], values[below + (~inward).long()]
        t = (exact - inner) / (outer - inner)
        up = outward(rounding, t, (below + inward) % 2 == 1, x < 0, u) | (t == 1)
        rank = below + (up != inward)
    magnitude = codes[rank.long()]
    return magnitude | (torch.signbit(x).to(torch.uint8) << fmt.bits - 1) if signed else magnitude
