"""The definition on arrays: what exact.py does to one number, done to many at once with NumPy.

Computes in float64, where everything needed is exact: elements have at most 24 significant bits, scaling by powers
of two loses nothing, and midpoints between neighbours fit. Equal to exact.py on every code and between codes
(tests/formats/test_array.py). For stochastic rounding into a table the comparison u < t is made on float64
quotients, so it can differ from exact.py where the two sides agree to 2^-52.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from nybble.errors import BadInput, UnknownName
from nybble.formats import exact
from nybble.formats.exact import ROUNDINGS, Rounding
from nybble.formats.spec import ElementFormat, FloatFormat, IntFormat, TableFormat

Floats = NDArray[np.float64]
Codes = NDArray[np.int64]
Uniform = float | Floats


@cache
def values(fmt: ElementFormat) -> Floats:
    """The value of every code of a format of up to 16 bits, in order of the codes, read-only."""
    if fmt.bits > 16:
        raise BadInput(f"{fmt.name} has 2^{fmt.bits} codes; values() lists formats of up to 16 bits")
    table = np.array([exact.decode(fmt, code) for code in range(fmt.codes)], dtype=np.float64)
    table.setflags(write=False)
    return table


def decode(fmt: ElementFormat, codes: NDArray[np.integer]) -> Floats:
    """The values (float64) of an array of codes."""
    codes = np.asarray(codes, dtype=np.int64)
    if codes.size and not (0 <= codes.min() and codes.max() < fmt.codes):
        raise BadInput(f"{fmt.name} has codes 0 to {fmt.codes - 1}, got {codes.min()} to {codes.max()}")
    if fmt.bits <= 16:
        return values(fmt)[codes]
    if not isinstance(fmt, FloatFormat):
        raise TypeError(f"{fmt.name}: formats above 16 bits are floats")
    magnitude = codes & ((1 << fmt.magnitude_bits) - 1)
    mantissa = magnitude & ((1 << fmt.mantissa_bits) - 1)
    exponent = magnitude >> fmt.mantissa_bits
    normal = (exponent > 0) | (not fmt.subnormals)
    significand = mantissa + (normal.astype(np.int64) << fmt.mantissa_bits)
    exponent = np.maximum(exponent - fmt.bias, fmt.min_exponent)
    value = np.ldexp(significand.astype(np.float64), exponent - fmt.mantissa_bits)
    infinity = fmt.max_code + 1 if fmt.specials == "ieee" else -1
    value = np.where(magnitude > fmt.max_code, np.where(magnitude == infinity, np.inf, np.nan), value)
    return np.where(codes >> fmt.magnitude_bits, -value, value)


def round(  # noqa: A001 - the twin of exact.round
    fmt: ElementFormat, x: Floats, rounding: Rounding = "nearest", uniform: Uniform = 0.0, saturate: bool = True
) -> Floats:
    """The values of `fmt` that the numbers in x become; arguments as for exact.round, `uniform` broadcast to x."""
    return decode(fmt, encode(fmt, x, rounding, uniform, saturate))


def encode(
    fmt: ElementFormat, x: Floats, rounding: Rounding = "nearest", uniform: Uniform = 0.0, saturate: bool = True
) -> Codes:
    """The codes (int64) that the numbers in x become; arguments as for exact.encode, `uniform` broadcast to x."""
    if rounding not in ROUNDINGS:
        raise UnknownName("rounding", rounding, ROUNDINGS)
    x = np.asarray(x, dtype=np.float64)
    nan = np.isnan(x)
    if nan.any() and not fmt.has_nan:
        raise BadInput(f"{fmt.name} has no NaN, and {int(nan.sum())} of {x.size} values are NaN")
    x = np.where(nan, 0.0, x)
    uniform = np.asarray(uniform, dtype=np.float64)
    if isinstance(fmt, FloatFormat):
        codes = _encode_float(fmt, x, rounding, uniform, saturate)
    elif isinstance(fmt, IntFormat):
        codes = _encode_int(fmt, x, rounding, uniform)
    elif isinstance(fmt, TableFormat):
        codes = _encode_table(fmt, x, rounding, uniform)
    else:
        raise TypeError(f"{fmt.name}: no definition for {type(fmt).__name__}")
    return np.where(nan, exact.encode(fmt, np.nan), codes) if nan.any() else codes


def _outward(rounding: Rounding, t: Floats, even: NDArray[np.bool_], negative: NDArray[np.bool_], u: Floats) -> Codes:
    """1 where the outer neighbour is taken; t in [0, 1) is the way outward, and t = 0 never moves."""
    match rounding:
        case "nearest":
            up = (t > 0.5) | ((t == 0.5) & ~even)
        case "toward_zero":
            up = np.zeros_like(even)
        case "down":
            up = negative
        case "up":
            up = ~negative
        case "stochastic":
            up = u < t
        case "stochastic_8bit":
            up = t + (2 * np.floor(256 * u) + 1) / 512 >= 1
    return (up & (t > 0)).astype(np.int64)


def _encode_float(fmt: FloatFormat, x: Floats, rounding: Rounding, u: Floats, saturate: bool) -> Codes:
    negative = np.signbit(x)
    a = np.minimum(np.abs(x), 2 * fmt.max)  # an infinity, too, becomes a number that overflows
    exponent = np.where(a > 0, np.frexp(a)[1] - 1, fmt.min_exponent).astype(np.int64)
    exponent = np.maximum(exponent, fmt.min_exponent)
    scaled = np.ldexp(a, fmt.mantissa_bits - exponent)
    whole = np.floor(scaled)
    inner = ((exponent - fmt.min_exponent) << fmt.mantissa_bits) + whole.astype(np.int64)
    if not fmt.subnormals:
        inner -= 1 << fmt.mantissa_bits
    code = inner + _outward(rounding, scaled - whole, inner % 2 == 0, negative, u)
    code = np.where(a < float(fmt.magnitude(0)), 0, code)
    over = (code > fmt.max_code) | np.isinf(x)
    if not saturate and over.any() and not fmt.has_nan:
        raise BadInput(f"{fmt.name} has no code for an overflow")
    code = np.where(over, fmt.max_code + (not saturate), code)
    if not fmt.signed:
        return np.where(negative, 0, code)
    return code | (negative.astype(np.int64) << fmt.magnitude_bits)


def _encode_int(fmt: IntFormat, x: Floats, rounding: Rounding, u: Floats) -> Codes:
    scaled = np.clip(x * 2.0**fmt.fraction_bits, fmt.low, fmt.high)
    negative = scaled < 0
    whole = np.floor(np.abs(scaled))
    t = np.abs(scaled) - whole
    magnitude = whole.astype(np.int64) + _outward(rounding, t, whole % 2 == 0, negative, u)
    return np.where(negative, -magnitude, magnitude) % fmt.codes


def _encode_table(fmt: TableFormat, x: Floats, rounding: Rounding, u: Floats) -> Codes:
    grid = np.array([value for value, _ in fmt.ranked])
    codes = np.array([code for _, code in fmt.ranked], dtype=np.int64)
    x = np.clip(x, fmt.min, fmt.max)
    below = np.clip(np.searchsorted(grid, x, side="right") - 1, 0, len(grid) - 2)
    negative = x < 0
    inner, outer = grid[below + negative], grid[below + ~negative]
    t = (x - inner) / (outer - inner)
    # Midpoints are exact in float64 and quotients are not: which half x lies in is decided by comparing.
    beyond = (x - (inner + outer) / 2) * np.where(negative, -1, 1)
    t = np.where(
        beyond > 0, np.maximum(t, np.nextafter(0.5, 1)), np.where(beyond < 0, np.minimum(t, np.nextafter(0.5, 0)), t)
    )
    # At the upper end x is itself the outer neighbour: t = 1.
    up = np.where(t == 1, 1, _outward(rounding, t, (below + negative) % 2 == 0, negative, u))
    return codes[below + (up != negative)]
