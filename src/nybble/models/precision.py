"""In which dtype a model runs where it is not quantized.

What is deployed on a GPU computes in 16 bits, and that is what our kernels and their rivals serve: under float32
activations nearly every format would only be emulated, and its speed would say nothing about it. So a GPU runs in the
checkpoint's own dtype if that has 16 bits, and in bfloat16 if not, whatever the file spends on a weight (GGUF tensors
become float32 when they are dequantized). A CPU runs in the checkpoint's own dtype, and quality is measured there in
float32.

The choice is a function of three values and asks no device.
"""

from __future__ import annotations

from pathlib import Path

import torch

from nybble.checkpoints import huggingface
from nybble.models.load import resolve

HALVES = (torch.bfloat16, torch.float16)


def deployed(device: str, stored: torch.dtype, asked: torch.dtype | None = None) -> torch.dtype:
    """The dtype in which one would run a model.

    Args:
        device: a torch device type, "cpu" or "cuda".
        stored: what the checkpoint holds.
        asked: what a user chose, which is taken as it is; None to choose.
    """
    if asked is not None:
        return asked
    return stored if device == "cpu" or stored in HALVES else torch.bfloat16


def judged(device: str, stored: torch.dtype, asked: torch.dtype | None = None) -> torch.dtype:
    """The dtype in which quality is measured: the deployed one on a GPU, float32 on a CPU; arguments as above."""
    return deployed(device, torch.float32 if device == "cpu" else stored, asked)


def stored(model: str | Path) -> torch.dtype:
    """The floating dtype that most values of a checkpoint have, codes aside; float32 for GGUF and where none has one.

    Args:
        model: a Hugging Face directory, a .gguf file, or "smollm2-135m".

    Raises:
        BadInput: no such model.
        DamagedFile: a file is truncated or corrupt.
    """
    source = resolve(model)
    if source.kind == "gguf" or not any(source.path.glob("*.safetensors")):  # what is missing there, `load` says
        return torch.float32
    weights = huggingface.Weights(source.path)
    return weights.dtype(weights.names()) or torch.float32
