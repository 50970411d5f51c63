"""From calibration to quantized weights, one block at a time.

For each block: its inputs are gathered while the kept activations run through it, parts that change the block fold
their scales in, the linears are rounded, and the activations go through the block as it has become. See stages.py
for how a model is cut, layer.py for what is gathered.

Peak memory beyond the model: the activations that enter one block, one block's second moments, the factoring of one
and the rounding of one weight (memory.py has the sizes).
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn

from nybble.errors import BadInput
from nybble.methods import rtn, share
from nybble.methods.calibrate import collect
from nybble.methods.compose import Plan
from nybble.methods.layer import Inputs, Layer
from nybble.methods.select import fused_groups
from nybble.methods.stages import Stage, Whole
from nybble.methods.work import Finished, Work
from nybble.ops import QuantLinear
from nybble.quantize import QuantTensor
from nybble.quantize.schemes import Scheme

Progress = Callable[[int, int, str], None]


@dataclass
class Run:
    """A run over a model.

    Attributes:
        model, scheme, plan: what is done to what; changes of a whole block look at the scheme of most layers.
        schemes: the scheme of each linear.
        driver: runs blocks over the calibration; None where no part needs it.
        input_amax: static input scales known beforehand, by name.
        work: where finished blocks are kept, or None.
        progress: called with (layers done, layers in all, name).
        unreached: the layers that no calibration input reached.
        starved: (tokens, K, name) of the layer that saw the fewest inputs for its size, if fewer than K.
    """

    model: nn.Module
    scheme: Scheme
    schemes: Mapping[str, Scheme]
    plan: Plan
    driver: Whole | None
    input_amax: Mapping[str, Tensor]
    work: Work | None = None
    progress: Progress | None = None
    unreached: list[str] = field(default_factory=list)
    starved: tuple[int, int, str] | None = None
    _tied: dict[int, Tensor] = field(default_factory=dict)
    _shared: dict[int, QuantTensor] = field(default_factory=dict)
    _done: int = 0

    def go(self, stages: list[Stage]) -> None:
        """Quantize every linear of the stages, in their order; the stages are emptied, so that nothing is held."""
        total = sum(len(stage.linears) for stage in stages)
        weights = [linear.weight for stage in stages for linear in stage.linears.values()]
        uses = Counter(map(id, weights))
        self._tied = {id(weight): weight for weight in weights if uses[id(weight)] > 1}
        del weights
        for stage in stages:
            if self.driver is not None:
                self.driver.enter(stage)
            finished = share.agreed(self.work.load(stage.name)) if self.work else None
            if finished is None:
                finished = self._solve(stage, self._inputs(stage), total)
                if self.work:
                    self.work.save(stage.name, finished)
            else:
                _restore(stage, finished.others)
                self._tell(total, len(stage.linears), stage.name)
            self.unreached += finished.unreached
            self._install(stage, finished)
            if self.driver is not None:
                self.driver.leave(stage)
        if self.driver is not None:
            self.driver.close()
        self._warn()

    def _inputs(self, stage: Stage) -> dict[str, Inputs]:
        if self.driver is None:
            return {}
        scaled = any(hasattr(part.module, "fold") for part in self.plan.changes)
        activations = {name: self.schemes[name].activation for name in stage.linears}
        # Scaling would change what rounding makes of inputs.
        seen = collect(stage.linears, self.driver.run(stage), stage.module, None if scaled else activations)
        for name, inputs in seen.items():
            tokens, k = inputs.tokens, len(inputs.amax)
            if tokens < k and (self.starved is None or tokens * self.starved[1] < self.starved[0] * k):
                self.starved = (tokens, k, name)
        return seen

    def _solve(self, stage: Stage, inputs: dict[str, Inputs], total: int) -> Finished:
        """Fold, then round each linear of a stage."""
        for part in self.plan.changes:
            if hasattr(part.module, "fold") and self.driver is not None:
                probe = partial(self.driver.probe, stage)
                inputs.update(part.module.fold(stage, inputs, self.scheme, part.config, probe))
        amax = weight_amax(stage.linears)
        weights, readers = {}, Counter(map(id, inputs.values()))
        for name, linear in stage.linears.items():
            layer = Layer(name, linear.weight, self.schemes[name], amax[name], inputs.get(name))
            weights[name] = self._round(layer)
            self._tell(total, 1, name)
            if layer.inputs is not None:
                readers[id(layer.inputs)] -= 1
                if not readers[id(layer.inputs)]:
                    layer.inputs.forget()
        reached = {name: seen.amax.amax() for name, seen in inputs.items()}
        unreached = [] if self.driver is None else [name for name in stage.linears if name not in inputs]
        return Finished(weights, _others(stage), reached, unreached)

    def _round(self, layer: Layer) -> QuantTensor:
        known = self._shared.get(id(layer.weight))
        if known is not None:
            return known
        part = self.plan.rounds
        if not part.needs_inputs:
            rounded = part.module.apply(layer, part.config)
        elif layer.inputs is None:
            rounded = rtn.apply(layer, rtn.Config())
        else:
            rounded = share.rounded(layer, lambda one: part.module.apply(one, part.config))
        if id(layer.weight) in self._tied:
            self._shared[id(layer.weight)] = rounded
        return rounded

    def _install(self, stage: Stage, finished: Finished) -> None:
        for name in list(stage.linears):
            linear = stage.linears.pop(name)
            amax, device, dtype = None, linear.weight.device, linear.weight.dtype
            scheme = self.schemes[name]
            if scheme.static_input_scale:
                amax = self.input_amax.get(name, finished.input_amax.get(name))
                amax = None if amax is None else amax.to(device)
            layer = QuantLinear(finished.weights.pop(name).to(device), linear.bias, scheme.activation, amax)
            take_over(linear, layer)
            replace(self.model, linear, layer)
            del linear  # its weight may go before the codes are brought into another layout
            layer.prepare(dtype)

    def _tell(self, total: int, count: int, name: str) -> None:
        self._done += count
        if self.progress is not None:
            self.progress(self._done, total, name)

    def _warn(self) -> None:
        if self.unreached and self.plan.needs_inputs:
            warnings.warn(
                f"calibration never reached {len(self.unreached)} layers, which were rounded to nearest "
                f"(first: {self.unreached[0]})",
                stacklevel=4,
            )
        if self.starved:
            tokens, k, name = self.starved
            warnings.warn(
                f"calibration is short: {name} has {k} inputs and saw {tokens} tokens, so that the second moment of "
                "its inputs is singular; damping stands in for what is missing",
                stacklevel=4,
            )


def _others(stage: Stage) -> dict[str, Tensor]:
    """The parameters of a block that are no linear's weight: what folding may have changed beside them."""
    if not stage.name:
        return {}
    weights = {id(linear.weight) for linear in stage.linears.values()}
    return {name: p.detach() for name, p in stage.module.named_parameters() if id(p) not in weights}


def _restore(stage: Stage, others: Mapping[str, Tensor]) -> None:
    for name, value in others.items():
        owner, _, leaf = name.rpartition(".")
        old = stage.module.get_parameter(name)
        if not torch.equal(old.cpu(), value):
            fresh = nn.Parameter(value.to(old.device), requires_grad=old.requires_grad)
            setattr(stage.module.get_submodule(owner), leaf, fresh)


def take_over(old: nn.Module, new: nn.Module) -> None:
    """Give `new` what was attached to `old`: modules below it and hooks before it."""
    for name, child in old.named_children():
        new.add_module(name, child)
    for hook in old._forward_pre_hooks.values():
        new.register_forward_pre_hook(hook)


def replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever `old` stands in the model."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)


def weight_amax(linears: Mapping[str, nn.Linear]) -> dict[str, Tensor]:
    """Each weight's largest magnitude (float32 []), shared among fused projections.

    Raises:
        BadInput: a weight is on the meta device, or holds NaN or infinity (named).
    """
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
