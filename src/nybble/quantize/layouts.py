"""Where the bytes lie: a layout turns codes into storage and back, for every length.

A layout is a small frozen object with a name and two invertible maps: `pack`/`unpack` for the codes (uint8, one
code an element, [..., N, K]), and `pack_scales`/`unpack_scales` for the scales and zero points. What a kernel wants
its weights to look like is a layout; a checkpoint's arrangement is one too. Layouts know nothing of formats beyond
the number of bits, and are found by name, so that a name in a file or in a compiled graph is enough.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import reduce
from typing import ClassVar

import torch
from torch import Tensor

from nybble.errors import UnknownName
from nybble.formats.spec import BlockFormat

Shape = tuple[int, ...]
Scales = tuple[Tensor, Tensor | None]
_LAYOUTS: dict[str, Layout] = {}


@dataclass(frozen=True)
class Layout:
    """Base of the layouts: plain codes, scales left as they are.

    Attributes:
        name: by which it is found.
        rows: how many rows of a matrix are stored together, so that runs of that many can be packed alone and lie
            below each other in the storage; 0 where only the whole can be packed.
    """

    name: str
    rows: ClassVar[int] = 0

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        """Storage for uint8 codes [..., N, K] of `bits` bits each."""
        raise NotImplementedError

    def unpack(self, packed: Tensor, shape: Shape, bits: int) -> Tensor:
        """The uint8 codes of logical `shape` [..., N, K]; the inverse of `pack`."""
        raise NotImplementedError

    def pack_scales(self, scale: Tensor, zero_point: Tensor | None, fmt: BlockFormat, shape: Shape) -> Scales:
        """Storage for block scales [..., N', K'] and zero points of the same shape, of a tensor of `shape`."""
        return scale, zero_point

    def unpack_scales(self, scale: Tensor, zero_point: Tensor | None, fmt: BlockFormat, shape: Shape) -> Scales:
        """The inverse of `pack_scales`."""
        return scale, zero_point


def register(layout: Layout) -> Layout:
    """Make a layout known by its name; a second one of that name is an error."""
    if layout.name in _LAYOUTS:
        raise ValueError(f"layout {layout.name!r} is registered twice")
    _LAYOUTS[layout.name] = layout
    return layout


def get(name: str) -> Layout:
    """The layout called `name`, or UnknownName."""
    if name not in _LAYOUTS:
        raise UnknownName("layout", name, _LAYOUTS)
    return _LAYOUTS[name]


def names() -> list[str]:
    """The names of all registered layouts."""
    return list(_LAYOUTS)


@dataclass(frozen=True)
class BitStream(Layout):
    """Each row a little-endian stream of bits, element 0 in the lowest ones, padded with zeros to a whole word.

    With four bits this puts the even column in the low nibble.

    Attributes:
        word: the storage's word in bytes (1: uint8, 4: int32).
        offset: whether two's complement codes are stored plus 2^(bits-1), as unsigned numbers in ascending order.
        high_first: within a byte, whether the first element takes the high bits (bitsandbytes' nibbles).
    """

    rows: ClassVar[int] = 1
    word: int = 1
    offset: bool = False
    high_first: bool = False

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        if bits == 8 and self == DENSE:
            return codes.contiguous()
        if self.offset:
            codes = codes ^ (1 << bits - 1)
        size = self._row_bytes(codes.shape[-1], bits)
        group, group_bytes = _group(bits)
        groups = math.ceil(size / group_bytes)
        grouped = _pad(codes, groups * group).unflatten(-1, (groups, group))
        stream = grouped.squeeze(-1) if bits == 8 else self._join(grouped, bits, group_bytes).flatten(-2)
        packed = _pad(stream, size).contiguous()
        if self.word == 1:
            return packed
        return packed.view(torch.int32) if size else packed.to(torch.int32)

    def unpack(self, packed: Tensor, shape: Shape, bits: int) -> Tensor:
        if bits == 8 and self == DENSE:
            return packed.view(shape)
        # Flat first: contiguous() keeps the odd strides of axes of length 1, which a view as bytes refuses.
        stream = packed.flatten().view(torch.uint8).view(*packed.shape[:-1], packed.shape[-1] * self.word)
        group, group_bytes = _group(bits)
        groups = math.ceil(shape[-1] / group)
        grouped = _pad(stream, groups * group_bytes).unflatten(-1, (groups, group_bytes))
        codes = grouped if bits == 8 else self._split(grouped, bits, group)
        codes = codes.flatten(-2)[..., : shape[-1]].reshape(shape)
        return codes ^ (1 << bits - 1) if self.offset else codes.contiguous()

    def _row_bytes(self, columns: int, bits: int) -> int:
        return self.word * math.ceil(columns * bits / (8 * self.word))

    def _slots(self, group: int) -> range:
        return range(group - 1, -1, -1) if self.high_first else range(group)

    def _join(self, grouped: Tensor, bits: int, group_bytes: int) -> Tensor:
        """[..., group] codes to [..., group_bytes] bytes."""
        if group_bytes == 1:
            slots = self._slots(8 // bits)
            parts = [grouped[..., i] << (bits * slot) for i, slot in enumerate(slots)]
            return reduce(torch.bitwise_or, parts)[..., None]
        joined = _weighted(grouped, bits, group_bytes)
        return (joined >> 8 * _count(group_bytes, joined) & 0xFF).to(torch.uint8)

    def _split(self, grouped: Tensor, bits: int, group: int) -> Tensor:
        """[..., group_bytes] bytes to [..., group] codes."""
        mask = (1 << bits) - 1
        if grouped.shape[-1] == 1:
            byte = grouped[..., 0]
            return torch.stack([byte >> (bits * slot) & mask for slot in self._slots(group)], dim=-1)
        joined = _weighted(grouped, 8, grouped.shape[-1])
        return (joined >> bits * _count(group, joined) & mask).to(torch.uint8)


def _group(bits: int) -> tuple[int, int]:
    """The smallest run of elements that fills whole bytes: (elements, bytes)."""
    whole = math.lcm(bits, 8)
    return whole // bits, whole // 8


def _count(n: int, like: Tensor) -> Tensor:
    return torch.arange(n, dtype=like.dtype, device=like.device)


def _weighted(digits: Tensor, bits: int, group_bytes: int) -> Tensor:
    """sum_i digits[..., i] << (bits * i), [..., 1], in the narrowest integers that hold `group_bytes`."""
    wide = digits.to(torch.int32 if group_bytes < 4 else torch.int64)
    return (wide << bits * _count(wide.shape[-1], wide)).sum(-1, keepdim=True, dtype=wide.dtype)


def _pad(x: Tensor, size: int) -> Tensor:
    """x with its last axis cut or padded with zeros to `size`."""
    have = x.shape[-1]
    return x[..., :size] if have >= size else torch.nn.functional.pad(x, (0, size - have))


DENSE = register(BitStream("dense"))
"""The layout that quantize() gives."""

DENSE_INT32 = register(BitStream("dense_int32_offset", word=4, offset=True))
"""compressed-tensors' pack-quantized: dense across int32 words, plus 2^(bits-1)."""

NIBBLES_HIGH_FIRST = register(BitStream("nibbles_high_first", high_first=True))
"""bitsandbytes: the first of two elements in the high nibble."""
