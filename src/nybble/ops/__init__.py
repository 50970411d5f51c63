"""What the machine runs: numeric contracts and the implementations that fulfil them here."""

from importlib import import_module
from pkgutil import iter_modules

from nybble.ops._choose import Candidate, explain
from nybble.ops._declare import Op
from nybble.ops.linear import QuantLinear, linear

__all__ = ["Candidate", "Op", "QuantLinear", "declared", "explain", "linear"]


def declared() -> dict[str, Op]:
    """Every op of this folder by its name, in order of the files."""
    found = {}
    for module in iter_modules(__path__):
        if not module.name.startswith("_"):
            members = vars(import_module(f"{__name__}.{module.name}")).values()
            found.update({op.name: op for op in members if isinstance(op, Op)})
    return found
