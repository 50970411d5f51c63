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

from nybble.errors import Unsupported
from nybble.methods.calibrate import Batch, call
from nybble.methods.room import Room, Shelf, Visits


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

    def having(self, hidden: Tensor | None) -> _Entry:
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

    @property
    def device(self) -> torch.device:
        """Where blocks are worked on."""
        return next(self._model.parameters()).device

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

    def enter(self, stage: Stage) -> None:
        """The stage's turn has come."""

    def leave(self, stage: Stage) -> None:
        """Nothing is kept, so nothing moves on."""

    def close(self) -> None:
        """The last stage is done."""

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
    """Keeps what enters the current block and runs that block alone, on a device of its own where asked (room.py).

    Args:
        model: the model.
        batches: the calibration.
        blocks: the model's blocks in their order.
        slot: which of a block's arguments carries the activations.
        room: where blocks are worked on, and where the activations are kept.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Batch], blocks: Sequence[nn.Module], slot: int | str, room: Room
    ) -> None:
        super().__init__(model, batches)
        self._blocks, self._home = list(blocks), next(blocks[0].parameters()).device
        self._device = device = room.device or self._home
        self._visits = Visits(None if device == self._home else device)
        self._shelf, self._entries = Shelf(room.spill, device), list[_Entry]()
        for number, batch in enumerate(batches):
            entry = replace(_entry(model, batch, blocks[0]), slot=slot)
            self._shelf.put(number, entry.hidden)
            self._entries.append(_moved(entry.having(None), device))

    @property
    def device(self) -> torch.device:
        return self._device

    @property
    def visiting(self) -> bool:
        """Whether blocks are brought from elsewhere."""
        return self._device != self._home

    @property
    def count(self) -> int:
        """Of batches."""
        return len(self._entries)

    @property
    def kept_bytes(self) -> int:
        """What enters a block, as far as it is kept on the device."""
        return self._shelf.nbytes_on(self._device)

    def run(self, stage: Stage) -> Generator[None, None, None]:
        if stage.module is self._model:
            yield from super().run(stage)
            return
        for entry, hidden in zip(self._entries, self._shelf.all(len(self._entries)), strict=True):
            whole = entry.having(hidden)
            stage.module(*whole.args, **whole.kwargs)
            yield

    def enter(self, stage: Stage) -> None:
        """The stage's block comes to the device, and the next one follows while it is worked on."""
        if stage.module is self._model:
            return
        self._visits.bring(stage.module)
        after = self._blocks.index(stage.module) + 1
        if after < len(self._blocks):
            self._visits.expect(self._blocks[after])

    def leave(self, stage: Stage) -> None:
        """The kept activations go through the block, and the block goes home."""
        if stage.module is self._model:
            return
        for number, hidden in enumerate(self._shelf.all(len(self._entries))):
            whole = self._entries[number].having(hidden)
            self._shelf.put(number, _hidden(stage.module(*whole.args, **whole.kwargs)))
        self._visits.back(stage.module, self._home)

    def close(self) -> None:
        self._visits.close()
        self._shelf.clear()


def drive(model: nn.Module, stages: Sequence[Stage], batches: Sequence[Batch], room: Room | None = None) -> Whole:
    """A Chain where the model is one, else Whole.

    Raises:
        Unsupported: blocks shall be worked on elsewhere, and the model is no chain of blocks.
    """
    room = room or Room()
    blocks = [stage.module for stage in stages if stage.module is not model]
    slot = _chained(model, blocks, batches[0]) if len(blocks) > 1 and batches else None
    if slot is not None:
        return Chain(model, batches, blocks, slot, room)
    if room != Room():
        raise Unsupported(
            f"{type(model).__name__} is no chain of blocks that could be worked on one by one: "
            "move the model to the device as a whole, and keep activations there"
        )
    return Whole(model, batches)


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


def _moved(value: Any, device: torch.device) -> Any:
    """The same with all its tensors on a device."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, _Entry):
        return replace(value, args=_moved(value.args, device), kwargs=_moved(value.kwargs, device))
    if type(value) in (tuple, list):
        return type(value)(_moved(item, device) for item in value)
    return {key: _moved(item, device) for key, item in value.items()} if type(value) is dict else value


def _hidden(result: Any) -> Any:
    return result[0] if isinstance(result, tuple) else result


def _stop(module: nn.Module, args: tuple[Any, ...], result: Any) -> None:
    raise _Stop


def _until_stopped(run: Callable[[], object]) -> None:
    try:
        run()
    except _Stop:
        return
