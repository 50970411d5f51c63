"""The text that quality is measured on, and how it becomes windows of tokens.

The default needs no download: the help topics that CPython ships as `pydoc_data.topics`, which every installation
has. They differ between versions of Python, so a text carries a hash and results name both.

A model sees the *last* tokens of the text, in windows that start from nothing; what stands before them is left for
calibration, so that no token is used for both.
"""

from __future__ import annotations

import hashlib
import platform
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nybble.errors import BadInput

RANGES, LEARNING = 2, 32
"""Windows of calibration: to find the range of inputs, and for a method that learns from them."""


@dataclass(frozen=True)
class Text:
    """A text and what to call it."""

    name: str
    content: str

    @cached_property
    def sha256(self) -> str:
        """The hash of its UTF-8 bytes."""
        return hashlib.sha256(self.content.encode("utf-8")).hexdigest()


def default_text() -> Text:
    """The values of pydoc_data.topics in the order of their sorted keys, joined by newlines."""
    from pydoc_data.topics import topics

    content = "\n".join(topics[key] for key in sorted(topics))
    return Text(f"pydoc_data.topics of Python {platform.python_version()}", content)


def read_text(path: str | Path | None) -> Text:
    """The text in a UTF-8 file; None is the default text.

    Raises:
        BadInput: the file cannot be read or is not UTF-8.
    """
    if path is None:
        return default_text()
    try:
        return Text(str(path), Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: cannot be read as UTF-8 text: {error}") from error


def encode(tokenizer: Any, text: Text) -> Tensor:
    """All tokens of the text: int64 [n], on the CPU."""
    ids = tokenizer(text.content, return_attention_mask=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def split(ids: Tensor, tokens: int, window: int, name: str = "the text") -> list[Tensor]:
    """The last `tokens` tokens in windows of `window`; where that does not divide, the first window is shorter.

    Args:
        ids: int64 [n].
        tokens: how many to use, at least 2.
        window: the longest a window may be, at least 2.
        name: what to call the text in an error.

    Raises:
        BadInput: there are fewer than `tokens`, or numbers below 2 were asked for.
    """
    if tokens < 2 or window < 2:
        raise BadInput(f"tokens = {tokens} and window = {window}: both must be at least 2, a token to predict another")
    if len(ids) < tokens:
        raise BadInput(f"{name} has {len(ids)} tokens and {tokens} were asked for: ask for fewer or give a longer text")
    last, first = ids[len(ids) - tokens :], tokens % window
    parts = [last[:first], *last[first:].split(window)] if first else list(last.split(window))
    return [part for part in parts if len(part) >= 2]


def calibration(ids: Tensor, tokens: int, windows: int = RANGES, window: int = 512) -> list[Tensor]:
    """Up to `windows` windows int64 [1, <= window] of what stands directly before the last `tokens` tokens.

    Empty where nothing stands there.
    """
    before = ids[: max(0, len(ids) - tokens)][-windows * window :]
    return [part[None] for part in before.split(window)] if len(before) else []
