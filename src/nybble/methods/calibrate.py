"""What data says about the inputs of a model's linears.

Batches are what the model is called with: a tensor, a tuple of positional arguments, or a mapping of keywords.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from nybble.errors import BadInput

Batch = Tensor | tuple[Any, ...] | Mapping[str, Any]


def call(model: nn.Module, batch: Batch) -> Any:
    """model(batch), a mapping as keywords and a tuple as positional arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def input_amax(model: nn.Module, linears: Mapping[str, nn.Module], batches: Iterable[Batch]) -> dict[str, Tensor]:
    """The largest magnitude (float32 []) that reaches each linear over all batches.

    Raises:
        BadInput: no batch was given, a linear was never reached, or an input held NaN or infinity (layer named).
    """
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args[0].numel():
                amax = args[0].detach().abs().amax().to(torch.float32)
                seen[name] = torch.maximum(seen[name], amax) if name in seen else amax

        return hook

    handles = [module.register_forward_pre_hook(watch(name)) for name, module in linears.items()]
    try:
        with torch.no_grad():
            for batch in batches:
                call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    missing = [name for name in linears if name not in seen]
    if missing:
        raise BadInput(f"calibration never reached {len(missing)} of {len(linears)} layers, first: {missing[0]}")
    for name, amax in seen.items():
        if not bool(amax.isfinite()):
            raise BadInput(f"calibration: the input of {name} holds NaN or infinity")
    return seen
