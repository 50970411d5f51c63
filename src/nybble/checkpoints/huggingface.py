"""A Hugging Face directory: config.json, and weights in one or several safetensors files.

Reading is by name and lazy: a shard's header is checked when it is opened, a tensor's bytes are touched when it is
asked for. Writing is all or nothing: the files are made in a folder beside the target, which is then renamed.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nybble.errors import BadInput, DamagedFile

CONFIG = "config.json"
GENERATION = "generation_config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5_000_000_000
_FLOATING = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; DamagedFile where there is none."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DamagedFile(f"{path}: {error}") from error
    if not isinstance(value, dict):
        raise DamagedFile(f"{path}: holds a {type(value).__name__}, expected an object")
    return value


class Weights:
    """The tensors of a directory of safetensors files, by name; each is read when asked for.

    Args:
        directory: holds model.safetensors, or shards with their index, or any *.safetensors.

    Raises:
        DamagedFile: a file is truncated or corrupt, or a shard of the index is missing.
        BadInput: the directory holds no safetensors file.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._files: dict[Path, Any] = {}
        self._where: dict[str, Path] = {}
        for path in _shards(directory):
            self._files[path] = _open(path)
            self._where.update(dict.fromkeys(self._files[path].keys(), path))

    def names(self) -> set[str]:
        """The names of all tensors."""
        return set(self._where)

    def __contains__(self, name: str) -> bool:
        return name in self._where

    def dtype(self, names: Iterable[str]) -> torch.dtype | None:
        """The floating dtype that most of the values of these tensors have; None where none is floating."""
        counts: dict[torch.dtype, int] = {}
        for name in names:
            header = self._files[self._where[name]].get_slice(name)
            dtype = _FLOATING.get(header.get_dtype())
            if dtype is not None:
                counts[dtype] = counts.get(dtype, 0) + math.prod(header.get_shape())
        return max(counts, key=lambda dtype: counts[dtype], default=None)

    def __getitem__(self, name: str) -> Tensor:
        from safetensors import SafetensorError

        path = self._where[name]
        try:
            # A copy: the file may be replaced or cut while the model lives.
            return self._files[path].get_tensor(name).clone()
        except SafetensorError as error:
            raise DamagedFile(f"{path}: {name}: {error}") from error


def _shards(directory: Path) -> list[Path]:
    index = directory / INDEX
    if index.is_file():
        where = read_json(index).get("weight_map")
        if not isinstance(where, dict):
            raise DamagedFile(f"{index}: has no weight_map")
        shards = [directory / name for name in sorted(set(where.values()))]
        for shard in shards:
            if not shard.is_file():
                raise DamagedFile(f"{shard}: is missing, and {INDEX} names it")
        return shards
    single = directory / SINGLE
    shards = [single] if single.is_file() else sorted(directory.glob("*.safetensors"))
    if not shards:
        other = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in directory.glob(pattern))
        hint = f"; {other[0]} is a pickle, convert it to safetensors first" if other else ""
        raise BadInput(f"{directory}: holds no *.safetensors file{hint}")
    return shards


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise DamagedFile(f"{path}: {error}") from error


@contextmanager
def new_directory(directory: Path) -> Iterator[Path]:
    """A folder to fill, which becomes `directory` when the block ends well, and vanishes when it does not.

    Raises:
        BadInput: `directory` exists and is not an empty folder, or cannot be made or written to.
    """
    target = directory.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise BadInput(f"{directory}: exists and is not an empty folder; choose another, or remove it first")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    except OSError as error:
        raise BadInput(f"{directory}: cannot be written: {error}") from error
    try:
        yield scratch
        _open_up(scratch)
        os.replace(scratch, target)
    except OSError as error:
        raise BadInput(f"{directory}: cannot be written: {error}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _open_up(folder: Path) -> None:
    """Give a folder and its files the usual permissions; temporary ones are made for their owner alone."""
    mask = os.umask(0)
    os.umask(mask)
    folder.chmod(0o777 & ~mask)
    for path in folder.iterdir():
        path.chmod((0o777 if path.is_dir() else 0o666) & ~mask)


def write_weights(
    directory: Path, tensors: Iterable[tuple[str, Tensor]], shard_bytes: int = SHARD_BYTES
) -> dict[str, int]:
    """Write tensors as safetensors, in shards of at most `shard_bytes` (one tensor may be larger), with an index
    where there are several. Only one shard is held at a time.

    Returns:
        {"tensors": count, "bytes": total}.
    """
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    size = total = 0
    for name, tensor in tensors:
        nbytes = tensor.numel() * tensor.element_size()
        if held and size + nbytes > shard_bytes:
            shards.append(_write_shard(directory, len(shards), held))
            held, size = {}, 0
        held[name] = _separate(tensor.detach().cpu().contiguous(), held)
        size, total = size + nbytes, total + nbytes
    shards.append(_write_shard(directory, len(shards), held))
    _name_shards(directory, shards, total)
    return {"tensors": sum(map(len, shards)), "bytes": total}


def _separate(tensor: Tensor, held: Mapping[str, Tensor]) -> Tensor:
    """The tensor, or a copy where it shares memory with one that is held: a file has no aliases."""
    storage = tensor.untyped_storage().data_ptr()
    return tensor.clone() if any(storage == t.untyped_storage().data_ptr() for t in held.values()) else tensor


def _part(directory: Path, number: int) -> Path:
    return directory / f"part-{number}.safetensors"


def _write_shard(directory: Path, number: int, held: dict[str, Tensor]) -> list[str]:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file(held, _part(directory, number), metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(str(error)) from error
    return list(held)


def _name_shards(directory: Path, shards: list[list[str]], total: int) -> None:
    if len(shards) == 1:
        os.replace(_part(directory, 0), directory / SINGLE)
        return
    where: dict[str, str] = {}
    for number, names in enumerate(shards):
        name = f"model-{number + 1:05}-of-{len(shards):05}.safetensors"
        os.replace(_part(directory, number), directory / name)
        where.update(dict.fromkeys(names, name))
    write_json(directory / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))})


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    """Write an object as indented JSON."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
