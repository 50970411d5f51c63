"""From tensor to numbers and back: QuantTensor, scale rules, rounding and layouts.

`nybble.quantize` is this package and also the function: calling the module quantizes.
"""

import sys
from types import ModuleType
from typing import Any

from nybble.quantize.api import dequantize, quantize
from nybble.quantize.tensor import QuantTensor

__all__ = ["QuantTensor", "dequantize", "quantize"]


class _Callable(ModuleType):
    """Importing a submodule binds the package to `nybble.quantize`, so the package itself has to be callable."""

    def __call__(self, *args: Any, **kwargs: Any) -> QuantTensor:
        return quantize(*args, **kwargs)


sys.modules[__name__].__class__ = _Callable
