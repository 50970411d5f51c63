"""Methods by name: one file each in this folder, composed with "+".

A method's file has a `Config` and one or more of

    apply(layer, config) -> QuantTensor          rounds one linear                          (rtn, gptq, schur, …)
    fold(stage, inputs, scheme, config, probe)   changes one block so that it rounds better (smoothquant, awq)
    prepare(model, linears, scheme, config)      the same for the whole model, without data (hadamard)
    fit(model, linears, scheme, batches, config, progress, work)   the same with data       (distill)

`NEEDS_INPUTS = True` says that it has to be told what reaches each linear, `NEEDS_BATCHES = True` that it runs the
model on calibration itself. "smoothquant+gptq" folds with the first and rounds with the second; a name without
anything that rounds is followed by rtn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from importlib import import_module
from pkgutil import iter_modules
from types import SimpleNamespace
from typing import Any

from nybble.errors import BadInput, UnknownName

_INFRASTRUCTURE = {
    "api",
    "calibrate",
    "columns",
    "compose",
    "fold",
    "layer",
    "memory",
    "overrides",
    "pipeline",
    "room",
    "select",
    "share",
    "stages",
    "work",
}


@dataclass(frozen=True)
class Settings:
    """Settings of composed methods.

    Attributes:
        seed: given to every part that draws numbers; None leaves each its own.
        parts: a method's Config by its name.
    """

    seed: int | None = None
    parts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Part:
    """A method with its settings."""

    name: str
    module: Any
    config: Any

    @property
    def needs_inputs(self) -> bool:
        """Whether it has to be told what reaches each linear."""
        return getattr(self.module, "NEEDS_INPUTS", False)

    @property
    def needs_batches(self) -> bool:
        """Whether calibration has to be given."""
        return self.needs_inputs or getattr(self.module, "NEEDS_BATCHES", False)


@dataclass(frozen=True)
class Plan:
    """What is done to a model: parts that change it, then the one that rounds."""

    changes: list[Part]
    rounds: Part

    @property
    def needs_inputs(self) -> bool:
        """Whether any part has to be told what reaches each linear."""
        return any(part.needs_inputs for part in (*self.changes, self.rounds))

    @property
    def needs_batches(self) -> bool:
        """Whether calibration has to be given."""
        return any(part.needs_batches for part in (*self.changes, self.rounds))


def methods() -> list[str]:
    """The names of all methods."""
    package = import_module("nybble.methods")
    return [m.name for m in iter_modules(package.__path__) if m.name not in _INFRASTRUCTURE]


def method_module(name: str) -> Any:
    """The module of the method called `name`, or UnknownName with the nearest.

    Composed names give an object whose Config is `Settings`.
    """
    known = methods()
    parts = name.split("+")
    for part in parts:
        if part not in known:
            raise UnknownName("method", part, known)
    if len(parts) > 1:
        return SimpleNamespace(Config=Settings)
    return import_module(f"nybble.methods.{name}")


def plan(method: str, config: Any = None) -> Plan:
    """What "a+b" means, with its settings.

    Args:
        method: one name, or several joined by "+".
        config: None, Settings, or the Config of a method that stands alone.

    Raises:
        UnknownName: no such method.
        BadInput: more than one part rounds, or it does not come last, or the config is another method's.
    """
    method_module(method)
    names = method.split("+")
    parts = [_part(name, config, alone=len(names) == 1) for name in names]
    rounding = [hasattr(part.module, "apply") for part in parts]
    if any(rounding[:-1]):
        wrong = names[rounding.index(True)]
        raise BadInput(f"method {method!r}: {wrong} rounds, so that it must come last and alone")
    if rounding[-1]:
        return Plan(parts[:-1], parts[-1])
    return Plan(parts, _part("rtn", None, alone=False))


def _part(name: str, config: Any, alone: bool) -> Part:
    module = import_module(f"nybble.methods.{name}")
    if isinstance(config, Settings):
        chosen = config.parts.get(name) or module.Config()
        if config.seed is not None and "seed" in {f.name for f in fields(chosen)}:
            chosen = replace(chosen, seed=config.seed)
        return Part(name, module, chosen)
    if config is None:
        return Part(name, module, module.Config())
    if not alone or not isinstance(config, module.Config):
        raise BadInput(f"method {name!r} cannot take {type(config).__module__}.{type(config).__name__} as its settings")
    return Part(name, module, config)
