"""The arithmetic of decode.cuh replayed in exact numbers, with the macros that the kernels get."""

from __future__ import annotations

import pytest
import torch

from nybble.formats import FloatFormat, IntFormat, array, block
from nybble.formats.table import BF16, FP16
from nybble.ops.linear import macros

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
