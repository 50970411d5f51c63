"""rmsnorm_linear: a quantized linear with the normalization that feeds it, and with the gate of an MLP behind it.

    h = x + residual                                  add_rmsnorm (ops/rmsnorm)
    y = (gain * h / sqrt(mean(h^2) + eps)) W^T + bias linear (ops/linear)
    y = silu(y[:, :N/2]) * y[:, N/2:]                 silu_mul (ops/silu_mul), if asked for

with every rounding of the three ops, one after the other: the contract is their composition. At one token these small
ops cost not what they compute but their launches, in a chain of kernels that wait for each other, and a decode step of
a Llama has two such norms and one such gate a layer. Every block of the product for few tokens reads all of x, so it
can as well normalize it; and where it holds the rows of the gate and those of `up` that belong to them, it can as well
multiply these. config.py says when that pays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from nybble.errors import BadInput
from nybble.formats import table
from nybble.ops._choose import choose
from nybble.ops._declare import Agreement, Cost, Implementation, Op
from nybble.ops.linear import check as check_linear
from nybble.ops.linear import cost as linear_cost
from nybble.ops.linear import linear
from nybble.ops.linear.reference import linear_reference
from nybble.ops.rmsnorm import add_rmsnorm, add_rmsnorm_reference
from nybble.ops.silu_mul import silu_mul, silu_mul_reference
from nybble.quantize import QuantTensor, layouts, quantize


def rmsnorm_linear(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor,
    eps: float,
    w: QuantTensor,
    bias: Tensor | None = None,
    gate: bool = False,
) -> tuple[Tensor, Tensor]:
    """(the linear of RMSNorm(x + residual), x + residual).

    Args:
        x: [..., K], float32, bfloat16 or float16, any strides, any number of rows from 0 up.
        residual: the shape and dtype of x, or None for zero.
        gain: [K], the norm's weight, x's dtype.
        eps: added to the mean of squares.
        w: the quantized weight, logical shape [N, K], on x's device.
        bias: [N] or None.
        gate: whether w is [gate | up] and silu(gate) * up is wanted.

    Returns:
        [..., N], or [..., N / 2] with a gate, in x.dtype; and [..., K], which is x itself without a residual.

    Raises:
        BadInput: shapes, dtypes or devices that do not fit, with the values seen.
    """
    if torch.compiler.is_compiling():
        parts = torch.ops.nybble.rmsnorm_linear(
            x, residual, gain, eps, w.codes, w.scale, w.tensor_scale, w.zero_point, bias,
            w.format.name, w.layout.name, list(w.shape), gate,
        )  # fmt: skip
        return parts[0], x if residual is None else parts[1]
    check(x, residual, gain, w, bias, gate)
    args = (x, residual, gain, eps, w, bias, gate)
    return choose(RMSNORM_LINEAR, x.device.type, *args).run(*args)


def fuses(x: Tensor, residual: Tensor | None, gain: Tensor, eps: float, w: QuantTensor, bias: Tensor | None,
          gate: bool = False) -> bool:  # fmt: skip
    """Whether `rmsnorm_linear` on these arguments would be less than its three ops one after the other."""
    return choose(RMSNORM_LINEAR, x.device.type, x, residual, gain, eps, w, bias, gate).name != COMPOSED.name


def check(x: Tensor, residual: Tensor | None, gain: Tensor, w: QuantTensor, bias: Tensor | None, gate: bool) -> None:
    """Refuse what no implementation could serve."""
    check_linear(x, w, bias)
    if tuple(gain.shape) != x.shape[-1:] or gain.dtype != x.dtype:
        raise BadInput(f"rmsnorm_linear: gain is {gain.dtype} {tuple(gain.shape)}, expected {x.dtype} [{x.shape[-1]}]")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise BadInput(f"rmsnorm_linear: residual is {residual.dtype} {tuple(residual.shape)}, "
                       f"x {x.dtype} {tuple(x.shape)}")  # fmt: skip
    if gate and w.shape[0] % 2:
        raise BadInput(f"rmsnorm_linear: a gate takes gate and up in equal parts; the weight [N, K] is {w.shape}")


@torch.library.custom_op("nybble::rmsnorm_linear", mutates_args=())
def _rmsnorm_linear_op(
    x: Tensor, residual: Tensor | None, gain: Tensor, eps: float, codes: Tensor, scale: Tensor,
    tensor_scale: Tensor | None, zero_point: Tensor | None, bias: Tensor | None, weight_format: str, layout: str,
    shape: list[int], gate: bool,
) -> list[Tensor]:  # fmt: skip
    fmt = table.block(weight_format)
    w = QuantTensor(fmt, tuple(shape), codes, scale, tensor_scale, zero_point, layouts.get(layout), x.dtype)
    y, h = rmsnorm_linear(x, residual, gain, eps, w, bias, gate)
    return [y] if residual is None else [y, h]


@_rmsnorm_linear_op.register_fake
def _(
    x: Tensor, residual: Any, gain: Tensor, eps: float, codes: Tensor, scale: Tensor, tensor_scale: Any,
    zero_point: Any, bias: Any, weight_format: str, layout: str, shape: list[int], gate: bool,
) -> list[Tensor]:  # fmt: skip
    torch._check(x.shape[-1] == shape[1], lambda: f"rmsnorm_linear: x must end in {shape[1]}, got {tuple(x.shape)}")
    y = x.new_empty((*x.shape[:-1], shape[0] // (1 + gate)))
    return [y] if residual is None else [y, x.new_empty(x.shape)]


def rmsnorm_linear_reference(
    x: Tensor, residual: Tensor | None, gain: Tensor, eps: float, w: QuantTensor, bias: Tensor | None, gate: bool
) -> tuple[Tensor, Tensor]:
    """The definition: the definitions of the three ops, one after the other."""
    normal, h = add_rmsnorm_reference(x, residual, gain, eps)
    y = linear_reference(normal, w, bias)
    return silu_mul_reference(y) if gate else y, h


def composed(
    x: Tensor, residual: Tensor | None, gain: Tensor, eps: float, w: QuantTensor, bias: Tensor | None, gate: bool
) -> tuple[Tensor, Tensor]:
    """The three ops one after the other."""
    normal, h = add_rmsnorm(x, residual, gain, eps)
    y = linear(normal, w, bias)
    return silu_mul(y) if gate else y, h


CASE_FORMATS = ("int4_g128", "nvfp4", "int8_channel", "mxfp4", "int4_g32_asym", "nf4_g64", "fp8_channel")
CASE_SHAPES = ((0, 64, 64), (1, 64, 128), (1, 96, 576), (2, 160, 328), (3, 34, 129), (4, 352, 1024), (6, 64, 256))


def cases(
    device: str = "cpu", dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments): every format with and without a gate, odd sizes, no rows, rows of zeros, a strided x, with
    and without a residual and a bias."""
    generator = torch.Generator().manual_seed(0)
    for number, (name, (m, n, k)) in enumerate(product(CASE_FORMATS, CASE_SHAPES)):
        dtype, gate = dtypes[number % len(dtypes)], bool(number // 2 % 2)
        w = quantize(torch.randn(n, k, generator=generator), name).to(device)
        wide = torch.randn(m, 2 * k, generator=generator)
        wide[1:2] = 0
        x = wide.to(device, dtype)
        x = x[:, ::2] if number % 5 == 4 else x[:, :k]
        gain = torch.randn(k, generator=generator).to(device, dtype)
        residual = torch.randn(m, k, generator=generator).to(device, dtype) if number % 4 else None
        bias = torch.randn(n, generator=generator).to(device, dtype) if number % 3 else None
        label = f"{name}-M{m}-N{n}-K{k}-{str(dtype).removeprefix('torch.')}{'-gate' if gate else ''}"
        yield label, (x, residual, gain, 1e-5, w, bias, gate)


def cost(x: Tensor, residual: Tensor | None, gain: Tensor, eps: float, w: QuantTensor, *rest: Any) -> Cost:
    """The linear's, in one launch; a residual is read and the sum written."""
    moved = 0 if residual is None else 2 * x.numel() * x.element_size()
    alone = linear_cost(x, w)
    return replace(alone, nbytes=alone.nbytes + moved, launches=1)


COMPOSED = Implementation("rmsnorm_linear_composed", composed, native=True, note="its three ops, one after the other")

RMSNORM_LINEAR = Op(
    name="rmsnorm_linear",
    reference=rmsnorm_linear_reference,
    # Twice the linear's: behind a gate two of its results multiply each other, and their errors add.
    agreement=Agreement({torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2.0**-17}),
    cases=cases,
    cost=cost,
    homes={"cuda": "nybble.ops.rmsnorm_linear.cuda"},
    fallback=COMPOSED,
)

__all__ = ["RMSNORM_LINEAR", "fuses", "rmsnorm_linear"]
