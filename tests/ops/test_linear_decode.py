"""The arithmetic of decode.cuh replayed in exact numbers, with the macros that the kernels get."""

from __future__ import annotations

import pytest
import torch

from nybble.formats import FloatFormat, IntFormat, array, block
from nybble.formats.table import BF16, FP16
from nybble.ops.linear import LINEAR, macros
from nybble.quantize import quantize

WIDE = {False: (torch.bfloat16, BF16), True: (torch.float16, FP16)}


def pattern(bits: list[int], dtype: torch.dtype) -> torch.Tensor:
    """The values of 16-bit patterns, in float64."""
    return torch.tensor(bits, dtype=torch.int32).to(torch.int16).view(dtype).double()


def rounds_to_itself(x: torch.Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(x.to(dtype).double(), x)


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize(("bits", "shift"), [(2, 0), (2, 6), (3, 0), (4, 0), (4, 4), (8, 0)])
def test_masked_integers_are_plain_numbers_among_the_subnormals(bits: int, shift: int, fp16: bool) -> None:
    dtype, wide = WIDE[fp16]
    fmt = block(f"int{bits}_g32_asym")
    offset = 1 << bits - 1
    codes = list(range(1 << bits))
    raw = pattern([((code ^ offset) << shift) for code in codes], dtype)
    down = 2.0 ** -(wide.mantissa_bits - 1)
    for zero_point in (-offset, 0, offset - 1):
        term = torch.tensor(-(offset + zero_point) * down, dtype=torch.float64)
        element = raw * 2.0 ** (wide.bias - shift) + term
        assert rounds_to_itself(term, dtype)
        assert rounds_to_itself(element, dtype), "the fused multiply-add rounds nothing"
        signed = torch.tensor(
            [code - 2 * offset * (code >= offset) - zero_point for code in codes], dtype=torch.float64
        )
        assert isinstance(fmt.element, IntFormat)
        assert torch.equal(element * macros.factor(fmt, fp16), signed)


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("name", ["mxfp4", "ufp4"])
def test_spread_floats_become_their_values(name: str, fp16: bool) -> None:
    dtype, wide = WIDE[fp16]
    element = block(name).element
    assert isinstance(element, FloatFormat)
    move = wide.mantissa_bits - 6 - element.mantissa_bits
    magnitudes = [(code & 7) << 6 << move if move >= 0 else (code & 7) << 6 >> -move for code in range(16)]
    values = pattern([(code >> 3) << 15 | m for code, m in enumerate(magnitudes)], dtype) * 2.0 ** (
        wide.bias - element.bias
    )
    assert rounds_to_itself(values, dtype)
    assert torch.equal(values, torch.tensor(array.values(element), dtype=torch.float64))


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("name", ["fp8_channel", "mxfp8_e5m2"])
def test_eight_bit_floats_become_their_values(name: str, fp16: bool) -> None:
    dtype, wide = WIDE[fp16]
    element = block(name).element
    assert isinstance(element, FloatFormat)
    move = wide.mantissa_bits - element.mantissa_bits - 8
    codes = [code for code in range(256) if (code & 127) <= element.max_code]
    magnitudes = [(code & 127) << 8 << move if move >= 0 else (code & 127) << 8 >> -move for code in codes]
    values = pattern([(code >> 7) << 15 | m for code, m in zip(codes, magnitudes, strict=True)], dtype)
    values = values * 2.0 ** (wide.bias - element.bias)
    assert rounds_to_itself(values, dtype)
    assert torch.equal(values, torch.tensor(array.values(element), dtype=torch.float64)[codes])


@pytest.mark.parametrize(("name", "fp16"), [("nvfp4", False), ("nvfp4", True), ("ue5m3fp4", False)])
def test_short_elements_take_their_scale_exactly(name: str, fp16: bool) -> None:
    dtype, wide = WIDE[fp16]
    fmt = block(name)
    found = macros.defines(fmt, fp16)
    assert found["FOLD"]
    assert isinstance(fmt.scale, FloatFormat)
    assert isinstance(fmt.element, FloatFormat)
    scales = torch.tensor(
        [float(fmt.scale.magnitude(code)) for code in range(fmt.scale.max_code + 1)], dtype=torch.float64
    )
    raised = scales * 2.0 ** found["FOLD_UP"]
    assert rounds_to_itself(raised, dtype)
    small = torch.tensor(array.values(fmt.element), dtype=torch.float64) * 2.0 ** (fmt.element.bias - wide.bias)
    product = raised[:, None] * small
    assert rounds_to_itself(product, dtype)
    assert torch.equal(
        product * macros.factor(fmt, fp16),
        scales[:, None] * torch.tensor(array.values(fmt.element), dtype=torch.float64),
    )


def test_powers_of_two_are_taken_in_exactly_within_the_usual_range() -> None:
    """And what leaves the range below is lost beside the largest scale that the range allows."""
    fmt = block("mxfp4")
    found = macros.defines(fmt, False)
    bounds = macros.usual_scales(fmt, False)
    assert bounds is not None
    assert found["FOLD"]
    assert isinstance(fmt.element, FloatFormat)
    values = torch.tensor(array.values(fmt.element), dtype=torch.float64)
    for exponent in range(-127, 128):
        raised = (
            (torch.tensor(2.0**exponent * 2.0 ** found["FOLD_UP"], dtype=torch.float64)).to(torch.bfloat16).double()
        )
        made = (raised * values * 2.0 ** (fmt.element.bias - BF16.bias)).to(torch.bfloat16).double()
        undone = made * macros.factor(fmt, False)
        if 2.0**exponent <= bounds[1]:
            lost = (undone - 2.0**exponent * values).abs().max()
            assert lost == 0 or lost <= bounds[0] * 2.0**-30
        if bounds[0] <= 2.0**exponent <= bounds[1]:
            assert torch.equal(undone, 2.0**exponent * values)
    assert not macros.defines(fmt, False, usual=False)["FOLD"]


def test_integers_in_fp16_stay_finite_within_the_usual_range() -> None:
    fmt = block("int4_g128")
    bounds = macros.usual_scales(fmt, True)
    assert bounds is not None
    raised = torch.tensor(bounds[1], dtype=torch.float64).mul(2.0**macros.FP16_SCALE_UP).to(torch.float16)
    assert raised.isfinite()
    assert macros.tile_refusal(fmt, True) is None
    assert "largest scale" in (macros.tile_refusal(fmt, True, usual=False) or "")
    assert macros.tile_refusal(fmt, False, usual=False) is None
    assert macros.usual_scales(fmt, False) is None


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("size", [2.0**-15, 0.02, 8.0])
def test_scaled_weights_keep_the_bits_of_their_dtype(size: float, fp16: bool, rng: torch.Generator) -> None:
    """What tile.cu makes of int4 weights around `size`: the product rounded once, nowhere near the subnormals."""
    dtype, wide = WIDE[fp16]
    fmt = block("int4_g128")
    scale = (torch.rand(200, generator=rng) + 0.5).mul(size / 7).to(torch.bfloat16).double()
    elements = torch.arange(-8, 8, dtype=torch.float64)
    undo = macros.tile_factor(fmt, fp16)
    small = elements / macros.factor(fmt, fp16)
    up = macros.factor(fmt, fp16) / undo
    made = (small * (scale * up)[:, None]).to(dtype).double() * undo
    wanted = scale[:, None] * elements
    assert ((made - wanted).abs() <= wanted.abs() * 2.0 ** -(wide.mantissa_bits + 1)).all()


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("name", ["fp8_block128", "fp8_g128"])
def test_eight_bit_floats_take_in_the_power_of_two_of_their_scale(name: str, fp16: bool) -> None:
    """Exactly within the usual range; what is lost of smaller scales is 2^-30 of what the range allows."""
    dtype, wide = WIDE[fp16]
    fmt, bounds = block(name), macros.usual_scales(block(name), fp16)
    assert bounds is not None
    assert isinstance(fmt.element, FloatFormat)
    assert macros.tile_defines(fmt, fp16)["SUM_SCALE"]
    up = macros.tile_defines(fmt, fp16)["SCALE_UP"]
    codes = [code for code in range(256) if (code & 127) <= fmt.element.max_code]
    values = torch.tensor(array.values(fmt.element), dtype=torch.float64)[codes]
    for exponent in range(-140, 41):
        if 2.0**exponent > bounds[1]:
            continue
        power = torch.tensor(2.0 ** (exponent + wide.bias - fmt.element.bias + up), dtype=torch.float64).to(dtype)
        made = (values * 2.0 ** (fmt.element.bias - wide.bias) * power.double()).to(dtype).double()
        undone, wanted = made * macros.tile_factor(fmt, fp16), values * 2.0**exponent
        assert made.isfinite().all()
        lost = (undone - wanted).abs().max()
        assert lost == 0 if bounds[0] <= 2.0**exponent else lost <= bounds[0] * fmt.element.max * 2.0**-30
    assert "largest scale" in (macros.tile_refusal(fmt, fp16, usual=False) or "")


def test_sums_change_their_units_from_chunk_to_chunk(rng: torch.Generator) -> None:
    """The order of operands.cuh in float32: what 112 changes of units lose is far below one rounding of the result."""
    products = torch.randn(112, 256, generator=rng)
    scales = torch.exp2(8 * torch.rand(112, generator=rng) - 14)
    rest = torch.frexp(scales).mantissa * 2  # in [1, 2)
    total = torch.zeros(256)
    for i, one in enumerate(products * (scales / rest)[:, None]):
        total = (total + one) * (rest[i] / (rest[i + 1] if i + 1 < len(rest) else 1.0))
    exact = (products.double() * scales.double()[:, None]).sum(0)
    assert (total.double() - exact).norm() <= exact.norm() * 2.0**-19


@pytest.mark.parametrize("fp16", [False, True])
@pytest.mark.parametrize("kind", ["normal", "constant"])
def test_roundings_of_a_table_do_not_add_up(kind: str, fp16: bool, rng: torch.Generator) -> None:
    """Each of eight columns has its factor within a unit in the last place: without, constant x is too far off."""
    dtype, wide = WIDE[fp16]
    w = quantize(torch.randn(264, 1024, generator=rng) / 32, "nf4_g64").dequantize(torch.float32)
    x = torch.ones(1, 1024) if kind == "constant" else torch.randn(64, 1024, generator=rng)
    column = torch.arange(1024)
    level = column % 8 // 2 * 2 + column // 8 % 2
    up = 2.0 ** macros.tile_defines(block("nf4_g64"), fp16)["SCALE_UP"]
    factors = up * (1 + (level - 3.5) * 2.0 ** -(wide.mantissa_bits + 4))
    x, exact = x.to(dtype).double(), x.to(dtype).double() @ w.double().t()
    size = max(float(exact.norm()), float(x.norm() * w.double().norm()) / 32)
    made = (w * factors.float()).to(dtype).double() * macros.tile_factor(block("nf4_g64"), fp16)
    distance = LINEAR.agreement.distance((x @ made.t()).to(dtype), exact.to(dtype), size)
    assert distance <= 0.95 * LINEAR.agreement.limits[dtype]
