"""quantize_: a model's linears to a scheme, in place."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nybble.errors import BadInput, Unsupported
from nybble.methods import memory
from nybble.methods.calibrate import Batch, Calibration, batches, evaluating, input_amax
from nybble.methods.compose import Plan, method_module, methods, plan
from nybble.methods.overrides import Overrides, assign
from nybble.methods.pipeline import Progress, Run, replace, weight_amax
from nybble.methods.room import Room
from nybble.methods.select import Selection, Skipped, fused_groups, matches
from nybble.methods.stages import Stage, drive, split
from nybble.methods.work import Work, fingerprint
from nybble.quantize.schemes import Scheme
from nybble.quantize.schemes import scheme as find_scheme

_RECORD = "_nybble_record"


@dataclass(frozen=True)
class Record:
    """What quantize_ did to a model.

    Attributes:
        scheme: the scheme, of most layers where there are others.
        method: the method's name.
        quantized: names of the layers that were quantized.
        skipped: every other weight of two axes or more, with reason and share of bytes.
        ignore: the patterns that were asked to be left alone.
        unreached: layers that no calibration input reached, where the method asked for them: rounded to nearest.
        others: the schemes of layers that have another one, by name.
    """

    scheme: Scheme
    method: str
    quantized: list[str]
    skipped: list[Skipped] = field(default_factory=list)
    ignore: tuple[str, ...] = ()
    unreached: tuple[str, ...] = ()
    others: Mapping[str, Scheme] = field(default_factory=dict)


def record(model: nn.Module) -> Record | None:
    """What quantize_ or load did to this model; None for a model they never saw."""
    return getattr(model, _RECORD, None)


def set_record(model: nn.Module, value: Record) -> None:
    """Note on the model what was done to it."""
    setattr(model, _RECORD, value)


def quantize_(
    model: nn.Module,
    scheme: str | Scheme,
    method: str = "rtn",
    *,
    ignore: Sequence[str] = ("lm_head",),
    overrides: Overrides | None = None,
    calibration: Calibration | None = None,
    config: Any = None,
    progress: Progress | None = None,
    work_dir: str | Path | None = None,
    device: torch.device | str | None = None,
    spill: str | Path | None = None,
) -> nn.Module:
    """Replace the nn.Linear modules of any model by quantized ones, in place.

    Nothing is touched before every weight was found to be finite. Weights that stay as they are (embeddings, stacked
    experts, ignored or tied ones) are listed with their share of bytes by `nybble.methods.record(model)`, and
    stacked experts are warned about. Parameters are never written to, only replaced, so that a copy of the model
    that shares them keeps them.

    Args:
        model: any module; weights may be on any device, and stay there.
        scheme: a scheme or its name ("W4A16", "NVFP4", …).
        method: a file of nybble.methods, or several joined by "+" ("smoothquant+gptq"); "rtn" rounds to nearest.
        ignore: module names (full, or the tail after a dot) or "re:" patterns to leave alone.
        overrides: patterns of layers that get another scheme, or None to leave them alone (overrides.py); the last
            that matches decides.
        calibration: batches the model can be called with, or a callable that makes them; most methods need them, and
            activation formats with a tensor scale then get a static one, which a checkpoint needs.
        config: the method's Config, or compose.Settings for several; None takes defaults.
        progress: called with (layers done, layers in all, name) after each layer, and with (steps done, steps in all,
            what) after each step of a method that trains.
        work_dir: where finished blocks are kept, so that a run that was stopped goes on; None keeps none.
        device: where blocks are worked on, one by one, for methods that look at inputs; None: where they are.
        spill: "cpu", or a folder, for what enters the blocks over all of the calibration; None keeps it on `device`.

    Returns:
        The model.

    Raises:
        UnknownName: no such scheme or method, with the nearest.
        BadInput: NaN or infinity in a weight or an input (named), nothing to quantize, an override that matches no
            layer, no calibration for a method that needs it, or not enough memory (what would fit is said).
        Unsupported: the method does not serve this format, or several schemes at once, or blocks cannot be worked on
            one by one.
    """
    chosen, what = find_scheme(scheme), plan(method, config)
    selection, schemes = assign(model, chosen, ignore, overrides)
    if not selection.linears:
        raise BadInput(f"{type(model).__name__} has no nn.Linear to quantize (ignored: {', '.join(ignore) or 'none'})")
    given = None if calibration is None else batches(calibration)
    if what.needs_batches and not given:
        raise BadInput(
            f"method {method!r} learns from the inputs of each layer: give calibration, batches for the model"
        )
    _warn(model, selection, ignore)
    weight_amax(selection.linears)
    work = None
    if work_dir is not None:
        work = Work(work_dir, _identity(model, chosen, schemes, what, selection, given))
    names = list(selection.linears)
    with evaluating(model):
        room = Room(None if device is None else torch.device(device), spill)
        run = _prepare(model, chosen, schemes, what, selection, given, work, room, progress)
        stages = _stages(model, run, selection)
        selection.linears.clear()  # from here on only the stages hold them, each until it is done
        run.go(stages)
    unreached = tuple(run.unreached if what.needs_inputs else ())
    others = {name: row for name, row in schemes.items() if row != chosen}
    set_record(model, Record(chosen, method, names, selection.skipped, tuple(ignore), unreached, others))
    return model


def _prepare(
    model: nn.Module, scheme: Scheme, schemes: Mapping[str, Scheme], what: Plan, selection: Selection,
    given: list[Batch] | None, work: Work | None, room: Room, progress: Progress | None,
) -> Run:  # fmt: skip
    mixed = sorted({row.name for row in schemes.values()} | {scheme.name})
    for part in what.changes:
        if hasattr(part.module, "fit") and len(mixed) > 1:
            raise Unsupported(f"{part.name} trains for one scheme, and the overrides make it {', '.join(mixed)}")
        if hasattr(part.module, "prepare"):
            part.module.prepare(model, selection.linears, scheme, part.config)
        if hasattr(part.module, "fit"):
            part.module.fit(model, selection.linears, scheme, given, part.config, progress, work)
    amax: dict[str, Tensor] = {}
    static = {name: linear for name, linear in selection.linears.items() if schemes[name].static_input_scale}
    if given is not None and static and not what.needs_inputs:
        amax = input_amax(model, static, given)
    stages = split(model, selection.linears)
    driver = drive(model, stages, given, room) if what.needs_inputs and given else None
    memory.check(driver, stages, schemes)
    return Run(model, scheme, schemes, what, driver, amax, work, progress)


def _stages(model: nn.Module, run: Run, selection: Selection) -> list[Stage]:
    """Blocks where they are gone through one by one, else what shares a tensor scale."""
    if run.driver is None and run.work is None:
        groups = fused_groups(selection.linears)
        return [Stage("", model, {name: selection.linears[name] for name in group}) for group in groups]
    return split(model, selection.linears)


def _identity(
    model: nn.Module, scheme: Scheme, schemes: Mapping[str, Scheme], what: Plan, selection: Selection,
    given: list[Batch] | None,
) -> dict[str, str]:  # fmt: skip
    """What makes two runs the same."""
    parts = [f"{part.name} {part.config}" for part in (*what.changes, what.rounds)]
    return {
        "scheme": str(scheme),
        "others": str({name: row for name, row in schemes.items() if row != scheme}),
        "method": " + ".join(parts),
        "layers": fingerprint(list(selection.linears)),
        "weights": fingerprint(model),
        "calibration": fingerprint(given),
    }


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


__all__ = ["Record", "method_module", "methods", "quantize_", "record", "replace", "set_record"]
