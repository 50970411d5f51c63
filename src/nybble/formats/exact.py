"""The definition: decode, round and encode one number, in integers and fractions.

Slow on purpose and exact: every value here is a `Fraction`, or a Python float that holds a format's value without
error (float64 contains every element format up to FP32). Every other path of nybble, on arrays, in torch or on a
GPU, has to equal this file bit for bit.

Rounding picks between the two neighbours of x, `inner` (nearer to zero) and `outer`; t in (0, 1) is how far x lies
on the way from inner to outer:

    nearest          outer if t > 1/2; a tie goes to the even code (tables: the even rank in order of value)
    toward_zero      inner
    down, up         the neighbour toward -inf, +inf
    stochastic       outer if u < t, for the given uniform u in [0, 1): right on average
    stochastic_8bit  outer if t + (2r + 1)/512 >= 1, for r = floor(256 u): the eight-bit midpoint rule of
                     arXiv 2609.02846, whose mean error is at most 1/512 of the gap

Values beyond the largest saturate, as quantization wants; `saturate=False` gives infinity or NaN where the format
has them, as an IEEE conversion does.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal, get_args

from nybble.errors import BadInput, UnknownName
from nybble.formats.spec import ElementFormat, FloatFormat, IntFormat, TableFormat
from nybble.formats.table import FP32

Rounding = Literal["nearest", "toward_zero", "down", "up", "stochastic", "stochastic_8bit"]
ROUNDINGS: tuple[str, ...] = get_args(Rounding)
Number = int | float | Fraction


def decode(fmt: ElementFormat, code: int) -> float:
    """The value of `code`: finite, -0.0, an infinity, or NaN (also for a code that the format leaves unused)."""
    if not 0 <= code < fmt.codes:
        raise BadInput(f"{fmt.name} has codes 0 to {fmt.codes - 1}, got {code}")
    if isinstance(fmt, TableFormat):
        return fmt.values[code]
    if isinstance(fmt, IntFormat):
        integer = code - fmt.codes if fmt.low < 0 and code >= fmt.codes >> 1 else code
        return math.ldexp(integer, -fmt.fraction_bits) if fmt.low <= integer <= fmt.high else math.nan
    if not isinstance(fmt, FloatFormat):
        raise TypeError(f"{fmt.name}: no definition for {type(fmt).__name__}")
    magnitude = code & ((1 << fmt.magnitude_bits) - 1)
    value = _special(fmt, magnitude) if magnitude > fmt.max_code else float(fmt.magnitude(magnitude))
    return -value if code >> fmt.magnitude_bits else value


def _special(fmt: FloatFormat, magnitude: int) -> float:
    return math.inf if fmt.specials == "ieee" and magnitude == fmt.max_code + 1 else math.nan


def round(  # noqa: A001 - the field's word, and the module is used by its name
    fmt: ElementFormat, x: Number, rounding: Rounding = "nearest", uniform: Number = 0, saturate: bool = True
) -> float:
    """The value of `fmt` that x becomes.

    Args:
        fmt: the element format.
        x: any number; NaN stays NaN where the format has one and is refused (BadInput) where not.
        rounding: one of ROUNDINGS.
        uniform: the draw in [0, 1) for the stochastic modes.
        saturate: whether values beyond the largest become the largest.
    """
    return decode(fmt, encode(fmt, x, rounding, uniform, saturate))


def encode(
    fmt: ElementFormat, x: Number, rounding: Rounding = "nearest", uniform: Number = 0, saturate: bool = True
) -> int:
    """The code that x becomes; arguments as for `round`."""
    if rounding not in ROUNDINGS:
        raise UnknownName("rounding", rounding, ROUNDINGS)
    if math.isnan(x):
        return _nan_code(fmt)
    negative = math.copysign(1, x) < 0 if isinstance(x, float) else x < 0
    if math.isinf(x):
        return _overflow(fmt, negative, saturate)
    exact = Fraction(x)
    if isinstance(fmt, FloatFormat):
        return _encode_float(fmt, exact, negative, rounding, Fraction(uniform), saturate)
    if isinstance(fmt, IntFormat):
        return _encode_int(fmt, exact, rounding, Fraction(uniform))
    if isinstance(fmt, TableFormat):
        return _encode_table(fmt, exact, rounding, Fraction(uniform))
    raise TypeError(f"{fmt.name}: no definition for {type(fmt).__name__}")


def _nan_code(fmt: ElementFormat) -> int:
    if isinstance(fmt, FloatFormat) and fmt.has_nan:
        quiet = 1 << (fmt.mantissa_bits - 1) if fmt.specials == "ieee" else 0
        return (fmt.max_code + 1) | quiet
    raise BadInput(f"{fmt.name} has no NaN")


def _overflow(fmt: ElementFormat, negative: bool, saturate: bool) -> int:
    """The code for a value beyond the largest (or, with `negative`, below the smallest)."""
    if isinstance(fmt, FloatFormat):
        if negative and not fmt.signed:
            return 0
        if not saturate and not fmt.has_nan:
            raise BadInput(f"{fmt.name} has no code for an overflow")
        return (negative << fmt.magnitude_bits) | (fmt.max_code + (not saturate))
    return encode(fmt, fmt.min if negative else fmt.max)


def _outward(rounding: Rounding, t: Fraction, inner_is_even: bool, negative: bool, uniform: Fraction) -> bool:
    """Whether a value that lies the fraction t (0 < t < 1) of the way outward goes to the outer neighbour."""
    match rounding:
        case "nearest":
            return t > Fraction(1, 2) or (t == Fraction(1, 2) and not inner_is_even)
        case "toward_zero":
            return False
        case "down":
            return negative
        case "up":
            return not negative
        case "stochastic":
            return uniform < t
        case "stochastic_8bit":
            return t + Fraction(2 * math.floor(256 * uniform) + 1, 512) >= 1


def _encode_float(
    fmt: FloatFormat, x: Fraction, negative: bool, rounding: Rounding, uniform: Fraction, saturate: bool
) -> int:
    if negative and not fmt.signed:
        return 0
    a, sign = abs(x), negative << fmt.magnitude_bits
    if a < fmt.magnitude(0):
        return sign
    inner = _floor_code(fmt, a)
    low, high = fmt.magnitude(inner), fmt.magnitude(inner + 1)
    up = a > low and _outward(rounding, (a - low) / (high - low), inner % 2 == 0, negative, uniform)
    code = inner + up
    return _overflow(fmt, negative, saturate) if code > fmt.max_code else sign | code


def _floor_code(fmt: FloatFormat, a: Fraction) -> int:
    """The magnitude code of the largest value not above a, as if the exponent had no upper end."""
    low = 0
    high = 1
    while fmt.magnitude(high) <= a:
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fmt.magnitude(middle) <= a else (low, middle)
    return low


def _encode_int(fmt: IntFormat, x: Fraction, rounding: Rounding, uniform: Fraction) -> int:
    scaled = min(max(x * (1 << fmt.fraction_bits), Fraction(fmt.low)), Fraction(fmt.high))
    inner = math.floor(abs(scaled))
    t = abs(scaled) - inner
    magnitude = inner + (t > 0 and _outward(rounding, t, inner % 2 == 0, scaled < 0, uniform))
    return (-magnitude if scaled < 0 else magnitude) % fmt.codes


def _encode_table(fmt: TableFormat, x: Fraction, rounding: Rounding, uniform: Fraction) -> int:
    x = min(max(x, Fraction(fmt.min)), Fraction(fmt.max))
    rank = sum(Fraction(value) <= x for value, _ in fmt.ranked) - 1
    below, code = fmt.ranked[rank]
    if x == below:
        return code
    above, code_above = fmt.ranked[rank + 1]
    # For x < 0 the outer neighbour is the lower one.
    negative = x < 0
    inner, outer = (above, below) if negative else (below, above)
    t = (x - Fraction(inner)) / (Fraction(outer) - Fraction(inner))
    up = _outward(rounding, t, (rank + negative) % 2 == 0, negative, uniform)
    return code_above if up != negative else code


def encode_scaled(
    fmt: ElementFormat,
    x: float,
    scale: float,
    zero_point: int = 0,
    rounding: Rounding = "nearest",
    uniform: Number = 0,
) -> int:
    """The code of x under a scale: the quotient x / scale is rounded to FP32, then to `fmt`.

    The FP32 step is part of the contract: it is what one division instruction gives on any machine, so that kernels
    can equal it. A zero point (integers only) is added after rounding.
    """
    quotient = round(FP32, Fraction(x) / Fraction(scale))
    if not isinstance(fmt, IntFormat) or not zero_point:
        return encode(fmt, quotient, rounding, uniform)
    wide = IntFormat("wide", 32, "intermediate", -(1 << 31), (1 << 31) - 1)
    whole = int(round(wide, quotient, rounding, uniform)) + zero_point
    return min(max(whole, fmt.low), fmt.high) % fmt.codes
