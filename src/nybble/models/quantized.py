"""Loading a quantized checkpoint: its linears become QuantLinear, their bits as they are in the file."""

from __future__ import annotations

import dataclasses
import re
import warnings
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from nybble.checkpoints import huggingface
from nybble.checkpoints.stored import Ledger, StoredLinear
from nybble.errors import BadInput, Unsupported
from nybble.methods import hadamard
from nybble.methods.api import Record, replace, set_record
from nybble.methods.select import Skipped, fused_groups, select
from nybble.models.skeleton import fill, skeleton
from nybble.ops import QuantLinear
from nybble.quantize.schemes import SCHEMES, Scheme

# Scales of a quantized key-value cache: the cache keeps its precision here.
_CACHE_SCALES = re.compile(r".*\.(?:[qkv]_scale|[qkv]_zero_point)")

_LONE_EXPERT = re.compile(r"\.experts\.\d+\.")


class Reader(Protocol):
    """What a checkpoint layout offers."""

    def rotated(self, name: str, module: nn.Module) -> int | None:
        """The size of the Hadamard blocks that rotate a module's inputs, or None."""

    def find(self, name: str, module: nn.Module) -> Any:
        """How a module is stored, or None where it is not quantized."""

    def read(self, name: str, found: Any, shape: tuple[int, int], tensors: Ledger) -> StoredLinear:
        """A quantized linear of weight shape [N, K]; `found` is what `find` said."""


def load_quantized(
    path: Path, reader: Reader, tensors: Ledger, device: torch.device, dtype: torch.dtype | None
) -> nn.Module:
    """A model from a directory of quantized safetensors.

    Args:
        path: the directory.
        reader: the layout's reader.
        tensors: the directory's tensors.
        device: where each layer is put as soon as it is read.
        dtype: of what is not quantized; None takes that of the tensors in the file.

    Raises:
        BadInput: tensors that are missing, or that nothing asked for.
        Unsupported: quantized modules that are not linears (stacked experts).
    """
    from transformers import AutoConfig, GenerationConfig

    config = AutoConfig.from_pretrained(path, local_files_only=True)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    model = skeleton(config, dtype or tensors.dtype(_plain(tensors)) or torch.float32)
    _refuse_lone_experts(model, tensors)
    stored = _quantized_linears(model, reader, tensors, device)
    plain = [name for name in model.state_dict() if name in tensors and name not in tensors.used]
    fill(model, {name: partial(tensors.get, name) for name in plain}, str(path), device)
    _account(path, model, tensors)
    if (path / huggingface.GENERATION).is_file():
        whole: Any = model
        whole.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    set_record(model, _record(model, stored))
    return model


def _refuse_lone_experts(model: nn.Module, tensors: Ledger) -> None:
    """Experts that a file holds one by one, and transformers stacks, would need to be merged as they are read."""
    lone = next((name for name in sorted(tensors.names()) if _LONE_EXPERT.search(name)), None)
    if lone is not None and lone.rpartition(".")[0] not in dict(model.named_modules()):
        raise Unsupported(f"experts stored one by one ({lone}) are not read from a quantized checkpoint")


def _plain(tensors: Ledger) -> list[str]:
    """The names of tensors that belong to no quantized linear: those without a scale beside them."""
    return [name for name in tensors.names() if f"{name.rpartition('.')[0]}.weight_scale" not in tensors]


def _quantized_linears(
    model: nn.Module, reader: Reader, tensors: Ledger, device: torch.device
) -> dict[str, StoredLinear]:
    """Replace every linear that the checkpoint quantizes; {name: what was read}."""
    done: dict[str, StoredLinear] = {}
    blocks: dict[str, int | None] = {}
    for name, module in list(model.named_modules()):
        found = reader.find(name, module) if type(module) is nn.Linear else None
        if not isinstance(module, nn.Linear) or found is None:
            continue
        dtype = module.weight.dtype
        stored = reader.read(name, found, (module.out_features, module.in_features), tensors)
        bias = None
        if module.bias is not None:
            bias = nn.Parameter(tensors.get(f"{name}.bias", (module.out_features,)).to(dtype))
        weight = dataclasses.replace(stored.weight, dtype=dtype)
        layer = QuantLinear(weight, bias, stored.activation, stored.activation_amax).to(device)
        replace(model, module, layer.prepare(dtype))
        done[name] = stored
        blocks[name] = reader.rotated(name, module)
    _rotate(model, {name: block for name, block in blocks.items() if block is not None})
    if not done:
        raise Unsupported(f"a quantized checkpoint of {type(model).__name__}, but none of its linears is in it")
    return done


def _rotate(model: nn.Module, blocks: dict[str, int]) -> None:
    """Rotate the inputs of linears as they come, those of fused projections together."""
    for names in fused_groups(blocks):
        layers = [model.get_submodule(name) for name in names]
        first: Any = layers[0]
        rotation = hadamard.Rotation(first.in_features, None)
        if any(blocks[name] != rotation.plain for name in names):
            raise Unsupported(f"{names[0]}: rotated in blocks of {blocks[names[0]]}, only {rotation.plain} is read")
        hadamard.attach(layers, rotation.to(first.weight.device))


def _account(path: Path, model: nn.Module, tensors: Ledger) -> None:
    """Every tensor of the file must have been used."""
    left = tensors.names() - tensors.used
    cache = {name for name in left if _CACHE_SCALES.fullmatch(name)}
    if cache:
        warnings.warn(f"{path}: {len(cache)} scales of a quantized key-value cache are not used", stacklevel=2)
    expected = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or []
    unknown = sorted(n for n in left - cache if not any(re.search(pattern, n) for pattern in expected))
    if unknown:
        raise BadInput(f"{path}: {len(unknown)} tensors have no place in the model, first: {unknown[0]}")


def _record(model: nn.Module, stored: dict[str, StoredLinear]) -> Record:
    """The scheme most of the layers have, those of others, and what is not quantized."""
    found = {name: _scheme(one) for name, one in stored.items()}
    rows = list(found.values())
    scheme = max(rows, key=rows.count)
    selection = select(model, ())
    total = sum(p.numel() * p.element_size() for p in model.parameters()) or 1
    kept = [
        Skipped(f"{name}.weight", "not quantized in the checkpoint", linear.weight.nbytes / total)
        for name, linear in selection.linears.items()
    ]
    others = {name: row for name, row in found.items() if row != scheme}
    return Record(scheme, "checkpoint", list(stored), kept + selection.skipped, others=others)


def _scheme(stored: StoredLinear) -> Scheme:
    """The row of a linear's formats, or one made for them."""
    weight, activation = stored.weight.format, stored.activation
    named = next((s for s in SCHEMES.values() if (s.weight, s.activation, s.rule) == (weight, activation, None)), None)
    inputs = f"_{activation.name}" if activation else "_a16"
    return named or Scheme(f"{weight.name}{inputs}".upper(), weight, activation)
