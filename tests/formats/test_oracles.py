"""The definition against independent libraries: ml_dtypes' casts and gfloat's decoders and rounding."""

import itertools

import numpy as np
import pytest

from nybble.formats import array, exact, table

ml_dtypes = pytest.importorskip("ml_dtypes", reason="ml_dtypes is an oracle of the test extra")
gfloat = pytest.importorskip("gfloat", reason="gfloat is an oracle of the test extra")

ML = {
    "e2m1": "float4_e2m1fn", "e2m3": "float6_e2m3fn", "e3m2": "float6_e3m2fn", "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2", "e8m0": "float8_e8m0fnu", "bf16": "bfloat16", "int2": "int2", "int4": "int4",
    "uint4": "uint4",
}  # fmt: skip
GF = {
    "e2m1": "ocp_e2m1", "e2m3": "ocp_e2m3", "e3m2": "ocp_e3m2", "e4m3": "ocp_e4m3", "e5m2": "ocp_e5m2",
    "e8m0": "ocp_e8m0", "int8f6": "ocp_int8", "fp16": "binary16", "bf16": "bfloat16",
}  # fmt: skip


def ml_values(fmt) -> np.ndarray:
    dtype = np.dtype(getattr(ml_dtypes, ML[fmt.name]))
    codes = np.arange(fmt.codes).astype(np.uint16 if fmt.bits == 16 else np.uint8)
    return codes.view(dtype).astype(np.float64)


@pytest.mark.parametrize("name", ML)
def test_ml_dtypes_decodes_alike(name: str) -> None:
    fmt = table.ELEMENTS[name]
    np.testing.assert_array_equal(array.decode(fmt, np.arange(fmt.codes)), ml_values(fmt))


@pytest.mark.parametrize("name", [n for n in ML if "int" not in n and n != "e8m0"])
def test_ml_dtypes_rounds_alike(name: str) -> None:
    fmt = table.ELEMENTS[name]
    values = np.unique(array.values(fmt)[np.isfinite(array.values(fmt))])
    steps = np.diff(values)
    # float32 inputs, since ml_dtypes converts from float32; quarters of a step are exact there.
    points = np.concatenate([values[:-1] + steps * f for f in (0.25, 0.5, 0.75)]).astype(np.float32)
    cast = points.astype(getattr(ml_dtypes, ML[name])).astype(np.float64)
    got = array.round(fmt, points.astype(np.float64))
    np.testing.assert_array_equal(got, cast)
    np.testing.assert_array_equal(np.signbit(got), np.signbit(cast))


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_ml_dtypes_overflows_alike(name: str) -> None:
    fmt = table.ELEMENTS[name]
    points = np.array([fmt.max * f for f in (1.0, 1.03, 1.04, 1.2, 4.0)])
    cast = points.astype(np.float32).astype(getattr(ml_dtypes, ML[name])).astype(np.float64)
    np.testing.assert_array_equal(array.round(fmt, points, saturate=False), cast)


@pytest.mark.parametrize("name", GF)
def test_gfloat_decodes_alike(name: str) -> None:
    import gfloat.formats

    fmt, info = table.ELEMENTS[name], getattr(gfloat.formats, f"format_info_{GF[name]}")
    stride = 1 if fmt.bits <= 8 else 37
    for code in range(0, fmt.codes, stride):
        np.testing.assert_equal(exact.decode(fmt, code), gfloat.decode_float(info, code).fval)


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [("nearest", "TiesToEven"), ("toward_zero", "TowardZero"), ("down", "TowardNegative"), ("up", "TowardPositive")],
)
@pytest.mark.parametrize("name", [n for n in GF if table.ELEMENTS[n].bits <= 8 and n != "e8m0"])
def test_gfloat_rounds_alike(name: str, ours, theirs: str) -> None:
    import gfloat.formats

    fmt, info = table.ELEMENTS[name], getattr(gfloat.formats, f"format_info_{GF[name]}")
    mode = getattr(gfloat.RoundMode, theirs)
    values = np.unique(array.values(fmt)[np.isfinite(array.values(fmt))])
    for low, high in itertools.pairwise(values):
        for fraction in (0.25, 0.5, 0.75):
            x = float(low + (high - low) * fraction)
            assert exact.round(fmt, x, ours) == gfloat.round_float(info, x, mode, sat=True), (x, ours)
