"""native, emulated or refused: what serves a model's quantized linears here, and why nothing better does."""

from __future__ import annotations

from collections import Counter

import torch
from torch import nn

from nybble.ops import Candidate, QuantLinear, explain
from nybble.ops.linear import LINEAR
from nybble.survey.rows import Service

_RANK: dict[Service, int] = {"native": 0, "emulated": 1, "refused": 2}


def service(model: nn.Module, m: int, dtype: torch.dtype) -> tuple[Service, str]:
    """(path, why) for inputs of m rows: the path is that of the worst-served layer, since all of them run.

    Returns:
        For native the implementations' names; for emulated and refused every refusal of a native implementation,
        with the number of layers where it is not all of them.
    """
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    served = [explain_layer(layer, m, dtype) for layer in layers]
    worst: Service = max((_path(lines) for lines in served), key=lambda path: _RANK[path], default="native")
    if worst == "native":
        return worst, ", ".join(sorted({line.name for lines in served for line in lines if line.chosen}))
    bad = [lines for lines in served if _path(lines) == worst]
    reasons = Counter(f"{line.name}: {line.reason}" for lines in bad for line in lines if line.native)
    where = "" if len(bad) == len(layers) else f"{len(bad)} of {len(layers)} layers: "
    return worst, f"{where}{'; '.join(reasons) or 'no native implementation on this device'}"


def explain_layer(layer: QuantLinear, m: int, dtype: torch.dtype) -> list[Candidate]:
    """Every implementation and its answer for one layer and inputs of m rows."""
    device = layer.weight.device
    probe = torch.empty((m, layer.in_features), dtype=dtype, device=device)
    return explain(LINEAR, device.type, probe, layer.weight, layer.bias, layer.activation, layer.activation_amax)


def _path(lines: list[Candidate]) -> Service:
    chosen = next((line for line in lines if line.chosen), None)
    if chosen is None:
        return "refused"
    return "native" if chosen.native else "emulated"
