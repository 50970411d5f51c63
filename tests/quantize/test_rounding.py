"""The generator against its published vectors, and stochastic rounding against its promise."""

import pytest
import torch

import nybble
from nybble.errors import BadInput, UnknownName
from nybble.quantize.rounding import philox, uniform

# Known-answer vectors of philox4x32-10 from the authors' Random123 distribution.
VECTORS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "expected"), VECTORS)
def test_philox_vectors(counter, key, expected) -> None:
    assert philox(torch.tensor([counter]), key)[0].tolist() == list(expected)


def test_draws_depend_on_seed_and_index_alone() -> None:
    whole = uniform((1001,), seed=7)
    assert torch.equal(uniform((13, 77), 7).flatten(), whole)
    for start in (1, 2, 3, 4, 997):
        assert torch.equal(uniform((1001 - start,), 7, start=start), whole[start:])
    assert not torch.equal(uniform((1001,), seed=8), whole)
    assert not torch.equal(uniform((1001,), seed=7 + (1 << 32)), whole), "the seed's high word counts"
    assert 0 <= float(whole.min())
    assert float(whole.max()) < 1
    assert uniform((0, 3), 7).shape == (0, 3)


@pytest.mark.parametrize("rounding", ["stochastic", "stochastic_8bit"])
@pytest.mark.parametrize("name", ["nvfp4", "int4_g32", "nf4_g64", "mxfp8_e4m3"])
def test_stochastic_rounding_is_right_on_average(name: str, rounding: str) -> None:
    draws, grid = 100_000, nybble.formats.block(name)
    columns = grid.block[1]
    for value in torch.linspace(-0.93, 0.93, 7):
        x = torch.full((draws // columns, columns), float(value))
        x[:, 0] = 1.0  # pins every block's scale
        q = nybble.quantize(x, name, rounding=rounding, seed=3)
        sample = q.dequantize()[:, 1:].double()
        gap = float(sample.max() - sample.min())
        bias = abs(float(sample.mean()) - float(value))
        allowed = 5 * float(sample.std()) / sample.numel() ** 0.5 + (gap / 512 if rounding == "stochastic_8bit" else 0)
        assert bias <= allowed + 2.0**-22, (float(value), bias, allowed)


def test_values_on_the_grid_stay() -> None:
    x = torch.tensor([[0.0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.5, -1, -1.5, -2, -3, -4, -6, 6]])
    for rounding in ("stochastic", "stochastic_8bit", "toward_zero", "up", "down"):
        q = nybble.quantize(x, "mxfp4", rounding=rounding, seed=1)
        assert torch.equal(q.dequantize(), x)


def test_one_seed_gives_the_same_codes_in_pieces_or_whole() -> None:
    x = torch.randn(2100, 257, generator=torch.Generator().manual_seed(0))  # above the size that is worked on in pieces
    whole = nybble.quantize(x, "int8_channel", rounding="stochastic", seed=5)
    tail = nybble.quantize(x, "int8_channel", rounding="stochastic", seed=5)
    assert torch.equal(whole.codes, tail.codes)
    single = nybble.quantize(x[:1], "int8_channel", rounding="stochastic", seed=5)
    assert torch.equal(single.codes, whole.codes[:1]), "row 0 draws the same numbers alone"
    assert not torch.equal(nybble.quantize(x, "int8_channel", rounding="stochastic", seed=6).codes, whole.codes)


def test_the_global_generator_is_left_alone() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    nybble.quantize(torch.ones(4, 32), "mxfp4", rounding="stochastic", seed=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_bad_arguments() -> None:
    with pytest.raises(BadInput, match="needs a seed"):
        nybble.quantize(torch.ones(4, 32), "mxfp4", rounding="stochastic")
    with pytest.raises(UnknownName, match="stochastic"):
        nybble.quantize(torch.ones(4, 32), "mxfp4", rounding="stochastik")
