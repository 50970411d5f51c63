"""Going through a model block by block, so that only one block is worked on at a time.

A transformer is a list of blocks, each fed what the one before it gave. Calibration then needs no whole run of the
model for each block: what entered the first block is kept, and a block maps the kept activations to those of the
next. Once a block is quantized the activations go through the *quantized* block, so that every later block learns to
live with the errors before it. Held at any time: the activations of one block's entry, and one block's statistics.

A model is taken to be such a chain only after one call has shown it: every block must be given the very tensor that
the block before returned, and the same other arguments as the first. Where that is not so, or where there is no list
of blocks, the same stages are gone through by running the whole model, up to the end of the block in question.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from nybble.methods.calibrate import Batch, call


@dataclass(frozen=True)
class Stage:
    """Linears that are quantized together.

    Attributes:
        name: the block's name, or "" for what lies outside all blocks.
        module: the block, or the whole model.
        linears: by their full names.
    """

    name: str
    module: nn.Module
    linears: dict[str, nn.Linear]


class _Stop(Exception):
    """Ends a model's forward pass once all that is wanted was seen."""


@dataclass(frozen=True)
class _Entry:
    """How a block was called, and which of its arguments (position or keyword) carries the activations."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slot: int | str = 0

    @property
    def hidden(self) -> Any:
        return self.args[self.slot] if isinstance(self.slot, int) else self.kwargs[self.slot]

    def having(self, hidden: Tensor) -> _Entry:
        if isinstance(self.slot, int):
            return replace(self, args=(*self.args[: self.slot], hidden, *self.args[self.slot + 1 :]))
        return replace(self, kwargs={**self.kwargs, self.slot: hidden})

    def others(self) -> list[Any]:
        positional = [a for i, a in enumerate(self.args) if i != self.slot]
        return positional + [v for k, v in sorted(self.kwargs.items()) if k != self.slot]


def split(model: nn.Module, linears: dict[str, nn.Linear]) -> list[Stage]:
    """The blocks that hold linears, in their order, then the linears outside of them."""
    name, blocks = _blocks(model, linears)
    stages, left = [], dict(linears)
    for index, block in enumerate(blocks):
        prefix = f"{name}.{index}."
        inside = {n: left.pop(n) for n in linears if n.startswith(prefix) and n in left}
        if inside:
            stages.append(Stage(prefix[:-1], block, inside))
    return [*stages, Stage("", model, left)] if left else stages


def _blocks(model: nn.Module, linears: dict[str, nn.Linear]) -> tuple[str, Sequence[nn.Module]]:
    """The list of modules with the most linears inside; of equal ones the outermost."""
    best, found, most = "", nn.ModuleList(), 0
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList):
            inside = sum(n.startswith(f"{name}.") for n in linears)
            if inside > most:
                best, found, most = name, module, inside
    return best, list(found)


class Whole:
    """Runs the whole model for every stage."""

    def __init__(self, model: nn.Module, batches: Sequence[Batch]) -> None:
        self._model, self._batches = model, batches

    def run(self, stage: Stage) -> Generator[None, None, None]:
        """Call the model with each batch in turn, up to the end of the stage's block."""
        handle = None
        if stage.module is not self._model:
            handle = stage.module.register_forward_hook(_stop)
        try:
            for batch in self._batches:
                _until_stopped(partial(call, self._model, batch))
                yield
        finally:
            if handle is not None:
                handle.remove()

    def advance(self, stage: Stage) -> None:
        """Nothing is kept, so nothing moves on."""

    def probe(self, stage: Stage) -> Tensor:
        """What the stage's module gives for the first batch."""
        results: list[Any] = []
        handle = stage.module.register_forward_hook(lambda module, args, result: results.append(_hidden(result)))
        runs = self.run(stage)
        try:
            next(runs)
        finally:
            runs.close()
            handle.remove()
        found = results[-1]
        return found if isinstance(found, Tensor) else found.logits


class Chain(Whole):
    """Keeps what enters the current block and runs that block alone."""

    def __init__(self, model: nn.Module, batches: Sequence[Batch], first: nn.Module, slot: int | str) -> None:
        super().__init__(model, batches)
        self._entries = [replace(_entry(model, batch, first), slot=slot) for batch in batches]

    def run(self, stage: Stage) -> Generator[None, None, None]:
        if stage.module is self._model:
            yield from super().run(stage)
            return
        for entry in self._entries:
            stage.module(*entry.args, **entry.kwargs)
            yield

    def advance(self, stage: Stage) -> None:
        """The kept activations go through the block."""
        if stage.module is self._model:
            return
        for index, entry in enumerate(self._entries):
            self._entries[index] = entry.having(_hidden(stage.module(*entry.args, **entry.kwargs)))


def drive(model: nn.Module, stages: Sequence[Stage], batches: Sequence[Batch]) -> Whole:
    """A Chain where the model is one, else Whole."""
    blocks = [stage.module for stage in stages if stage.module is not model]
    slot = _chained(model, blocks, batches[0]) if len(blocks) > 1 and batches else None
    return Whole(model, batches) if slot is None else Chain(model, batches, blocks[0], slot)


def _chained(model: nn.Module, blocks: Sequence[nn.Module], batch: Batch) -> int | str | None:
    """Which argument carries the activations from block to block; None where the model is no chain of them."""
    entries: list[_Entry] = []
    results: list[Any] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        slots = [*range(len(args)), *kwargs]
        values = [*args, *kwargs.values()]
        given = [s for s, v in zip(slots, values, strict=True) if results and v is _hidden(results[-1])]
        entries.append(_Entry(args, kwargs, given[0] if given else -1))

    def leave(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
        results.append(result)

    handles = [block.register_forward_pre_hook(enter, with_kwargs=True) for block in blocks]
    handles += [block.register_forward_hook(leave) for block in blocks]
    try:
        call(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    if len(entries) != len(blocks) or any(entry.slot != entries[1].slot or entry.slot == -1 for entry in entries[1:]):
        return None
    first = replace(entries[0], slot=entries[1].slot)
    return first.slot if all(_same(first.others(), entry.others()) for entry in entries[1:]) else None


def _same(a: Any, b: Any) -> bool:
    """Whether two arguments of blocks are equal, tensors and nested tuples of them included."""
    if a is b:
        return True
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, tuple | list):
        return isinstance(b, tuple | list) and len(a) == len(b) and all(map(_same, a, b))
    return isinstance(a, int | float | str | bool) and bool(a == b)


def _entry(model: nn.Module, batch: Batch, block: nn.Module) -> _Entry:
    """How the model calls a block for this batch."""
    found: list[_Entry] = []

    def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(_Entry(args, kwargs))
        raise _Stop

    handle = block.register_forward_pre_hook(enter, with_kwargs=True)
    try:
        _until_stopped(lambda: call(model, batch))
    finally:
        handle.remove()
    return found[0]


def _hidden(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _stop(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
    raise _Stop


def _until_stopped(run: Callable[[], object]) -> None:
    try:
        run()
    except _Stop:
        return
