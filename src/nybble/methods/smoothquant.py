"""SmoothQuant: outliers of activations moved into the weights, where they do less harm.

Some input channels of a transformer are a hundred times larger than the rest, always the same ones. Rounded token by
token, everything else then falls on a few steps. Dividing channel j by s_j and multiplying column j of the weights by
it changes nothing but who carries the range; SmoothQuant shares it out,

    s_j = max|x_j|^alpha / max|w_j|^(1 - alpha)

with the maxima over calibration inputs and over the rows of all linears that are fed them. alpha = 1/2 leaves both
with the same range in every channel. It serves schemes that round activations (W8A8, W4A8, W4A4); the division is
folded into the normalization before (fold.py), so that the model costs nothing more to run.

Source: Xiao et al.: SmoothQuant, arXiv 2211.10438.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nybble.errors import BadInput
from nybble.methods.fold import edges, fold_edges, positive
from nybble.methods.layer import Inputs
from nybble.methods.stages import Stage
from nybble.quantize.schemes import Scheme

NEEDS_INPUTS = True


@dataclass(frozen=True)
class Config:
    """Settings of SmoothQuant.

    Attributes:
        alpha: how much of the range goes to the weights, 0 to 1.
        products: whether scales are also folded into up (before down) and v (before o).
    """

    alpha: float = 0.5
    products: bool = False


def fold(
    stage: Stage, inputs: Mapping[str, Inputs], scheme: Scheme, config: Config, probe: Callable[[], Tensor]
) -> dict[str, Inputs]:
    """Smooth one block.

    Args:
        stage: the block; its parameters are replaced.
        inputs: what its linears were fed.
        scheme: not looked at.
        config: the settings.
        probe: gives the block's output for one batch.

    Returns:
        The inputs that changed, by linear.
    """
    if not 0 <= config.alpha <= 1:
        raise BadInput(f"smoothquant: alpha = {config.alpha} is outside 0 … 1")
    chosen = []
    for edge in edges(stage, inputs, config.products):
        x = edge.tied(inputs[edge.names[0]].amax)
        columns = torch.stack([linear.weight.detach().abs().amax(0) for linear in edge.linears])
        w = edge.tied(columns.amax(0).to(torch.float32))
        chosen.append((edge, positive(x**config.alpha / w ** (1 - config.alpha))))
    return fold_edges(stage, inputs, chosen, probe)
