"""Elements in torch equal the definition: every code, between neighbours, every rounding."""

import numpy as np
import pytest
import torch

from nybble.formats import array, table
from nybble.formats.exact import ROUNDINGS
from nybble.quantize import elements

UP_TO_8 = [fmt for fmt in table.ELEMENTS.values() if fmt.bits <= 8]
FRACTIONS = (0.001, 0.25, 0.5 - 2.0**-12, 0.5, 0.5 + 2.0**-12, 0.75, 0.999)


def points(fmt) -> torch.Tensor:
    """Float32 points on, between and beyond the values of a format, both zeros and tiny numbers."""
    values = np.unique(array.values(fmt)[np.isfinite(array.values(fmt))])
    between = np.concatenate([values[:-1] + np.diff(values) * f for f in FRACTIONS])
    ends = [0.0, -0.0, 1e-30, -1e-30, 1e-42, fmt.max * 1.01, -fmt.max * 1.01, 3e38, -3e38]
    x = torch.tensor(np.concatenate([values, between, ends]), dtype=torch.float64).to(torch.float32)
    # The neighbours of each point catch thresholds that are off by one unit in the last place.
    return torch.cat([x, torch.nextafter(x, torch.tensor(torch.inf)), torch.nextafter(x, torch.tensor(-torch.inf))])


@pytest.mark.parametrize("fmt", UP_TO_8, ids=str)
def test_every_code_decodes_alike(fmt) -> None:
    codes = torch.arange(fmt.codes, dtype=torch.uint8)
    expected = array.values(fmt)
    valued = ~np.isnan(expected)  # integers decode unused codes arithmetically; they never occur in a tensor
    got = elements.decode(fmt, codes).double().numpy()
    np.testing.assert_array_equal(got[valued], expected[valued])
    np.testing.assert_array_equal(np.signbit(got[valued]), np.signbit(expected[valued]))


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", UP_TO_8, ids=str)
def test_encodes_alike(fmt, rounding: str) -> None:
    x = points(fmt)
    x = x[x.isfinite()]
    for uniform in (0.0, 0.4, 1 - 2.0**-24) if rounding.startswith("stochastic") else (0.0,):
        u = torch.full_like(x, uniform) if rounding.startswith("stochastic") else None
        got = elements.encode(fmt, x, rounding, u)
        expected = array.encode(fmt, x.double().numpy(), rounding, float(np.float32(uniform)))
        assert got.dtype == torch.uint8
        np.testing.assert_array_equal(got.numpy(), expected)


@pytest.mark.parametrize("name", ["fp16", "bf16", "fp32"])
def test_wide_formats_saturate(name: str) -> None:
    fmt = table.ELEMENTS[name]
    x = torch.cat([torch.randn(100, generator=torch.Generator().manual_seed(0)), torch.tensor([3.4e38, -3.4e38, 7e4])])
    got = elements.encode(fmt, x).double().numpy()
    np.testing.assert_array_equal(got, array.round(fmt, x.double().numpy()))
    with pytest.raises(ValueError, match="nearest only"):
        elements.encode(fmt, x, "up")
