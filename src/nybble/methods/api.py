"""quantize_: a model's linears to a scheme, in place."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pkgutil import iter_modules
from typing import Any

import torch
from torch import Tensor, nn

from nybble.errors import BadInput, UnknownName
from nybble.methods.calibrate import Batch, input_amax
from nybble.methods.select import Selection, Skipped, fused_groups, matches, select
from nybble.ops import QuantLinear
from nybble.quantize import QuantTensor
from nybble.quantize.schemes import Scheme
from nybble.quantize.schemes import scheme as find_scheme

_INFRASTRUCTURE = {"api", "calibrate", "select"}
_RECORD = "_nybble_record"


@dataclass(frozen=True)
class Record:
    """What quantize_ did to a model.

    Attributes:
        scheme: the scheme.
        method: the method's name.
        quantized: names of the layers that were quantized.
        skipped: every other weight of two axes or more, with reason and share of bytes.
        ignore: the patterns that were asked to be left alone.
    """

    scheme: Scheme
    method: str
    quantized: list[str]
    skipped: list[Skipped] = field(default_factory=list)
    ignore: tuple[str, ...] = ()


def record(model: nn.Module) -> Record | None:
    """What quantize_ or load did to this model; None for a model they never saw."""
    return getattr(model, _RECORD, None)


def set_record(model: nn.Module, value: Record) -> None:
    """Note on the model what was done to it."""
    setattr(model, _RECORD, value)


def methods() -> list[str]:
    """The names of all methods: one file each in this folder."""
    package = import_module("nybble.methods")
    return [m.name for m in iter_modules(package.__path__) if m.name not in _INFRASTRUCTURE]


def method_module(name: str) -> Any:
    """The module of the method called `name`, or UnknownName with the nearest."""
    known = methods()
    if name not in known:
        raise UnknownName("method", name, known)
    return import_module(f"nybble.methods.{name}")


def quantize_(
    model: nn.Module,
    scheme: str | Scheme,
    method: str = "rtn",
    *,
    ignore: Sequence[str] = ("lm_head",),
    calibration: Iterable[Batch] | None = None,
    config: Any = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> nn.Module:
    """Replace the nn.Linear modules of any model by quantized ones, in place.

    Nothing is touched before every weight was found to be finite. Weights that stay as they are (embeddings, stacked
    experts, ignored or tied ones) are listed with their share of bytes by `nybble.methods.record(model)`, and
    stacked experts are warned about.

    Args:
        model: any module; weights may be on any device, and stay there.
        scheme: a scheme or its name ("W4A16", "NVFP4", …).
        method: a file of nybble.methods; "rtn" rounds to nearest.
        ignore: module names (full, or the tail after a dot) or "re:" patterns to leave alone.
        calibration: batches the model can be called with; activation formats with a tensor scale then get a static
            one, which a checkpoint needs.
        config: the method's Config; None takes its defaults.
        progress: called with (layers done, layers in all, name) after each layer.

    Returns:
        The model.

    Raises:
        UnknownName: no such scheme or method, with the nearest.
        BadInput: NaN or infinity in a weight (named), or nothing to quantize.
    """
    chosen, apply = find_scheme(scheme), method_module(method)
    settings = config or apply.Config()
    selection = select(model, ignore)
    if not selection.linears:
        raise BadInput(f"{type(model).__name__} has no nn.Linear to quantize (ignored: {', '.join(ignore) or 'none'})")
    _warn(model, selection, ignore)
    amax = _weight_amax(selection.linears)
    inputs = {}
    if chosen.static_input_scale and calibration is not None:
        inputs = input_amax(model, selection.linears, calibration)
    done: dict[int, QuantTensor] = {}
    with torch.no_grad():
        for index, (name, linear) in enumerate(selection.linears.items()):
            weight = done.get(id(linear.weight))
            if weight is None:
                weight = apply.apply(
                    name, linear.weight, chosen, amax[name] if chosen.weight.tensor_scale else None, settings
                )
                done[id(linear.weight)] = weight
            layer = QuantLinear(weight, linear.bias, chosen.activation, inputs.get(name))
            replace(model, linear, layer.prepare(linear.weight.dtype))
            if progress is not None:
                progress(index + 1, len(selection.linears), name)
    set_record(model, Record(chosen, method, list(selection.linears), selection.skipped, tuple(ignore)))
    return model


def replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever `old` stands in the model."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)


def _weight_amax(linears: dict[str, nn.Linear]) -> dict[str, Tensor]:
    """Each weight's largest magnitude, shared among fused projections; refuses NaN and infinity by name."""
    amax = {}
    for name, linear in linears.items():
        if linear.weight.device.type == "meta":
            raise BadInput(f"{name}.weight is on the meta device: load the model first")
        low, high = torch.aminmax(linear.weight.detach())
        amax[name] = torch.maximum(high, -low).to(torch.float32)
        if not bool(amax[name].isfinite()):
            bad = int((~linear.weight.isfinite()).sum())
            raise BadInput(f"{name}.weight holds {bad} values that are NaN or infinite; nothing was changed")
    for group in fused_groups(linears):
        shared = torch.stack([amax[name] for name in group]).amax()
        amax.update(dict.fromkeys(group, shared))
    return amax


def _warn(model: nn.Module, selection: Selection, ignore: Sequence[str]) -> None:
    experts = [s for s in selection.skipped if "experts" in s.reason]
    if experts:
        share = sum(s.share for s in experts)
        warnings.warn(
            f"{len(experts)} stacked expert weights stay unquantized, {share:.0%} of the model's bytes "
            f"(first: {experts[0].name})",
            stacklevel=3,
        )
    names = [name for name, _ in model.named_modules()]
    unmatched = [p for p in ignore if p != "lm_head" and not any(matches(n, [p]) for n in names)]
    if unmatched:
        warnings.warn(f"ignore matches no module: {', '.join(unmatched)}", stacklevel=3)
