"""Rules that choose a scale, one function each, by name.

A rule sees the blocks of a tensor (float32 [..., N', rows, K', columns], see blocks.py) and proposes each block's
scale in float32; `store` then rounds the proposal to the scale's own format. With E the element's largest value,
2^e its largest power of two, and a the block's largest magnitude:

    amax             a / E: the largest value is met exactly
    amax_half_range  a / ((high - low) / 2): compressed-tensors' symmetric integers (a/7.5 in four bits, so that +a
                     clips to 7 and -a meets -8 nearly)
    minmax           (max - min) / (high - low) with a zero point; the range always includes 0
    absmean          mean |x| (BitNet b1.58, XNOR-Net)
    floor            2^(floor(log2 a) - e): OCP MX v1.0; may clip the top of a block
    ceil             2^(ceil(log2 a) - e): never clips
    rceil            the smallest power of two that does not clip: 2^ceil(log2(a / E))
    even             floor, after rounding a to the element's mantissa (half away from zero)
    ct175            floor, after rounding a up from 1.75 * 2^k: compressed-tensors' MX scales
    encode_centric   2^ceil(log2 a) / E, the 1/E in the tensor scale (arXiv 2610.00053)
    two_level        a / E under a tensor scale that gives the tensor's largest block the format's target scale
    four_over_six    two_level, or a block scale 1.5 times larger where that has the smaller squared error
                     (arXiv 2512.02010)
    held             two_level under a tensor amax measured earlier (arXiv 2609.02846's sample and hold)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from nybble.errors import BadInput, UnknownName
from nybble.formats import exact
from nybble.formats.spec import BlockFormat, FloatFormat, IntFormat
from nybble.formats.table import FP32
from nybble.quantize import elements
from nybble.quantize.blocks import per_block

FOUR_OVER_SIX_TARGET = 256.0  # arXiv 2512.02010: leaves room for a block scale 1.5 times larger in E4M3
CT_ROUND_UP_FROM = 1.75  # compressed-tensors: the mantissa of amax from which the power of two goes up
MAX_ENCODE = 2.0**126  # keeps both a tensor's encode factor and its reciprocal normal float32 numbers


@dataclass(frozen=True)
class TensorScale:
    """The second-level scale: `encode` multiplies before rounding, `decode` = fl32(1/encode) is what is stored."""

    encode: Tensor
    decode: Tensor


@dataclass(frozen=True)
class Proposal:
    """What a rule proposes: block scales (float32) and, for asymmetric integers, zero points (int8)."""

    scale: Tensor
    zero_point: Tensor | None = None


Rule = Callable[[Tensor, BlockFormat, TensorScale | None], Proposal]


def largest(blocks: Tensor) -> Tensor:
    """Each block's largest magnitude, float32 [..., N', K']; NaN where the block holds one."""
    return blocks.abs().amax((-3, -1))


def divide(a: Tensor, b: float) -> Tensor:
    """a / b, rounded once on every device: torch on CUDA multiplies by the reciprocal when b is a Python number."""
    return a / a.new_full((), b)


def store(scale: Tensor, fmt: BlockFormat) -> Tensor:
    """The stored form of proposed scales (uint8 codes or the native dtype), never zero.

    A scale that rounds to zero becomes the format's floor, so that a block of zeros stays exactly zero without a
    division by zero; a scale that is not a finite number becomes NaN, so that the block decodes to NaN.
    """
    floor, nan, has_zero = _special_scales(fmt)
    finite = scale.isfinite()
    codes = elements.encode(fmt.scale, torch.where(finite, scale, 1.0))
    if has_zero:
        codes = torch.where(codes == 0, floor, codes)
    return torch.where(finite, codes, nan)


@cache
def _special_scales(fmt: BlockFormat) -> tuple[float, float, bool]:
    """(the floor, NaN) as stored numbers, and whether the stored number 0 means a scale of zero."""
    has_zero = exact.decode(fmt.scale, 0) == 0
    if elements.native_dtype(fmt.scale) is not None:
        return fmt.scale_floor, math.nan, has_zero
    return exact.encode(fmt.scale, fmt.scale_floor), exact.encode(fmt.scale, math.nan), has_zero


def amax(blocks: Tensor, fmt: BlockFormat, tensor: TensorScale | None) -> Proposal:
    """a / E."""
    return Proposal(divide(largest(blocks), fmt.element.max))


def amax_half_range(blocks: Tensor, fmt: BlockFormat, tensor: TensorScale | None) -> Proposal:
    """a / ((high - low) / 2)."""
    return Proposal(divide(largest(blocks), (fmt.element.max - fmt.element.min) / 2))


def minmax(blocks: Tensor, fmt: BlockFormat, tensor: TensorScale | None) -> Proposal:
    """The range of the block and zero, mapped to all codes; the zero point is a whole element."""
    element = fmt.element
    if not (fmt.zero_point and isinstance(element, IntFormat)):
        raise BadInput(f"rule 'minmax' gives zero points, and {fmt.name} stores none")
    low, high = blocks.amin((-3, -1)).clamp(max=0), blocks.amax((-3, -1)).clamp(min=0)
    # Halves keep the difference of two values near the end of float32 finite; powers of two round nothing.
    scale = divide(high / 2 - low / 2, element.high - element.low) * 2
    stored = elements.decode(fmt.scale, store(scale, fmt))
    zero = (element.low - (low / stored).round()).nan_to_num(0).clamp(element.low, element.high)
    return Proposal(scale, zero.to(torch.int8))


def absmean(blocks: Tensor, fmt: BlockFormat, tensor: TensorScale | None) -> Proposal:
    """mean |x|, summed in float64; the padding of a tail block counts, so whole-row blocks only."""
    if fmt.block[1] is not None:
        raise BadInput(f"rule 'absmean' works on whole rows, and {fmt.name} has blocks of {fmt.block[1]} columns")
    return Proposal(blocks.abs().mean((-3, -1), dtype=torch.float64).to(torch.float32))


def _power_of_two(exponent: Tensor, a: Tensor, fmt: BlockFormat) -> Proposal:
    """2^(exponent - e); NaN where a is not finite, the smallest where a is 0. At the top the scale stops where the
    largest element still decodes to a finite float32."""
    scale, element = fmt.scale, fmt.element
    if not (isinstance(scale, FloatFormat) and fmt.power_of_two_scale):
        raise BadInput(f"power-of-two rules are for power-of-two scales; {fmt.name} has {scale.name} scales")
    top = exponent_of(element.max)
    shifted = torch.where(a == 0, scale.min_exponent, exponent - top)
    shifted = shifted.clamp(scale.min_exponent, min(scale.max_exponent, FP32.max_exponent - top))
    power = torch.ldexp(torch.ones_like(a), shifted)
    return Proposal(torch.where(a.isfinite(), power, torch.nan))


def exponent_of(value: float) -> int:
    """floor(log2 value) of a positive number."""
    return int(torch.frexp(torch.tensor(value, dtype=torch.float64)).exponent) - 1


def _split(a: Tensor) -> tuple[Tensor, Tensor]:
    """a = mantissa * 2^exponent with mantissa in [1, 2) (0 for 0)."""
    mantissa, exponent = torch.frexp(a)
    return mantissa * 2, exponent - 1


def floor(blocks: Tensor, fmt: BlockFormat, tensor: TensorScale | None) -> Proposal:
    """2^(floor(log2 a) - e)."""
    a = largest(blocks)
    return _power_of_two(_split(a)[1], a, fmt)


def ceil(blocks: Tensor, fmt: BlockFormat, tensor: TensorScale | None) -> Proposal:
    """2^(ceil(log2 a) - e)."""
    a = largest(blocks)
    mantissa, exponent = _split(a)
    return _power_of_two(exponent + (mantissa > 1).int(), a, fmt)


def _round_up_from(threshold: float, blocks: Tensor, fmt: BlockFormat, inclusive: bool = True) -> Proposal:
    a = largest(blocks)
    mantissa, exponent = _split(a)
    up = mantissa >= threshold if inclusive else mantissa > threshold
    return _power_of_two(exponent + up.int(), a, fmt)


def rceil(blocks: Tensor, fmt: BlockFormat, tensor: TensorScale | None) -> Proposal:
    """2^ceil(log2(a / E)), decided on mantissas and so exact."""
    top = fmt.element.max / 2.0 ** exponent_of(fmt.element.max)
    return _round_up_from(top, blocks, fmt, inclusive=False)


def even(blocks: Tensor, fmt: BlockFormat, tensor: TensorScale | None) -> Proposal:
    """Floor of a rounded to the element's mantissa: up from 2 - 2^-(m+1)."""
    element = fmt.element
    mantissa_bits = element.mantissa_bits if isinstance(element, FloatFormat) else element.bits - 2
    return _round_up_from(2 - 2.0 ** -(mantissa_bits + 1), blocks, fmt)


def ct175(blocks: Tensor, fmt: BlockFormat, tensor: TensorScale | None) -> Proposal:
    """Floor of a, the power of two going up from a mantissa of 1.75, whatever the element."""
    return _round_up_from(CT_ROUND_UP_FROM, blocks, fmt)


def encode_centric(blocks: Tensor, fmt: BlockFormat, tensor: TensorScale | None) -> Proposal:
    """2^ceil(log2 a) / E: the top of the block lands in (E/2, E]."""
    _tensor(fmt, tensor)
    a = largest(blocks)
    mantissa, exponent = _split(a)
    return _power_of_two(exponent + (mantissa > 1).int() + exponent_of(fmt.element.max), a, fmt)


def two_level(blocks: Tensor, fmt: BlockFormat, tensor: TensorScale | None) -> Proposal:
    """encode * (a / E), each operation rounded to float32, in compressed-tensors' order."""
    return Proposal(_tensor(fmt, tensor).encode * divide(largest(blocks), fmt.element.max))


def four_over_six(blocks: Tensor, fmt: BlockFormat, tensor: TensorScale | None) -> Proposal:
    """The better of two_level and a scale 1.5 times larger, by squared error in float64; a tie keeps the first."""
    full = two_level(blocks, fmt, tensor).scale
    candidates = [full, full * 1.5]
    errors = [squared_error(blocks, fmt, scale, tensor) for scale in candidates]
    return Proposal(torch.where(errors[1] < errors[0], candidates[1], candidates[0]))


def squared_error(blocks: Tensor, fmt: BlockFormat, scale: Tensor, tensor: TensorScale | None) -> Tensor:
    """Each block's squared error (float64 [..., N', K']) when rounded to nearest under proposed scales."""
    effective = elements.decode(fmt.scale, store(scale, fmt))
    effective = per_block(effective if tensor is None else effective * tensor.decode)
    rounded = elements.decode(fmt.element, elements.encode(fmt.element, blocks / effective)) * effective
    return (rounded.double() - blocks.double()).square().sum((-3, -1))


RULES: dict[str, Rule] = {
    "amax": amax,
    "amax_half_range": amax_half_range,
    "minmax": minmax,
    "absmean": absmean,
    "floor": floor,
    "ceil": ceil,
    "rceil": rceil,
    "even": even,
    "ct175": ct175,
    "encode_centric": encode_centric,
    "two_level": two_level,
    "four_over_six": four_over_six,
    "held": two_level,
}


def rule(name: str) -> Rule:
    """The rule called `name`, or UnknownName with the nearest."""
    if name not in RULES:
        raise UnknownName("scale rule", name, RULES)
    return RULES[name]


def tensor_scale(name: str, fmt: BlockFormat, a: Tensor) -> TensorScale | None:
    """The second-level scale under rule `name` for a tensor whose largest magnitude is `a` (float32 []).

    encode = target * E / a; a tensor of zeros gets 1, and a tensor of tiny values the largest factor whose
    reciprocal is a normal number.
    """
    if fmt.tensor_scale is None:
        return None
    if name == "encode_centric":
        encode = torch.full_like(a, fmt.element.max)
    else:
        target = FOUR_OVER_SIX_TARGET if name == "four_over_six" else fmt.target
        encode = torch.where(a == 0, 1.0, (torch.full_like(a, target * fmt.element.max) / a).clamp(max=MAX_ENCODE))
    return TensorScale(encode, 1 / encode)


def _tensor(fmt: BlockFormat, tensor: TensorScale | None) -> TensorScale:
    if tensor is None:
        raise BadInput(f"this rule needs a tensor scale, and {fmt.name} has none")
    return tensor
