"""Saving a model: a directory that transformers and vLLM load as it is.

Quantized linears are written in the compressed-tensors layout, everything else in its own dtype under its own name,
so that what is loaded again is equal to the bit; a weight that several modules share is written once. A model
without quantized linears becomes an ordinary safetensors checkpoint. Whether a scheme can be written is a question
of its formats and of K alone, so that `check_saveable` answers it before any work is done.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nybble.checkpoints import compressed_tensors, huggingface
from nybble.checkpoints.compressed_tensors import Group
from nybble.checkpoints.stored import StoredLinear
from nybble.errors import BadInput, Unsupported
from nybble.formats.spec import BlockFormat
from nybble.methods.compose import plan
from nybble.methods.hadamard import plain_block
from nybble.methods.overrides import Overrides, assign
from nybble.ops import QuantLinear
from nybble.quantize.schemes import Scheme
from nybble.quantize.schemes import scheme as find_scheme

_SHOWN = 3  # layers named in a refusal


def check_saveable(
    model: nn.Module,
    scheme: str | Scheme,
    ignore: Sequence[str] = ("lm_head",),
    method: str = "rtn",
    config: Any = None,
    overrides: Overrides | None = None,
) -> None:
    """Raise Unsupported where no checkpoint can hold what `quantize_` would make; to be asked before it.

    Args:
        model: not quantized yet; may be without memory (meta device).
        scheme: a scheme or its name.
        ignore, method, config, overrides: as for `quantize_`.

    Raises:
        Unsupported: layers, their K and the reason, and schemes that can be saved; or a method that works on inputs
            as they come.
        UnknownName: no such scheme or method.
        BadInput: an override that matches no layer.
    """
    row = find_scheme(scheme)
    for part in plan(method, config).changes:
        if getattr(part.config, "online", False) and not getattr(part.config, "plain", False):
            raise Unsupported(f"method {part.name} {_ONLINE}")
    selection, schemes = assign(model, row, ignore, overrides)
    wanted = {
        name: (schemes[name].weight, schemes[name].activation, linear.in_features)
        for name, linear in selection.linears.items()
    }
    _refuse(row.name, wanted)


def save(model: nn.Module, directory: str | Path, tokenizer: Any = None) -> Path:
    """Write a checkpoint that transformers and vLLM load as it is.

    The directory appears when it is complete, or not at all.

    Args:
        model: a transformers model, quantized by `quantize_`, loaded, or not quantized.
        directory: where to; must not exist or be empty.
        tokenizer: a transformers tokenizer to go with it.

    Returns:
        The directory.

    Raises:
        Unsupported: compressed-tensors cannot express a layer's format, or its K is no multiple of the group (the
            layers are named, with schemes that can be saved); or something is attached to a layer (a rotation of its
            inputs).
        BadInput: not a transformers model, inputs without a calibrated scale, or the directory cannot be written.
    """
    transformer: Any = model
    if not hasattr(getattr(model, "config", None), "to_json_string"):
        raise BadInput(f"{type(model).__name__} is no transformers model: it has no config to save")
    linears = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    formats = {name: (m.weight.format, m.activation, m.in_features) for name, m in linears.items()}
    _refuse("this model", formats)
    rotated = _rotated(model)
    groups = _groups(linears)
    with huggingface.new_directory(Path(directory)) as scratch:
        huggingface.write_weights(scratch, _tensors(model))
        huggingface.write_json(scratch / huggingface.CONFIG, _config(transformer, groups, rotated))
        if getattr(model, "generation_config", None) is not None:
            text = transformer.generation_config.to_json_string()
            (scratch / huggingface.GENERATION).write_text(text, encoding="utf-8")
        if tokenizer is not None:
            tokenizer.save_pretrained(scratch)
    return Path(directory)


_ONLINE = (
    "changes inputs as they come, which a checkpoint cannot hold; set online=False where it has that setting, "
    "or plain=True"
)
_UNREAD = (
    "the checkpoint rotates inputs as they come (transform_config): nybble.load does so, transformers alone does not "
    "and gives other logits; compressed_tensors.transform.apply_transform_config makes up for it after loading"
)


def _rotated(model: nn.Module) -> dict[int, list[str]]:
    """Linears with a plain rotation before them, by the size of its blocks.

    Whatever else acts on a linear's inputs or outputs from outside would be lost in silence.
    """
    found: dict[int, list[str]] = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear | QuantLinear):
            block = plain_block(module)
            attached = module._forward_pre_hooks or module._forward_hooks or list(module.children())
            if attached and block is None:
                raise Unsupported(f"{name}: something attached to it {_ONLINE}")
            if block is not None:
                found.setdefault(block, []).append(name)
    if found:
        warnings.warn(_UNREAD, stacklevel=3)
    return found


def _refuse(what: str, formats: Mapping[str, tuple[BlockFormat, BlockFormat | None, int]]) -> None:
    reasons = {name: compressed_tensors.refusal(*three) for name, three in formats.items()}
    refused = {name: reason for name, reason in reasons.items() if reason}
    if not refused:
        return
    weight, activation, _ = formats[next(iter(refused))]
    able = compressed_tensors.nearest(weight, activation, {k for _, _, k in formats.values()})
    shown = dict(list(refused.items())[:_SHOWN])
    raise Unsupported(
        f"{what} cannot be saved: {len(refused)} of {len(formats)} layers cannot be stored. "
        f"Schemes that can be: {', '.join(able) or 'none'}",
        shown,
    )


def _groups(linears: Mapping[str, QuantLinear]) -> dict[Group, list[str]]:
    groups: dict[Group, list[str]] = {}
    for name, module in linears.items():
        one = compressed_tensors.group(module.weight.format, module.activation)
        if one is not None:
            groups.setdefault(one, []).append(name)
    return groups


def _tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of everything that is stored, a shared parameter once, by the first of its names."""
    seen: set[int] = set()
    for name, module in model.named_modules():
        prefix = f"{name}." if name else ""
        if isinstance(module, QuantLinear):
            linear = StoredLinear(module.weight, module.activation, module.activation_amax)
            yield from ((prefix + leaf, tensor) for leaf, tensor in compressed_tensors.store(linear).items())
        for leaf, tensor in _own(module):
            if id(tensor) in seen:
                continue
            seen.add(id(tensor))
            if tensor.device.type == "meta":
                raise BadInput(f"{prefix}{leaf} is on the meta device: there is nothing to save")
            yield prefix + leaf, tensor


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters and, but for a QuantLinear's parts, its persistent buffers."""
    yield from ((leaf, p) for leaf, p in module._parameters.items() if p is not None)
    if not isinstance(module, QuantLinear):
        persistent = module._buffers.keys() - module._non_persistent_buffers_set
        yield from ((leaf, b) for leaf, b in module._buffers.items() if b is not None and leaf in persistent)


def _config(model: Any, groups: Mapping[Group, list[str]], rotated: Mapping[int, list[str]]) -> dict[str, Any]:
    written: dict[str, Any] = json.loads(model.config.to_json_string())
    for key in ("quantization_config", "_name_or_path"):  # of where it was loaded from
        written.pop(key, None)
    written["architectures"] = [type(model).__name__]
    written["dtype"] = str(compressed_tensors.run_dtype(groups, _dtype(model))).removeprefix("torch.")
    if groups:
        plain = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        written["quantization_config"] = compressed_tensors.config(groups, plain, rotated)
    return written


def _dtype(model: nn.Module) -> torch.dtype:
    """The dtype most of the parameters have."""
    counts: dict[torch.dtype, int] = {}
    for parameter in model.parameters():
        if parameter.is_floating_point():
            counts[parameter.dtype] = counts.get(parameter.dtype, 0) + parameter.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)
