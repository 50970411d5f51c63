"""quantize and dequantize: the whole contract against the definition, and inputs that broke other libraries."""

import math

import numpy as np
import pytest
import torch

import nybble
from nybble.errors import BadInput, UnknownName
from nybble.formats import block, exact, table
from nybble.quantize.blocks import expand, scale_shape

BLOCKS = list(table.BLOCKS.values())
MAIN = ["mxfp4", "mxfp6_e3m2", "mxfp8_e4m3", "mxint8", "nvfp4", "ue5m3fp4", "ufp4", "int2_g32", "int3_g64", "int4_g128",
        "int4_g32_asym", "int8_channel", "int8_token", "fp8_tensor", "fp8_block128", "fp8_g128", "nf4_g64",
        "fp4bnb_g64",
        "ternary_channel", "binary_channel", "mxfp4_encode"]  # fmt: skip


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("fmt", BLOCKS, ids=str)
def test_codes_and_values_are_the_definition(fmt) -> None:
    """Each code is encode_scaled of x under the stored scale, each value (element - zero) * scale in float32."""
    x = normal(3, 150) * torch.tensor([[1.0], [1e-3], [50.0]])
    q = nybble.quantize(x, fmt)
    codes, (scale, zero) = q.unpack(), q.scales()
    e = expand(scale, fmt, q.shape)
    z = torch.zeros_like(codes, dtype=torch.int8) if zero is None else expand(zero, fmt, q.shape)
    values = q.dequantize()
    for i in range(3):
        for j in range(0, 150, 7):
            xi, ei, zi = float(x[i, j]), float(e[i, j]), int(z[i, j])
            code = exact.encode_scaled(fmt.element, xi, ei, zi)
            assert int(codes[i, j]) == code
            assert float(values[i, j]) == float(np.float32((exact.decode(fmt.element, code) - zi) * np.float64(ei)))


@pytest.mark.parametrize("fmt", BLOCKS, ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 63), (17, 129), (129, 17), (2, 3, 33), (5,), (0, 32), (4, 0)])
def test_odd_shapes(fmt, shape) -> None:
    """Tails are right: shapes and sizes hold, no NaN, the error is bounded by the block's largest magnitude."""
    x = normal(*shape)
    q = nybble.quantize(x, fmt)
    y = q.dequantize()
    assert y.shape == x.shape
    assert q.shape == tuple(shape)
    assert q.unpack().shape == x.shape
    assert q.scale.shape == scale_shape(fmt, tuple(shape))
    assert y.isfinite().all()
    if x.numel():
        assert (y - x).abs().max() <= x.abs().max() * 1.01
        assert q.bits_per_value == pytest.approx(8 * q.nbytes / x.numel())
    else:
        assert math.isnan(q.bits_per_value)


@pytest.mark.parametrize("name", MAIN)
def test_a_tail_block_equals_the_same_values_in_a_whole_tensor_of_that_length(name: str) -> None:
    x = normal(4, 160)
    fmt = block(name)
    if fmt.block[1] is None or fmt.tensor_scale is not None or fmt.block[0] != 1:
        cut = x  # one scale reaches over the cut, so there is nothing to compare
    else:
        cut = x[:, : fmt.block[1] + 3]
        whole = nybble.quantize(x[:, fmt.block[1] : fmt.block[1] + 3], name).dequantize()
        assert torch.equal(nybble.quantize(cut, name).dequantize()[:, fmt.block[1] :], whole)
    assert nybble.quantize(cut, name).dequantize().isfinite().all()


@pytest.mark.parametrize("name", MAIN)
def test_strides_and_offsets_do_not_matter(name: str) -> None:
    base = normal(70, 140)
    views = [base.t(), base[:, ::2], base[:, 1:-1], base[3:], base[::3, 5:], base[0].expand(9, 140),
             base.view(7, 10, 140)[:, 2], base.view(7, 10, 140).transpose(0, 1)]  # fmt: skip
    for view in views:
        before = view.clone()
        q, c = nybble.quantize(view, name), nybble.quantize(view.contiguous(), name)
        assert torch.equal(q.codes, c.codes)
        assert torch.equal(q.scale, c.scale)
        assert torch.equal(view, before), "the input is left alone"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", MAIN)
def test_other_dtypes_are_float32_inside(name: str, dtype) -> None:
    x = normal(5, 130).to(dtype)
    q, wide = nybble.quantize(x, name), nybble.quantize(x.to(torch.float32), name)
    assert torch.equal(q.codes, wide.codes)
    assert torch.equal(q.scale, wide.scale)
    assert q.dequantize().dtype == dtype
    assert torch.equal(q.dequantize(), wide.dequantize().to(dtype))
    assert q.dequantize(torch.float32).dtype == torch.float32


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("filler", [0.0, -0.0])
def test_zero_blocks_stay_exactly_zero(name: str, filler: float) -> None:
    x = normal(64, 256)
    x[3, 16:144] = filler
    q = nybble.quantize(x, name)
    fmt = q.format
    decoded = q.dequantize()
    assert decoded.isfinite().all()
    if name not in ("binary_channel",):  # binary has no zero
        inside = decoded[3, 128:144] if fmt.block[1] in (128, None) else decoded[3, 64:128]
        assert (inside == 0).all()
    if q.scale.dtype == torch.uint8 and fmt.scale.has_nan:
        assert not np.isnan([exact.decode(fmt.scale, int(c)) for c in q.scale.unique()]).any()
    if fmt.tensor_scale is None and fmt.block[0] == 1:
        plain = nybble.quantize(normal(64, 256), name)
        others = torch.arange(64) != 3
        assert torch.equal(q.dequantize()[others], plain.dequantize()[others]), "other rows are untouched to the bit"


@pytest.mark.parametrize("name", [n for n in MAIN if n != "binary_channel"])
def test_a_tensor_of_zeros(name: str) -> None:
    q = nybble.quantize(torch.zeros(32, 64), name)
    assert (q.dequantize() == 0).all()
    if q.tensor_scale is not None and name != "mxfp4_encode":
        assert float(q.tensor_scale) == 1.0


@pytest.mark.parametrize("name", MAIN)
@pytest.mark.parametrize("size", [1e-30, 1e-38, 1e-42, 1e30, 1e38])
def test_extreme_magnitudes_stay_finite(name: str, size: float) -> None:
    x = normal(4, 64).clamp(-3, 3) * size
    y = nybble.quantize(x, name).dequantize()
    assert y.isfinite().all()
    assert (y.abs().max() <= x.abs().max() * 1.5) or name in ("binary_channel", "ternary_channel")


@pytest.mark.parametrize("name", ["nvfp4", "ue5m3fp4", "int4_g32", "ufp4", "mxfp4"])
def test_a_block_whose_scale_underflows(name: str) -> None:
    x = normal(4, 128)
    x[1, :64] *= 1e-30
    y = nybble.quantize(x, name).dequantize()
    assert y.isfinite().all()
    assert (y[1, :64].abs() <= x[1, :64].abs().max() * 1.5).all()


def test_negative_zero_keeps_its_sign_where_the_element_has_one() -> None:
    x = torch.tensor([[-0.0, 1.0] * 16])
    assert torch.signbit(nybble.quantize(x, "mxfp4").dequantize()[0, 0])
    assert not torch.signbit(nybble.quantize(x, "mxint8").dequantize()[0, 0])


def test_nan_and_infinity_are_refused_by_name() -> None:
    x = normal(4, 64)
    x[2, 3], x[0, 0] = torch.nan, torch.inf
    with pytest.raises(BadInput, match=r"layers\.0\.weight holds 2 values"):
        nybble.quantize(x, "nvfp4", name="layers.0.weight")


def test_what_cannot_be_quantized() -> None:
    with pytest.raises(BadInput, match="floating"):
        nybble.quantize(torch.ones(3, 4, dtype=torch.int32), "nvfp4")
    with pytest.raises(BadInput, match="axis"):
        nybble.quantize(torch.tensor(1.0), "nvfp4")
    with pytest.raises(UnknownName, match="mxfp4"):
        nybble.quantize(torch.ones(3, 4), "mxfp44")


def test_large_tensors_in_pieces_equal_their_rows_alone() -> None:
    """Above 2^18 values the work is cut into runs of rows; the cut must not show."""
    for name in ("mxfp4", "int4_g128_asym", "fp8_block128", "int8_channel", "nf4_g64", "int3_g64"):
        x = normal(1100, 300)
        q = nybble.quantize(x, name)
        rows = 128 if name == "fp8_block128" else 1
        for start in (0, 512, 1024):
            part = nybble.quantize(x[start : start + rows], name)
            assert torch.equal(q.dequantize()[start : start + rows], part.dequantize())
    stacked = nybble.quantize(normal(3, 400, 300), "nvfp4")
    assert stacked.scale.shape == (3, 400, 19)
    assert stacked.dequantize().shape == (3, 400, 300)
    flat = nybble.quantize(normal(3, 400, 300).view(1200, 300), "nvfp4")
    assert torch.equal(stacked.dequantize().view(1200, 300), flat.dequantize())


def test_the_size_of_a_tensor_is_what_it_stores() -> None:
    q = nybble.quantize(normal(256, 512), "nvfp4")
    assert q.nbytes == 256 * 512 // 2 + 256 * 32 + 4
    assert q.bits_per_value == block("nvfp4").bits_per_value(256, 512)
    assert q.to("cpu").nbytes == q.nbytes


def test_a_wrong_reading_of_the_tensor_scale_would_be_seen() -> None:
    """The tensor scale multiplies; read as a divisor the error is beyond 1."""
    import dataclasses

    x = normal(64, 256) * 0.02
    q = nybble.quantize(x, "nvfp4")
    right = (q.dequantize() - x).norm() / x.norm()
    wrong = dataclasses.replace(q, tensor_scale=1 / q.tensor_scale).dequantize()
    assert right < 0.1
    assert (wrong - x).norm() / x.norm() > 1


def test_quantizing_twice_changes_nothing() -> None:
    """Under a rule that maps the largest value to itself, a quantized tensor is a fixed point."""
    for name, rule in [("mxfp4", "floor"), ("mxfp8_e4m3", "floor"), ("ufp4", None), ("nf4_g64", None)]:
        once = nybble.quantize(normal(8, 128), name, rule=rule).dequantize()
        assert torch.equal(nybble.quantize(once, name, rule=rule).dequantize(), once)


def test_the_function_and_the_package_share_a_name() -> None:
    from nybble.quantize import quantize

    assert torch.equal(nybble.quantize(torch.ones(1, 32), "mxfp4").codes, quantize(torch.ones(1, 32), "mxfp4").codes)
