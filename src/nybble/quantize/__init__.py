"""From tensor to numbers and back: QuantTensor, scale rules, rounding and layouts.

`nybble.quantize` is this package and also the function: calling the module quantizes. Names are resolved when first
used, so that the table of schemes can be read without torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nybble.quantize.api import dequantize as dequantize
    from nybble.quantize.api import quantize as quantize
    from nybble.quantize.tensor import QuantTensor as QuantTensor

__all__ = ["QuantTensor", "dequantize", "quantize"]

_HOMES = {"QuantTensor": "tensor", "dequantize": "api", "quantize": "api"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    globals()[name] = value
    return value


class _Callable(ModuleType):
    """Importing a submodule binds the package to `nybble.quantize`, so the package itself has to be callable."""

    def __call__(self, *args: Any, **kwargs: Any) -> QuantTensor:
        found: QuantTensor = __getattr__("quantize")(*args, **kwargs)
        return found


sys.modules[__name__].__class__ = _Callable
