"""The pieces of a quantizing kernel, in Triton: a block's scale, the quotient, the element's code.

Each equals quantize/ bit for bit. A format's numbers come in as compile-time constants that `facts` takes from its row.
No product is written next to a sum that a compiler could fuse with it, unless the product is exact.
"""

from __future__ import annotations

import math
from typing import Any

import triton
import triton.language as tl
from torch import Tensor

from nybble.errors import Unsupported
from nybble.formats import exact
from nybble.formats.spec import BlockFormat, FloatFormat, IntFormat
from nybble.formats.table import E4M3, FP32
from nybble.quantize.scales import exponent_of

_E4M3_MAX = tl.constexpr(E4M3.max)
_MANTISSA = tl.constexpr(FP32.mantissa_bits)
_BIAS = tl.constexpr(FP32.bias)
_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_SIGN = tl.constexpr(-0x80000000)
_ONE, _TWO = tl.constexpr(1), tl.constexpr(2.0)  # as constants, so that the interpreter combines them with others
_EXPONENT = tl.constexpr(((1 << FP32.exponent_bits) - 1) << FP32.mantissa_bits)
_SMALL, _LARGE = tl.constexpr(2.0**-60), tl.constexpr(2.0**60)  # beyond, quotients are taken of scaled numbers
_SMALLEST_NORMAL = tl.constexpr(2.0**FP32.min_exponent)
_UP, _DOWN = tl.constexpr(2.0**80), tl.constexpr(2.0**-80)
_TO_WHOLE = tl.constexpr(1.5 * 2.0**FP32.mantissa_bits)  # added to |x| < 2^22, the float32 adder rounds x to a whole


def refusal(fmt: BlockFormat, tensor_amax: Tensor | None) -> str | None:
    """Why no kernel can write this format, or None."""
    if fmt.tensor_scale and tensor_amax is None:
        return "the tensor scale would have to wait for the whole tensor; give tensor_amax"
    element, columns = fmt.element, fmt.block[1]
    if fmt.zero_point or not isinstance(element, FloatFormat | IntFormat):
        return f"writes symmetric integers and floats; {fmt.name} is neither"
    if element.bits not in (4, 8) or (isinstance(element, FloatFormat) and not element.mantissa_bits):
        return f"packs four and eight bits; {fmt.name} has {element.name}"
    if columns is not None and (columns & (columns - 1) or not 16 <= columns <= 128):
        return f"has blocks of 16 to 128 columns, a power of two; {fmt.name} has {columns}"
    if fmt.rule != ("two_level" if fmt.tensor_scale else "ct175" if fmt.power_of_two_scale else "amax"):
        return f"knows amax, ct175 and two_level; {fmt.name}'s rule is {fmt.rule}"
    return None


def facts(fmt: BlockFormat) -> dict[str, Any]:
    """The format's numbers as the kernel's compile-time constants."""
    element, scale = fmt.element, fmt.scale
    if not isinstance(scale, FloatFormat):
        raise Unsupported(f"{fmt.name}: the kernel stores float scales")
    top = exponent_of(element.max)
    floor = fmt.scale_floor if scale == FP32 else exact.encode(scale, fmt.scale_floor)
    return {
        "BLOCK": fmt.block[1] or 0,
        "BITS": element.bits,
        "E_MANTISSA": element.mantissa_bits if isinstance(element, FloatFormat) else 0,
        "E_BIAS": element.bias if isinstance(element, FloatFormat) else 0,
        "E_MAX": element.max,
        "E_MIN": element.min,
        "E_STEPS": 2.0**element.fraction_bits if isinstance(element, IntFormat) else 1.0,
        "S_MANTISSA": scale.mantissa_bits,
        "S_BIAS": scale.bias,
        "S_MAX": scale.max,
        "S_FLOOR": floor,
        "S_NAN": 0 if scale == FP32 else exact.encode(scale, math.nan),
        "S_TOP": top,
        "S_MOST": min(scale.max_exponent, FP32.max_exponent - top),
        "TARGET": fmt.target * element.max if fmt.tensor_scale else 0.0,
    }


@triton.jit
def magnitude_bits(v):
    """|v| as the bits of a float32: as integers they are in the order of the numbers, and NaN is above all."""
    return v.to(tl.float32).to(tl.int32, bitcast=True) & _MAGNITUDE


@triton.jit
def float_code(a, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The magnitude code of 0 <= a <= max, to nearest even, as quantize/elements.py rounds."""
    SHIFT: tl.constexpr = _MANTISSA - MANTISSA
    HALF: tl.constexpr = (_ONE << (SHIFT - 1)) - 1
    MAGIC: tl.constexpr = _TWO ** (1 - BIAS + SHIFT)
    bits = a.to(tl.int32, bitcast=True)
    normal = ((bits + ((bits >> SHIFT) & 1) + HALF) >> SHIFT) - ((_BIAS - BIAS) << MANTISSA)
    below = (a + MAGIC).to(tl.int32, bitcast=True) - ((_BIAS + 1 - BIAS + SHIFT) << _MANTISSA)
    return tl.where(a < _TWO ** (1 - BIAS), below, normal)


@triton.jit
def float_value(code, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """The value of a magnitude code: the inverse of `float_code`."""
    normal = (code + ((_BIAS - BIAS) << MANTISSA)) << (_MANTISSA - MANTISSA)
    below = code.to(tl.float32) * _TWO ** (1 - BIAS - MANTISSA)
    return tl.where(code < (1 << MANTISSA), below, normal.to(tl.float32, bitcast=True))


@triton.jit
def e4m3_code(a):
    """The E4M3 code of a >= 0 by the GPU's own conversion (sm_89 and later), saturating, as an int32.

    One by one: pairs that are taken apart again are miscompiled by ptxas 12.8, which reads the register before the
    conversion has written it (cvt.e4m3x2, shr.u16 by 8, mov.b32 of both).
    """
    return tl.inline_asm_elementwise(
        "{ .reg .b16 c; cvt.rn.satfinite.e4m3x2.f32 c, 0f00000000, $1; cvt.u32.u16 $0, c; }",
        "=r,f", [a], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def e4m3_value(code):
    """The value of an E4M3 code (int32) by the GPU's own conversion."""
    return tl.inline_asm_elementwise(
        "{ .reg .b16 c, low, high; .reg .b32 pair; cvt.u16.u32 c, $1; cvt.rn.f16x2.e4m3x2 pair, c; "
        "mov.b32 {low, high}, pair; cvt.f32.f16 $0, low; }",
        "=f,r", [code], dtype=tl.float32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def block_scale(
    largest, encode, decode,
    E_MAX: tl.constexpr, S_MANTISSA: tl.constexpr, S_BIAS: tl.constexpr, S_MAX: tl.constexpr,
    S_FLOOR: tl.constexpr, S_NAN: tl.constexpr, S_TOP: tl.constexpr, S_MOST: tl.constexpr, TARGET: tl.constexpr,
    MACHINE: tl.constexpr,
):  # fmt: skip
    """(what is stored, e) for blocks whose largest magnitudes have these bits; for power-of-two scales 1 / e."""
    if S_MANTISSA == 0:
        quarter = _ONE << (_MANTISSA - 2)
        if S_TOP == 0:  # then the exponent of a subnormal number matters, whose 1.75 * 2^-127 is half as many steps
            quarter = tl.where(largest < (_ONE << _MANTISSA), quarter >> 1, quarter)
        rounded = (largest + quarter) >> _MANTISSA  # the exponent, one more from 1.75 on
        exponent = tl.minimum(tl.maximum(rounded - _BIAS - S_TOP, -S_BIAS), S_MOST)
        finite = largest < _EXPONENT
        inverse = tl.maximum((-exponent + _BIAS) << _MANTISSA, _ONE << (_MANTISSA - 1))  # 2^-127 is subnormal
        e = tl.where(finite, inverse.to(tl.float32, bitcast=True), float("nan"))
        stored = tl.where(finite, exponent + S_BIAS, S_NAN)
    else:
        scale = tl.div_rn(largest.to(tl.float32, bitcast=True), E_MAX)
        if TARGET > 0:
            scale = encode * scale
        finite = magnitude_bits(scale) < _EXPONENT
        if S_MANTISSA == _MANTISSA:
            stored = tl.where(finite, tl.where(scale == 0, S_FLOOR, scale), float("nan"))
            e = stored
        else:
            limited = tl.minimum(tl.where(finite, scale, 0.0), S_MAX)
            if MACHINE == 2 and S_MAX == _E4M3_MAX:
                code = e4m3_code(limited)
                code = tl.where(code == 0, S_FLOOR, code)
                value = e4m3_value(code)
            else:
                code = float_code(limited, S_MANTISSA, S_BIAS)
                code = tl.where(code == 0, S_FLOOR, code)
                value = float_value(code, S_MANTISSA, S_BIAS)
            e = tl.where(finite, value, float("nan"))
            stored = tl.where(finite, code, S_NAN)
        if TARGET > 0:
            e = e * decode
    return stored, e


@triton.jit
def tensor_scale(amax, TARGET: tl.constexpr, MOST: tl.constexpr):
    """(encode, decode) of a tensor whose largest magnitude is amax: quantize/scales.py's tensor_scale."""
    factor = tl.div_rn(tl.full((), TARGET, tl.float32), amax)
    encode = tl.where(amax == 0, 1.0, tl.where(factor > MOST, MOST, factor))
    return encode, tl.div_rn(1.0, encode)


@triton.jit
def reciprocal(e):
    """(f, e f, 1 / (e f) to nearest, what that lacks): what `quotient` needs of a divisor, f a power of two."""
    f = tl.where(e < _SMALL, _UP, tl.where(e > _LARGE, _DOWN, 1.0))
    scaled = e * f
    high = tl.div_rn(1.0, scaled)
    left = tl.fma(-scaled, high, 1.0)
    low = left * high
    return f, scaled, high, tl.fma(left, low, low)


@triton.jit
def quotient(x, e, high, low, SHORT: tl.constexpr):
    """x / e as a division rounds it, where a division would branch for every value.

    x (high + low) is nearly twice as precise as float32. For x of up to 11 bits (SHORT) no tie of an element lies so
    near to a quotient that its rounding could matter: a test tries them all. For others the remainder, exact in a
    fused multiply-add, gives one more step, after which all bits are a division's (Markstein, IBM J. Res. Dev. 34,
    1990).
    """
    q = tl.fma(x, high, x * low)
    if not SHORT:
        q = tl.fma(tl.fma(-q, e, x), high, q)
    return q


@triton.jit
def divide(
    v, e, BLOCK: tl.constexpr, E_MANTISSA: tl.constexpr, E_MAX: tl.constexpr, E_MIN: tl.constexpr,
    S_MANTISSA: tl.constexpr, MACHINE: tl.constexpr,
):  # fmt: skip
    """v, or |v| for floats, by what `block_scale` gave, rounded to nearest; MACHINE is 0 in the interpreter.

    Where integers can leave their range they are clipped: in blocks, whose scales are rounded, and where e is not a
    normal number.
    """
    wide = v.to(tl.float32)
    if E_MANTISSA > 0:
        wide = magnitude_bits(v).to(tl.float32, bitcast=True)
    if S_MANTISSA == 0:
        q = wide * e
    elif MACHINE == 0:
        q = tl.div_rn(wide, tl.broadcast_to(e, wide.shape))
    else:
        f, scaled, high, low = reciprocal(e)
        if BLOCK > 0 or f != 1.0:  # for a whole row a branch, which is seldom taken
            wide = wide * f
        q = quotient(wide, scaled, high, low, v.dtype.primitive_bitwidth == 16)
    if E_MANTISSA == 0 and (BLOCK > 0 or e < _SMALLEST_NORMAL):
        q = tl.minimum(tl.maximum(q, E_MIN), E_MAX)
    return q


@triton.jit
def element_code(
    q, v, BITS: tl.constexpr, E_MANTISSA: tl.constexpr, E_BIAS: tl.constexpr, E_MAX: tl.constexpr,
    E_STEPS: tl.constexpr, MACHINE: tl.constexpr,
):  # fmt: skip
    """The codes (int32, their low BITS) of `divide`'s quotients of v; MACHINE is 2 where E4M3 is converted by itself.

    A short float's code is a concave function of its magnitude, a straight line a power of two: the least of the
    lines, each rounded to a whole, is the code. A longer one's magnitude is added to 2^(23 - M) times its own power
    of two, where the float32 adder rounds it to M bits; below the smallest normal the power stays.
    """
    if E_MANTISSA == 0:
        if E_STEPS != 1:
            q = q * E_STEPS
        code = (q + _TO_WHOLE).to(tl.int32, bitcast=True)
    else:
        bits = v.to(tl.float32).to(tl.int32, bitcast=True)
        # Magnitudes are compared as integers, which takes one instruction.
        most = tl.full((), E_MAX, tl.float32).to(tl.int32, bitcast=True)
        a = tl.minimum(q.to(tl.int32, bitcast=True), most).to(tl.float32, bitcast=True)
        if MACHINE == 2 and E_MAX == _E4M3_MAX:
            signed = (q.to(tl.int32, bitcast=True) | (bits & _SIGN)).to(tl.float32, bitcast=True)
            code = signed.to(tl.float8e4nv).to(tl.uint8, bitcast=True).to(tl.int32)
        elif BITS == 4:
            code = tl.fma(a, _TWO ** (E_MANTISSA + E_BIAS - 1), _TO_WHOLE).to(tl.int32, bitcast=True)
            for i in tl.static_range(1, (1 << (BITS - 1 - E_MANTISSA)) - 1):
                line = tl.fma(a, _TWO ** (E_MANTISSA + E_BIAS - 1 - i), _TO_WHOLE + (i << E_MANTISSA))
                code = tl.minimum(code, line.to(tl.int32, bitcast=True))
            code |= (bits >> (32 - BITS)) & (_ONE << (BITS - 1))
        else:
            SHIFT: tl.constexpr = _MANTISSA - E_MANTISSA
            FIRST: tl.constexpr = ((1 + _BIAS - E_BIAS) << E_MANTISSA) + (SHIFT << _MANTISSA)
            power = tl.maximum(a, _TWO ** (1 - E_BIAS)).to(tl.int32, bitcast=True) & _EXPONENT
            rounded = (a + (power + (SHIFT << _MANTISSA)).to(tl.float32, bitcast=True)).to(tl.int32, bitcast=True)
            code = (rounded - power - FIRST + (power >> SHIFT)) | ((bits >> (32 - BITS)) & (_ONE << (BITS - 1)))
    return code
