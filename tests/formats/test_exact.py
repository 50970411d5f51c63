"""The definition, held against facts from the standards and against itself."""

import math
from fractions import Fraction

import pytest

from nybble.errors import BadInput, UnknownName
from nybble.formats import exact, get, table
from nybble.formats.exact import ROUNDINGS, decode, encode

SMALL = [fmt for fmt in table.ELEMENTS.values() if fmt.bits <= 8]


@pytest.mark.parametrize("fmt", SMALL, ids=str)
def test_every_value_encodes_to_a_code_of_that_value(fmt) -> None:
    for code in range(fmt.codes):
        value = decode(fmt, code)
        if math.isfinite(value):
            back = encode(fmt, value)
            assert decode(fmt, back) == value
            assert math.copysign(1, decode(fmt, back)) == math.copysign(1, value) or not fmt.sign_magnitude
            for rounding in ROUNDINGS:
                assert encode(fmt, value, rounding, 0.999) == back


def test_e2m1_rounds_ties_to_even_and_saturates() -> None:
    pairs = {0.25: 0, 0.75: 1, 1.25: 1, 1.75: 2, 2.5: 2, 3.5: 4, 5: 4, 5.01: 6, 6: 6, 100: 6}
    for x, expected in pairs.items():
        assert exact.round(table.E2M1, x) == expected
        assert exact.round(table.E2M1, -x) == -expected
    assert math.copysign(1, exact.round(table.E2M1, -0.25)) == -1
    assert encode(table.E2M1, -0.0) == 8


def test_special_codes() -> None:
    assert math.isnan(decode(table.E4M3, 0x7F))
    assert math.isnan(decode(table.E4M3, 0xFF))
    assert decode(table.E4M3, 0x7E) == 448
    assert decode(table.E5M2, 0x7C) == math.inf
    assert decode(table.E5M2, 0xFC) == -math.inf
    assert math.isnan(decode(table.E5M2, 0x7D))
    assert math.isnan(decode(table.E8M0, 0xFF))
    assert decode(table.E8M0, 0) == 2.0**-127
    assert decode(table.UE5M3, 0xF7) == 61440
    assert decode(table.UE5M3, 0xF8) == math.inf
    assert decode(table.UE5M3FN, 0xFE) == 114688
    assert math.isnan(decode(table.UE5M3FN, 0xFF))
    assert math.isnan(decode(table.TERNARY, 0b10)), "an unused code carries no value"


@pytest.mark.parametrize(
    ("rounding", "uniform", "expected"),
    [
        ("nearest", 0, (2.0, 3.0, -2.0, -3.0)),
        ("toward_zero", 0, (2.0, 2.0, -2.0, -2.0)),
        ("down", 0, (2.0, 2.0, -3.0, -3.0)),
        ("up", 0, (3.0, 3.0, -2.0, -2.0)),
        ("stochastic", 0.3, (2.0, 3.0, -2.0, -3.0)),
        ("stochastic", 0.2, (3.0, 3.0, -3.0, -3.0)),
        ("stochastic", 0.75, (2.0, 2.0, -2.0, -2.0)),
        ("stochastic_8bit", 0.74, (2.0, 3.0, -2.0, -3.0)),
        ("stochastic_8bit", 0.0, (2.0, 2.0, -2.0, -2.0)),
        ("stochastic_8bit", 255 / 256, (3.0, 3.0, -3.0, -3.0)),
    ],
)
def test_rounding_modes(rounding, uniform, expected) -> None:
    got = tuple(exact.round(table.E2M1, x, rounding, uniform) for x in (2.25, 2.75, -2.25, -2.75))
    assert got == expected


def test_the_eight_bit_rule_is_right_on_average_to_a_512th() -> None:
    for step in range(1, 200):
        t = Fraction(step, 200)
        ups = sum(exact.round(table.E2M1, 2 + t, "stochastic_8bit", Fraction(r, 256)) == 3 for r in range(256))
        assert abs(Fraction(ups, 256) - t) <= Fraction(1, 512)


def test_without_saturation_an_overflow_is_special() -> None:
    assert exact.round(table.E4M3, 464, saturate=False) == 448, "the tie goes to the even code"
    assert math.isnan(exact.round(table.E4M3, 465, saturate=False))
    assert exact.round(table.E5M2, 1e6, saturate=False) == math.inf
    assert exact.round(table.E5M2, -math.inf, saturate=False) == -math.inf
    assert exact.round(table.E4M3, math.inf) == 448
    assert exact.round(table.UE5M3, -3.0) == 0
    with pytest.raises(BadInput, match="overflow"):
        exact.round(table.E2M1, 7.0, saturate=False)


def test_nan_stays_or_is_refused() -> None:
    assert math.isnan(exact.round(table.E4M3, math.nan))
    for fmt in (table.E2M1, table.INT[4], table.NF4):
        with pytest.raises(BadInput, match="no NaN"):
            encode(fmt, math.nan)


def test_bad_arguments() -> None:
    with pytest.raises(BadInput, match="codes 0 to 15"):
        decode(table.E2M1, 16)
    with pytest.raises(UnknownName, match="nearest"):
        encode(table.E2M1, 1.0, "nearst")  # type: ignore[arg-type]


def test_a_scaled_element_rounds_its_quotient_to_float32_first() -> None:
    # 1/3 of 2.25 is 0.75 exactly, a tie; in float32 the scale is not 1/3 and the quotient is still the tie.
    third = exact.round(table.FP32, Fraction(1, 3))
    assert decode(table.E2M1, exact.encode_scaled(table.E2M1, 0.25, third)) == 1.0
    assert exact.encode_scaled(table.INT[4], 1.0, 0.5, zero_point=-3) == (2 - 3) % 16
    assert exact.encode_scaled(table.INT[4], -100.0, 0.5, zero_point=3) == 8, "clamped to -8"


def test_power_of_two_formats_break_ties_by_the_code() -> None:
    assert exact.round(get("e3m0"), 3.0) == 2.0, "2 has code 4, 4 has code 5"
    assert exact.round(get("e3m0"), 6.0) == 8.0
