"""Round to nearest: each weight on its own, by its scale rule, with no data.

Every other method is measured against it. With W the weight, s the block's scale from the format's rule and Q the
element's grid,

    Q(W) = s * round(W / s)

so the error of a weight is at most half a step of its block. What it ignores is that errors of neighbouring weights
act on correlated inputs: they could cancel, and here they do not.
"""

from __future__ import annotations

from dataclasses import dataclass

from nybble.methods.layer import Layer
from nybble.quantize import QuantTensor, quantize


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


def apply(layer: Layer, config: Config) -> QuantTensor:
    """Quantize one layer.

    Args:
        layer: its inputs are not looked at.
        config: the settings.
    """
    return quantize(
        layer.weight,
        layer.scheme.weight,
        rule=config.rule or layer.scheme.rule,
        rounding=config.rounding,
        seed=config.seed,
        tensor_amax=layer.tensor_amax if layer.scheme.weight.tensor_scale else None,
        name=layer.name,
    )
