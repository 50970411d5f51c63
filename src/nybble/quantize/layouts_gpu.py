"""How the GPU kernels want a weight: tiles of 16 rows by 64 columns, in the order in which a warp's lanes use them.

The tensor-core instruction m16n8k16 takes 16 rows by 16 columns from a warp. Lane 4g + t gives, for rows g and g + 8
and columns 2t, 2t + 1, 2t + 8, 2t + 9, four pairs of neighbours: pair p = 2 * (column half) + (row half). A tile is
four such steps j. Here a lane's 32 elements lie together, so that it fetches them with one or two 16-byte copies, and
the two elements e of a pair lie at the same position of the two 16-bit halves of a word, so that one shift and one
mask bring a pair into place. Elements of three bits are kept as a plane of two bits and a plane of one.

4-bit floats are *spread*: the bits of a half word are ordered so that three of its four elements lie, up to a shift,
where bf16 has its sign and the ends of its exponent and mantissa; the fourth takes the bits left over.

Rows are padded to 16 and columns to 64 with code 0. Scales and zero points follow the same order, [row tile, group,
g, row half, groups within 64 columns]; a scale shared by several rows, or by the whole matrix, is repeated.

Source of the lanes' order: PTX ISA, "Matrix Fragments for mma.m16n8k16".
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nybble.formats.spec import BlockFormat
from nybble.quantize.blocks import sides
from nybble.quantize.layouts import Layout, Scales, Shape, register

ROWS, COLUMNS = 16, 64
_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
_AXES = "rugcjhte"  # row = 16r + 8u + g, column = 64c + 16j + 8h + 2t + e


@dataclass(frozen=True)
class Tiles(Layout):
    """Tiles of 16 x 64 in lane order, for 1, 2, 3, 4 and 8 bits.

    Packed codes are uint8 [..., row tiles, column tiles, 128 * bits].

    Attributes:
        spread: whether the bits of 4-bit codes are spread as the module says.
    """

    spread: bool = False

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        n, k = codes.shape[-2:]
        padded = torch.nn.functional.pad(codes, (0, -k % COLUMNS, 0, -n % ROWS))
        tiles = padded.unflatten(-1, (-1, 4, 2, 4, 2)).unflatten(-6, (-1, 2, 8))
        lanes = _permute(tiles, _AXES, "rcgtjhue").flatten(-6, -5).flatten(-4, -2)  # [..., r, c, lane, (j p), e]
        planes, shift = [], 0
        for width in _PLANES[bits]:
            planes.append(self._pack_plane(lanes >> shift & (1 << width) - 1, width))
            shift += width
        return torch.cat(planes, -1)

    def unpack(self, packed: Tensor, shape: Shape, bits: int) -> Tensor:
        lanes, shift = None, 0
        for width, plane in zip(_PLANES[bits], packed.split([128 * w for w in _PLANES[bits]], -1), strict=True):
            part = self._unpack_plane(plane, width) << shift
            lanes = part if lanes is None else lanes | part
            shift += width
        if lanes is None:
            raise ValueError(f"no planes for {bits} bits")
        tiles = _permute(lanes.unflatten(-2, (4, 2, 2)).unflatten(-5, (8, 4)), "rcgtjhue", _AXES)
        return tiles.flatten(-8, -6).flatten(-5)[..., : shape[-2], : shape[-1]].contiguous()

    def _pack_plane(self, lanes: Tensor, width: int) -> Tensor:
        """[..., lane, 16, e] to bytes: word q of a lane holds, in each half, 16 / width of the 16 pairs."""
        pairs = lanes.unflatten(-2, (width, 16 // width)).to(torch.int16)
        half = torch.zeros_like(pairs[..., 0, :])
        for i in range(16 // width):
            half |= _spread(pairs[..., i, :], i) if self._spreads(width) else pairs[..., i, :] << (width * i)
        words = half.flatten(-2)
        if width == 8:  # two copies of 16 bytes: the first of every lane, then the second
            words = words.unflatten(-1, (2, -1)).transpose(-2, -3)
        return words.contiguous().view(torch.uint8).flatten(-3 if width == 8 else -2)

    def _unpack_plane(self, plane: Tensor, width: int) -> Tensor:
        words = plane.contiguous().view(torch.int16)
        if width == 8:
            words = words.unflatten(-1, (2, 32, -1)).transpose(-2, -3).flatten(-2)
        else:
            words = words.unflatten(-1, (32, -1))
        half = words.unflatten(-1, (width, 2))
        if self._spreads(width):
            pairs = [_gather(half, i) for i in range(16 // width)]
        else:
            pairs = [half >> (width * i) & (1 << width) - 1 for i in range(16 // width)]
        return torch.stack(pairs, -2).flatten(-3, -2).to(torch.uint8)

    def _spreads(self, width: int) -> bool:
        return self.spread and width == 4

    def pack_scales(self, scale: Tensor, zero_point: Tensor | None, fmt: BlockFormat, shape: Shape) -> Scales:
        tiled = [None if part is None else _tile(part, fmt, shape) for part in (scale, zero_point)]
        return tiled[0], tiled[1]  # type: ignore[return-value]

    def unpack_scales(self, scale: Tensor, zero_point: Tensor | None, fmt: BlockFormat, shape: Shape) -> Scales:
        plain = [None if part is None else _untile(part, fmt, shape) for part in (scale, zero_point)]
        return plain[0], plain[1]  # type: ignore[return-value]


def _permute(x: Tensor, axes: str, order: str) -> Tensor:
    """x with its last axes, named by letters, brought into another order."""
    lead = x.ndim - len(axes)
    return x.permute(*range(lead), *(lead + axes.index(letter) for letter in order))


def _spread(code: Tensor, i: int) -> Tensor:
    """The bits of pair i's 4-bit code (sign, magnitude) in the half word."""
    sign, magnitude = code >> 3, code & 7
    if i < 3:
        return sign << (15 - 3 * i) | magnitude << (6 - 3 * i)
    return sign << 14 | magnitude >> 2 << 13 | (magnitude & 3) << 10


def _gather(half: Tensor, i: int) -> Tensor:
    """The inverse of `_spread`."""
    if i < 3:
        return (half >> (15 - 3 * i) & 1) << 3 | half >> (6 - 3 * i) & 7
    return (half >> 14 & 1) << 3 | (half >> 13 & 1) << 2 | half >> 10 & 3


def _groups(fmt: BlockFormat, shape: Shape) -> tuple[int, int]:
    """(rows that share a scale, groups within 64 columns)."""
    rows, columns = sides(fmt, shape)
    return rows, max(1, COLUMNS // columns)


def _tile(part: Tensor, fmt: BlockFormat, shape: Shape) -> Tensor:
    """[..., N', K'] to [..., row tile, group, 8, 2, groups within 64 columns]."""
    rows, within = _groups(fmt, shape)
    full = part.repeat_interleave(rows, -2)[..., : shape[-2], :]
    padded = torch.nn.functional.pad(full, (0, -full.shape[-1] % within, 0, -full.shape[-2] % ROWS))
    tiles = padded.unflatten(-1, (-1, within)).unflatten(-3, (-1, 2, 8))
    return _permute(tiles, "rugcw", "rcguw").contiguous()


def _untile(part: Tensor, fmt: BlockFormat, shape: Shape) -> Tensor:
    """The inverse of `_tile`."""
    rows, _ = _groups(fmt, shape)
    _, columns = sides(fmt, shape)
    full = _permute(part, "rcguw", "rugcw").flatten(-2).flatten(-4, -2)
    return full[..., : shape[-2] : rows, : -(-shape[-1] // columns)].contiguous()


TILES = register(Tiles("tiles_16x64"))
"""For integers, 8-bit floats and tables."""

SPREAD_TILES = register(Tiles("tiles_16x64_spread", spread=True))
"""For 4-bit floats."""
