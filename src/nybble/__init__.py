"""nybble: how few bits can your model take, and is it really faster on your machine?

Public names are resolved when first used, so that `import nybble` loads neither torch nor any compiler.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nybble import formats as formats
    from nybble import methods as methods
    from nybble import ops as ops
    from nybble.methods import quantize_ as quantize_
    from nybble.models.load import load as load
    from nybble.models.save import save as save
    from nybble.models.verify import verify_promise as verify_promise
    from nybble.ops._promise import promise as promise
    from nybble.quantize import QuantTensor as QuantTensor
    from nybble.quantize import dequantize as dequantize
    from nybble.quantize import quantize as quantize

__version__ = "0.1.0"

_HOMES = {
    "QuantTensor": "nybble.quantize.tensor",
    "dequantize": "nybble.quantize.api",
    "quantize_": "nybble.methods",
    "load": "nybble.models",
    "promise": "nybble.ops._promise",
    "save": "nybble.models",
    "verify_promise": "nybble.models.verify",
}
_PACKAGES = ("formats", "methods", "ops", "quantize")

__all__ = [
    "QuantTensor", "__version__", "dequantize", "formats", "load", "methods", "ops", "promise", "quantize", "quantize_",
    "save", "verify_promise",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(_HOMES[name]), name)
    elif name in _PACKAGES:
        value = import_module(f"nybble.{name}")
    else:
        raise AttributeError(f"module 'nybble' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
