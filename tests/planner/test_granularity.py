"""The model of granularity: what it says of the machines in APEX4's paper, and whose arithmetic it is."""

import pytest

from nybble import costs
from nybble.errors import Unsupported
from nybble.formats import table
from nybble.planner import granularity, machines, predict


@pytest.mark.parametrize(("name", "reported"), [("l40s", 8), ("rtx3090", 16), ("a40", 16), ("a100", 64)])
def test_rho_is_what_the_paper_reports(name: str, reported: int) -> None:
    assert granularity.rho(machines.get(name)) == pytest.approx(reported, rel=0.02)


def test_groups_of_128_hide_where_the_paper_found_them_to_and_not_on_the_a100() -> None:
    assert [granularity.choose(machines.get(name)) for name in ("l40s", "rtx3090", "a40")] == [64, 64, 128]
    assert granularity.choose(machines.get("a100")) is None
    assert granularity.choose(machines.get("h200")) == 128


def test_halving_the_group_doubles_what_is_exposed() -> None:
    for machine in (machines.get("h200"), machines.get("a100")):
        assert granularity.exposed(machine, 32) == pytest.approx(4 * granularity.exposed(machine, 128))
        assert granularity.slowdown(machine, 1 << 20) == 1


@pytest.mark.parametrize("group", [32, 64, 128])
def test_it_is_the_ratio_of_the_planners_terms(group: int) -> None:
    """The same counts as costs.linear's, where nothing else is done on scalar units."""
    fmt, h200 = table.block(f"int8_g{group}"), machines.get("h200")
    terms = predict.terms(costs.linear(4096, 4096, 4096, fmt, fmt)[0].steps[-1], h200)
    assert terms.scalar / terms.compute == pytest.approx(granularity.exposed(h200, group))


def test_a_machine_without_integer_products_is_refused() -> None:
    with pytest.raises(Unsupported, match="no integer products"):
        granularity.choose(machines.get("c2075"))
