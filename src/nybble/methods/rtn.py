"""Round to nearest: each weight on its own, by its scale rule, with no data.

Every other method is measured against it. With W the weight, s the block's scale from the format's rule and Q the
element's grid,

    Q(W) = s * round(W / s)

so the error of a weight is at most half a step of its block. What it ignores is that errors of neighbouring weights
act on correlated inputs: they could cancel, and here they do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from nybble.quantize import QuantTensor, quantize
from nybble.quantize.schemes import Scheme


@dataclass(frozen=True)
class Config:
    """Settings of round-to-nearest.

    Attributes:
        rule: the scale rule; None takes the scheme's.
        rounding: one of formats.exact.ROUNDINGS (the stochastic ones take `seed`).
        seed: for stochastic rounding.
    """

    rule: str | None = None
    rounding: str = "nearest"
    seed: int = 0


def apply(name: str, weight: Tensor, scheme: Scheme, tensor_amax: Tensor | None, config: Config) -> QuantTensor:
    """Quantize the weight [N, K] of the layer `name`.

    Args:
        name: the layer's name, for errors.
        weight: floating [N, K].
        scheme: gives the format and the rule.
        tensor_amax: float32 [], the magnitude that fused layers share; None measures the weight.
        config: the settings.
    """
    return quantize(
        weight,
        scheme.weight,
        rule=config.rule or scheme.rule,
        rounding=config.rounding,
        seed=config.seed,
        tensor_amax=tensor_amax,
        name=name,
    )
