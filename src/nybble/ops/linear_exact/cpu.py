"""linear_exact on CPUs: the reference's order, vectorised over outputs and chains.

torch has no fused multiply-add over tensors, but mostly needs none:

  float32   the product of two 16-bit numbers (bf16: 8 significant bits, fp16: 11), or of a bf16 number and an integer
            times a bf16 scale, fits float32's 24. Then multiplying and adding round once, as a fused multiply-add does,
            unless a product leaves float32's range; the smallest and the largest magnitudes tell.
  float64   products of up to 28 bits: the float64 sum of such a product and a float32 number is exact wherever it comes
            near the middle between two float32 numbers (a term below half a unit in the last place and above 2^-53 of
            the sum has all of its bits in reach), so rounding it to float32 is one rounding in effect.
  odd       wider products: the reference's rounding to odd.

All three give the same bits wherever they apply, and the first that applies runs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from nybble.formats.table import BF16, FP16, FP32
from nybble.ops import _promised_linear as shared
from nybble.ops._declare import Implementation
from nybble.ops._promised_linear import RUN
from nybble.ops.linear_exact.reference import CHAINS, chains, finish, fma

_OUTPUTS, _MANY_OUTPUTS, _TOKENS = 512, 2048, 16  # of a block whose sums stay in a core's cache
_EXACT_IN_FLOAT64 = 28
_BITS = {torch.bfloat16: BF16.mantissa_bits + 1, torch.float16: FP16.mantissa_bits + 1}
_INTEGER = {2: torch.int16, 4: torch.int32}

Step = Callable[[Tensor, Tensor, Tensor], object]


def significant_bits(t: Tensor) -> int:
    """Bits that every number of a float tensor fits into, the leading one included; at most three answers each."""
    if t.dtype in _BITS:
        return _BITS[t.dtype]
    for bits in (FP32.mantissa_bits + 1 - width for width in _BITS.values()):  # what leaves room for a 16-bit partner
        if not (t.view(torch.int32) & (1 << FP32.mantissa_bits + 1 - bits) - 1).any():
            return bits
    return FP32.mantissa_bits + 1


def extent(t: Tensor) -> tuple[float, float]:
    """(smallest nonzero, largest) magnitude; (inf, 0) where all are zero, (…, inf or nan) where some are not finite."""
    integer = _INTEGER[t.element_size()]
    mask = torch.iinfo(integer).max
    code = t.view(integer) & mask
    low, high = int(((code - 1) & mask).min()) + 1, int(code.max())  # taking one away sends zeros to the top
    if high == 0:
        return torch.inf, 0.0
    found = torch.tensor([low, high], dtype=integer).view(t.dtype).tolist()
    return found[0], found[1]


def exact_products(x: Tensor, w: Tensor) -> bool:
    """Whether every product of the two is a float32 number."""
    bits = significant_bits(x) + significant_bits(w)
    if bits > FP32.mantissa_bits + 1:
        return False
    (x_low, x_high), (w_low, w_high) = extent(x), extent(w)
    lowest = 2.0 ** (1 - FP32.bias - FP32.mantissa_bits)
    return x_high * w_high < FP32.max and x_low * w_low * 2.0**-bits >= lowest


def _float32(a: Tensor, b: Tensor, sums: Tensor) -> None:
    sums.addcmul_(a, b)


def _float64(a: Tensor, b: Tensor, sums: Tensor) -> None:
    sums.copy_((a.double() * b.double()).add_(sums))


def _odd(a: Tensor, b: Tensor, sums: Tensor) -> None:
    sums.copy_(fma(a, b, sums))


def _step(x: Tensor, w: Tensor) -> Step:
    if exact_products(x, w):
        return _float32
    return _float64 if significant_bits(x) + significant_bits(w) <= _EXACT_IN_FLOAT64 else _odd


def _turned(w: Tensor) -> list[Tensor]:
    """[N, K] -> for each turn [run, chains, N] in float32; transposed first, which torch does fast within a dtype."""
    n, k = w.shape
    wide = torch.empty((-(-k // RUN) * RUN, n))
    wide[:k] = w.t().contiguous()
    wide[k:] = 0
    return [turn.view(-1, RUN, n).transpose(0, 1) for turn in wide.split(RUN * CHAINS)] if k else []


def _run(x: Tensor, w: shared.Weight, bias: Tensor | None) -> Tensor:
    rows, weight = shared.rows(x).contiguous(), shared.values(w).contiguous()
    n = weight.shape[0]
    y = torch.empty((len(rows), n), dtype=x.dtype)
    a = chains(rows.to(torch.float32)).permute(1, 3, 0, 2)[..., None].contiguous()
    outputs = _OUTPUTS if len(rows) >= _TOKENS // 4 else _MANY_OUTPUTS
    for first in range(0, n if len(rows) else 0, outputs):
        out = slice(first, first + outputs)
        b, step = _turned(weight[out]), _step(rows, weight[out])
        for token in range(0, len(rows), _TOKENS):
            part = slice(token, token + _TOKENS)
            sums = torch.zeros((len(rows[part]), CHAINS, len(weight[out])))
            _add_up(sums, a[:, :, part], b, step)
            y[part, out] = finish(sums.unbind(1), None if bias is None else bias[out], rows[part])
    return y.view(*x.shape[:-1], n)


def _add_up(sums: Tensor, a: Tensor, b: list[Tensor], step: Step) -> None:
    """sums [tokens, chains, outputs] += the products, each chain's in its order."""
    for columns, weights in zip(a, b, strict=True):
        some = weights.shape[1]  # in the last turn not every chain has columns
        for column in range(RUN):
            step(columns[column, :, :some], weights[column], sums[:, :some])


IMPLEMENTATIONS = (Implementation("linear_exact_cpu", _run, native=True),)
