"""linear: y = x W^T + bias with a quantized weight.

Any floating x [..., K], any QuantTensor weight [N, K], optionally with activations rounded to a format on the fly.
The contract is reference.py; which implementation serves a call is chosen by device and shape and can be asked
with `nybble.ops.explain(LINEAR, ...)` or `nybble ops linear`.

Eager calls go straight to the implementation; under torch.compile the call is the custom op `nybble::linear`, so
that a graph holds one opaque node whatever the format.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from nybble import costs
from nybble.errors import BadInput
from nybble.formats import table
from nybble.formats.spec import BlockFormat
from nybble.ops._choose import choose
from nybble.ops._declare import Agreement, Cost, Implementation, Op
from nybble.ops.linear.reference import linear_reference, round_activation
from nybble.ops.quantize_rows import quantize_rows
from nybble.quantize import QuantTensor, layouts, quantize


def linear(
    x: Tensor,
    w: QuantTensor,
    bias: Tensor | None = None,
    activation: BlockFormat | str | None = None,
    activation_amax: Tensor | None = None,
) -> Tensor:
    """x W^T + bias.

    Args:
        x: [..., K], float32, bfloat16 or float16, any strides, any number of rows from 0 up.
        w: the quantized weight, logical shape [N, K], on x's device.
        bias: [N] or None.
        activation: the format x is rounded to first, token by token; None keeps x.
        activation_amax: float32 [], the calibrated largest magnitude for activation formats with a tensor scale;
            None measures x.

    Returns:
        [..., N] in x.dtype.

    Raises:
        BadInput: shapes, dtypes or devices that do not fit, with the values seen.
        Unsupported: no implementation serves the call; every one's reason.
    """
    fmt = table.block(activation) if isinstance(activation, str) else activation
    if torch.compiler.is_compiling():
        return torch.ops.nybble.linear(
            x, w.codes, w.scale, w.tensor_scale, w.zero_point, bias,
            w.format.name, w.layout.name, list(w.shape), fmt.name if fmt else "", activation_amax,
        )  # fmt: skip
    check(x, w, bias)
    return choose(LINEAR, x.device.type, x, w, bias, fmt, activation_amax).run(x, w, bias, fmt, activation_amax)


def takes_codes(x: Tensor, w: QuantTensor, bias: Tensor | None, activation: BlockFormat | None) -> bool:
    """Whether `linear` on these arguments would quantize x token by token and multiply the codes: whoever makes x may
    then make its codes (ops/quantize_rows), and call `product`."""
    if activation is None or activation.block[0] != 1 or x.device.type != "cuda":
        return False
    from nybble.ops.linear import gpu

    return choose(LINEAR, x.device.type, x, w, bias, activation, None).name in gpu.KERNELS


def product(a: QuantTensor, w: QuantTensor, bias: Tensor | None = None) -> Tensor:
    """a w^T + bias for an input that is quantized already, in a.dtype; see gpu.py's `product`."""
    from nybble.ops.linear import gpu

    return gpu.product(a, w, bias)


def check(x: Tensor, w: QuantTensor, bias: Tensor | None) -> None:
    """Refuse what no implementation could serve."""
    if len(w.shape) != 2:
        raise BadInput(f"linear takes a weight [N, K], got shape {w.shape}")
    n, k = w.shape
    if x.dtype not in LINEAR.agreement.limits:
        raise BadInput(f"linear takes float32, bfloat16 or float16 inputs, got {x.dtype}")
    if x.ndim == 0 or x.shape[-1] != k:
        raise BadInput(f"linear: x is {tuple(x.shape)} and the weight [N, K] = [{n}, {k}]; x must end in {k}")
    if bias is not None and tuple(bias.shape) != (n,):
        raise BadInput(f"linear: bias is {tuple(bias.shape)}, expected ({n},)")
    if x.device != w.device:
        raise BadInput(f"linear: x is on {x.device} and the weight on {w.device}")


@torch.library.custom_op("nybble::linear", mutates_args=())
def _linear_op(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    tensor_scale: Tensor | None,
    zero_point: Tensor | None,
    bias: Tensor | None,
    weight_format: str,
    layout: str,
    shape: list[int],
    activation: str,
    activation_amax: Tensor | None,
) -> Tensor:
    fmt = table.block(weight_format)
    w = QuantTensor(fmt, tuple(shape), codes, scale, tensor_scale, zero_point, layouts.get(layout), x.dtype)
    return linear(x, w, bias, activation or None, activation_amax)


@_linear_op.register_fake
def _(x: Tensor, codes: Tensor, scale: Tensor, tensor_scale: Any, zero_point: Any, bias: Any,
      weight_format: str, layout: str, shape: list[int], activation: str, activation_amax: Any) -> Tensor:  # fmt: skip
    torch._check(x.shape[-1] == shape[1], lambda: f"linear: x must end in {shape[1]}, got {tuple(x.shape)}")
    return x.new_empty((*x.shape[:-1], shape[0]))


def _rounded(x: Tensor, activation: BlockFormat | None, amax: Tensor | None) -> Tensor:
    """`round_activation`, by the one-pass producer where a token's scales are its own."""
    if activation is None or activation.block[0] != 1:
        return round_activation(x, activation, amax)
    q = quantize_rows(x.reshape(-1, x.shape[-1]), activation, tensor_amax=amax)
    return q.dequantize(torch.float32).view(x.shape)


def _emulated(
    x: Tensor, w: QuantTensor, bias: Tensor | None, activation: BlockFormat | None, activation_amax: Tensor | None
) -> Tensor:
    """Dequantize to float32, multiply there, round once: exact but for the float32 sum, and slow."""
    a = _rounded(x, activation, activation_amax).to(torch.float32).contiguous()
    y = torch.nn.functional.linear(a, w.dequantize(torch.float32), None if bias is None else bias.to(torch.float32))
    return y.to(x.dtype)


CASE_FORMATS = (
    "int8_channel", "int4_g128", "int4_g64", "int4_g32_asym", "int4_channel", "int3_g64", "int2_g32", "fp8_channel",
    "fp8_block128", "nvfp4", "mxfp4", "mxfp6_e2m3", "mxfp8_e4m3", "mxint8", "nf4_g64", "ufp4", "ternary_channel",
)  # fmt: skip
CASE_ACTIVATIONS = {
    "int8_channel": "int8_token", "int4_g128": "int8_token", "fp8_channel": "fp8_token", "fp8_block128": "fp8_g128",
    "nvfp4": "nvfp4", "mxfp4": "mxfp4", "mxfp8_e4m3": "mxfp8_e4m3", "ufp4": "ufp4",
}  # fmt: skip
CASE_SHAPES = (
    (0, 16, 32),
    (1, 1, 1),
    (3, 17, 129),
    (2, 15, 33),
    (1, 64, 128),
    (5, 48, 160),
    (17, 128, 256),
    (33, 33, 96),
    (70, 136, 192),
    (130, 72, 320),
)


def cases(
    device: str = "cpu", dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments of `linear`): every weight format with and without activation rounding, odd shapes, a bias
    every other time, x contiguous, strided and offset in turn."""
    generator = torch.Generator().manual_seed(0)
    pairs = [(name, None) for name in CASE_FORMATS] + list(CASE_ACTIVATIONS.items())
    for number, ((name, activation), (m, n, k)) in enumerate(itertools.product(pairs, CASE_SHAPES)):
        dtype = dtypes[number % len(dtypes)]
        w = quantize(torch.randn(n, k, generator=generator), name).to(device)
        wide = torch.randn(m, 2 * k + 1, generator=generator).to(device, dtype)
        x = (wide[:, :k].contiguous(), wide[:, 1 : 2 * k + 1 : 2], wide[:, 1 : k + 1])[number % 3]
        bias = torch.randn(n, generator=generator).to(device, dtype) if number % 2 else None
        label = f"{name}-{activation or 'a16'}-M{m}-N{n}-K{k}-{str(dtype).removeprefix('torch.')}"
        yield label, (x, w, bias, table.block(activation) if activation else None, None)


def cost(
    x: Tensor, w: QuantTensor, bias: Tensor | None = None, activation: BlockFormat | None = None, *rest: Any
) -> Cost:
    """2MNK operations; x, the stored weight and y move once; what decoding and rescaling add on the preferred route."""
    n, k = w.shape
    rows = x.numel() // k if k else 0
    steps = costs.linear(rows, n, k, w.format, activation, x.element_size())[0].steps
    moved = w.nbytes + x.element_size() * (rows * k + rows * n)
    return replace(steps[-1], nbytes=moved, launches=len(steps))


def size(x: Tensor, w: QuantTensor, bias: Tensor | None = None, *rest: Any) -> float:
    """||x|| ||W|| / sqrt(K): the norm of x W^T when its terms are independent."""
    return float(x.double().norm() * w.dequantize(torch.float32).double().norm()) / max(w.shape[1], 1) ** 0.5


LINEAR = Op(
    name="linear",
    reference=linear_reference,
    # One rounding of the result is at most 2^-8 of bf16 and 2^-11 of fp16, about half of that on average, which
    # leaves room for an implementation that rounds the weight too. float32 is given K = 2^16 additions.
    agreement=Agreement({torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-18}),
    cases=cases,
    cost=cost,
    size=size,
    homes={"cpu": "nybble.ops.linear.cpu", "cuda": "nybble.ops.linear.gpu"},
    fallback=Implementation("linear_dequantize", _emulated, native=False),
)

from nybble.ops.linear.module import QuantLinear  # noqa: E402 - the module calls `linear`

__all__ = ["LINEAR", "QuantLinear", "linear", "product", "takes_codes"]
