"""Where blocks are worked on, and where what enters them is kept: models larger than the device that solves them.

A model may lie in main memory while one block at a time is worked on elsewhere. The next block is copied over by a
thread while the present one is worked on, so that two blocks are there at any time. What enters a block (tokens times
hidden size for all of the calibration) can be kept in main memory or on disk, one batch read ahead.

Parameters are lent, never moved: a block gets new ones for its visit, and those that nothing replaced meanwhile are
the old ones again when it returns.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from nybble.ops import QuantLinear


@dataclass(frozen=True)
class Room:
    """What of a device and of other memory a run may take.

    Attributes:
        device: where blocks are worked on; None: where they are.
        spill: a folder, or "cpu", for what enters the blocks; None keeps it on the device.
    """

    device: torch.device | None = None
    spill: Path | str | None = None


class Shelf:
    """Tensors by number, kept on a device, in main memory or in a folder, and given back on the device.

    Args:
        spill: as in Room.
        device: where tensors are wanted.
    """

    def __init__(self, spill: Path | str | None, device: torch.device) -> None:
        self._device, self._kept = device, dict[int, Tensor]()
        self._folder = Path(spill) if spill is not None and spill != "cpu" else None
        self._home = torch.device("cpu") if spill is not None else device
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)

    def put(self, number: int, x: Tensor) -> None:
        """Keep a tensor, in place of an earlier one of this number."""
        if self._folder is None:
            self._kept[number] = x.detach().to(self._home)
        else:
            torch.save(x.detach().cpu(), self._path(number))

    def get(self, number: int) -> Tensor:
        """A tensor, on the device."""
        x = self._kept[number] if self._folder is None else torch.load(self._path(number), weights_only=True)
        found: Tensor = x.to(self._device)
        return found

    def all(self, count: int) -> Iterator[Tensor]:
        """Tensors 0 … count - 1 in turn; each may be replaced while it is the last that was given."""
        if self._home == self._device and self._folder is None:
            yield from (self.get(number) for number in range(count))
            return
        with ThreadPoolExecutor(1) as reader:
            ahead = reader.submit(self.get, 0) if count else None
            for number in range(count):
                present = ahead.result() if ahead else self.get(number)
                ahead = reader.submit(self.get, number + 1) if number + 1 < count else None
                yield present

    def nbytes_on(self, device: torch.device) -> int:
        """Bytes that lie on a device."""
        return sum(x.nbytes for x in self._kept.values() if x.device == device)

    def clear(self) -> None:
        """Remove everything."""
        for number in list(self._kept):
            del self._kept[number]
        for path in self._folder.glob("*.activations.pt") if self._folder else ():
            path.unlink()

    def _path(self, number: int) -> Path:
        if self._folder is None:
            raise ValueError("nothing is kept in files here")
        return self._folder / f"{number:05d}.activations.pt"


class Visits:
    """Brings modules to a device and back, the next one ahead of its turn.

    Args:
        device: where to; None leaves them where they are.
    """

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._copier = ThreadPoolExecutor(1) if device is not None else None
        self._ahead: dict[int, Future[list[tuple[Tensor, Tensor]]]] = {}
        self._lent: list[tuple[Tensor, Tensor]] = []

    def expect(self, module: nn.Module) -> None:
        """Start to copy a module's tensors, whose turn is next."""
        if self._copier is not None and id(module) not in self._ahead:
            self._ahead[id(module)] = self._copier.submit(self._copies, module)

    def _copies(self, module: nn.Module) -> list[tuple[Tensor, Tensor]]:
        return [(t, t.detach().to(self._device)) for _, _, t in _tensors(module)]

    def bring(self, module: nn.Module) -> None:
        """Lend a module copies of its parameters and buffers on the device."""
        if self._copier is None:
            return
        self.expect(module)
        copies = {id(old): (old, copy) for old, copy in self._ahead.pop(id(module)).result()}
        for owner, name, old in list(_tensors(module)):
            known, fresh = copies.get(id(old), (None, old))
            if known is not old:
                continue
            lent = nn.Parameter(fresh, requires_grad=old.requires_grad) if isinstance(old, nn.Parameter) else fresh
            self._lent.append((lent, old))  # both are held: an address must not come to mean another tensor
            _put(owner, name, lent)

    def back(self, module: nn.Module, home: torch.device) -> None:
        """Return what was lent; what has come instead goes to `home`."""
        if self._copier is None:
            return
        lent = {id(copy): old for copy, old in self._lent}
        for owner, name, here in list(_tensors(module)):
            if id(here) in lent:
                _put(owner, name, lent[id(here)])
            elif not isinstance(owner, QuantLinear):
                moved = here.detach().to(home)
                known = isinstance(here, nn.Parameter)
                _put(owner, name, nn.Parameter(moved, requires_grad=here.requires_grad) if known else moved)
        for layer in module.modules():
            if isinstance(layer, QuantLinear):
                layer.to(home).prepare(layer.weight.dtype)
        self._lent.clear()

    def close(self) -> None:
        """No more visits."""
        if self._copier is not None:
            self._copier.shutdown()


def _tensors(module: nn.Module) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for owner in module.modules():
        for held in (owner._parameters, owner._buffers):
            yield from ((owner, name, t) for name, t in held.items() if t is not None)


def _put(owner: nn.Module, name: str, value: Tensor) -> None:
    held = owner._parameters if name in owner._parameters else owner._buffers
    held[name] = value  # type: ignore[assignment]
