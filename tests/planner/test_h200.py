"""Predictions for the H200, written before they were compared, and the comparison with the committed measurements."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import house
from nybble import costs
from nybble.planner import predict


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("bench_planner", house.ROOT / "benchmarks" / "planner.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_planner"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_predictions_are_still_those_that_were_written(bench: ModuleType) -> None:
    written, now = json.loads(bench.PREDICTIONS.read_text(encoding="utf-8"))["cells"], bench.predict()["cells"]
    assert list(written) == list(now)
    kept = [cell for cell in written if cell.split()[0] not in bench.RETHOUGHT]
    assert {cell: written[cell] for cell in kept} == {cell: now[cell] for cell in kept}
    assert {t.scheme for t in bench.measured(bench.result_files())}.isdisjoint(bench.RETHOUGHT), "none is compared"
    assert all(now[cell] >= written[cell] for cell in written), "work that takes turns is not faster"


def test_what_takes_turns_is_near_what_was_measured(bench: ModuleType) -> None:
    """Over bf16 at [2048, 14336, 4096], with groups of 128 and both operands in four bits: 0.94x, not the 1.7x of work
    that overlaps."""
    us = {name: bench.microseconds(name, 14336, 4096, 2048, bench.h200()) for name in ("bf16", "W4A4")}
    assert us["bf16"] / us["W4A4"] == pytest.approx(0.94, rel=0.1)


# (N, K, M): cuBLAS bf16, us; x: speed over it of the best int4 kernels that others offer (Humming 0.1.19, group 128).
PEERS = {
    (28672, 8192, 1): (116.4, 2.74), (28672, 8192, 16): (117.1, 2.45), (28672, 8192, 64): (123.3, 1.68),
    (28672, 8192, 256): (198.7, 1.09), (28672, 8192, 2048): (1389.0, 1.05), (4096, 4096, 1): (14.3, 1.55),
    (14336, 4096, 1): (36.5, 2.32), (4096, 14336, 1): (38.0, 2.40),
}  # fmt: skip


@pytest.mark.parametrize("cell", PEERS, ids=str)
def test_a_prediction_bounds_the_best_kernels_of_others(bench: ModuleType, cell: tuple[int, int, int]) -> None:
    (n, k, m), (us, x) = cell, PEERS[cell]
    machine = bench.h200()
    assert bench.microseconds("bf16", n, k, m, machine) <= 1.05 * us
    assert bench.microseconds("W4A16", n, k, m, machine) <= 1.05 * us / x


def test_ozaki_with_measured_ceilings(bench: ModuleType) -> None:
    # Published for GH200 with 15 int8 moduli: 53.7 against 61.5 TFLOP/s at 4096, 88.5 against 61.2 at 16384.
    def pays(n: int) -> bool:
        native, int8, _ = (predict.predict(route, bench.h200()).seconds for route in costs.product_fp64(n, n, n))
        return int8 < native

    assert (pays(4096), pays(16384)) == (False, True)


@pytest.fixture
def timings(bench: ModuleType) -> list[Any]:
    return bench.measured(bench.result_files()) or pytest.skip("no measurements of linear are committed yet")


def test_rivals_and_emulations_are_no_measurements_of_ours(bench: ModuleType, tmp_path: Path) -> None:
    kernels = {
        "cublas": "bf16",
        "linear_w4a16_cuda": "int4_g128",
        "humming": "int4_g128",
        "linear_dequantize": "nf4_g64",
    }
    rows = [{"format": f, "kernel": kernel, "n": 8, "k": 16, "m": 1, "us": 2.0} for kernel, f in kernels.items()]
    path = tmp_path / "linear.json"
    path.write_text(json.dumps({"rows": rows}), encoding="utf-8")
    assert [t.scheme for t in bench.measured([path])] == ["bf16", "W4A16"]
    for other in ({"rows": [{"scheme": "bf16", "ms": 3.0}]}, {"rows": 7}, []):  # of other benchmarks
        path.write_text(json.dumps(other), encoding="utf-8")
        assert bench.measured([path]) == []


@pytest.fixture
def held_out(bench: ModuleType, timings: list[Any]) -> dict[str, float]:
    """How lines measured on two shapes did on every other one."""
    machine = bench.h200()
    others = [t for t in timings if (t.n, t.k) not in bench.ANCHORS]
    return bench.summary(bench.cells(others, machine, bench.calibrate(timings, machine)))


def test_predictions_on_held_out_shapes(bench: ModuleType, held_out: dict[str, float]) -> None:
    assert held_out["cells"] > 0
    assert held_out["within"] >= bench.CELLS


def test_the_fastest_scheme_on_held_out_shapes(bench: ModuleType, held_out: dict[str, float]) -> None:
    assert held_out["right"] >= bench.WINNERS


def test_the_page_says_how_predictions_did(bench: ModuleType, timings: list[Any], held_out: dict[str, float]) -> None:
    peak = bench.summary(bench.cells(timings, bench.h200()))
    page = (house.ROOT / "docs" / "why" / "planner.md").read_text(encoding="utf-8")
    right = round(held_out["choices"] * held_out["right"])
    said = (
        f"{peak['within']:.0%} of {peak['cells']} cells within 20 %, the fastest scheme in {peak['right']:.0%} of "
        f"{peak['choices']} choices; with lines {held_out['within']:.0%} of {held_out['cells']} held-out cells, the "
        f"fastest in {right} of {held_out['choices']}"
    )
    assert said in " ".join(page.split())


def test_peaks_bound_what_was_measured(bench: ModuleType, timings: list[Any]) -> None:
    """Nothing measured is faster than the peaks allow, but for the 10 % by which runs differ."""
    assert [c for c in bench.cells(timings, bench.h200()) if c.error > 0.10] == []
