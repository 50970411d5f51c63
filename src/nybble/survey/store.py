"""Rows on disk as they finish, so that a survey can be stopped at any moment and go on.

    DIR/survey-rows/survey.json    what the rows belong to (Identity)
    DIR/survey-rows/original.json  the original's figures
    DIR/survey-rows/W4A16.rtn.json one row
    DIR/survey.json, survey.html   the results

Speeds that something disturbed (`busy`) are kept for the report, and count as not measured when a survey goes on.
Every file is written beside its place and then put there in one step: a reader sees the old file or the new one.
"""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any, TypeVar

from nybble.errors import BadInput
from nybble.files import write_whole
from nybble.survey.rows import Identity, Original, Row

ROWS, RESULT, PAGE = "survey-rows", "survey.json", "survey.html"
_Kept = TypeVar("_Kept", Original, Row)
_IDENTITY, _ORIGINAL = "survey.json", "original.json"


def write_json(path: Path, value: Any) -> None:
    """Write JSON; numbers that JSON does not have (NaN, infinities) become null."""
    write_whole(path, json.dumps(_finite(value), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value


def fingerprint(path: Path) -> list[str]:
    """A line "name size time" for each file of a model: itself, or what of a directory can change what is loaded."""
    names = [path] if path.is_file() else sorted(p for p in path.iterdir() if p.suffix in _MODEL_SUFFIXES)
    return [f"{p.name} {p.stat().st_size} {p.stat().st_mtime_ns}" for p in names]


_MODEL_SUFFIXES = {".safetensors", ".json", ".gguf", ".bin", ".model", ".txt"}


class Store:
    """The folder of one survey."""

    def __init__(self, directory: Path, identity: Identity) -> None:
        self.directory = directory
        self.identity = identity
        self._rows = directory / ROWS

    def open(self, force: bool = False) -> None:
        """See that the folder is ours or free; nothing is written before the first figures are there.

        Args:
            force: whether another survey's rows and results may be replaced.

        Raises:
            BadInput: the folder cannot be written, or holds another survey.
        """
        existing = next(p for p in [self._rows, *self._rows.absolute().parents] if p.exists())
        if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
            raise BadInput(f"{self.directory}: cannot be written")
        if force:
            self._clear()
        there = _read(self._rows / _IDENTITY)
        if there is None and (self.directory / RESULT).exists():
            raise BadInput(self._occupied([f"{RESULT} without the rows it came from"]))
        differences = [] if there is None else self.identity.differences(Identity.from_dict(_complete(there)))
        if differences:
            raise BadInput(self._occupied(differences))

    def _occupied(self, differences: list[str]) -> str:
        return (
            f"{self.directory} holds another survey ({'; '.join(differences)}): "
            f"choose another folder with --out, or replace it with --force"
        )

    def _clear(self) -> None:
        """Remove what a survey writes, and nothing else."""
        for path in [*self._rows.glob("*.json"), self.directory / RESULT, self.directory / PAGE]:
            path.unlink(missing_ok=True)

    def original(self) -> Original | None:
        """The original's figures, if they were measured and nothing disturbed it."""
        return _load(Original, self._rows / _ORIGINAL)

    def save_original(self, original: Original) -> None:
        """Keep the original's figures."""
        self._keep(_ORIGINAL, original)

    def row(self, scheme: str, method: str) -> Row | None:
        """The row of a scheme, if it was measured and nothing disturbed it."""
        return _load(Row, self._path(scheme, method))

    def save(self, row: Row) -> None:
        """Keep a row."""
        self._keep(self._path(row.scheme, row.method).name, row)

    def _keep(self, name: str, value: Original | Row) -> None:
        try:
            self._rows.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"{self.directory}: cannot be written: {error.strerror or error}") from error
        write_json(self._rows / _IDENTITY, self.identity.as_dict())
        write_json(self._rows / name, value.as_dict())

    def _path(self, scheme: str, method: str) -> Path:
        return self._rows / f"{scheme}.{method}.json"


def _complete(found: dict[str, Any]) -> dict[str, Any]:
    """An identity read from a file of any version: fields it lacks are None, which equals nothing asked for."""
    return {key: found.get(key) for key in Identity.__dataclass_fields__}


def _load(kind: type[_Kept], path: Path) -> _Kept | None:
    """What a file holds; None where there is no such file, or what it holds is to be measured again."""
    found = _read(path)
    try:
        kept = None if found is None else kind.from_dict(found)
        return None if kept is None or kept.busy else kept
    except TypeError as error:
        raise BadInput(f"{path}: {error}; remove it, or start over with --force") from error


def _read(path: Path) -> dict[str, Any] | None:
    """A file's JSON object; None where there is no such file.

    Raises:
        BadInput: it is there and is not what a survey writes.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: cannot be read: {error}; remove it, or start over with --force") from error
    if not isinstance(value, dict):
        raise BadInput(f"{path}: is no survey's file; remove it, or start over with --force")
    return value
