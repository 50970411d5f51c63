"""Costs say what an op asks of a machine; ops and the planner read the same ones."""

from __future__ import annotations

import pytest
import torch

import nybble
from nybble import costs
from nybble.errors import Unsupported
from nybble.formats import table
from nybble.ops.linear import LINEAR
from nybble.quantize.schemes import SCHEMES


@pytest.mark.parametrize("name", sorted(SCHEMES))
def test_every_scheme_has_a_route_on_wide_numbers(name: str) -> None:
    row = SCHEMES[name]
    routes = costs.linear(8, 64, 128, row.weight, row.activation)
    assert any(route.units <= {"bf16"} for route in routes)
    for route in routes:
        product = route.steps[-1]
        assert product.flops == 2 * 8 * 64 * 128
        assert product.nbytes >= costs.weight_bytes(row.weight, 64, 128)
        assert len(route.steps) == (1 if row.activation is None else 2)
        assert all(count > 0 for step in route.steps for count in step.gamma.values())


@pytest.mark.parametrize(
    ("weight", "activation"), [("int4_g128", None), ("int8_channel", "int8_token"), ("nvfp4", None)]
)
def test_an_ops_cost_is_the_planners(weight: str, activation: str | None, rng: torch.Generator) -> None:
    w = nybble.quantize(torch.randn(64, 256, generator=rng), weight)
    x = torch.randn(4, 256, generator=rng).bfloat16()
    rounded = table.block(activation) if activation else None
    cost = LINEAR.cost(x, w, None, rounded)
    steps = costs.linear(4, 64, 256, w.format, rounded)[0].steps
    assert (cost.unit, cost.alpha, cost.beta) == (steps[-1].unit, steps[-1].alpha, steps[-1].beta)
    assert cost.gamma == steps[-1].gamma
    assert cost.launches == len(steps)
    assert costs.weight_bytes(w.format, 64, 256) == w.nbytes


def test_reconstruction_grows_with_groups_and_with_tiles_of_tokens() -> None:
    grouped, channel = (costs.linear(256, 64, 1024, table.block(w), table.block(a))[0].steps[-1].gamma
                        for w, a in (("int4_g128", "int4_g128"), ("int4_channel", "int4_token")))  # fmt: skip
    assert grouped["convert"] == 8 * channel["convert"] == 8 * 256 * 64
    one, two = (costs.linear(m, 64, 1024, table.block("int4_g128"))[0].steps[0].gamma["logic"] for m in (128, 129))
    assert two == 2 * one


def test_widening_is_not_native() -> None:
    routes = {route.name: route.native for route in costs.linear(1, 64, 128, *2 * (table.block("int4_g128"),))}
    assert routes["int4 products"]
    assert not routes["int8 products"]


def test_an_op_without_a_cost_is_named() -> None:
    with pytest.raises(Unsupported, match=r"'softmax' declares no cost.*linear"):
        costs.routes("softmax", 1, 2, 3)
