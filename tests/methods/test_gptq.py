"""GPTQ against the textbook, on every weight format, and on inputs that are not as they should be."""

import pytest
import torch

from method_layers import layer
from nybble.errors import BadInput
from nybble.formats import array, table
from nybble.methods import gptq, rtn, schur
from nybble.methods.columns import ordered
from nybble.methods.layer import Inputs, Layer, absorbed, factor, relative_error
from nybble.ops.linear.reference import round_activation
from nybble.ops.round_columns.reference import nearest
from nybble.quantize import elements
from nybble.quantize.api import encode_quotient
from nybble.quantize.schemes import Scheme
from textbook_gptq import gptq as textbook

FORMATS = (
    "nvfp4", "mxfp4", "int4_g32", "int4_g32_asym", "nf4_g64", "ufp4", "int8_channel", "int2_g32", "mxint8",
    "fp8_block128", "fp8_tensor", "mxfp6_e2m3", "ue5m3fp4", "int3_g64_asym", "fp4bnb_g64",
)  # fmt: skip


def of(name: str) -> Scheme:
    return Scheme(name, table.block(name))


@pytest.mark.parametrize("seed", range(20))
def test_equals_the_textbook_on_random_layers(seed: int) -> None:
    name = FORMATS[seed % len(FORMATS)]
    one = layer(of(name), n=8 + 3 * seed, k=(64, 80, 129)[seed % 3], seed=seed)
    rounded = gptq.apply(one, gptq.Config(act_order=False)).dequantize(torch.float32).double()
    assert torch.equal(rounded, torch.from_numpy(textbook(one)))


@pytest.mark.parametrize("fmt", sorted(table.BLOCKS))
def test_serves_every_format_and_never_does_worse_than_nothing(fmt: str) -> None:
    one = layer(of(fmt), n=24, k=96, seed=3)
    h = one.inputs.second_moment
    q = gptq.apply(one, gptq.Config())
    nearest = rtn.apply(one, rtn.Config())
    assert (q.format, q.shape, q.dtype) == (nearest.format, nearest.shape, nearest.dtype)
    assert {n: (p.shape, p.dtype) for n, p in q.parts.items()} == {
        n: (p.shape, p.dtype) for n, p in nearest.parts.items()
    }
    error, rounding = relative_error(one.weight, q, h), relative_error(one.weight, nearest, h)
    coarse = table.block(fmt).element.bits <= 2
    assert error < (1.5 * rounding if coarse else 0.9 * rounding), (error, rounding)


def test_columns_by_weight_keep_groups_together_and_help_where_inputs_differ() -> None:
    diagonal = torch.tensor([1.0, 2, 3, 9, 8, 7, 5, 4, 6, 6.5])
    assert ordered(diagonal, 4, True).tolist() == [9, 8, 4, 5, 6, 7, 3, 2, 1, 0]
    assert ordered(diagonal, 10, True).tolist() == diagonal.argsort(descending=True).tolist()
    assert ordered(diagonal, 4, False).tolist() == list(range(10))
    plain, by_weight = [], []
    for seed in range(6):
        one = layer(of("int3_channel"), n=32, k=96, seed=seed)
        h = one.inputs.second_moment
        plain.append(relative_error(one.weight, gptq.apply(one, gptq.Config(act_order=False)), h))
        by_weight.append(relative_error(one.weight, gptq.apply(one, gptq.Config(act_order=True)), h))
    assert sum(by_weight) < sum(plain)


def test_the_factor_is_that_of_the_damped_inverse() -> None:
    seen = layer(of("nvfp4"), 4, 48, seed=0).inputs
    order = torch.randperm(48, generator=torch.Generator().manual_seed(0))
    found = seen.factor(0.01, order)
    h = seen.second_moment + 0.01 * seen.second_moment.diagonal().mean() * torch.eye(48, dtype=torch.float64)
    inverse = torch.linalg.inv(h[order][:, order])
    assert (found.upper.tril(-1) == 0).all()
    assert float((found.upper.t() @ found.upper - inverse).norm() / inverse.norm()) < 1e-10
    assert seen.factor(0.01, order) is found


def test_damping_grows_only_where_cholesky_fails() -> None:
    full = layer(of("nvfp4"), 4, 32, seed=0).inputs.second_moment
    assert factor(full, 0.0, torch.arange(32)).damping == 0
    one = torch.ones(32, 1, dtype=torch.float64)
    singular = factor(one @ one.t() - 0.05 * torch.eye(32), 0.01, torch.arange(32))
    assert singular.damping == pytest.approx(0.1)
    with pytest.raises(BadInput, match="NaN"):
        factor(full * torch.nan, 0.01, torch.arange(32))


def test_too_few_tokens_for_the_rank_still_give_finite_weights() -> None:
    one = layer(of("int4_g32"), n=8, k=96, seed=1, tokens=5)
    q = gptq.apply(one, gptq.Config())
    assert q.dequantize().isfinite().all()
    h = one.inputs.second_moment
    assert relative_error(one.weight, q, h) < relative_error(one.weight, rtn.apply(one, rtn.Config()), h)


def test_dead_channels_are_rounded_on_their_own() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(500, 64, generator=generator)
    x[:, 7] = 0
    seen = Inputs(64)
    seen.add(x)
    weight = torch.randn(8, 64, generator=generator)
    q = gptq.apply(Layer("l", weight, of("int8_channel"), weight.abs().amax(), seen), gptq.Config())
    nearest = rtn.apply(Layer("l", weight, of("int8_channel")), rtn.Config())
    assert torch.equal(q.unpack()[:, 7], nearest.unpack()[:, 7])
    assert not torch.equal(q.unpack(), nearest.unpack())


def test_without_inputs_it_says_so() -> None:
    with pytest.raises(BadInput, match="layer: this method needs to see inputs"):
        gptq.apply(Layer("layer", torch.ones(4, 32), of("nvfp4"), torch.tensor(1.0)), gptq.Config())


def test_inputs_add_up_and_map() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 16, generator=generator)
    whole, first, second = Inputs(16), Inputs(16), Inputs(16)
    whole.add(x.view(4, 10, 16))
    first.add(x[:13])
    second.add(x[13:])
    both = first.merge(second)
    expected = x.double().t() @ x.double() / 40
    for seen in (whole, both):
        assert seen.tokens == 40
        assert torch.equal(seen.amax, x.abs().amax(0))
        assert float((seen.second_moment - expected).norm() / expected.norm()) < 2.0**-20
    scale = torch.rand(16, generator=generator) + 0.5
    scaled = Inputs(16)
    scaled.add(x * scale)
    mapped = whole.mapped(scale)
    assert float((mapped.second_moment - scaled.second_moment).norm() / expected.norm()) < 2.0**-20
    assert torch.allclose(mapped.amax, scaled.amax, rtol=2.0**-22, atol=0)
    rotation = torch.linalg.qr(torch.randn(16, 16, generator=generator))[0]
    rotated = Inputs(16)
    rotated.add(x @ rotation)
    assert float((whole.mapped(rotation).second_moment - rotated.second_moment).norm() / expected.norm()) < 2.0**-18


def test_elements_of_integers_with_zero_points_are_whole() -> None:
    one = layer(of("int4_g32_asym"), n=8, k=64, seed=0)
    q = gptq.apply(one, gptq.Config())
    codes = elements.decode_int(q.format.element, q.unpack())
    assert codes.min() >= q.format.element.low
    assert codes.max() <= q.format.element.high
    assert q.zero_point.dtype == torch.int8


@pytest.mark.parametrize("fmt", sorted(table.BLOCKS))
def test_columns_are_rounded_as_quantize_rounds(fmt: str) -> None:
    """Values, ties between neighbours and their surroundings, beyond the ends, under an odd scale and zero points."""
    block = table.block(fmt)
    values = torch.tensor(array.values(block.element), dtype=torch.float32)
    values = values[values.isfinite()].unique()
    ties = (values[1:] + values[:-1]) / 2
    near = [torch.nextafter(t, torch.full_like(t, side)) for t in (ties, values) for side in (-9e9, 9e9)]
    x = torch.cat([values, ties, *near, 3 * values, torch.randn(500, generator=torch.Generator().manual_seed(0))])
    zero = (torch.arange(len(x)) % 5 - 2).to(torch.float32) if block.zero_point else None
    for scale in (1.0, 0.37):
        effective = torch.full_like(x, scale)
        rounded = nearest(block.element, x.double() * scale, effective, zero)
        stored = None if zero is None else zero[:, None].to(torch.int8)
        codes = encode_quotient(
            block, ((x.double() * scale).float() / effective)[:, None, None, None], stored
        ).flatten()
        expected = elements.decode(block.element, codes)
        assert torch.equal(rounded, expected if zero is None else expected - zero)
        whole = rounded if zero is None else rounded + zero
        again = elements.decode(block.element, elements.encode(block.element, whole))
        assert torch.equal(again, expected)


@pytest.mark.parametrize("method", [gptq, schur])
def test_weights_absorb_the_rounding_of_inputs(method: object) -> None:
    """The error that counts, |x W^T - a W'^T| on inputs not seen before, shrinks; without rounding nothing moves."""
    generator = torch.Generator().manual_seed(0)
    row = Scheme("W4A4_G32", table.block("int4_g32"), table.block("int4_g32"))
    mix = torch.linalg.qr(torch.randn(96, 96, generator=generator))[0] * 0.9 ** torch.arange(96)
    weight = torch.randn(64, 96, generator=generator)
    draw = lambda count: torch.randn(count, 96, generator=generator) @ mix.t()  # noqa: E731
    seen, plain = Inputs(96), Inputs(96)
    x = draw(2000)
    seen.add(x, round_activation(x, row.activation))
    plain.add(x)
    one, fresh = Layer("l", weight, row, weight.abs().amax(), seen), draw(2000)
    fed = round_activation(fresh, row.activation)

    def error(absorb: bool) -> float:
        q = method.apply(one, method.Config(absorb=absorb)).dequantize()
        return float((fresh @ weight.t() - fed @ q.t()).norm() / (fresh @ weight.t()).norm())

    assert error(True) < 0.9 * error(False)
    same = Layer("l", weight, row, weight.abs().amax(), plain)
    assert torch.equal(absorbed(same, 0.01), weight.double())
    assert method.apply(one, method.Config()).dtype == weight.dtype
