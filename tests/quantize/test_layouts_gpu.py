"""The GPU layouts: invertible for every length, and every code where the kernels look for it."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from nybble.formats import table
from nybble.quantize import api, blocks, layouts, quantize, tensor
from nybble.quantize.layouts_gpu import SPREAD_TILES, TILES, spreading

BOTH = (TILES, SPREAD_TILES)
SHAPES = [(n, k) for n, k in product((1, 15, 16, 17, 64, 65), (1, 33, 127, 128, 129, 200))] + [(2, 3, 17, 130)]


@pytest.mark.parametrize("layout", BOTH, ids=lambda layout: layout.name)
@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_codes_come_back(layout: layouts.Layout, bits: int, shape: tuple[int, ...], rng: torch.Generator) -> None:
    codes = torch.randint(0, 1 << bits, shape, dtype=torch.uint8, generator=rng)
    packed = layout.pack(codes, bits)
    assert packed.shape[-1] == 16 * 128 * bits // 8
    assert torch.equal(layout.unpack(packed, shape, bits), codes)


FORMATS = (
    "int4_g128",
    "int4_g32_asym",
    "int4_g256",
    "nvfp4",
    "mxfp4",
    "int8_channel",
    "fp8_tensor",
    "fp8_block128",
    "ufp4",
)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (16, 64), (17, 129), (40, 200), (300, 513)], ids=str)
def test_scales_and_zero_points_come_back(name: str, shape: tuple[int, int], rng: torch.Generator) -> None:
    fmt = table.block(name)
    scale = torch.randn(blocks.scale_shape(fmt, shape), generator=rng)
    zero = torch.randint(-8, 8, scale.shape, dtype=torch.int8, generator=rng) if fmt.zero_point else None
    tiled = TILES.pack_scales(scale, zero, fmt, shape)
    plain_scale, plain_zero = TILES.unpack_scales(*tiled, fmt, shape)
    assert torch.equal(plain_scale, scale)
    assert plain_zero is zero is None or torch.equal(plain_zero, zero)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout", BOTH, ids=lambda layout: layout.name)
def test_a_tensor_means_the_same_in_every_layout(name: str, layout: layouts.Layout, rng: torch.Generator) -> None:
    w = quantize(torch.randn(33, 200, generator=rng), name)
    assert torch.equal(w.to_layout(layout).dequantize(), w.dequantize())
    assert torch.equal(w.to_layout(layout).to_layout(layouts.DENSE).codes, w.codes)


@pytest.mark.parametrize("name", ["int4_g128_asym", "int3_g64", "nvfp4", "fp8_block128", "int8_channel"])
@pytest.mark.parametrize("layout", BOTH, ids=lambda layout: layout.name)
def test_a_large_tensor_is_packed_in_pieces(
    name: str, layout: layouts.Layout, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """N and the piece's rows divide neither each other nor a block's."""
    x = torch.randn(517, 200, generator=rng)
    whole = quantize(x, name)
    expected = whole.to_layout(layout)
    monkeypatch.setattr(api, "_CPU_PIECE", 3_000)
    monkeypatch.setattr(tensor, "PIECE", 3_000)
    pieces = quantize(x, name)
    packed = pieces.to_layout(layout)
    for one, other in ((pieces, whole), (packed, expected), (packed.to_layout(layouts.DENSE), whole)):
        assert one.parts.keys() == other.parts.keys()
        assert all(torch.equal(part, other.parts[part_name]) for part_name, part in one.parts.items())


def fragment(packed: torch.Tensor, row: int, column: int) -> int:
    """The 4-bit code of (row, column), found by the tables of the PTX ISA for the A operand of m16n8k16."""
    block, tile, r = row // 64, row % 64 // 16, row % 16
    chunk, step, c = column // 128, column % 128 // 16, column % 16
    lane = (r % 8) * 4 + c % 8 // 2
    register = (r >= 8) + 2 * (c >= 8)  # a0, a1, a2, a3
    words = packed[block, chunk, tile].view(torch.int32).view(2, 32, 4)  # pieces of 16 bytes, 32 lanes apart
    word = int(words[step // 4, lane, step % 4])
    return word >> (16 * (c % 2) + 4 * register) & 0xF


def test_nibbles_lie_where_the_tensor_cores_want_them(rng: torch.Generator) -> None:
    codes = torch.randint(0, 16, (80, 160), dtype=torch.uint8, generator=rng)
    packed = TILES.pack(codes, 4)
    for row, column in product((0, 7, 8, 15, 16, 79), (0, 1, 2, 8, 15, 16, 100, 127, 128, 159)):
        assert fragment(packed, row, column) == codes[row, column]


def test_spread_floats_are_in_place_up_to_a_rotation(rng: torch.Generator) -> None:
    """decode.cuh's way to the four pairs of an even and an odd step: rotations, and what two words have left."""
    codes = torch.randint(0, 16, (64, 128), dtype=torch.uint8, generator=rng)

    def words(layout: layouts.Layout) -> torch.Tensor:
        return layout.pack(codes, 4).view(torch.int32).long().bitwise_and(0xFFFFFFFF).view(-1, 2)

    def rotated(word: torch.Tensor, by: int) -> torch.Tensor:
        return (word << by | word >> (32 - by)) & 0xFFFFFFFF

    spread, plain, left = words(SPREAD_TILES), words(TILES), 0x06030603
    rest = spread[:, 0] & left | spread[:, 1] << 2 & ~left & 0xFFFFFFFF
    for step in range(2):
        places = [rotated(spread[:, step], by) for by in (0, 4, 10)] + [rotated(rest, (6, 12)[step])]
        for pair, place in enumerate(places):
            for half in (0, 16):
                code = plain[:, step] >> (half + 4 * pair) & 0xF
                assert torch.equal(place >> (half + 15) & 1, code >> 3)
                assert torch.equal(place >> (half + 6) & 7, code & 7)


def test_spreading_moves_every_bit_to_a_place_of_its_own() -> None:
    assert sorted(spreading().keys()) == sorted(spreading().values()) == list(range(64))
