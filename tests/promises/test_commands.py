"""A fingerprint's file and the commands that hold a model to a promise: what they write, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import nybble
from nybble import models
from nybble.cli import main
from nybble.errors import BadInput, DamagedFile
from nybble.models import decode, fingerprint, promised
from nybble.ops._promise import in_force, promise
from tiny_models import IDS, Words, tiny

pytest.importorskip("transformers", reason="the definition of the model")
ON = ["--device", "cpu"]


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


@pytest.fixture(scope="module")
def made(model: Any) -> dict[str, Any]:
    return fingerprint.make(model, IDS[0], 6)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A model's folder."""
    nybble.save(tiny(), tmp_path / "model")
    monkeypatch.setattr(models, "load_tokenizer", lambda name: Words())
    return str(tmp_path / "model")


@pytest.mark.parametrize(("name", "value"), [("nybble", "0.0.9"), ("fingerprint", 99)])
def test_another_version_is_refused_by_name(name: str, value: Any, model: Any, made: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=f"by version {value} of {name}, this is"):
        fingerprint.check(model, {**made, name: value})


@pytest.mark.parametrize("text", ["{", "[]", '{"fingerprint": 1}', "\xff"])
def test_what_is_no_fingerprint_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(DamagedFile, match="is no fingerprint"):
        fingerprint.read(path)
    with pytest.raises(BadInput, match="cannot be read"):
        fingerprint.read(tmp_path / "none.json")


DAMAGES: dict[str, Any] = {
    "logits": ["0" * 16], "ops": [1, 2], "prompt": ["a"], "tokens": [], "dtype": "float8", "machine": None,
}  # fmt: skip


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_fingerprint_is_refused_with_what_is_wrong(name: str, made: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "f.json").write_text(json.dumps({**made, name: DAMAGES[name]}))
    with pytest.raises(DamagedFile, match=rf"is no fingerprint: .*{name}.* missing or damaged"):
        fingerprint.read(tmp_path / "f.json")


def test_a_truncated_file_is_refused(made: dict[str, Any], tmp_path: Path) -> None:
    fingerprint.write(tmp_path / "f.json", made)
    whole = (tmp_path / "f.json").read_text()
    for length in (0, len(whole) // 2, len(whole) - 3):
        (tmp_path / "f.json").write_text(whole[:length])
        with pytest.raises(DamagedFile, match="is no fingerprint"):
            fingerprint.read(tmp_path / "f.json")


def test_a_folder_that_is_not_there_is_refused_and_nothing_left(made: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be written"):
        fingerprint.write(tmp_path / "none" / "f.json", made)
    assert not list(tmp_path.iterdir())


def test_text_begun_under_a_promise_keeps_it_where_it_is_read(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """`generate` gives pieces as they are asked for, which may be after the context was left."""
    seen = []
    forward = promised.PromisedRunner._forward
    monkeypatch.setattr(
        promised.PromisedRunner, "_forward", lambda self, *a: (seen.append(in_force()), forward(self, *a))[1]
    )
    with promise("cross-machine"):
        pieces = decode.generate(model, Words(), "Hello", 3)
    assert len("".join(pieces)) == 3
    assert set(seen) == {"cross-machine"}
    assert in_force() == "none"


def test_another_model_is_refused_by_the_command(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = str(tmp_path / "f.json")
    fingerprint.write(file, fingerprint.make(tiny(hidden_size=64, num_attention_heads=2), IDS[0], 2))
    assert main(["fingerprint", folder, "--check", file, *ON]) == 2
    assert "the fingerprint is of another model" in capsys.readouterr().err
    assert main(["fingerprint", folder, "--check", str(tmp_path / "none.json"), *ON]) == 2
    assert "cannot be read" in capsys.readouterr().err


def test_tokens_that_are_not_the_models_are_refused_by_the_command(
    folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], made: dict[str, Any]
) -> None:
    file = str(tmp_path / "f.json")
    fingerprint.write(file, {**made, "prompt": [5, 10**9]})
    assert main(["fingerprint", folder, "--check", file, *ON]) == 2
    assert "the model knows 96 tokens" in capsys.readouterr().err


def test_the_commands(folder: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "f.json")
    assert main(["fingerprint", folder, "-o", file, "--prompt", "Hi", "--tokens", "3", *ON]) == 0
    assert main(["fingerprint", folder, "--check", file, *ON]) == 0
    assert "the same bits: 2" in capsys.readouterr().out
    content = json.loads(Path(file).read_text())
    content["ops"][2][1] = "0" * 16
    Path(file).write_text(json.dumps(content))
    assert main(["fingerprint", folder, "--check", file, *ON]) == 3
    assert "layers.0.self_attn.rotary (rope_cache_exact_) differs first" in capsys.readouterr().out
    content["nybble"] = "0.0.1"
    Path(file).write_text(json.dumps(content))
    assert main(["fingerprint", folder, "--check", file, *ON]) == 2
    assert "version 0.0.1 of nybble" in capsys.readouterr().err
    drawn = ["--promise", "batch-invariant", "--temperature", "2", "--seed", "5", "--tokens", "5", *ON]
    texts = set()
    for _ in range(2):
        assert main(["generate", folder, "Hi", *drawn]) == 0
        texts.add(capsys.readouterr().out)
    assert len(texts) == 1
