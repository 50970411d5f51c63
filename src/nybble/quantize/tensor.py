"""QuantTensor: a tensor as codes and scales, with the format that gives them meaning.

    value = (element - zero_point) * e,   e = fl32(block_scale * tensor_scale)

with the product in float32. Format (what a code means), layout (where the bytes lie) and shape (how big it is) are
kept apart: nothing is ever inferred from a storage dtype.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nybble.formats.spec import BlockFormat, IntFormat
from nybble.quantize import elements
from nybble.quantize.blocks import expand
from nybble.quantize.layouts import DENSE, Layout


@dataclass(frozen=True, eq=False)
class QuantTensor:
    """A quantized tensor; treated as immutable.

    Attributes:
        format: the block format.
        shape: the logical shape [..., N, K] (or [K]).
        codes: the elements' codes, stored as `layout` says; by default uint8 [..., N, ceil(K*bits/8)].
        scale: block scales [..., ceil(N/rows), ceil(K/columns)]: uint8 codes of an 8-bit scale format, else
            float values in its torch dtype.
        tensor_scale: float32 [] multiplier over the whole tensor, where the format has one.
        zero_point: int8, the shape of `scale`, where the format has one.
        layout: where the bytes of `codes` and `scale` lie.
        dtype: what `dequantize` returns when not told otherwise.
    """

    format: BlockFormat
    shape: tuple[int, ...]
    codes: Tensor
    scale: Tensor
    tensor_scale: Tensor | None = None
    zero_point: Tensor | None = None
    layout: Layout = DENSE
    dtype: torch.dtype = torch.float32

    @property
    def device(self) -> torch.device:
        """Where the codes are."""
        return self.codes.device

    @property
    def parts(self) -> dict[str, Tensor]:
        """The stored tensors by their names."""
        named = {
            "codes": self.codes,
            "scale": self.scale,
            "tensor_scale": self.tensor_scale,
            "zero_point": self.zero_point,
        }
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @property
    def nbytes(self) -> int:
        """Bytes of everything stored."""
        return sum(t.numel() * t.element_size() for t in self.parts.values())

    @property
    def bits_per_value(self) -> float:
        """Stored bits for each logical value; NaN for an empty tensor."""
        count = math.prod(self.shape)
        return 8 * self.nbytes / count if count else math.nan

    def unpack(self) -> Tensor:
        """The codes, uint8 of the logical shape."""
        return self.layout.unpack(self.codes, self.shape, self.format.element.bits)

    def scales(self) -> tuple[Tensor, Tensor | None]:
        """(effective scales e as float32 [..., N', K'], zero points or None) in the plain arrangement."""
        scale, zero_point = self.layout.unpack_scales(self.scale, self.zero_point, self.format, self.shape)
        effective = elements.decode(self.format.scale, scale)
        return (effective if self.tensor_scale is None else effective * self.tensor_scale), zero_point

    def dequantize(self, dtype: torch.dtype | None = None) -> Tensor:
        """The values, of the logical shape; the float32 product is converted to `dtype` (default: self.dtype)."""
        effective, zero_point = self.scales()
        codes, element = self.unpack(), self.format.element
        if zero_point is not None and isinstance(element, IntFormat):
            shift = expand(zero_point, self.format, self.shape).to(torch.float32)
            values = elements.decode_int(element, codes).to(torch.float32).sub_(shift)
        else:
            values = elements.decode(element, codes)
        return values.mul_(expand(effective, self.format, self.shape)).to(dtype or self.dtype)

    def to_layout(self, layout: Layout) -> QuantTensor:
        """The same codes and scales in another layout."""
        if layout == self.layout:
            return self
        plain = self.layout.unpack_scales(self.scale, self.zero_point, self.format, self.shape)
        scale, zero_point = layout.pack_scales(*plain, self.format, self.shape)
        codes = layout.pack(self.unpack(), self.format.element.bits)
        return replace(self, codes=codes, scale=scale, zero_point=zero_point, layout=layout)

    def to(self, device: torch.device | str) -> QuantTensor:
        """The same tensor on another device."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.parts.items()}
        return replace(self, **moved)
