"""Layouts are invertible for every length, and agree with the bytes other libraries store."""

import pytest
import torch

from nybble.errors import UnknownName
from nybble.quantize import layouts
from nybble.quantize.layouts import DENSE, DENSE_INT32, NIBBLES_HIGH_FIRST

ALL = [DENSE, DENSE_INT32, NIBBLES_HIGH_FIRST]


def codes(rows: int, columns: int, bits: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rows * 1000 + columns)
    return torch.randint(0, 1 << bits, (rows, columns), dtype=torch.uint8, generator=generator)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("layout", ALL, ids=lambda layout: layout.name)
def test_round_trip_for_every_length(layout, bits: int) -> None:
    if layout is NIBBLES_HIGH_FIRST and bits not in (1, 2, 4, 8):
        pytest.skip("the order within a byte is defined for elements that do not straddle bytes")
    for columns in [*range(70), 127, 128, 129, 255, 1000]:
        c = codes(3, columns, bits)
        packed = layout.pack(c, bits)
        assert torch.equal(layout.unpack(packed, (3, columns), bits), c), columns
        assert packed.shape == (3, -(-columns * bits // (8 * layout.word)))


def test_more_and_fewer_axes() -> None:
    c = codes(12, 33, 3).view(2, 2, 3, 33)
    assert torch.equal(DENSE.unpack(DENSE.pack(c, 3), (2, 2, 3, 33), 3), c)
    assert torch.equal(DENSE.unpack(DENSE.pack(c[0, 0, 0], 3), (33,), 3), c[0, 0, 0])


def test_storage_with_odd_strides() -> None:
    c = codes(8, 8, 4)
    packed = DENSE_INT32.pack(c, 4)
    odd = packed.t().contiguous().t()
    assert odd.shape == (8, 1)
    assert torch.equal(DENSE_INT32.unpack(odd, (8, 8), 4), c)


def test_nibbles_put_the_even_column_low() -> None:
    c = torch.arange(16, dtype=torch.uint8)[None]
    assert DENSE.pack(c, 4)[0].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
    assert NIBBLES_HIGH_FIRST.pack(c, 4)[0].tolist() == [0x01, 0x23, 0x45, 0x67, 0x89, 0xAB, 0xCD, 0xEF]


def test_int32_words_are_dense_and_offset() -> None:
    minus_8_to_7 = torch.arange(-8, 8).to(torch.int8).view(torch.uint8)[None] & 0xF
    words = DENSE_INT32.pack(minus_8_to_7, 4)[0]
    assert [w & 0xFFFFFFFF for w in words.tolist()] == [0x76543210, 0xFEDCBA98]
    assert DENSE_INT32.pack(codes(1, 32, 3), 3).shape == (1, 3), "32 values of 3 bits are exactly three words"


def test_three_bits_cross_bytes_from_the_low_end() -> None:
    c = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 0]], dtype=torch.uint8)
    value = sum(v << 3 * i for i, v in enumerate(c[0].tolist()))
    assert DENSE.pack(c, 3)[0].tolist() == list(value.to_bytes(3, "little"))


def test_registry() -> None:
    assert layouts.get("dense") is DENSE
    assert "dense" in layouts.names()
    with pytest.raises(UnknownName, match="dense"):
        layouts.get("dens")
    with pytest.raises(ValueError, match="twice"):
        layouts.register(layouts.BitStream("dense"))
