"""linear_exact on the CPU: the fast twin against the definition, and the definition against exact fractions."""

from __future__ import annotations

import math
import random
from fractions import Fraction
from itertools import product

import pytest
import torch

import nybble
from nybble.errors import BadInput
from nybble.ops._promised_linear import RUN
from nybble.ops.linear_exact import LINEAR_EXACT, cpu, linear_exact
from nybble.ops.linear_exact.reference import CHAINS, fma, linear_exact_reference

INTEGER = {2: torch.int16, 4: torch.int32}
HALVES = (torch.bfloat16, torch.float16)
CASES = dict(LINEAR_EXACT.cases())


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(INTEGER[a.element_size()]), b.view(INTEGER[b.element_size()]))


def scattered(*shape: int, dtype: torch.dtype, seed: int, powers: int) -> torch.Tensor:
    """Normal numbers times powers of two up to 2^powers either way: sums that round, products that leave the range."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randint(-powers, powers + 1, shape, generator=generator).double())
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def fraction_to_float32(value: Fraction) -> float:
    """Round to nearest, ties to even, subnormals and overflow included."""
    if value == 0:
        return 0.0
    magnitude = abs(value)
    exponent = max(math.frexp(float(magnitude))[1] if magnitude > Fraction(2) ** -1000 else -1000, -125) - 24
    unit = Fraction(2) ** exponent
    steps = magnitude / unit
    whole = steps.numerator // steps.denominator
    rest = steps - whole
    whole += rest > Fraction(1, 2) or (rest == Fraction(1, 2) and whole % 2 == 1)
    result = whole * unit
    found = math.inf if result >= Fraction(2) ** 128 else float(result)
    return math.copysign(found, value)


def test_fma_rounds_once() -> None:
    """Against fractions, with addends so near a tie that rounding twice would go wrong."""
    draw = random.Random(0)
    triples = []
    for _ in range(3000):
        a, b = (draw.randrange(1, 1 << 24) * 2.0 ** draw.randrange(-90, 40) for _ in range(2))
        near = float(torch.tensor(a * b, dtype=torch.float32)) * 2.0 ** draw.choice(
            (-30, -25, -24, -23, 0, 23, 24, 25, 30)
        )
        c = float(torch.tensor(near * draw.choice((1, -1, 1 + 2.0**-23)), dtype=torch.float32))
        triples.append((a, b, c if math.isfinite(c) else 0.0))
    # A hair below and above half a unit in the last place of an odd and an even number, lost in float64.
    for power, side, last in product((-100, 0, 90), (1, -1), (1, 2)):
        hair = 1 + side * 2.0**-20
        triples.append((hair * 2.0 ** (power - 24), hair if side > 0 else 2 - hair, (1 + last * 2.0**-23) * 2.0**power))
    a, b, c = (torch.tensor(column, dtype=torch.float32) for column in zip(*triples, strict=True))
    expected = [fraction_to_float32(Fraction(x) * Fraction(y) + Fraction(z))
                for x, y, z in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]  # fmt: skip
    got = fma(a, b, c)
    assert got.tolist() == expected
    twice = (a.double() * b.double() + c.double()).to(torch.float32)
    assert not torch.equal(twice, got), "the triples never reach a case where rounding twice goes wrong"


def test_the_order_is_the_one_written_down() -> None:
    """A naive loop over chains and columns, on numbers that cancel so badly that any other order shows."""
    k = 2 * RUN * CHAINS + 45
    x, w = (scattered(k, dtype=torch.bfloat16, seed=seed, powers=12) for seed in (1, 2))
    total, one = torch.zeros(()), lambda t, at: t[at].to(torch.float32)
    for chain in range(CHAINS):
        partial = torch.zeros(())
        for column in range(k):
            if column // RUN % CHAINS == chain:
                partial = fma(one(x, column), one(w, column), partial)
        total = total + partial
    expected = total.to(torch.bfloat16).view(1)
    assert same_bits(linear_exact_reference(x, w[None]), expected)
    assert same_bits(linear_exact(x, w[None]), expected)
    exact_sum = linear_exact(x.flip(0), w.flip(0)[None].contiguous())
    wide = linear_exact(x.to(torch.float32), w[None]), linear_exact(x.flip(0).to(torch.float32), w.flip(0)[None])
    assert not torch.equal(*wide), f"another order must show: {exact_sum}"


@pytest.mark.parametrize("label", CASES)
def test_the_twin_is_the_definition_on_every_case(label: str) -> None:
    args = CASES[label]
    before = args[0].clone()
    assert same_bits(linear_exact(*args), linear_exact_reference(*args))
    assert torch.equal(args[0], before), "the input is left alone"


@pytest.mark.parametrize("powers", [0, 20, 70])
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_the_twin_is_the_definition_beyond_the_range(dtype: torch.dtype, powers: int) -> None:
    """Subnormal numbers, products that vanish or overflow and come back, infinities."""
    x, w = (scattered(n, 300, dtype=dtype, seed=n, powers=powers) for n in (5, 7))
    y = linear_exact(x, w)
    assert same_bits(y, linear_exact_reference(x, w))
    wide = linear_exact(x.to(torch.float32), w)
    assert same_bits(wide, linear_exact_reference(x.to(torch.float32), w))


def test_products_that_are_not_float32_numbers_are_noticed() -> None:
    large, tiny = torch.tensor([[2.0**64]], dtype=torch.bfloat16), torch.tensor([[2.0**-70]], dtype=torch.bfloat16)
    assert not cpu.exact_products(large, large)
    assert not cpu.exact_products(tiny, tiny)
    assert cpu.exact_products(large, tiny)
    assert cpu.exact_products(torch.zeros(1, 1, dtype=torch.bfloat16), large)
    assert not cpu.exact_products(torch.randn(4, 4), torch.randn(4, 4))
    cancel = torch.tensor([[2.0**64, 1.0]], dtype=torch.bfloat16)
    start = torch.tensor(
        [[-(2.0**63), 2.0**127]], dtype=torch.bfloat16
    )  # -2^127 + 2^127: inside; one product alone not
    assert linear_exact(cancel, start).item() == 0
    assert linear_exact(torch.cat([cancel, cancel], 1), torch.cat([start, -start], 1)).item() == 0


def test_nan_is_one_kind_and_zero_is_positive() -> None:
    x = torch.tensor([[math.inf, 1.0], [0.0, math.nan], [-0.0, -0.0]])
    for dtype, code in ((torch.bfloat16, 0x7FC0), (torch.float16, 0x7E00), (torch.float32, 0x7FC00000)):
        y = linear_exact(x.to(dtype), torch.tensor([[0.0, 1.0]], dtype=dtype))
        assert y.view(INTEGER[y.element_size()]).flatten().tolist() == [code, code, 0]


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, "int8_channel", "int4_g128"], ids=str)
def test_a_row_of_a_batch_is_the_row_alone(kind: torch.dtype | str) -> None:
    original = scattered(70, 600, dtype=torch.float32, seed=3, powers=3)
    w = nybble.quantize(original, kind) if isinstance(kind, str) else original.to(kind)
    dtype = torch.bfloat16 if isinstance(kind, str) else kind
    x = scattered(37, 600, dtype=dtype, seed=4, powers=5)
    whole = linear_exact(x, w)
    assert all(same_bits(whole[i], linear_exact(x[i], w)) for i in range(len(x)))
    assert same_bits(whole, linear_exact(x, w)), "run to run"


def test_outputs_do_not_depend_on_their_neighbours_or_on_threads() -> None:
    x, w = (
        scattered(3, 520, dtype=torch.bfloat16, seed=5, powers=5),
        scattered(2100, 520, dtype=torch.bfloat16, seed=6, powers=5),
    )
    whole, threads = linear_exact(x, w), torch.get_num_threads()
    assert same_bits(whole[:, 2048:], linear_exact(x, w[2048:]))
    try:
        torch.set_num_threads(2 if threads == 1 else 1)
        assert same_bits(whole, linear_exact(x, w))
    finally:
        torch.set_num_threads(threads)


def test_autocast_changes_nothing() -> None:
    x, w = (
        scattered(4, 300, dtype=torch.float32, seed=7, powers=2),
        scattered(9, 300, dtype=torch.float32, seed=8, powers=2),
    )
    plain = linear_exact(x, w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same_bits(linear_exact(x, w), plain)


def test_flushing_to_zero_is_refused() -> None:
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush")
    try:
        with pytest.raises(BadInput, match="flushed to zero"):
            linear_exact(torch.ones(1, 4), torch.ones(1, 4))
    finally:
        torch.set_flush_denormal(False)


def test_what_does_not_fit_is_refused_with_values() -> None:
    w = torch.ones(16, 32)
    with pytest.raises(BadInput, match=r"inputs, got torch\.float64; nearest: torch\.nn\.functional\.linear"):
        linear_exact(torch.ones(2, 32).double(), w)
    with pytest.raises(BadInput, match=r"weights, got torch\.float64"):
        linear_exact(torch.ones(2, 32), w.double())
    with pytest.raises(BadInput, match=r"\[16, 32\]; x must end in 32"):
        linear_exact(torch.ones(2, 31), w)
    with pytest.raises(BadInput, match=r"\(15,\), expected \(16,\)"):
        linear_exact(torch.ones(2, 32), w, torch.zeros(15))
    with pytest.raises(BadInput, match="shape"):
        linear_exact(torch.ones(2, 32), torch.ones(32))


def test_no_rows_no_columns_no_outputs() -> None:
    assert linear_exact(torch.ones(2, 0, 32), torch.ones(16, 32)).shape == (2, 0, 16)
    assert torch.equal(
        linear_exact(torch.ones(3, 0), torch.ones(4, 0), torch.arange(4.0)), torch.arange(4.0).expand(3, 4)
    )
    assert linear_exact(torch.ones(3, 32), torch.ones(0, 32)).shape == (3, 0)


def test_compiles_whole() -> None:
    w, q = torch.randn(16, 64), nybble.quantize(torch.randn(16, 64), "int4_g64")
    compiled = torch.compile(lambda x: linear_exact(x, w) + linear_exact(x, q), fullgraph=True, backend="aot_eager")
    for m in (2, 5):
        x = torch.randn(m, 64)
        assert same_bits(compiled(x), linear_exact(x, w) + linear_exact(x, q))
