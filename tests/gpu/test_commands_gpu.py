"""Whole commands on a GPU, on a tiny model: what a user types, end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tiny
from nybble.cli import main

pytestmark = [pytest.mark.gpu, pytest.mark.raw_memory]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("commands")
    tiny.directory(path / "model", tiny.llama(hidden_size=256, intermediate_size=512, max_position_embeddings=512))
    tiny.sentences(path / "text.txt")
    return path


def test_survey(place: Path) -> None:
    out = place / "survey"
    options = ["--device", "cuda", "--tokens", "400", "--text", str(place / "text.txt"), "--out", str(out)]
    schemes = ["W8A16", "W4A16", "W4A16_G32", "NVFP4A16", "MXFP4A16", "NVFP4", "W8A8", "FP8_DYNAMIC", "W2A16"]
    assert main(["survey", str(place / "model"), "--schemes", ",".join(schemes), *options]) == 0
    found = json.loads((out / "survey.json").read_text())
    assert found["reference"]["quality_dtype"] == found["reference"]["decode_dtype"] == "bfloat16", "float32 on disk"
    rows = {row["scheme"]: row for row in found["rows"]}
    assert list(rows) == schemes
    for name, row in rows.items():
        assert row["path"] != "refused", row["why"]
        assert row["speedup"] is not None, f"{name}: {row['why']}"
    assert rows["W4A16"]["path"] == rows["NVFP4A16"]["path"] == rows["W8A16"]["path"] == "native"
    assert rows["W8A16"]["kl"] < rows["W4A16_G32"]["kl"] < rows["W2A16"]["kl"]


def test_quantize_generate_evaluate(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A checkpoint made on the GPU generates and evaluates there; the CPU finds the same quality in it."""
    out = str(place / "quantized")
    assert main(["quantize", str(place / "model"), "W4A16", "--device", "cuda", "-o", out]) == 0
    assert main(["generate", out, "Sentence 7", "--device", "cuda", "--tokens", "8"]) == 0
    capsys.readouterr()
    shown = []
    for device in ("cuda", "cpu"):
        options = ["--device", device, "--dtype", "float32", "--tokens", "400", "--text", str(place / "text.txt")]
        assert main(["evaluate", out, "--reference", str(place / "model"), *options]) == 0
        words = capsys.readouterr().out.replace(",", "").split()
        shown.append([float(word) for word in words if word.replace(".", "", 1).isdigit()])
    assert shown[0] == pytest.approx(shown[1], rel=1e-2)


def test_measuring_the_machine(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ceilings are measured within a minute, kept, and override the row."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(place / "cache"))
    assert main(["machine", "--measure"]) == 0
    (kept,) = (place / "cache" / "nybble" / "machines").glob("*.json")
    ceilings = json.loads(kept.read_text())["ceilings"]
    assert ceilings["bandwidth"] > 1e11
    assert ceilings["bf16"] > ceilings["fp32"] > 0
    capsys.readouterr()
    assert main(["machine", "here"]) == 0
    assert "measured" in capsys.readouterr().out
