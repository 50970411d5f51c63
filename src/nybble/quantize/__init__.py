"""From tensor to numbers and back: QuantTensor, scale rules, rounding and layouts."""

from nybble.quantize.api import dequantize, quantize
from nybble.quantize.tensor import QuantTensor

__all__ = ["QuantTensor", "dequantize", "quantize"]
