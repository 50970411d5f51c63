"""QuantTensor: a tensor as codes and scales, with the format that gives them meaning.

    value = (element - zero_point) * e,   e = fl32(block_scale * tensor_scale)

with the product in float32. Format (what a code means), layout (where the bytes lie) and shape (how big it is) are
kept apart: nothing is ever inferred from a storage dtype.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from nybble.formats.spec import BlockFormat, IntFormat
from nybble.quantize import elements
from nybble.quantize.blocks import PIECE, Stack, expand
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
        return replace(self, codes=self._repacked(layout), scale=scale, zero_point=zero_point, layout=layout)

    def _repacked(self, layout: Layout) -> Tensor:
        """The codes in another layout; those of a large matrix in pieces, to need little memory beside both."""
        bits, step = self.format.element.bits, math.lcm(self.layout.rows, layout.rows)
        if not step or len(self.shape) != 2 or math.prod(self.shape) <= PIECE:
            return layout.pack(self.unpack(), bits)
        n, k = self.shape
        step *= max(1, PIECE // (step * k))
        packed = Stack(-(-n // layout.rows))
        for start in range(0, n, step):
            stop = min(start + step, n)
            stored = self.codes[start // self.layout.rows : -(-stop // self.layout.rows)]
            packed.add(layout.pack(self.layout.unpack(stored, (stop - start, k), bits), bits))
        return packed.whole()

    def to(self, device: torch.device | str) -> QuantTensor:
        """The same tensor on another device."""
        moved: dict[str, Any] = {name: tensor.to(device) for name, tensor in self.parts.items()}
        return replace(self, **moved)


def concatenate(tensors: Sequence[QuantTensor]) -> QuantTensor | None:
    """One [sum of N, K] tensor of several [N, K] ones, in the first one's layout.

    None where they cannot be joined bit for bit: formats or K that differ, tensor scales that differ, scales that
    reach over rows that would no longer be theirs.
    """
    first = tensors[0]
    rows = first.format.block[0]
    alike = all(t.format == first.format and t.shape[1:] == first.shape[1:] and len(t.shape) == 2 for t in tensors)
    if not alike or rows is None or any(t.shape[0] % rows for t in tensors[:-1]):
        return None
    tensor_scales = [t.tensor_scale for t in tensors if t.tensor_scale is not None]
    if any(not torch.equal(scale, tensor_scales[0]) for scale in tensor_scales):
        return None
    plain = [t.to_layout(DENSE) for t in tensors]
    zeros = [t.zero_point for t in plain if t.zero_point is not None]
    return replace(
        plain[0],
        shape=(sum(t.shape[0] for t in tensors), first.shape[1]),
        codes=torch.cat([t.codes for t in plain]),
        scale=torch.cat([t.scale for t in plain]),
        zero_point=torch.cat(zeros) if zeros else None,
    ).to_layout(first.layout)


def split_rows(tensor: QuantTensor, sizes: Sequence[int]) -> list[QuantTensor | None]:
    """Views of runs of rows of a [N, K] tensor; None for a run that its layout does not keep together."""
    found: list[QuantTensor | None] = []
    start = 0
    for size in sizes:
        stop = start + size
        parts: dict[str, Any] = {}
        for name, part in tensor.parts.items():
            if name != "tensor_scale":
                parts[name] = _rows(part, tensor.shape[0], start, stop)
        whole = all(part is not None for part in parts.values())
        found.append(replace(tensor, shape=(size, tensor.shape[1]), **parts) if whole else None)
        start = stop
    return found


def _rows(part: Tensor, n: int, start: int, stop: int) -> Tensor | None:
    """The part's share of rows start to stop of n, where its first axis is a whole number of rows a step."""
    step = n // part.shape[0] if part.shape[0] and n % part.shape[0] == 0 else 0
    if not step or start % step or stop % step:
        return None
    return part[start // step : stop // step]
