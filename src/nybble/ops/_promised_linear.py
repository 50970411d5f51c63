"""What `linear_exact` and `linear_invariant` share: their arguments, cases and costs, and how torch.compile sees them.

Both take x [..., K], a weight [N, K] that is a plain tensor or a QuantTensor, and a bias or none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from nybble.errors import BadInput
from nybble.formats import table
from nybble.ops._declare import Cost
from nybble.quantize import QuantTensor, layouts, quantize

RUN = 8
"""Columns that the kernels read at once: 16 bytes of 16-bit numbers."""
_ALIGNMENT = 16

Weight = Tensor | QuantTensor
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
QUANTIZED = ("int8_channel", "int4_g128", "int4_g32_asym", "nvfp4", "mxfp4", "fp8_block128", "nf4_g64")
SHAPES = ((0, 16, 32), (1, 1, 1), (3, 17, 129), (2, 15, 33), (1, 64, 128), (5, 48, 300), (17, 40, 512), (70, 33, 96))


def values(w: Weight) -> Tensor:
    """The weight's values, [N, K]; float32 for a QuantTensor, whose one multiplication by a scale is IEEE's."""
    return w.dequantize(torch.float32) if isinstance(w, QuantTensor) else w


def rows(x: Tensor) -> Tensor:
    """[..., K] as [M, K]."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def whole_runs(t: Tensor) -> Tensor:
    """[rows, K] with K a multiple of RUN and rows at multiples of 16 bytes, ended by zeros; t itself if it is so."""
    k, row = t.shape[1], t.stride(0) * t.element_size()
    if t.stride(1) == 1 and k % RUN == 0 and row % _ALIGNMENT == 0 and t.data_ptr() % _ALIGNMENT == 0:
        return t
    wide = t.new_zeros((len(t), -(-k // RUN) * RUN))
    wide[:, :k] = t
    return wide


def check(name: str, x: Tensor, w: Weight, bias: Tensor | None) -> None:
    """Refuse what no implementation could serve, with the values seen."""
    if len(w.shape) != 2:
        raise BadInput(f"{name} takes a weight [N, K], got shape {tuple(w.shape)}")
    n, k = w.shape
    for what, dtype in (("inputs", x.dtype), ("weights", x.dtype if isinstance(w, QuantTensor) else w.dtype)):
        if dtype not in DTYPES:
            wide = "; nearest: torch.nn.functional.linear, which promises nothing" if dtype == torch.float64 else ""
            raise BadInput(f"{name} takes float32, bfloat16 or float16 {what}, got {dtype}{wide}")
    if x.ndim == 0 or x.shape[-1] != k:
        raise BadInput(f"{name}: x is {tuple(x.shape)} and the weight [N, K] = [{n}, {k}]; x must end in {k}")
    if bias is not None and (tuple(bias.shape) != (n,) or bias.dtype not in DTYPES):
        raise BadInput(f"{name}: bias is {bias.dtype} {tuple(bias.shape)}, expected ({n},) in at most float32")
    if x.device != w.device:
        raise BadInput(f"{name}: x is on {x.device} and the weight on {w.device}")


def compilable(name: str, run: Callable[[Tensor, Weight, Tensor | None], Tensor]) -> Callable[..., Tensor]:
    """`run` as custom ops, `nybble::NAME_dense` and `nybble::NAME_quantized`, one opaque node in a graph."""

    @torch.library.custom_op(f"nybble::{name}_dense", mutates_args=())
    def dense(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return run(x, w, bias)

    @torch.library.custom_op(f"nybble::{name}_quantized", mutates_args=())
    def quantized(
        x: Tensor, codes: Tensor, scale: Tensor, tensor_scale: Tensor | None, zero_point: Tensor | None,
        bias: Tensor | None, weight_format: str, layout: str, shape: list[int],
    ) -> Tensor:  # fmt: skip
        fmt = table.block(weight_format)
        w = QuantTensor(fmt, tuple(shape), codes, scale, tensor_scale, zero_point, layouts.get(layout), x.dtype)
        return run(x, w, bias)

    @dense.register_fake
    def _(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        return x.new_empty((*x.shape[:-1], w.shape[0]))

    @quantized.register_fake
    def _(x: Tensor, codes: Tensor, scale: Tensor, tensor_scale: Any, zero_point: Any, bias: Any,
          weight_format: str, layout: str, shape: list[int]) -> Tensor:  # fmt: skip
        return x.new_empty((*x.shape[:-1], shape[0]))

    def call(x: Tensor, w: Weight, bias: Tensor | None) -> Tensor:
        if not isinstance(w, QuantTensor):
            return dense(x, w, bias)
        parts = (w.codes, w.scale, w.tensor_scale, w.zero_point)
        return quantized(x, *parts, bias, w.format.name, w.layout.name, list(w.shape))

    return call


def cases(device: str = "cpu") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments): plain and quantized weights, odd shapes, a bias every other time, views of x in turn."""
    generator = torch.Generator().manual_seed(0)
    kinds: list[torch.dtype | str] = [*DTYPES, *QUANTIZED]
    for number, (kind, (m, n, k)) in enumerate(product(kinds, SHAPES)):
        dtype = kind if isinstance(kind, torch.dtype) else DTYPES[number % len(DTYPES)]
        original = torch.randn(n, k, generator=generator).to(device)
        w = quantize(original, kind) if isinstance(kind, str) else original.to(kind)
        wide = torch.randn(m, 2 * k + 1, generator=generator).to(device, dtype)
        x = (wide[:, :k].contiguous(), wide[:, 1 : 2 * k + 1 : 2], wide[:, 1 : k + 1])[number % 3]
        bias = torch.randn(n, generator=generator).to(device, dtype) if number % 2 else None
        label = f"{kind if isinstance(kind, str) else 'dense'}-M{m}-N{n}-K{k}-{str(dtype).removeprefix('torch.')}"
        yield label, (x, w, bias)


def cost(unit: str | None) -> Callable[..., Cost]:
    """2MNK operations on `unit` (None: that of x's dtype); x, the stored weight and y move once."""

    def of(x: Tensor, w: Weight, bias: Tensor | None = None) -> Cost:
        n, k = w.shape
        rows = x.numel() // k if k else 0
        stored = w.nbytes if isinstance(w, QuantTensor) else w.numel() * w.element_size()
        own = "bf16" if x.element_size() == 2 else "fp32"
        return Cost(2.0 * rows * n * k, stored + x.element_size() * (rows * k + rows * n), unit or own)

    return of
