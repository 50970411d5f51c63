"""GGUF files for tests: a transformers model written the way llama.cpp's converter does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from torch import nn


def permute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """llama.cpp's order of a Llama's q and k rows: (half, index) of a head to (index, half)."""
    return rows.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(rows.shape)


def convert(name: str, value: torch.Tensor, architecture: str, config: Any) -> torch.Tensor:
    """What the converter does to a tensor of this transformers name."""
    if architecture == "llama" and ".q_proj." in name:
        return permute(value, config.num_attention_heads)
    if architecture == "llama" and ".k_proj." in name:
        return permute(value, config.num_key_value_heads)
    if architecture.startswith("gemma") and name.endswith("norm.weight"):
        return value + 1
    return value


def metadata(config: Any, architecture: str) -> dict[str, int | float]:
    """The numbers of a configuration under the file's names."""
    from transformers.integrations.ggml import GGUF_CONFIG_MAPPING

    values: dict[str, int | float] = {}
    for key, attribute in GGUF_CONFIG_MAPPING[architecture].items():
        flat = {**config.to_dict(), **(config.rope_parameters or {})}
        if isinstance(flat.get(attribute), int | float):
            values[key] = flat[attribute]
    return values


def write(
    path: Path,
    model: nn.Module,
    architecture: str,
    kinds: dict[str, gguf.GGMLQuantizationType] | None = None,
    extra: dict[str, np.ndarray] | None = None,
    strings: dict[str, str] | None = None,
) -> Path:
    """Write `model` to `path`.

    Args:
        path: the file.
        model: a transformers model in float32.
        architecture: llama.cpp's name.
        kinds: by the end of a transformers name, the type to quantize the tensor to; float32 otherwise.
        extra: further tensors.
        strings: further metadata.
    """
    config: Any = model.config
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in metadata(config, architecture).items():
        add = writer.add_float32 if isinstance(value, float) else writer.add_uint32
        add(f"{architecture}.{key}", value)
    for key, text in (strings or {}).items():
        writer.add_string(key, text)
    writer.add_token_list([f"t{i}" for i in range(config.vocab_size)])
    numbers = {name: number for number, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(numbers[architecture], config.num_hidden_layers)
    for name, parameter in model.named_parameters():
        value = convert(name, parameter.detach(), architecture, config).contiguous().numpy()
        kind = next((k for end, k in (kinds or {}).items() if name.endswith(end)), gguf.GGMLQuantizationType.F32)
        stored = table.get_name(name, try_suffixes=(".weight", ".bias"))
        writer.add_tensor(stored, gguf.quants.quantize(value, kind), raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
