"""The table of machines, machines in files, and measured ceilings over both."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nybble import machine as whole
from nybble.cli import plan as cli
from nybble.errors import BadInput, Unsupported
from nybble.planner import here, machines, measure, predict
from nybble.planner.plan import of_linear

ASKED_FOR = (
    "a100", "h100", "h200", "b200", "b300", "l4", "l40s", "a10g", "a40", "rtx3090", "rtx4090", "rtx5090", "rtxpro6000",
    "mi300x", "mi350", "orin-nano", "m4", "epyc-2c",
)  # fmt: skip


@pytest.mark.parametrize("name", ASKED_FOR)
def test_a_row_has_a_source_and_can_run_a_linear(name: str) -> None:
    row = machines.get(name)
    assert row.source
    assert any("launch" in note for note in row.uncertain) or "measured" in row.source
    assert of_linear(1, 4096, 4096, "W4A16", row).seconds > 0


def test_names_are_forgiving() -> None:
    assert machines.get("RTX 3090") is machines.get("rtx_3090") is machines.TABLE["rtx3090"]


def test_an_unknown_machine_names_the_nearest_and_how_to_describe_one() -> None:
    with pytest.raises(ValueError, match="rtx3090") as info:
        machines.get("rtx3080")
    assert "bandwidth_gbs" in str(info.value)


def test_the_example_is_a_machine(tmp_path: Path) -> None:
    path = tmp_path / "gpu.toml"
    path.write_text(machines.EXAMPLE, encoding="utf-8")
    row = machines.get(str(path))
    assert (row.units["int8"], row.bandwidth, row.scalars["convert"]) == (284e12, 936e9, pytest.approx(8.9e12))
    assert row.scalars["shift"] == row.scalars["float"]


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("name = 'x'", "memory_gb"),
        (machines.EXAMPLE.replace("float =", "flaot ="), "scalar_tera.float"),
        (machines.EXAMPLE.replace("bf16 = 71", "bf17 = 71"), "unknown unit 'bf17'"),
        (machines.EXAMPLE.replace("936", "-936"), "bandwidth"),
        (machines.EXAMPLE.replace("936", "inf"), "bandwidth"),
        (machines.EXAMPLE.replace("936", "'fast'"), "a machine looks like this"),
        (machines.EXAMPLE.replace("bf16 = 71", "bf16 = [71]"), "a machine looks like this"),
        ("name = ", "cannot be read"),
    ],
)
def test_a_file_that_describes_no_machine(tmp_path: Path, text: str, what: str) -> None:
    path = tmp_path / "gpu.toml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match=what):
        machines.get(str(path))


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtxpro6000"),
        ("NVIDIA L40", None),
        ("NVIDIA GH200 480GB", None),
    ],
)
def test_which_row_a_device_is(name: str, row: str | None) -> None:
    found = here.row_for(name)
    assert (found.name if found else None) == row


def test_measured_ceilings_replace_the_rows_and_are_marked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(here, "key", lambda cpu=False: "NVIDIA H200")
    assert here.machine() is machines.TABLE["h200"]
    measure.save(here.file_for("NVIDIA H200"), "NVIDIA H200", {"bandwidth": 4.2e12, "bf16": 7.8e14, "launch": 2e-6})
    row = here.machine()
    assert (row.bandwidth, row.units["bf16"], row.launch, row.units["fp8"]) == (4.2e12, 7.8e14, 2e-6, 1979e12)
    assert set(row.measured) == {"bandwidth", "bf16", "launch"}
    assert len(row.measured["bf16"]) == len("2026-11-30")


def test_an_unknown_machine_is_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(here, "key", lambda cpu=False: "Some CPU, 96 cores")
    with pytest.raises(Unsupported, match="--measure"):
        here.machine()
    found = {"memory": 1e12, "bandwidth": 1e11, "launch": 1e-5, "fp32": 2e12}
    measure.save(here.file_for("Some CPU, 96 cores"), "Some CPU, 96 cores", found)
    assert here.machine().units == {"fp32": 2e12}
    assert predict.best(_plain(), here.machine()).seconds > 0


@pytest.mark.parametrize(("kept", "said"), [(1.5, False), (2.5, True)])
def test_a_measurement_that_was_kept_waiting_says_so(
    kept: float, said: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of ten seconds a fifth may pass; a thread that came meanwhile counts whole, an older one what it waited since."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(here, "key", lambda cpu=False: "Some CPU, 96 cores")
    monkeypatch.setattr(here, "gpu_name", lambda: None)
    found = {"memory": 1e12, "bandwidth": 1e11, "launch": 1e-5, "fp32": 2e12}
    monkeypatch.setattr(measure, "ceilings", lambda *_: found)
    monkeypatch.setattr(measure, "timings", lambda *_: [])
    waits, clock = iter([{"1": 50.0}, {"1": 50.5, "2": kept}]), iter([0.0, 5.0, 10.0])
    monkeypatch.setattr(whole, "waited", lambda: next(waits))
    monkeypatch.setattr(cli.time, "monotonic", lambda: next(clock))
    cli._measure()
    assert ("other work kept the processors from it for 25%" in capsys.readouterr().err) is said


def _plain() -> tuple[predict.Route, ...]:
    from nybble import costs

    return costs.linear(4, 64, 64, None, None, 4)


@pytest.mark.parametrize("text", ["{}", "no json", json.dumps({"key": "x", "date": "x", "ceilings": {"bf16": -1}})])
def test_a_damaged_file_of_ceilings(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(BadInput, match="measure again"):
        here.load(path)


def test_measuring_keeps_within_its_limit_and_finds_every_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "_REPEATS", 1)
    monkeypatch.setattr(measure, "_PRODUCTS", {"fp32": lambda device, size: measure._PRODUCT_FP32(device, 64)})
    said: list[str] = []
    found = measure.ceilings("cpu", said.append)
    assert set(found) == {"memory", "bandwidth", "launch", "fp32"}
    assert all(value > 0 for value in found.values())
    assert set(measure.ceilings("cpu", said.append, limit=-1.0)) == {"memory"}
    assert "left out" in said[-1]
