"""Scale rules: tables of known answers, exactness at every mantissa, and blocks that break careless code."""

import math
from fractions import Fraction

import pytest
import torch

import nybble
from nybble.errors import BadInput, UnknownName
from nybble.formats import array, block, exact, table
from nybble.quantize import scales

POWER_RULES = ("floor", "ceil", "rceil", "even", "ct175")


def exponent(rule: str, amax: float, name: str) -> int:
    """The E8M0 byte that `rule` gives a block with this largest magnitude."""
    x = torch.zeros(1, 32)
    x[0, 5] = -amax
    return int(nybble.quantize(x, name, rule=rule).scale[0, 0])


# amax -> E8M0 byte, in the order of POWER_RULES; worked out by hand from the definitions in scales.py.
MXFP4 = {
    1.0: (125, 125, 125, 125, 125),
    1.25: (125, 126, 125, 125, 125),
    1.5: (125, 126, 125, 125, 125),
    1.5000001: (125, 126, 126, 125, 125),
    1.7499999: (125, 126, 126, 125, 125),
    1.75: (125, 126, 126, 126, 126),
    4.0: (127, 127, 127, 127, 127),
    6.0: (127, 128, 127, 127, 127),
    6.5: (127, 128, 128, 127, 127),
    7.0: (127, 128, 128, 128, 128),
    7.5: (127, 128, 128, 128, 128),
    8.0: (128, 128, 128, 128, 128),
}
MXFP8 = {
    150.0: (126, 127, 126, 126, 126),
    256.0: (127, 127, 127, 127, 127),
    447.0: (127, 128, 127, 127, 127),
    448.0: (127, 128, 127, 127, 128),
    449.0: (127, 128, 128, 127, 128),
    495.9: (127, 128, 128, 127, 128),
    496.0: (127, 128, 128, 128, 128),
    500.0: (127, 128, 128, 128, 128),
}


@pytest.mark.parametrize(("name", "known"), [("mxfp4", MXFP4), ("mxfp8_e4m3", MXFP8)])
def test_power_of_two_rules_by_table(name: str, known: dict) -> None:
    for amax, expected in known.items():
        assert tuple(exponent(rule, amax, name) for rule in POWER_RULES) == expected, amax


@pytest.mark.parametrize("name", ["mxfp4", "mxfp6_e2m3", "mxfp8_e5m2", "mxint8"])
def test_rceil_is_the_smallest_power_that_does_not_clip(name: str) -> None:
    largest = Fraction(block(name).element.max)
    for step in range(512):
        amax = float(torch.tensor((1 + step / 512) * 2.0 ** (step % 7 - 3), dtype=torch.float32))
        power = Fraction(2) ** (exponent("rceil", amax, name) - 127)
        assert amax <= largest * power
        assert amax > largest * power / 2


def test_floor_clips_as_often_as_its_closed_form_says() -> None:
    """With mantissas uniform in [1, 2) the floor rule clips a block's top where the mantissa exceeds 1.5 (E2M1)."""
    mantissas = torch.arange(1024) / 1024 + 1
    x = torch.zeros(1024, 32)
    x[:, 0] = mantissas
    q = nybble.quantize(x, "mxfp4", rule="floor")
    top = q.scales()[0][:, 0] * q.format.element.max
    assert float((mantissas > top).double().mean()) == float((mantissas > 1.5).double().mean())


@pytest.mark.parametrize("rule", POWER_RULES)
def test_power_of_two_rules_at_the_ends_of_float32(rule: str) -> None:
    for amax in (3.4e38, 2.0**-126, 1.4e-45):
        x = torch.zeros(1, 32)
        x[0, 0] = amax
        q = nybble.quantize(x, "mxfp4", rule=rule)
        assert q.dequantize().isfinite().all()
    assert exponent(rule, 2.0**-149, "mxfp4") == 0


def test_symmetric_integers_by_both_rules() -> None:
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 1] = 7.5, -7.5
    by_amax = nybble.quantize(x, "int4_g64").scales()[0]
    by_range = nybble.quantize(x, "int4_g64", rule="amax_half_range")
    assert float(by_amax) == float(torch.tensor(7.5 / 7).bfloat16())
    assert float(by_range.scales()[0]) == 1.0
    assert by_range.dequantize()[0, :2].tolist() == [7.0, -8.0], "+a clips to 7, -a rounds to even"


def test_zero_points_reach_both_ends() -> None:
    x = torch.linspace(-1, 3, 64)[None]
    q = nybble.quantize(x, "int4_g64_asym")
    scale, zero = q.scales()
    assert float(zero) == -8 + round(1 / float(scale))
    assert (q.dequantize() - x).abs().max() <= float(scale) * 0.51
    positive = nybble.quantize(x + 2, "int4_g64_asym")
    assert int(positive.zero_point) == -8, "the range always includes zero"


def test_nvfp4_scales_are_the_published_formula() -> None:
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    q = nybble.quantize(x, "nvfp4")
    f32 = lambda v: exact.round(table.FP32, v)  # noqa: E731
    encode = f32(Fraction(448 * 6) / Fraction(float(x.abs().max())))
    assert float(q.tensor_scale) == f32(1 / Fraction(encode))
    for row in range(8):
        for group in range(4):
            amax = f32(Fraction(float(x[row, 16 * group : 16 * group + 16].abs().max())) / 6)
            expected = exact.encode(table.E4M3, f32(Fraction(encode) * Fraction(amax)))
            assert int(q.scale[row, group]) == expected
    assert int(q.scale.max()) == 0x7E, "the largest block gets the largest scale"


def test_noise_levels_on_gaussian_data_are_the_known_ones() -> None:
    """SQNR in dB on iid N(0, 1), measured independently: NVFP4 20.45, MXFP4 floor 18.78, encode-centric 18.58,
    four-over-six 21.24; E1M2 under FP32 scales 21.39 and E2M1 20.53."""
    x = torch.randn(1024, 1024, generator=torch.Generator().manual_seed(0))

    def sqnr(name: str, rule: str | None = None) -> float:
        error = nybble.quantize(x, name, rule=rule).dequantize() - x
        return 10 * math.log10(float(x.square().sum() / error.square().sum()))

    expected = {("nvfp4", None): 20.45, ("mxfp4", "floor"): 18.78, ("mxfp4_encode", None): 18.58,
                ("nvfp4", "four_over_six"): 21.24, ("ufp4", None): 21.39}  # fmt: skip
    for (name, rule), level in expected.items():
        assert sqnr(name, rule) == pytest.approx(level, abs=0.03), (name, rule)


def test_four_over_six_is_never_worse_in_any_block() -> None:
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(1))
    chosen = nybble.quantize(x, "nvfp4", rule="four_over_six")
    fmt = chosen.format
    tensor = scales.tensor_scale("four_over_six", fmt, x.abs().max())
    from nybble.quantize.blocks import cut

    plain = scales.two_level(cut(x, fmt), fmt, tensor).scale
    error = scales.squared_error(cut(x, fmt), fmt, plain, tensor)
    got = cut((chosen.dequantize() - x).double().square(), fmt).sum((-3, -1))
    assert (got <= error * (1 + 1e-6)).all()
    assert (got < error * 0.99).any()
    assert float(chosen.scales()[0].max() / chosen.tensor_scale) <= 384


def test_a_held_amax_leaves_room_only_in_wide_scales() -> None:
    """Growing past the held amax breaks E4M3 scales at once and UE5M3 scales from 61,440/448 = 137x on
    (arXiv 2609.02846)."""
    x = torch.randn(16, 256, generator=torch.Generator().manual_seed(2))

    def error(name: str, growth: float) -> float:
        grown = x * growth
        q = nybble.quantize(grown, name, rule="held", tensor_amax=float(x.abs().max()))
        return float((q.dequantize() - grown).norm() / grown.norm())

    assert error("nvfp4", 1.0) < 0.11
    assert error("nvfp4", 8.0) > 0.3
    assert error("ue5m3fp4", 130.0) < 0.11
    assert error("ue5m3fp4", 600.0) > 0.3
    with pytest.raises(BadInput, match="tensor_amax"):
        nybble.quantize(x, "nvfp4", rule="held")


def test_ue5m3_scales_that_round_to_zero_become_one() -> None:
    x = torch.zeros(1, 32)
    x[0, 0] = 1.0
    q = nybble.quantize(x, "ue5m3fp4")
    assert q.scales()[0][0, 1] == q.tensor_scale


def test_ternary_and_binary_use_the_mean_magnitude() -> None:
    x = torch.tensor([[0.1, -0.9, 0.5, -0.1]])
    s = float(torch.tensor(0.4).bfloat16())
    assert nybble.quantize(x, "ternary_channel").dequantize()[0].tolist() == [0.0, -s, s, 0.0]
    assert nybble.quantize(x, "binary_channel").dequantize()[0].tolist() == [s, -s, s, -s]


def test_rules_refuse_formats_they_do_not_fit() -> None:
    x = torch.randn(2, 64, generator=torch.Generator().manual_seed(0))
    for name, rule in [("int4_g64", "floor"), ("mxfp4", "two_level"), ("int4_g64", "minmax"), ("int4_g64", "absmean"),
                       ("mxfp4", "encode_centric")]:  # fmt: skip
        with pytest.raises(BadInput):
            nybble.quantize(x, name, rule=rule)
    with pytest.raises(UnknownName, match="rceil"):
        nybble.quantize(x, "mxfp4", rule="rceill")


def test_store_marks_what_is_not_finite() -> None:
    for name in ("nvfp4", "mxfp4", "int4_g32", "ufp4"):
        fmt = block(name)
        stored = scales.store(torch.tensor([[1.0, torch.inf, torch.nan, 0.0]]), fmt)
        if stored.dtype == torch.uint8:
            assert math.isnan(array.values(fmt.scale)[int(stored[0, 1])])
        values = nybble.quantize(torch.full((1, 4), torch.nan), fmt, check=False).dequantize()
        assert values.isnan().all(), name
