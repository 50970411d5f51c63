"""linear on CPUs, on torch's own kernels where they fulfil the contract.

torch has an int8 and an int4 weight-only kernel and an int8 product. Their limits were found by trying (torch 2.13,
AVX-512): the int8 kernel for bf16 reads out of bounds unless K is a multiple of 16, and the int4 kernel takes N in
multiples of 16 and groups of 32 to 256 that divide K. What they cannot take goes to the fallback.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from nybble.formats.spec import BlockFormat, IntFormat
from nybble.ops._declare import Implementation
from nybble.quantize import QuantTensor, quantize
from nybble.quantize.layouts import Layout, Scales, Shape, register

_INT8_COLUMNS = 16
_INT4_ROWS = 16
_INT4_GROUPS = (256, 128, 64, 32)
_FLOAT32_ROWS = 2  # beyond, dequantizing once is faster than torch's float32 kernel, which is scalar
_OFFSET = 8  # the int4 kernel stores codes plus 8


def _is_int(fmt: BlockFormat, bits: int) -> bool:
    return isinstance(fmt.element, IntFormat) and fmt.element.bits == bits and fmt.element.low == -(1 << bits - 1)


def _int8_weight(w: QuantTensor) -> str | None:
    fmt = w.format
    if not _is_int(fmt, 8) or fmt.block != (1, None) or fmt.zero_point:
        return f"serves symmetric int8 with one scale a row; the weight is {fmt.name}"
    return None


def _finish(y: Tensor, bias: Tensor | None, x: Tensor) -> Tensor:
    """y [rows, N] plus bias, in x's leading shape and dtype."""
    return (y if bias is None else y + bias).to(x.dtype).view(*x.shape[:-1], y.shape[-1])


def _w8a16_supports(
    x: Tensor, w: QuantTensor, bias: Tensor | None, activation: BlockFormat | None, amax: Tensor | None
) -> str | None:
    if activation is not None:
        return f"keeps activations as they are; {activation.name} was asked for"
    if x.dtype == torch.float16:
        return "scales in float16 would lose the range of BF16 scales"
    if x.dtype == torch.float32 and x.numel() > _FLOAT32_ROWS * x.shape[-1]:
        return f"torch's float32 kernel is scalar: it pays up to {_FLOAT32_ROWS} rows"
    if w.shape[1] % _INT8_COLUMNS or not w.shape[1]:
        return f"K = {w.shape[1]} is not a positive multiple of {_INT8_COLUMNS}"
    return _int8_weight(w)


def _w8a16(
    x: Tensor, w: QuantTensor, bias: Tensor | None, activation: BlockFormat | None, amax: Tensor | None
) -> Tensor:
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    y = torch.ops.aten._weight_int8pack_mm(rows, w.unpack().view(torch.int8), w.scale.flatten().to(x.dtype))
    return _finish(y, bias, x)


def _w8a8_supports(
    x: Tensor, w: QuantTensor, bias: Tensor | None, activation: BlockFormat | None, amax: Tensor | None
) -> str | None:
    if activation is None or not _is_int(activation, 8) or activation.block != (1, None) or activation.zero_point:
        return f"serves int8 activations by token; {activation.name if activation else 'none'} was asked for"
    if not x.numel():
        return "no rows"
    return _int8_weight(w)


def _w8a8(
    x: Tensor, w: QuantTensor, bias: Tensor | None, activation: BlockFormat | None, amax: Tensor | None
) -> Tensor:
    a = quantize(x.reshape(-1, x.shape[-1]), activation or "int8_token", check=False)
    products = torch._int_mm(a.unpack().view(torch.int8), w.unpack().view(torch.int8).t())
    return _finish(products.to(torch.float32).mul_(a.scale).mul_(w.scales()[0].flatten()), bias, x)


@dataclass(frozen=True)
class Int4Cpu(Layout):
    """The arrangement of torch's int4 CPU kernel.

    The order of the nibbles depends on the processor's vector width and is torch's own affair: it is asked for by
    packing, and undone by packing the positions themselves, digit by digit. Scales become [groups, N, 2] bfloat16
    pairs (scale, 0), the second a shift that symmetric formats do not have; a group that does not divide K is cut
    finer.
    """

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        # Two's complement codes become unsigned ones in ascending order.
        return _torch_pack((codes ^ _OFFSET).to(torch.int32))

    def unpack(self, packed: Tensor, shape: Shape, bits: int) -> Tensor:
        codes = torch.empty(shape, dtype=torch.uint8)
        codes.view(-1)[_positions(shape)] = _nibbles(packed)
        return codes ^ _OFFSET

    def pack_scales(self, scale: Tensor, zero_point: Tensor | None, fmt: BlockFormat, shape: Shape) -> Scales:
        if zero_point is not None:
            raise ValueError(f"{self.name} holds no zero points")
        fine = torch.stack([scale, torch.zeros_like(scale)], -1).repeat_interleave(_cut(fmt, shape), 1)
        return fine[:, : shape[1] // int4_group(fmt, shape)].transpose(0, 1).contiguous(), None

    def unpack_scales(self, scale: Tensor, zero_point: Tensor | None, fmt: BlockFormat, shape: Shape) -> Scales:
        return scale.transpose(0, 1)[:, :: _cut(fmt, shape), 0].contiguous(), None


INT4_CPU = register(Int4Cpu("int4_cpu"))


def int4_group(fmt: BlockFormat, shape: Shape) -> int:
    """The longest group of the kernel that divides both the format's group and K, or 0."""
    group, k = fmt.block[1] or shape[1], shape[1]
    return next((g for g in _INT4_GROUPS if k and group % g == 0 and k % g == 0), 0)


def _cut(fmt: BlockFormat, shape: Shape) -> int:
    """How many of the kernel's groups make one of the format's."""
    return (fmt.block[1] or shape[1]) // int4_group(fmt, shape)


def _torch_pack(codes: Tensor) -> Tensor:
    return torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.contiguous(), 2)


def _nibbles(packed: Tensor) -> Tensor:
    return torch.stack([packed & 0xF, packed >> 4], -1).flatten()


@lru_cache(maxsize=4)
def _positions(shape: Shape) -> Tensor:
    """For each nibble of the packed bytes, the index of the code that lies there."""
    index = torch.arange(shape[0] * shape[1]).view(shape)
    found = torch.zeros(index.numel(), dtype=torch.int64)
    for shift in range(0, index.numel().bit_length(), 4):
        found += _nibbles(_torch_pack((index >> shift & 0xF).to(torch.int32))).to(torch.int64) << shift
    return found


def _w4a16_supports(
    x: Tensor, w: QuantTensor, bias: Tensor | None, activation: BlockFormat | None, amax: Tensor | None
) -> str | None:
    fmt, (n, k) = w.format, w.shape
    if activation is not None:
        return f"keeps activations as they are; {activation.name} was asked for"
    if not _is_int(fmt, 4) or fmt.block[0] != 1:
        return f"serves int4 by group or channel; the weight is {fmt.name}"
    if x.dtype != torch.bfloat16:
        return f"torch's kernel is fast in bfloat16 only, the input is {x.dtype}"
    if fmt.zero_point:
        return "shifts by zero points would be rounded to bfloat16"
    if n % _INT4_ROWS or not n:
        return f"N = {n} is not a positive multiple of {_INT4_ROWS}"
    if not int4_group(fmt, w.shape):
        return f"no group of {_INT4_GROUPS} divides K = {k} and the format's group"
    return None


def _w4a16(
    x: Tensor, w: QuantTensor, bias: Tensor | None, activation: BlockFormat | None, amax: Tensor | None
) -> Tensor:
    w = w.to_layout(INT4_CPU)  # nothing to do once QuantLinear.prepare has run
    rows = x.reshape(-1, x.shape[-1]).contiguous()
    group = int4_group(w.format, w.shape)
    y = torch.ops.aten._weight_int4pack_mm_for_cpu(rows, w.codes, group, w.scale)
    return _finish(y, bias, x)


IMPLEMENTATIONS = (
    Implementation("linear_w8a16_channel_cpu", _w8a16, _w8a16_supports, native=True),
    Implementation("linear_w4a16_group_cpu", _w4a16, _w4a16_supports, native=True, layout=lambda w: INT4_CPU),
    Implementation("linear_w8a8_token_cpu", _w8a8, _w8a8_supports, native=True),
)
