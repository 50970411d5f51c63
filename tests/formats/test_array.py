"""array.py equals exact.py: on every code of every format of up to 16 bits, and between neighbouring values."""

import numpy as np
import pytest

from nybble.errors import BadInput
from nybble.formats import array, exact, table
from nybble.formats.exact import ROUNDINGS

UP_TO_16 = [fmt for fmt in table.ELEMENTS.values() if fmt.bits <= 16]
FRACTIONS = (2.0**-20, 0.25, 0.5 - 2.0**-20, 0.5, 0.5 + 2.0**-20, 0.75, 1 - 2.0**-20)


def between(fmt, most: int) -> np.ndarray:
    """Points between neighbouring values (all neighbours, or `most` spread over the range), and the extremes."""
    values = np.unique(array.values(fmt)[np.isfinite(array.values(fmt))])
    low = values[:-1][:: max(1, (len(values) - 1) // most)]
    high = values[1:][:: max(1, (len(values) - 1) // most)]
    points = np.concatenate([low + (high - low) * f for f in FRACTIONS])
    ends = [fmt.max * 1.03, fmt.max * 2.5, fmt.min * 1.03, -fmt.max * 3, np.inf, -np.inf, 0.0, -0.0, 1e-300, -1e-300]
    return np.concatenate([points, ends])


@pytest.mark.parametrize("fmt", UP_TO_16, ids=str)
def test_every_code(fmt) -> None:
    values = array.decode(fmt, np.arange(fmt.codes))
    expected = np.array([exact.decode(fmt, code) for code in range(fmt.codes)])
    np.testing.assert_array_equal(values, expected)
    np.testing.assert_array_equal(np.signbit(values), np.signbit(expected))
    finite = np.isfinite(values)
    codes = array.encode(fmt, values[finite])
    np.testing.assert_array_equal(array.decode(fmt, codes), values[finite])
    if fmt.sign_magnitude:
        np.testing.assert_array_equal(codes, np.arange(fmt.codes)[finite])


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("fmt", UP_TO_16, ids=str)
def test_between_neighbours(fmt, rounding) -> None:
    points = between(fmt, 256 if fmt.bits <= 8 else 60)
    for uniform in (0.0, 0.4) if rounding.startswith("stochastic") else (0.0,):
        got = array.encode(fmt, points, rounding, uniform)
        expected = [exact.encode(fmt, float(x), rounding, uniform) for x in points]
        np.testing.assert_array_equal(got, expected)


def test_float32_on_a_spread_of_codes() -> None:
    rng = np.random.default_rng(0)
    codes = np.concatenate([rng.integers(0, 2**32, 2000), [0, 1, 2**31, 2**31 + 1, 0x7F800000, 0x7FC00000, 0x7F7FFFFF]])
    expected = codes.astype(np.uint32).view(np.float32).astype(np.float64)
    np.testing.assert_array_equal(array.decode(table.FP32, codes), expected)
    x = expected[np.isfinite(expected)] * (1 + rng.uniform(-1, 1, np.isfinite(expected).sum()) * 2.0**-23)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(
            array.round(table.FP32, x, saturate=False), x.astype(np.float32).astype(np.float64)
        )


def test_without_saturation() -> None:
    x = np.array([464.0, 465.0, -1e9, np.inf])
    np.testing.assert_array_equal(array.round(table.E4M3, x, saturate=False), [448, np.nan, np.nan, np.nan])
    with pytest.raises(BadInput, match="overflow"):
        array.round(table.E2M1, x, saturate=False)


def test_nan() -> None:
    np.testing.assert_array_equal(array.round(table.E4M3, np.array([1.0, np.nan])), [1.0, np.nan])
    with pytest.raises(BadInput, match="1 of 2"):
        array.encode(table.E2M1, np.array([1.0, np.nan]))


def test_codes_outside_the_format_are_refused() -> None:
    with pytest.raises(BadInput, match="codes 0 to 15"):
        array.decode(table.E2M1, np.array([3, 16]))


def test_empty_arrays() -> None:
    for fmt in UP_TO_16:
        assert array.encode(fmt, np.zeros((0, 3))).shape == (0, 3)
        assert array.decode(fmt, np.zeros((0, 3), dtype=np.int64)).shape == (0, 3)
