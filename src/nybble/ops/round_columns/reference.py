"""round_columns in plain torch, and the rounding it rests on."""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor

from nybble.formats import array
from nybble.formats.spec import ElementFormat, FloatFormat, IntFormat
from nybble.quantize import elements

_EXPONENT = 0x7F800000  # the bits of a float32's exponent: alone, the power of two below a number


def round_columns_reference(
    columns: Tensor, upper: Tensor, scale: Tensor, zero_point: Tensor | None, element: ElementFormat
) -> Tensor:
    """The definition, in plain torch."""
    free = columns.clone(memory_format=torch.contiguous_format)
    flat, errors = free.view(len(free), -1), torch.empty_like(free)
    zero = None if zero_point is None else zero_point.expand(scale.shape)
    for j in range(len(free)):
        value = nearest(element, free[j], scale, zero) * scale
        torch.div(free[j] - value, upper[j, j], out=errors[j])
        flat[j + 1 :].addr_(upper[j, j + 1 :], errors[j].view(-1), alpha=-1)
    return errors


def nearest(element: ElementFormat, x: Tensor, scale: Tensor, zero: Tensor | None = None) -> Tensor:
    """What float64 values are rounded to, before the scale: the element less its zero point, float32.

    Scales and zero points (float32) broadcast over x. The same as encoding and decoding, in fewer steps.
    """
    quotient = x.to(torch.float32) / scale
    if isinstance(element, IntFormat):
        if zero is None:
            one = 2.0**element.fraction_bits
            return (quotient * one).clamp_(element.low, element.high).round_().div_(one)
        return (quotient.round_() + zero).clamp_(element.low, element.high).sub_(zero)
    if isinstance(element, FloatFormat) and element.mantissa_bits:
        return _to_steps(element, quotient.clamp_(element.min, element.max))
    values, thresholds = _steps(element, x.device)
    rank = torch.bucketize(quotient, thresholds, right=True, out_int32=True)
    return values.index_select(0, rank.flatten()).view(x.shape)


def _to_steps(element: FloatFormat, x: Tensor) -> Tensor:
    """The nearest multiple of the step in x's own binade; a tie goes to the even multiple, which has the even code."""
    binade = (x.view(torch.int32) & _EXPONENT).view(torch.float32)
    step = binade.clamp_(min=2.0**element.min_exponent).mul_(2.0**-element.mantissa_bits)
    return x.div_(step).round_().mul_(step)


@cache
def _steps(element: ElementFormat, device: torch.device) -> tuple[Tensor, Tensor]:
    """An element's values in ascending order, and the float32 numbers from which each but the first is the nearest.

    Each is found by asking `elements.encode` on either side of the midpoint, whose rule for ties thereby holds.
    """
    values = torch.tensor(array.values(element), dtype=torch.float32)
    values = values[values.isfinite()].unique()
    middle = ((values[:-1].double() + values[1:].double()) / 2).to(torch.float32)
    up, down = (torch.nextafter(middle, torch.full_like(middle, side)) for side in (math.inf, -math.inf))
    decided = [elements.decode(element, elements.encode(element, at)) for at in (down, middle, up)]
    thresholds = torch.where(decided[1] == values[1:], middle, up)
    thresholds = torch.where(decided[0] == values[1:], down, thresholds)
    return values.to(device), thresholds.to(device)
