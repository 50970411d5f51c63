"""Questions stay within what a problem allows, and go beyond what it shows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from collection import PROBLEMS
from nybble.judge import cases
from nybble.judge.problem import Case, Problem, same, seed_of
from nybble.judge.wire import BrokenWire, pack, unpack


def _problem(name: str, seed: int = 1) -> Problem:
    problem = Problem(str(PROBLEMS / f"{name}.py"))
    problem.build(seed)
    return problem


def test_structure_is_seen(rng: torch.Generator) -> None:
    full = torch.randn(64, 64, generator=rng)
    assert not cases.structured(full)
    assert not cases.structured(full.bfloat16())
    assert not cases.structured(torch.rand(3, 5, generator=rng))
    for value in (full + full.T, full.tril(), full.triu(), torch.eye(64), torch.ones(64, 64), full.sign()):
        assert cases.structured(value)


def test_a_problem_for_positive_numbers_is_asked_positive_ones() -> None:
    problem = _problem("x_log_x")
    asked = {}
    for pair in cases.redrawn(problem, 1, cases.DRAWS):
        asked[pair[0].label] = next((case for case in pair if problem.expect(case) is not None), None)
    assert all(case is None or bool((case.inputs[0] > 0).all()) for case in asked.values())
    assert asked["tiny"] is not None
    assert asked["negated"] is not None


def test_sizes_are_those_the_reference_takes() -> None:
    labels = [case.label for case in cases.shapes(_problem("linear_relu"), 1)]
    assert labels == ["size 64 → 63", "size 64 → 65", "size 64 → 61", "size 64 → 1"]
    both = [case.inputs for case in cases.shapes(_problem("matmul"), 1)]
    assert all(a.shape[1] == b.shape[0] for a, b in both)
    assert {a.shape[1] for a, b in both} > {159, 161}
    assert list(cases.shapes(_problem("triangular"), 1)) == []


def test_strides_keep_the_values() -> None:
    problem = _problem("matmul")
    base = problem.inputs(seed_of(1, "strides"))
    for case in cases.strides(problem, 1):
        assert all(same(a.contiguous(), b) for a, b in zip(case.inputs, base, strict=True))
        assert any(not v.is_contiguous() for v in case.inputs)


def test_dead_weights_come_alive() -> None:
    problem = _problem("affine")
    state = cases.new_state(problem, 3)
    assert bool((problem.state["gain"] == 1).all())
    assert bool((problem.state["bias"] == 0).all())
    assert state["gain"].unique().numel() > 100
    assert state["bias"].unique().numel() > 100
    assert bool((state["gain"] > 0).all())


def test_the_reference_is_asked_without_being_changed() -> None:
    problem = _problem("add_one_")
    inputs = problem.inputs(1)
    before = inputs[0].clone()
    expected = problem.expect(Case("x", inputs))
    assert expected is not None
    assert same(inputs[0], before)
    assert expected.touched == {0}
    assert same(expected.after[0], before + 1)


LOOKUP = """import torch
def look(rows, at): return rows[at.long()]
def get_inputs(): return [torch.randn(24, 8), torch.full((3,), 20, dtype=torch.int32)]
"""


def test_indices_stay_inside_what_they_point_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "look.py").write_text(LOOKUP)
    problem = Problem(f"{tmp_path}/look.py:look", "cuda")
    problem.build(1)
    asked: list[Case] = []
    monkeypatch.setattr(problem, "expect", asked.append)  # what is asked here would run on the GPU
    assert list(cases.shapes(problem, 1)) == []
    assert {len(case.inputs[0]) for case in asked} == {23, 24, 25}
    assert cases.no_rows(problem, 1) is None
    plain = cases.given(problem, 1)
    assert problem.within(plain)
    assert not problem.within(Case("beyond", [plain.inputs[0], plain.inputs[1] + 4]))


@pytest.mark.parametrize("seed", range(3))
def test_questions_come_from_the_seed_alone(seed: int) -> None:
    torch.manual_seed(seed)
    state = torch.get_rng_state()
    one = cases.given(_problem("matmul"), 5, "label").inputs
    assert torch.equal(torch.get_rng_state(), state)
    assert same(one[0], cases.given(_problem("matmul"), 5, "label").inputs[0])
    assert not same(one[0], cases.given(_problem("matmul"), 6, "label").inputs[0])
    assert not same(one[0], cases.given(_problem("matmul"), 5, "other").inputs[0])


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool, torch.uint8]
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)])
def test_values_cross_the_wire(dtype: torch.dtype, shape: tuple[int, ...], rng: torch.Generator) -> None:
    value = (torch.rand(shape, generator=rng) * 4).to(dtype)
    blobs: list[bytes | memoryview] = []
    tree = pack({"a": [value, 1, (2.5, None)], "b": dtype, "c": "text"}, blobs)
    back = unpack(tree, [bytearray(b) for b in blobs])
    assert same(back["a"][0], value)
    assert back["a"][1:] == [1, (2.5, None)]
    assert (back["b"], back["c"]) == (dtype, "text")


def test_one_element_of_odd_stride_crosses_the_wire() -> None:
    value = torch.arange(6, dtype=torch.bfloat16)[1::3][:1]
    blobs: list[bytes | memoryview] = []
    assert same(unpack(pack(value, blobs), [bytearray(b) for b in blobs]), value)


@pytest.mark.parametrize(
    "tree",
    [
        {}, 7, {"pickle": 0}, {"torch": "load"}, {"torch": "no_such_name"}, {"list": 3},
        {"tensor": 0, "dtype": "float32", "shape": [3], "stride": [1]},
        {"tensor": 4, "dtype": "float32", "shape": [1], "stride": [1]},
        {"tensor": 0, "dtype": "load", "shape": [1], "stride": [1]},
        {"tensor": 0, "dtype": "float32", "shape": [-1, -1], "stride": [1, 1]},
    ],
)  # fmt: skip
def test_a_candidate_cannot_send_what_is_not_a_value(tree: object) -> None:
    with pytest.raises(BrokenWire):
        unpack(tree, [bytearray(4)])
