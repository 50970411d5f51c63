"""ModelOpt NVFP4: the layout that NVIDIA's Model Optimizer writes, read only.

    weight           uint8 [N, K / 2], the even column in the low nibble
    weight_scale     float8_e4m3fn [N, K / 16]
    weight_scale_2   float32 [], a multiplier: w = e2m1 * weight_scale * weight_scale_2
    input_scale      float32 [], the multiplier of inputs that are quantized too

The same numbers as compressed-tensors' NVFP4 with both global scales turned over. What is quantized is said in
`hf_quant_config.json` or in config.json, and seen in the tensors: a quantized weight is uint8 and has its scales
beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from nybble.checkpoints import huggingface
from nybble.checkpoints.stored import Ledger, StoredLinear, amax_of
from nybble.errors import Unsupported
from nybble.formats import table
from nybble.quantize import QuantTensor

METHOD = "modelopt"
SIDE_FILE = "hf_quant_config.json"
_ALGORITHMS = ("NVFP4", "W4A16_NVFP4")


def find_config(directory: Path, config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """ModelOpt's description of a checkpoint, from config.json or the file beside it; None where there is none."""
    described = config.get("quantization_config")
    if isinstance(described, Mapping):
        return described if str(described.get("quant_method")).startswith(METHOD) else None
    side = directory / SIDE_FILE
    return huggingface.read_json(side).get("quantization") if side.is_file() else None


class Reader:
    """Reads the linears of a ModelOpt checkpoint.

    Raises:
        Unsupported: an algorithm other than NVFP4.
    """

    def __init__(self, config: Mapping[str, Any], tensors: Ledger) -> None:
        algorithm = str(config.get("quant_algo"))
        if algorithm.upper() not in _ALGORITHMS:
            raise Unsupported(f"ModelOpt checkpoints of {algorithm} are not read, those of {_ALGORITHMS[0]} are")
        self._tensors = tensors

    def rotated(self, name: str, module: nn.Module) -> int | None:
        """None: the layout has no rotations."""
        return None

    def find(self, name: str, module: nn.Module) -> str | None:
        """The name where this module is quantized, else None."""
        return name if f"{name}.weight_scale_2" in self._tensors else None

    def read(self, name: str, found: str, shape: tuple[int, int], tensors: Ledger) -> StoredLinear:
        """The linear called `name`, logical weight shape [N, K]."""
        if f"{name}.pre_quant_scale" in tensors:
            raise Unsupported(f"{name}: inputs scaled channel by channel (pre_quant_scale) are not read")
        fmt, (n, k) = table.block("nvfp4"), shape
        codes = tensors.get(f"{name}.weight", (n, -(-k * fmt.element.bits // 8)), torch.uint8)
        scale = tensors.scale(f"{name}.weight_scale", fmt, shape).view(torch.uint8)
        weight = QuantTensor(fmt, shape, codes, scale, tensors.scalar(f"{name}.weight_scale_2"))
        if f"{name}.input_scale" not in tensors:
            return StoredLinear(weight)
        encode = 1 / tensors.scalar(f"{name}.input_scale")
        return StoredLinear(weight, fmt, amax_of(fmt, encode))
