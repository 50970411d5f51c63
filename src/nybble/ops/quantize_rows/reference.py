"""The definition of `quantize_rows`: the prologue, rounded to x's dtype; the rotation, rounded again; quantize().

Every operation is in float32 and rounded once, so that the bits are the same on every machine:

    rmsnorm    h = x + residual;  y = gain * (h / sqrt(mean(h^2) + eps)), roundings as in add_rmsnorm. Squares are
               summed by eight neighbours, as a tree, and from there in float64, where no order of summation shows.
               add_rmsnorm's own sum is in float32, and the two differ by no more than that op's agreement.
    silu_mul   what the op of that name gives on the same device: its exponential is the device's own
    hadamard   sums and differences of neighbours 1, 2, 4, … apart, then times fl32(1 / sqrt(size)): x H / sqrt(size)
               in blocks of `size` columns, H Sylvester's matrix (methods/hadamard.py has the same one)
"""

from __future__ import annotations

import torch
from torch import Tensor

from nybble.formats.spec import BlockFormat
from nybble.ops.silu_mul import silu_mul
from nybble.quantize import QuantTensor, quantize
from nybble.quantize.scales import divide


def quantize_rows_reference(
    x: Tensor,
    fmt: BlockFormat,
    prologue: str = "plain",
    residual: Tensor | None = None,
    gain: Tensor | None = None,
    eps: float = 0.0,
    tensor_amax: Tensor | None = None,
    hadamard: int = 0,
) -> tuple[QuantTensor, Tensor]:
    """(codes and scales, h); arguments as for the op. h is x + residual, and x itself without one."""
    y, h = prologue_reference(x, prologue, residual, gain, eps)
    y = rotate(y, hadamard) if hadamard else y
    rows = y if y.ndim > 1 else y[None]
    q = quantize(rows, fmt, tensor_amax=tensor_amax, check=False, name="the activation")
    return q, h


def prologue_reference(
    x: Tensor, prologue: str, residual: Tensor | None, gain: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """(what is to be rotated and quantized, in x's dtype; h)."""
    if prologue == "silu_mul":
        return silu_mul(x), x
    if gain is None:
        return x, x
    h = x if residual is None else x + residual
    wide = h.to(torch.float32)
    squares = torch.nn.functional.pad(wide.square(), (0, -x.shape[-1] % 8))
    for _ in range(3):
        squares = squares[..., ::2] + squares[..., 1::2]
    total = squares.sum(-1, keepdim=True, dtype=torch.float64).to(torch.float32)
    mean = divide(total, float(max(x.shape[-1], 1))) + eps
    root = mean.double().sqrt().to(torch.float32)  # torch's own float32 root on CPUs can be an ulp off
    return gain * (wide * (torch.ones_like(root) / root)).to(x.dtype), h


def rotate(x: Tensor, size: int) -> Tensor:
    """x H / sqrt(size) in blocks of `size` columns, [..., K] in x.dtype; K is a multiple of `size`, a power of two."""
    wide, step = x.to(torch.float32), 1
    while step < size:
        a, b = wide.unflatten(-1, (-1, 2, step)).unbind(-2)
        wide, step = torch.stack([a + b, a - b], -2).flatten(-3), 2 * step
    return (wide * wide.new_full((), size**-0.5)).to(x.dtype)
