"""What data says about the inputs of a model's linears.

Batches are what the model is called with: a tensor, a tuple of positional arguments, or a mapping of keywords; a
calibration is any iterable of them, or a callable that makes one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from nybble.errors import BadInput
from nybble.formats.spec import BlockFormat
from nybble.methods.layer import Inputs
from nybble.ops.linear.reference import round_activation

Batch = Tensor | tuple[Any, ...] | Mapping[str, Any]
Calibration = Iterable[Batch] | Callable[[], Iterable[Batch]]


def batches(calibration: Calibration) -> list[Batch]:
    """The batches of a calibration, all of them: they are gone through more than once."""
    return list(calibration() if callable(calibration) else calibration)


def call(model: nn.Module, batch: Batch) -> Any:
    """model(batch), a mapping as keywords and a tuple as positional arguments, without a key-value cache."""
    extra: dict[str, Any] = {}
    takes_cache = "use_cache" in inspect.signature(model.forward).parameters
    if takes_cache and not (isinstance(batch, Mapping) and "use_cache" in batch):
        extra["use_cache"] = False
    if isinstance(batch, Mapping):
        return model(**batch, **extra)
    return model(*batch, **extra) if isinstance(batch, tuple) else model(batch, **extra)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout and without gradients; afterwards each module, or what took its place, has its mode again."""
    modes = {name: module.training for name, module in model.named_modules()}  # by name: a module may be let go
    try:
        model.eval()
        with torch.no_grad():
            yield
    finally:
        for name, module in model.named_modules():
            module.training = modes.get(name, module.training)


class _Watch:
    """Notes which tensor reached which linear during one call of a model, and which normalization made it."""

    def __init__(self, linears: Mapping[str, nn.Module], around: nn.Module | None) -> None:
        self.calls: list[tuple[str, Tensor]] = []
        self._made: dict[int, tuple[nn.Module, Tensor]] = {}
        self._handles = [module.register_forward_pre_hook(self._note(name)) for name, module in linears.items()]
        norms = [] if around is None else [module for module in around.modules() if _is_norm(module)]
        self._handles += [module.register_forward_hook(self._output) for module in norms]

    def _output(self, module: nn.Module, args: tuple[Any, ...], result: object) -> None:
        if isinstance(result, Tensor):
            self._made[id(result)] = (module, result)

    def _note(self, name: str) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            self.calls.append((name, args[0]))

        return hook

    def take(self) -> list[tuple[tuple[str, ...], Tensor, nn.Module | None]]:
        """(names, tensor, its normalization) for each tensor since the last time; the calls are forgotten."""
        by_tensor: dict[int, tuple[list[str], Tensor]] = {}
        for name, x in self.calls:
            by_tensor.setdefault(id(x), ([], x))[0].append(name)
        made = {key: module for key, (module, _) in self._made.items()}
        self.calls.clear()
        self._made.clear()
        return [(tuple(names), x, made.get(id(x))) for names, x in by_tensor.values()]

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


def _is_norm(module: nn.Module) -> bool:
    """Whether a module multiplies each channel by a weight of its own, as far as its parameters tell."""
    weight = getattr(module, "weight", None)
    return isinstance(weight, nn.Parameter) and weight.ndim == 1 and not list(module.children())


def collect(
    linears: Mapping[str, nn.Linear],
    runs: Iterable[object],
    around: nn.Module | None = None,
    activations: Mapping[str, BlockFormat | None] | None = None,
) -> dict[str, Inputs]:
    """What reaches each linear while `runs` is gone through, one item a batch.

    Linears that are fed the very same tensor, and round it alike, share one Inputs. A linear that no input reached has
    no entry.

    Args:
        linears: by name.
        runs: each item is one batch that ran through the model.
        around: a module that holds the linears; inputs then know the normalization in it that made them.
        activations: the formats of inputs by linear; inputs then also know what rounding makes of them.

    Raises:
        BadInput: an input holds NaN or infinity (layer and batch named).
    """
    seen: dict[tuple[str, ...], Inputs] = {}
    watch = _Watch(linears, around)
    try:
        for number, _ in enumerate(runs, 1):
            for names, x, producer in watch.take():
                for fmt, alike in _alike(names, activations or {}).items():
                    _add(_entry(seen, tuple(alike), x, producer), alike[0], x, fmt, number)
    finally:
        watch.close()
    return _by_name(seen)


def _alike(
    names: tuple[str, ...], activations: Mapping[str, BlockFormat | None]
) -> dict[BlockFormat | None, list[str]]:
    """The names by how they round their inputs."""
    groups: dict[BlockFormat | None, list[str]] = {}
    for name in names:
        groups.setdefault(activations.get(name), []).append(name)
    return groups


def _entry(
    seen: dict[tuple[str, ...], Inputs], names: tuple[str, ...], x: Tensor, producer: nn.Module | None
) -> Inputs:
    inputs = seen.get(names)
    if inputs is None:
        inputs = seen[names] = Inputs(x.shape[-1], x.device)
        inputs.producer = producer
    if inputs.producer is not producer:
        inputs.producer = None
    return inputs


def _add(inputs: Inputs, name: str, x: Tensor, activation: BlockFormat | None, number: int) -> None:
    rounded = None if activation is None else round_activation(x.detach(), activation)
    try:
        inputs.add(x, rounded)
    except BadInput as error:
        raise BadInput(f"calibration: the input of {name} holds NaN or infinity (batch {number}: {error})") from None


def _by_name(seen: Mapping[tuple[str, ...], Inputs]) -> dict[str, Inputs]:
    found: dict[str, Inputs] = {}
    for names, inputs in seen.items():
        for name in dict.fromkeys(names) if inputs.tokens else ():
            found[name] = found[name].merge(inputs) if name in found else inputs
    return found


def input_amax(model: nn.Module, linears: Mapping[str, nn.Module], calibration: Iterable[Batch]) -> dict[str, Tensor]:
    """The largest magnitude (float32 []) that reaches each linear over all batches.

    Raises:
        BadInput: no batch was given, a linear was never reached, or an input held NaN or infinity (layer named).
    """
    seen: dict[str, Tensor] = {}

    def watch(name: str) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            if args[0].numel():
                amax = args[0].detach().abs().amax().to(torch.float32)
                seen[name] = torch.maximum(seen[name], amax) if name in seen else amax

        return hook

    handles = [module.register_forward_pre_hook(watch(name)) for name, module in linears.items()]
    try:
        with evaluating(model):
            for batch in calibration:
                call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    missing = [name for name in linears if name not in seen]
    if missing:
        raise BadInput(f"calibration never reached {len(missing)} of {len(linears)} layers, first: {missing[0]}")
    for name, amax in seen.items():
        if not bool(amax.isfinite()):
            raise BadInput(f"calibration: the input of {name} holds NaN or infinity")
    return seen
