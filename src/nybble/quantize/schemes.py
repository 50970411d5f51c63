"""THE TABLE of schemes: how a linear layer runs. One row each: weight format, activation format, scale rule.

Names are compressed-tensors' preset names; what has no preset is named in the same grammar, W<bits>A<bits>, or by
its format. "A16" keeps activations as they come (bf16, fp16 or fp32).
"""

from __future__ import annotations

from dataclasses import dataclass

from nybble.errors import UnknownName
from nybble.formats import table
from nybble.formats.spec import BlockFormat


@dataclass(frozen=True)
class Scheme:
    """How a linear runs.

    Attributes:
        name: as users type it.
        weight: the weight's block format.
        activation: the format activations are rounded to on the fly, or None.
        rule: the weight's scale rule where it is not the format's own.
        preset: whether compressed-tensors has a preset of this name, so that its checkpoint loads elsewhere as it is.
    """

    name: str
    weight: BlockFormat
    activation: BlockFormat | None = None
    rule: str | None = None
    preset: bool = False

    @property
    def static_input_scale(self) -> bool:
        """Whether a checkpoint stores a scale for the inputs, which has to be calibrated."""
        return self.activation is not None and self.activation.tensor_scale is not None


SCHEMES: dict[str, Scheme] = {}


def _register(
    name: str, weight: str, activation: str | None = None, rule: str | None = None, preset: bool = False
) -> None:
    if name in SCHEMES:
        raise ValueError(f"scheme {name!r} stands in the table twice")
    SCHEMES[name] = Scheme(name, table.block(weight), table.block(activation) if activation else None, rule, preset)


def _preset(name: str, weight: str, activation: str | None = None) -> None:
    _register(name, weight, activation, preset=True)


# compressed-tensors' own W8A16 has groups of 128; one scale a channel costs nothing in eight bits, suits every K, and
# is what int8 kernels take.
_preset("W8A16", "int8_channel")
_preset("W8A8", "int8_channel", "int8_token")
_preset("W4A16", "int4_g128")
_preset("W4A16_ASYM", "int4_g128_asym")
_preset("W4A8", "int4_g128", "int8_token")
_preset("FP8_DYNAMIC", "fp8_channel", "fp8_token")
_preset("FP8_BLOCK", "fp8_block128", "fp8_g128")
_preset("NVFP4A16", "nvfp4")
_preset("NVFP4", "nvfp4", "nvfp4")
_preset("MXFP4A16", "mxfp4")
_preset("MXFP4", "mxfp4", "mxfp4")
_preset("MXFP8A16", "mxfp8_e4m3")
_preset("MXFP8", "mxfp8_e4m3", "mxfp8_e4m3")

_register("FP8A16", "fp8_channel")
_register("W4A16_G64", "int4_g64")
_register("W4A16_G32", "int4_g32")
_register("W4A16_G32_ASYM", "int4_g32_asym")
_register("W3A16", "int3_g64")
_register("W2A16", "int2_g32")
_register("W4A8_G64", "int4_g64", "int8_token")
_register("W4A8_G32", "int4_g32", "int8_token")
_register("W4A8_CHANNEL", "int4_channel", "int8_token")
_register("W4A4", "int4_g128", "int4_g128")
_register("W4A4_G64", "int4_g64", "int4_g64")
_register("W4A4_G32", "int4_g32", "int4_g32")
_register("W4A4_CHANNEL", "int4_channel", "int4_token")
_register("NF4", "nf4_g64")
_register("MXFP4A16_FLOOR", "mxfp4", rule="floor")
_register("MXFP6A16", "mxfp6_e2m3")
_register("MXINT8A16", "mxint8")
_register("NVFP4A16_4OVER6", "nvfp4", rule="four_over_six")
_register("UE5M3FP4A16", "ue5m3fp4")
_register("UFP4A16", "ufp4")
_register("UFP4", "ufp4", "ufp4")
_register("TERNARY", "ternary_channel")
_register("BINARY", "binary_channel")


def scheme(name: str | Scheme) -> Scheme:
    """The scheme called `name` (case does not matter); an unknown name raises UnknownName with the nearest."""
    if isinstance(name, Scheme):
        return name
    row = SCHEMES.get(name.upper().replace("-", "_"))
    if row is None:
        raise UnknownName("scheme", name, SCHEMES)
    return row


def names() -> list[str]:
    """Every scheme's name, presets first."""
    return list(SCHEMES)
