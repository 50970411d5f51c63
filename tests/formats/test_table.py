"""The rows: what they derive, what they refuse, and how they are found."""

import dataclasses
import math

import pytest

from nybble.errors import UnknownName
from nybble.formats import BlockFormat, FloatFormat, IntFormat, TableFormat, block, get, names, rows, table

LIMITS = {
    # name: (largest, smallest positive), from the standard or paper each row cites
    "e2m1": (6.0, 0.5),
    "e1m2": (1.75, 0.25),
    "e3m0": (16.0, 0.25),
    "e2m3": (7.5, 0.125),
    "e3m2": (28.0, 0.0625),
    "e4m3": (448.0, 2.0**-9),
    "e5m2": (57344.0, 2.0**-16),
    "e8m0": (2.0**127, 2.0**-127),
    "ue5m3": (61440.0, 2.0**-17),
    "ue5m3fn": (114688.0, 2.0**-17),
    "fp16": (65504.0, 2.0**-24),
    "bf16": (255 * 2.0**120, 2.0**-133),
    "fp32": ((2 - 2.0**-23) * 2.0**127, 2.0**-149),
}


@pytest.mark.parametrize("name", LIMITS)
def test_limits_are_those_of_the_standard(name: str) -> None:
    fmt = get(name)
    assert (fmt.max, fmt.smallest) == LIMITS[name]
    assert fmt.min == (-fmt.max if fmt.signed else (LIMITS[name][1] if name == "e8m0" else 0.0))


def test_integers_and_tables_have_the_limits_of_their_codes() -> None:
    assert (get("int4").min, get("int4").max) == (-8, 7)
    assert (get("uint4").min, get("uint4").max) == (0, 15)
    assert (get("int8f6").min, get("int8f6").max) == (-2, 127 / 64)
    assert (get("ternary").min, get("ternary").max) == (-1, 1)
    assert (get("nf4").min, get("nf4").max) == (-1, 1)
    assert (get("binary").min, get("binary").max) == (-1, 1)


def test_e1m2_is_the_uniform_grid_of_seven_steps() -> None:
    fmt = get("e1m2")
    assert [float(fmt.magnitude(c)) for c in range(8)] == [c / 4 for c in range(8)]


def test_every_name_is_found_and_unique() -> None:
    assert len(set(names())) == len(names()) == len(list(rows()))
    for name in names():
        assert get(name).name == name
        assert get(name.upper().replace("_", "-")) is get(name)


@pytest.mark.parametrize(
    ("name", "element", "group", "zero_point"),
    [("int4_g48", "int4", 48, False), ("int5_g32_asym", "int5", 32, True), ("nf4_g128", "nf4", 128, False),
     ("fp8_g64", "e4m3", 64, False)],
)  # fmt: skip
def test_a_family_member_is_made_on_demand(name: str, element: str, group: int, zero_point: bool) -> None:
    row = block(name)
    assert (row.name, row.element.name, row.block, row.zero_point) == (name, element, (1, group), zero_point)


def test_scales_in_another_width_have_a_name() -> None:
    row = block("int4_g128_fp16")
    assert (row.name, row.scale.name, row.element.name) == ("int4_g128_fp16", "fp16", "int4")
    assert table.with_scale(block("int4_g128"), table.FP16) == row
    assert table.with_scale(block("int4_g128"), table.BF16) is block("int4_g128")


@pytest.mark.parametrize("name", ["int9_g32", "int4_g0", "nf4_channel", "fp8_g128_asym", "nvpf4", ""])
def test_an_unknown_name_is_refused(name: str) -> None:
    with pytest.raises(UnknownName, match="unknown format"):
        get(name)


def test_a_misspelling_names_the_nearest() -> None:
    with pytest.raises(UnknownName, match="nvfp4"):
        get("nvpf4")
    with pytest.raises(UnknownName, match="element format"):
        block("e2m1")


def test_rows_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        get("e2m1").bits = 5  # type: ignore[misc]


def test_rows_check_themselves() -> None:
    with pytest.raises(ValueError, match="make 5 bits, not 4"):
        FloatFormat("bad", 4, "-", exponent_bits=2, mantissa_bits=2)
    with pytest.raises(ValueError, match="exponent bit"):
        FloatFormat("bad", 3, "-", exponent_bits=0, mantissa_bits=2)
    with pytest.raises(ValueError, match="outside 4 bits"):
        IntFormat("bad", 4, "-", -9, 7)
    with pytest.raises(ValueError, match="15 values for 16 codes"):
        TableFormat("bad", 4, "-", tuple(map(float, range(15))))
    with pytest.raises(ValueError, match="not finite"):
        TableFormat("bad", 1, "-", (0.0, math.nan))
    with pytest.raises(ValueError, match="below 1"):
        BlockFormat("bad", table.E2M1, (1, 0), table.E8M0, "amax", "-")
    with pytest.raises(ValueError, match="only integers"):
        BlockFormat("bad", table.E2M1, (1, 16), table.E8M0, "amax", "-", zero_point=True)
    with pytest.raises(ValueError, match="without a tensor scale"):
        BlockFormat("bad", table.E2M1, (1, 16), table.E8M0, "amax", "-", scale_target=1.0)


def test_a_second_row_of_a_name_is_an_error() -> None:
    with pytest.raises(ValueError, match="twice"):
        table._register(table.E2M1)


@pytest.mark.parametrize(
    ("name", "bits"),
    [("nvfp4", 4.5 + 32 / (256 * 512)), ("mxfp4", 4.25), ("int4_g128", 4.125), ("int4_g128_asym", 4 + 20 / 128),
     ("int8_channel", 8 + 16 / 512), ("fp8_block128", 8 + 32 / 128**2), ("ufp4", 6.0), ("nf4_g64", 4.5)],
)  # fmt: skip
def test_bits_per_value(name: str, bits: float) -> None:
    assert block(name).bits_per_value(256, 512) == bits


def test_bitsandbytes_fp4_is_its_formula_in_float32() -> None:
    import numpy as np

    expected = [float(np.float32(x / 12)) for x in (0, 1 / 16, 8, 12, 4, 6, 2, 3)]
    assert list(table.FP4BNB.values[:8]) == expected
    assert list(table.FP4BNB.values[8:]) == [-x for x in expected]
