"""Saving a model: a directory that transformers and vLLM load as it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn


def check_saveable(model: nn.Module, scheme: str) -> None:
    """Raise Unsupported where a checkpoint of `scheme` cannot hold this model; to be asked before quantizing."""
    raise NotImplementedError


def save(model: nn.Module, directory: str | Path, tokenizer: Any = None) -> Path:
    """Write a checkpoint."""
    raise NotImplementedError
