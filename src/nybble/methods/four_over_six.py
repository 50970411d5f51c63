"""Four over six: each block of four-bit floats chooses whether its largest value becomes a 6 or a 4.

E2M1 has a gap: between 4 and 6 there is nothing, so that values near five sixths of the block's largest are off by
up to a sixth of it. A block scale 1.5 times larger puts the largest value on 4 and spends the steps 4 … 6 on
nothing, but then the values below fall on the finer part of the grid. Both are tried, the smaller squared error
stays. The tensor scale leaves room for the larger block scale (256 in place of E4M3's 448 at the top).

This is round-to-nearest under the rule `four_over_six` of quantize/scales.py; `gptq` takes the same rule by
Config(rule="four_over_six"). It needs no data.

Source: Cook et al.: Four Over Six, arXiv 2512.02010.
"""

from __future__ import annotations

from dataclasses import dataclass

from nybble.errors import Unsupported
from nybble.methods import rtn
from nybble.methods.layer import Layer
from nybble.quantize import QuantTensor


@dataclass(frozen=True)
class Config:
    """No settings."""


def apply(layer: Layer, config: Config) -> QuantTensor:
    """Quantize one layer.

    Raises:
        Unsupported: the format has no scales on two levels over floats.
    """
    fmt = layer.scheme.weight
    if fmt.tensor_scale is None or fmt.power_of_two_scale:
        raise Unsupported(f"four_over_six chooses between two-level scales; {fmt.name} has none (nvfp4 has)")
    return rtn.apply(layer, rtn.Config(rule="four_over_six"))
