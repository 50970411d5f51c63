"""Random models of two layers, and what tests ask of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from nybble.methods import quantize_
from nybble.ops import QuantLinear
from nybble.quantize.schemes import SCHEMES

IDS = torch.arange(24).reshape(2, 12) * 7 % 96


def tiny(kind: str = "Llama", dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    """A random model of two layers, always the same."""
    import transformers

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64}  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **more})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


class Words:
    """A tokenizer whose tokens are letters."""

    eos_token_id = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) - 32 for letter in text]}

    def decode(self, ids: list[int], skip_special_tokens: bool) -> str:
        return "".join(chr(32 + n) for n in ids)


def quantized(scheme: str, **more: Any) -> Any:
    """A tiny model in a scheme, calibrated where the scheme needs it."""
    model = tiny(**more)
    return quantize_(model, scheme, calibration=[IDS] if SCHEMES[scheme].static_input_scale else None)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits.double()


def linears(model: nn.Module) -> dict[str, QuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")
