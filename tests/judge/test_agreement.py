"""Distances are free of scale, budgets come from honest code, and nothing that is not finite is forgiven."""

from __future__ import annotations

import pytest
import torch

from nybble.judge.agreement import budget, complaint, condition, distance

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("scale", [2.0**-60, 1.0, 2.0**60])
def test_distances_have_no_scale(scale: float, rng: torch.Generator) -> None:
    r = torch.randn(20, 30, generator=rng, dtype=torch.float64)
    y = r * (1 + 1e-3 * torch.randn(20, 30, generator=rng, dtype=torch.float64))
    assert distance(scale * y, scale * r) == distance(y, r)


def test_one_wrong_element_is_found_where_it_is(rng: torch.Generator) -> None:
    r = torch.randn(400, 500, generator=rng, dtype=torch.float64)
    y = r.float()
    y[123, 45] += 0.5
    found = complaint(y, budget(r, r.float()))
    assert found is not None
    assert found["element"] == "[123, 45]"
    assert float(found["seen"]) == pytest.approx(float(y[123, 45]))
    assert float(found["expected"]) == pytest.approx(float(r[123, 45]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_honest_rounding_is_within_budget_and_fewer_bits_are_not(dtype: torch.dtype, rng: torch.Generator) -> None:
    r = torch.randn(64, 64, generator=rng, dtype=torch.float64)
    honest = r.to(dtype)
    assert complaint(honest, budget(r, honest)) is None
    unit = torch.finfo(dtype).eps
    coarse = (r * (1 + 16 * unit * (torch.rand(64, 64, generator=rng, dtype=torch.float64) - 0.5))).to(dtype)
    assert (complaint(coarse, budget(r, honest)) is None) == (dtype in (torch.float32, torch.float64))
    coarser = (r * (1 + 2048 * unit * (torch.rand(64, 64, generator=rng, dtype=torch.float64) - 0.5))).to(dtype)
    assert complaint(coarser, budget(r, honest)) is not None


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_not_forgiven(value: float) -> None:
    r = torch.ones(4, 4, dtype=torch.float64)
    y = torch.ones(4, 4)
    y[1, 2] = value
    found = complaint(y, budget(r, torch.ones(4, 4)))
    assert found is not None
    assert found["element"] == "[1, 2]"
    assert distance(y, y.double()).worst == 0


def test_equality_is_asked_where_the_framework_attains_it() -> None:
    whole, third = torch.full((4,), 3.0, dtype=torch.float64), torch.full((4,), 1 / 3, dtype=torch.float64)
    assert budget(whole, whole.float(), want_exact=True).exact
    assert not budget(whole, whole.float()).exact
    assert not budget(third, third.float(), want_exact=True).exact
    off = torch.nextafter(torch.full((4,), 3.0), torch.tensor(4.0))
    assert complaint(off, budget(whole, whole.float(), want_exact=True)) is not None
    assert complaint(off, budget(whole, whole.float())) is None


def test_integers_and_empty_tensors() -> None:
    r = torch.tensor([1, 2, 3])
    assert complaint(r.clone(), budget(r, r)) is None
    assert complaint(torch.tensor([1, 2, 4]), budget(r, r)) is not None
    empty = torch.zeros(0, 5)
    assert complaint(empty, budget(empty.double(), empty)) is None


def test_the_condition_of_the_problem_widens_the_budget() -> None:
    r = torch.ones(8, dtype=torch.float64)
    plain = budget(r, r.float(), r)
    shaken = budget(r, r.float(), r * (1 + 1e-4))
    assert shaken.total > 100 * plain.total


def test_the_condition_of_an_op_multiplies_what_it_declares() -> None:
    r = torch.ones(8)
    assert condition(r * (1 + 2.0**-23), r) == 1.0
    assert condition(r * (1 + 2.0**-12), r) == pytest.approx(1024, rel=1e-3)
    assert condition(torch.full((8,), 1e-40), torch.zeros(8)) == 1.0
