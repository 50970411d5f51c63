"""GGUF: llama.cpp's file of metadata and tensors, read with the `gguf` package.

Every tensor type that the package can dequantize is read, as float32. What has to be undone besides is what
llama.cpp's converter does to a model: it renames tensors (the package has the table), and for some architectures it
changes values. For Llama it reorders the rows of q and k from two halves of each head to neighbouring pairs,
because its rotary embedding turns neighbours; for Gemma it adds the 1 that the norm adds at run time.

GGUF lists dimensions fastest first; the package gives arrays in torch's order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nybble.errors import DamagedFile, Unsupported

Undo = Callable[[str, Tensor, Any], Tensor]


def _as_is(name: str, value: Tensor, config: Any) -> Tensor:
    return value


def _pairs_to_halves(name: str, value: Tensor, config: Any) -> Tensor:
    """Undo Llama's reordering of q and k rows: within a head, (pair, member) back to (half, index)."""
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return value
    return value.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(value.shape)


def _less_one(name: str, value: Tensor, config: Any) -> Tensor:
    return value - 1 if name.endswith("norm.weight") else value


ARCHITECTURES: dict[str, Undo] = {
    "llama": _pairs_to_halves,
    "qwen2": _as_is,
    "qwen3": _as_is,
    "starcoder2": _as_is,
    "stablelm": _as_is,
    "gemma2": _less_one,
    "gemma3": _less_one,
}
"""Architectures whose files are read, with what undoes the converter's change of values."""


# The reader follows offsets that it found in the file, and a broken file makes it fail in any of these ways.
_READER_ERRORS = (OSError, ValueError, IndexError, KeyError, TypeError, AttributeError, OverflowError, MemoryError)


ROPE_DIVISORS = "rope_freqs.weight"
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def _llama3_divisors(rule: dict[str, float], theta: float, count: int) -> Tensor:
    """What Llama 3.1 divides its rotary frequencies by: long waves by `factor`, short ones by 1, smooth between."""
    frequency = theta ** -(torch.arange(count, dtype=torch.float64) / count)
    turns = rule["original_max_position_embeddings"] * frequency / (2 * math.pi)
    low, high = rule["low_freq_factor"], rule["high_freq_factor"]
    smooth = ((turns - low) / (high - low)).clamp(0, 1)
    return (1 / ((1 - smooth) / rule["factor"] + smooth)).to(torch.float32)


class GgufFile:
    """An open GGUF file.

    Attributes:
        path: the file.
        architecture: llama.cpp's name of the model's architecture.

    Raises:
        DamagedFile: not a GGUF file, truncated, or corrupt where that can be seen.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            reader = _reader(path)
            field = reader.fields["general.architecture"]
            self.architecture = str(field.contents())
            self._tensors = {tensor.name: tensor for tensor in reader.tensors}
            self._blocks = int(reader.fields[f"{self.architecture}.block_count"].contents())
            scaling = reader.fields.get(f"{self.architecture}.rope.scaling.type")
            self._rope_scaling = "none" if scaling is None else str(scaling.contents())
            parts = reader.fields.get("split.count")
            self._parts = 1 if parts is None else int(parts.contents())
        except _READER_ERRORS as error:
            raise DamagedFile(f"{path}: not a whole GGUF file ({type(error).__name__}: {error})") from error

    def check(self) -> None:
        """Raise Unsupported where a model cannot be made of this file without loss."""
        if self.architecture not in ARCHITECTURES:
            raise Unsupported(
                f"{self.path}: architecture {self.architecture!r} cannot be read from GGUF; "
                f"{', '.join(ARCHITECTURES)} can (a safetensors directory of the same model may do)"
            )
        if self._parts > 1:
            raise Unsupported(f"{self.path}: is one of {self._parts} parts; put them together with llama-gguf-split")
        if self._rope_scaling != "none":
            raise Unsupported(
                f"{self.path}: rotary scaling {self._rope_scaling!r} in GGUF metadata is not read, and the model would "
                "be another without it"
            )

    def names(self, parameters: Iterable[str]) -> dict[str, str]:
        """{a transformers parameter name: the tensor's name here}, for those that the file holds."""
        import gguf

        numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
        table = gguf.get_tensor_name_map(numbers[self.architecture], self._blocks)
        found = {}
        for parameter in parameters:
            name = table.get_name(parameter, try_suffixes=(".weight", ".bias"))
            if name in self._tensors:
                found[parameter] = name
        return found

    def rope_parameters(self, config: Any) -> dict[str, Any] | None:
        """The rotary scaling that Llama 3.1 and later have in a tensor instead of the metadata; None without one.

        The file holds, for each frequency, what it is divided by; `config` wants the three numbers of the rule that
        made them. All published models share two of them, the third is the largest divisor, and the rule must give
        the file's divisors back.

        Raises:
            Unsupported: the divisors follow some other rule.
        """
        if ROPE_DIVISORS not in self._tensors:
            return None
        divisors = self.read(ROPE_DIVISORS, config)
        rule = {**_LLAMA3, "factor": float(divisors.max())}
        theta = float(config.rope_parameters["rope_theta"])
        if not torch.allclose(_llama3_divisors(rule, theta, len(divisors)), divisors, rtol=1e-4, atol=0):
            raise Unsupported(f"{self.path}: {ROPE_DIVISORS} follows no rule that transformers has")
        return {"rope_type": "llama3", "rope_theta": theta, **rule}

    def tensor_names(self) -> set[str]:
        """The names of all tensors, as the file has them."""
        return set(self._tensors)

    def read(self, name: str, config: Any) -> Tensor:
        """One tensor in float32, with the converter's change of values undone.

        Args:
            name: the tensor's name in the file.
            config: the transformers configuration (for the numbers of heads).
        """
        import gguf

        tensor = self._tensors[name]
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        except NotImplementedError as error:
            raise Unsupported(f"{self.path}: {name} is {tensor.tensor_type.name}, which gguf cannot decode") from error
        except (ValueError, gguf.quants.QuantError) as error:
            raise DamagedFile(f"{self.path}: {name} ({tensor.tensor_type.name}): {error}") from error
        shape = tuple(int(size) for size in reversed(tensor.shape))
        value = torch.from_numpy(values if values.flags.writeable else values.copy()).reshape(shape)
        return ARCHITECTURES[self.architecture](name, value, config)


def _reader(path: Path) -> Any:
    """A GGUFReader over plain memory: half of its time for a vocabulary goes into slicing a numpy.memmap."""
    import gguf
    import numpy as np

    class Reader(gguf.GGUFReader):
        @property
        def data(self) -> np.ndarray:
            return self._plain

        @data.setter
        def data(self, mapped: np.ndarray) -> None:
            self._plain = np.asarray(mapped)

    return Reader(path)
