"""How the GPU kernels want a weight: tiles of 16 rows by 128 columns, in the order in which a warp's lanes use them.

The tensor-core instruction m16n8k16 takes 16 rows by 16 columns from a warp. Lane 4g + t gives, for rows g and g + 8
and columns 2t, 2t + 1, 2t + 8, 2t + 9, four pairs of neighbours: pair p = 2 * (column half) + (row half). A tile is
eight such steps j. Here a lane's 64 elements lie together, so that it fetches them with a few 16-byte copies, and the
two elements e of a pair lie at the same position of the two 16-bit halves of a word, so that one mask brings a pair
into place. Elements of three bits are kept as a plane of two bits and a plane of one. Four tiles above each other,
what a warpgroup owns, lie together.

4-bit floats are *spread*: their bits lie, up to a rotation of the word, where bf16 has its sign and the ends of its
exponent and mantissa, so that one mask takes them out. Three pairs of a step have a word of their own; the fourth
pairs of two neighbouring steps share the bits that the two words have left.

Rows are padded to 64 and columns to 128 with code 0. Scales and zero points follow the same order: [64 rows, group,
tile, g, row half, groups within 128 columns]; a scale shared by several rows, or by the whole matrix, is repeated.

Source of the lanes' order: PTX ISA, "Matrix Fragments for mma.m16n8k16".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, reduce
from itertools import product
from typing import ClassVar

import torch
from torch import Tensor

from nybble.formats.spec import BlockFormat
from nybble.quantize.blocks import sides
from nybble.quantize.layouts import Layout, Scales, Shape, register

ROWS, COLUMNS = 64, 128
_PLANES = {1: (1,), 2: (2,), 3: (2, 1), 4: (4,), 8: (8,)}
_AXES = "bwugcjhte"  # row = 64b + 16w + 8u + g, column = 128c + 16j + 8h + 2t + e
_PIECE = 16  # bytes that a lane copies at once


@dataclass(frozen=True)
class Tiles(Layout):
    """Tiles of 16 x 128 in lane order, for 1, 2, 3, 4 and 8 bits.

    Packed codes are uint8 [..., N / 64, K / 128, 4, 256 * bits], rounded up.

    Attributes:
        spread: whether the bits of 4-bit codes are spread as the module says.
    """

    rows: ClassVar[int] = ROWS
    spread: bool = False

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        n, k = codes.shape[-2:]
        padded = torch.nn.functional.pad(codes, (0, -k % COLUMNS, 0, -n % ROWS))
        tiles = padded.unflatten(-1, (-1, 8, 2, 4, 2)).unflatten(-6, (-1, 4, 2, 8))
        lanes = _permute(tiles, _AXES, "bcwgtjhue").flatten(-6, -5).flatten(-4, -2)  # [..., b, c, w, lane, (j p), e]
        planes, shift = [], 0
        for width in _PLANES[bits]:
            planes.append(self._pack_plane(lanes >> shift & (1 << width) - 1, width))
            shift += width
        return torch.cat(planes, -1)

    def unpack(self, packed: Tensor, shape: Shape, bits: int) -> Tensor:
        parts, shift = [], 0
        for width, plane in zip(_PLANES[bits], packed.split([256 * w for w in _PLANES[bits]], -1), strict=True):
            parts.append(self._unpack_plane(plane, width) << shift)
            shift += width
        lanes = reduce(torch.bitwise_or, parts)
        tiles = _permute(lanes.unflatten(-2, (8, 2, 2)).unflatten(-5, (8, 4)), "bcwgtjhue", _AXES)
        return tiles.flatten(-9, -6).flatten(-5)[..., : shape[-2], : shape[-1]].contiguous()

    def _pack_plane(self, lanes: Tensor, width: int) -> Tensor:
        """[..., lane, 32, e] to bytes: word q of a lane holds, in each half, 16 / width of the 32 pairs."""
        pairs = lanes.unflatten(-2, (2 * width, 16 // width)).to(torch.int16)
        half = torch.zeros_like(pairs[..., 0, :])
        for i in range(16 // width):
            half |= pairs[..., i, :] << (width * i)
        if self._spreads(width):
            half = _moved(half, spreading())
        pieces = half.flatten(-2).contiguous().view(torch.uint8).unflatten(-1, (-1, min(_PIECE, 8 * width)))
        return pieces.transpose(-2, -3).flatten(-3).contiguous()

    def _unpack_plane(self, plane: Tensor, width: int) -> Tensor:
        pieces = plane.unflatten(-1, (-1, 32, min(_PIECE, 8 * width))).transpose(-2, -3)
        half = pieces.flatten(-2).contiguous().view(torch.int16).unflatten(-1, (2 * width, 2))
        if self._spreads(width):
            half = _moved(half, {to: place for place, to in spreading().items()})
        pairs = [half >> (width * i) & (1 << width) - 1 for i in range(16 // width)]
        return torch.stack(pairs, -2).flatten(-3, -2).to(torch.uint8)

    def _spreads(self, width: int) -> bool:
        return self.spread and width == 4

    def pack_scales(self, scale: Tensor, zero_point: Tensor | None, fmt: BlockFormat, shape: Shape) -> Scales:
        return _tile(scale, fmt, shape), None if zero_point is None else _tile(zero_point, fmt, shape)

    def unpack_scales(self, scale: Tensor, zero_point: Tensor | None, fmt: BlockFormat, shape: Shape) -> Scales:
        return _untile(scale, fmt, shape), None if zero_point is None else _untile(zero_point, fmt, shape)


def _permute(x: Tensor, axes: str, order: str) -> Tensor:
    """x with its last axes, named by letters, brought into another order."""
    lead = x.ndim - len(axes)
    return x.permute(*range(lead), *(lead + axes.index(letter) for letter in order))


_IN_BF16 = (6, 7, 8, 15)
"""Where a 4-bit float's magnitude and sign lie in bf16, lowest bit first."""
_TURNS, _REST_TURNS, _MOVE = (0, 4, 10), (6, 12), 2
"""Left rotations that bring pairs into place: three of a word, then the fourth of an even and an odd step, taken from
the bits that the even step's word has left and, moved up by _MOVE, those that the odd step's has."""


@cache
def spreading() -> dict[int, int]:
    """Where each of the 64 bits of two steps' words goes, from four codes side by side in each half word."""
    found: dict[int, int] = {}
    for step, half, bit in product(range(2), range(2), range(4)):
        start = 32 * step + 16 * half
        for pair, turn in enumerate(_TURNS):
            found[start + 4 * pair + bit] = 32 * step + (_IN_BF16[bit] + 16 * half - turn) % 32
    taken = {place % 16 for place in found.values()}
    for step, half, bit in product(range(2), range(2), range(4)):
        place = (_IN_BF16[bit] + 16 * half - _REST_TURNS[step]) % 32
        found[32 * step + 16 * half + 12 + bit] = place if place % 16 not in taken else 32 + place - _MOVE
    return found


def _moved(half: Tensor, places: dict[int, int]) -> Tensor:
    """int16 [..., steps, 2] with the bits of every two steps moved; all bits that go equally far go together."""
    pairs = half.flatten(-2).contiguous().view(torch.int64)
    moves: dict[int, int] = {}
    for place, to in places.items():
        moves[to - place] = moves.get(to - place, 0) | 1 << to
    moved = torch.zeros_like(pairs)
    for distance, mask in moves.items():
        shifted = pairs << distance if distance >= 0 else pairs >> -distance
        moved |= shifted & (mask - (mask >> 63 << 64))
    return moved.view(torch.int16).view(half.shape)


def _tile(part: Tensor, fmt: BlockFormat, shape: Shape) -> Tensor:
    """[..., N', K'] to [..., 64 rows, group, 4, 8, 2, groups within 128 columns]."""
    rows, within = sides(fmt, shape)[0], max(1, COLUMNS // (fmt.block[1] or COLUMNS))
    full = part.repeat_interleave(rows, -2)[..., : shape[-2], :]
    padded = torch.nn.functional.pad(full, (0, -full.shape[-1] % within, 0, -full.shape[-2] % ROWS))
    tiles = padded.unflatten(-1, (-1, within)).unflatten(-3, (-1, 4, 2, 8))
    return _permute(tiles, "bwugcx", "bcwgux").contiguous()


def _untile(part: Tensor, fmt: BlockFormat, shape: Shape) -> Tensor:
    """The inverse of `_tile`."""
    rows, columns = sides(fmt, shape)
    full = _permute(part, "bcwgux", "bwugcx").flatten(-2).flatten(-5, -2)
    return full[..., : shape[-2] : rows, : -(-shape[-1] // columns)].contiguous()


TILES = register(Tiles("tiles_16x128"))
"""For integers, 8-bit floats and tables."""

SPREAD_TILES = register(Tiles("tiles_16x128_spread", spread=True))
"""For 4-bit floats."""
