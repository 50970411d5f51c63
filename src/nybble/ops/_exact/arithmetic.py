"""Arithmetic with the same bits on every machine: IEEE float32, one rounding an operation, an order fixed in advance.

IEEE 754 says what a + b, a - b, a * b, a / b and sqrt(a) are, to the last bit. What differs between machines is the
rest: functions of libraries, sums in another order, a product and a sum contracted into one rounding, subnormals
flushed. So nothing else is used here. Every line below is one rounded operation a value; torch keeps to that on CPUs
and, operation by operation, on GPUs. CUDA kernels spell the same operations (`__fmul_rn`, `__fadd_rn`, …), which no
compiler may contract, in the same order.

Sums take L lanes: lane l adds terms l, l + L, l + 2L, … one after another, starting from zero; then the upper half of
the lanes is added to the lower half until one is left. Terms that are missing count as zero, which changes no bits.
A NaN is a NaN: results hold the canonical one, since its payload differs between machines.
"""

from __future__ import annotations

import math
from struct import pack, unpack

import torch
from torch import Tensor

from nybble.errors import BadInput

DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def single(value: float) -> float:
    """The float32 nearest to a value, as a Python float."""
    return float(unpack("f", pack("f", value))[0])


LOG2_E = single(math.log2(math.e))
LN2_HIGH = 355 / 512
"""Nine bits of ln 2, so that n times it is exact for every exponent n of float32."""
LN2_LOW = single(math.log(2) - LN2_HIGH)
LOWEST, HIGHEST = -104.0, 89.0
"""Where exp has become 0 and infinity in float32."""
TAYLOR = tuple(single(1 / math.factorial(k)) for k in range(7, -1, -1))
"""1/7! … 1/0!: what is left out is 5e-9 of exp(r) at |r| = ln(2) / 2, a tenth of a rounding."""


def exp(x: Tensor) -> Tensor:
    """e^x in float32, within 2 ulp: x = n ln 2 + r, a polynomial in r, two exact powers of two.

    Args:
        x: float32.
    """
    t = x.nan_to_num(0.0, torch.inf, -torch.inf).clamp(LOWEST, HIGHEST)
    n = (t * LOG2_E).round()
    r = (t - n * LN2_HIGH) - n * LN2_LOW
    y = torch.full_like(r, TAYLOR[0])
    for coefficient in TAYLOR[1:]:
        y = y.mul_(r).add_(coefficient)
    n = n.to(torch.int32)
    half = n >> 1
    return y.mul_(_power(half)).mul_(_power(n - half)).masked_fill_(x.isnan(), torch.nan)


def _power(n: Tensor) -> Tensor:
    """2^n for whole n from -126 up to 0x7F, by the bits of float32."""
    return ((n + 0x7F) << 23).view(torch.float32)


def sqrt(x: Tensor) -> Tensor:
    """The float32 square root, rounded once.

    torch's own goes through vendors' libraries on some CPUs and is a last bit off there. A float64 root that is within
    2 ulp rounds to the right float32: no float32 number's root comes nearer than 2^-50 to the middle of two others.
    """
    return x.double().sqrt().to(torch.float32)


def narrow(y: Tensor, dtype: torch.dtype) -> Tensor:
    """float32 rounded to nearest in `dtype`, with one kind of NaN."""
    return y.to(dtype).masked_fill_(y.isnan(), torch.nan)


def lane_sum(terms: Tensor, lanes: int, dim: int) -> Tensor:
    """The sum over `dim` in the order described above; that dimension is removed.

    Args:
        terms: float32.
        lanes: a power of two.
        dim: negative, counted from the end.
    """
    count = terms.shape[dim]
    missing = -count % lanes
    if missing or not count:
        shape = list(terms.shape)
        shape[dim] = missing or lanes
        terms = torch.cat([terms, terms.new_zeros(shape)], dim)
    rows = terms.unflatten(dim, (-1, lanes)).unbind(dim - 1)
    total = rows[0] + 0.0
    for row in rows[1:]:
        total = total + row
    while lanes > 1:
        lanes //= 2
        total = total.narrow(dim, 0, lanes) + total.narrow(dim, lanes, lanes)
    return total.squeeze(dim)


def check_dtype(name: str, *tensors: Tensor) -> None:
    """Refuse anything but equal dtypes of DTYPES on one device."""
    seen = {str(t.dtype).removeprefix("torch.") for t in tensors}
    if len(seen) > 1 or tensors[0].dtype not in DTYPES:
        raise BadInput(f"{name} takes bfloat16, float16 or float32, the same for all; got {', '.join(sorted(seen))}")
    devices = {str(t.device) for t in tensors}
    if len(devices) > 1:
        raise BadInput(f"{name}: tensors are on {', '.join(sorted(devices))}")
