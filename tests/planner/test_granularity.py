"""The model of granularity: what it says of the machines in APEX4's paper, and whose arithmetic it is."""

import json
from pathlib import Path

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
        assert granularity.slowdown(machine, 1 << 20) == pytest.approx(1, abs=1e-3)
        assert granularity.exposed(machine, 64, both=False) < granularity.exposed(machine, 64)


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_it_is_the_ratio_of_the_planners_terms(group: int, both: bool) -> None:
    """The same counts as costs.linear's, where nothing else is done on scalar units."""
    fmt, h200 = table.block(f"int8_g{group}"), machines.get("h200")
    other = fmt if both else table.block("int8_token")
    terms = predict.terms(costs.linear(4096, 4096, 4096, fmt, other)[0].steps[-1], h200)
    assert terms.turns / terms.compute == pytest.approx(granularity.exposed(h200, group, both))
    assert terms.seconds >= terms.compute + terms.turns


def test_a_machine_without_integer_products_is_refused() -> None:
    with pytest.raises(Unsupported, match="no integer products"):
        granularity.choose(machines.get("c2075"))


def test_slowdowns_measured_on_an_h200_are_within_a_quarter() -> None:
    """Over the product with scales of whole rows, same run, [2048 and 4096, 14336, 4096]."""
    path = Path(__file__).parents[2] / "benchmarks" / "results" / "h200" / "activations.json"
    rows = [row for row in json.loads(path.read_text())["rows"] if row["kernel"].startswith("narrow_cuda")]
    h200, seen = machines.get("h200"), 0
    for m in (2048, 4096):
        us = {(row["weight"], row["activation"]): row["us"] for row in rows if (row["m"], row["n"]) == (m, 14336)}
        for group in granularity.GROUPS:
            for activation, both in ((f"int4_g{group}", True), ("int8_token", False)):
                whole = us["int4_channel", "int4_token" if both else "int8_token"]
                measured = us[f"int4_g{group}", activation] / whole
                assert measured == pytest.approx(granularity.slowdown(h200, group, both), rel=0.25)
                seen += 1
    assert seen == 12
