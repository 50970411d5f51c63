"""Writing a file that is there as a whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

from nybble.errors import BadInput


def write_whole(path: Path, text: str, parents: bool = False) -> None:
    """Write a file so that whoever reads it, and whatever stops this, finds all of it or what was there before.

    Args:
        path: the file. text: its content, written as UTF-8. parents: make the folders that are missing.

    Raises:
        BadInput: it cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        if parents:
            path.parent.mkdir(parents=True, exist_ok=True)
        scratch.write_text(text, encoding="utf-8")
        os.replace(scratch, path)
    except OSError as error:
        raise BadInput(f"{path}: cannot be written: {error.strerror or error}") from error
    finally:
        scratch.unlink(missing_ok=True)
