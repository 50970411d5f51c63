"""Directories of safetensors: damage is named, writing is all or nothing."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from nybble.checkpoints import huggingface as hf
from nybble.errors import BadInput, DamagedFile


@pytest.fixture
def tensors(rng: torch.Generator) -> dict[str, torch.Tensor]:
    return {f"layer.{i}.weight": torch.randn(8, 16, generator=rng) for i in range(5)}


@pytest.mark.parametrize("shard_bytes", [1, 1100, 10**9])
def test_what_is_written_is_read(shard_bytes: int, tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    written = hf.write_weights(tmp_path, tensors.items(), shard_bytes)
    assert written == {"tensors": 5, "bytes": 5 * 8 * 16 * 4}
    weights = hf.Weights(tmp_path)
    assert weights.names() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(weights[name], tensor)
    files = sorted(p.name for p in tmp_path.iterdir())
    shards = {1: 5, 1100: 3, 10**9: 1}[shard_bytes]
    assert len([f for f in files if f.endswith(".safetensors")]) == shards
    assert (hf.INDEX in files) == (shards > 1)


def test_a_shard_stays_below_its_limit(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    hf.write_weights(tmp_path, tensors.items(), 1100)
    index = json.loads((tmp_path / hf.INDEX).read_text())
    assert index["metadata"]["total_size"] == 5 * 512
    for name in set(index["weight_map"].values()):
        assert sum(t.nbytes for t in load_file(tmp_path / name).values()) <= 1100


def test_tensors_that_share_memory_are_written_apart(tmp_path: Path) -> None:
    whole = torch.arange(12.0)
    hf.write_weights(tmp_path, {"a": whole[:6], "b": whole[6:], "c": whole}.items())
    weights = hf.Weights(tmp_path)
    assert torch.equal(torch.cat([weights["a"], weights["b"]]), weights["c"])


def test_what_was_read_survives_the_file(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    hf.write_weights(tmp_path, tensors.items())
    read = hf.Weights(tmp_path)["layer.0.weight"]
    with (tmp_path / hf.SINGLE).open("r+b") as file:
        file.truncate(0)
    assert torch.equal(read, tensors["layer.0.weight"])


def spoil(path: Path, how: str) -> None:
    whole = path.read_bytes()
    path.write_bytes(
        {"truncated": whole[:-100], "empty": b"", "text": b"no tensors here", "header": b"\xff" + whole[1:]}[how]
    )


@pytest.mark.parametrize("how", ["truncated", "empty", "text", "header"])
def test_a_damaged_file_is_named(how: str, tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    hf.write_weights(tmp_path, tensors.items(), 1100)
    path = tmp_path / "model-00002-of-00003.safetensors"
    spoil(path, how)
    with pytest.raises(DamagedFile, match=path.name):
        hf.Weights(tmp_path)


def test_a_missing_shard_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    hf.write_weights(tmp_path, tensors.items(), 1100)
    (tmp_path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(DamagedFile, match=r"model-00003-of-00003\.safetensors: is missing"):
        hf.Weights(tmp_path)


def test_a_directory_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"holds no \*.safetensors"):
        hf.Weights(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(BadInput, match=r"pytorch_model.bin is a pickle"):
        hf.Weights(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_json_that_is_none_is_named(text: str, tmp_path: Path) -> None:
    path = tmp_path / hf.CONFIG
    path.write_text(text)
    with pytest.raises(DamagedFile, match=hf.CONFIG):
        hf.read_json(path)


def test_the_dtype_of_most_values(tmp_path: Path) -> None:
    some = {"a": torch.zeros(4), "b": torch.zeros(9, dtype=torch.bfloat16), "c": torch.zeros(99, dtype=torch.int32)}
    save_file(some, tmp_path / hf.SINGLE)
    weights = hf.Weights(tmp_path)
    assert weights.dtype(["a", "b", "c"]) == torch.bfloat16
    assert weights.dtype(["a"]) == torch.float32
    assert weights.dtype(["c"]) is None


def test_a_new_directory_appears_whole(tmp_path: Path) -> None:
    target = tmp_path / "deep" / "out"
    with hf.new_directory(target) as scratch:
        (scratch / "x").write_text("1")
        assert not target.exists()
    assert [p.name for p in target.iterdir()] == ["x"]
    assert target.stat().st_mode & 0o777 == 0o777 & ~umask()
    assert (target / "x").stat().st_mode & 0o777 == 0o666 & ~umask()
    assert [p.name for p in target.parent.iterdir()] == ["out"]


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_a_new_directory_that_fails_leaves_nothing(error: type[BaseException], tmp_path: Path) -> None:
    def attempt() -> None:
        with hf.new_directory(tmp_path / "out") as scratch:
            (scratch / "x").write_text("1")
            raise error

    with pytest.raises(error):
        attempt()
    assert list(tmp_path.iterdir()) == []


def test_what_is_there_is_never_replaced(tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.mkdir()
    (taken / "mine").write_text("dear")
    with pytest.raises(BadInput, match="not an empty folder"), hf.new_directory(taken):
        pytest.fail("must not get here")
    assert (taken / "mine").read_text() == "dear"
    with pytest.raises(BadInput, match="not an empty folder"), hf.new_directory(taken / "mine"):
        pytest.fail("must not get here")


def test_an_empty_folder_may_be_given(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with hf.new_directory(tmp_path / "out") as scratch:
        (scratch / "x").write_text("1")
    assert (tmp_path / "out" / "x").is_file()


def test_where_nothing_can_be_written_it_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(BadInput, match="cannot be written"), hf.new_directory(tmp_path / "file" / "out"):
        pytest.fail("must not get here")


def test_a_write_that_fails_on_the_way_says_so(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="cannot be written"), hf.new_directory(tmp_path / "out"):
        raise OSError("no space left on device")
    assert list(tmp_path.iterdir()) == []
