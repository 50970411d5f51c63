"""Finished blocks on disk, so that a run that was stopped goes on where it was.

A work directory holds one file for each finished stage, one for what a method that trains has reached, and
`manifest.json`, which names the run (scheme, method, settings, hashes of weights and calibration) and each file's
SHA-256. Files and manifest are written beside their
place and moved there, the file first, so that what the manifest names is whole at every moment. A directory of
another run, or a file that is not what the manifest says, is refused by name.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nybble.errors import BadInput, DamagedFile
from nybble.formats import table
from nybble.quantize import QuantTensor, layouts

_MANIFEST = "manifest.json"
_DTYPES = {str(d): d for d in (torch.float32, torch.float64, torch.bfloat16, torch.float16)}


@dataclass(frozen=True)
class Finished:
    """What is known of a stage once it is done.

    Attributes:
        weights: quantized, by the linear's name.
        others: the block's other parameters, by their names in the block: folding may have changed them.
        input_amax: float32 [], the largest magnitude that reached each linear.
        unreached: the linears that no input reached.
    """

    weights: dict[str, QuantTensor]
    others: dict[str, Tensor]
    input_amax: dict[str, Tensor]
    unreached: list[str]


class Work:
    """A work directory.

    Args:
        directory: made if it is not there.
        identity: what must be the same for finished stages to serve.

    Raises:
        BadInput: the directory cannot be made, or is another run's, with what differs.
    """

    def __init__(self, directory: str | Path, identity: Mapping[str, str]) -> None:
        self.path = Path(directory)
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"{self.path}: cannot be written: {error.strerror or error}") from error
        self._manifest: dict[str, Any] = {"run": dict(identity), "stages": {}}
        if (self.path / _MANIFEST).exists():
            self._manifest = self._read()
            mine, theirs = dict(identity), self._manifest["run"]
            differing = [f"{k}: {theirs.get(k)!r} there, {v!r} here" for k, v in mine.items() if theirs.get(k) != v]
            if differing:
                raise BadInput(f"{self.path} holds another run: {'; '.join(differing)}")

    def _read(self) -> dict[str, Any]:
        try:
            manifest: dict[str, Any] = json.loads((self.path / _MANIFEST).read_text(encoding="utf-8"))
            _ = manifest["run"], manifest["stages"]
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedFile(f"{self.path / _MANIFEST}: {error}") from error
        return manifest

    def load(self, stage: str) -> Finished | None:
        """A finished stage, on the CPU; None where it is not finished.

        Raises:
            DamagedFile: the file is missing or not what was written.
        """
        stored = self._stored(self._manifest["stages"].get(stage))
        if stored is None:
            return None
        weights = {name: _unpacked(parts) for name, parts in stored.pop("weights").items()}
        return Finished(weights, **stored)

    def save(self, stage: str, finished: Finished) -> None:
        """Write a finished stage."""
        stored = {**vars(finished), "weights": {n: _packed(w) for n, w in finished.weights.items()}}
        entry = self._store(f"{len(self._manifest['stages']):05d}.pt", stored)
        self._manifest["stages"][stage] = entry
        self._publish()

    def state(self) -> dict[str, Any] | None:
        """What `keep` was last given, on the CPU; None if nothing was kept.

        Raises:
            DamagedFile: the file is missing or not what was written.
        """
        return self._stored(self._manifest.get("state"))

    def keep(self, step: int, state: Mapping[str, Any]) -> None:
        """Write what training has reached after `step` steps, in place of what was kept before."""
        before = self._manifest.get("state")
        self._manifest["state"] = self._store(f"step-{step:06d}.pt", dict(state))
        self._publish()
        if before is not None and before != self._manifest["state"]:
            (self.path / before["file"]).unlink(missing_ok=True)

    def _stored(self, entry: Mapping[str, str] | None) -> dict[str, Any] | None:
        if entry is None:
            return None
        path = self.path / entry["file"]
        if not path.exists() or _sha256(path) != entry["sha256"]:
            raise DamagedFile(f"{path}: missing or changed since it was written; remove {self.path} to start anew")
        stored: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
        return stored

    def _store(self, name: str, stored: Mapping[str, Any]) -> dict[str, str]:
        """Write a file; what the manifest says of it."""
        fresh = self.path / f"{name}.new"
        torch.save(stored, fresh)
        entry = {"file": name, "sha256": _sha256(fresh)}
        os.replace(fresh, self.path / name)
        return entry

    def _publish(self) -> None:
        fresh = self.path / f"{_MANIFEST}.new"
        fresh.write_text(json.dumps(self._manifest, indent=1), encoding="utf-8")
        os.replace(fresh, self.path / _MANIFEST)


def _packed(weight: QuantTensor) -> dict[str, Any]:
    return {
        "format": weight.format.name,
        "shape": list(weight.shape),
        "layout": weight.layout.name,
        "dtype": str(weight.dtype),
        **weight.parts,
    }


def _unpacked(stored: Mapping[str, Any]) -> QuantTensor:
    return QuantTensor(
        table.block(stored["format"]),
        tuple(stored["shape"]),
        stored["codes"],
        stored["scale"],
        stored.get("tensor_scale"),
        stored.get("zero_point"),
        layouts.get(stored["layout"]),
        _DTYPES[stored["dtype"]],
    )


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(value: Any) -> str:
    """A SHA-256 over tensors, nested in tuples and mappings: what was given, to tell one run from another."""
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, nn.Module):
        value = {name: p.detach() for name, p in value.named_parameters()}
    if isinstance(value, Tensor):
        digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
        digest.update(value.detach().contiguous().cpu().flatten().view(torch.uint8).numpy())
    elif isinstance(value, Mapping):
        for key in sorted(value):
            digest.update(str(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, tuple | list):
        for one in value:
            _feed(digest, one)
    else:
        digest.update(repr(value).encode())
