"""Memory that tells: poisoned where a result should be written, fenced where nothing should."""

from __future__ import annotations

import numpy as np
import torch

FENCE_BYTES = 512  # keeps the alignment that a device allocator gives
LARGEST_FENCED = 64 << 20  # beyond this, a copy that lives until the test ends costs more than it finds
FENCE = 0xD7
# All ones is NaN in every float format from 8 bits up; 0xA5 is odd, large, and negative where there is a sign.
POISON_FLOAT, POISON_INTEGER = 0xFF, 0xA5


class Fences:
    """Hands out poisoned tensors with fences around them, and checks the fences later."""

    def __init__(self) -> None:
        self._bands: list[tuple[str, torch.Tensor]] = []

    def allocate(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", row_pad: int = 0
    ) -> torch.Tensor:
        """A poisoned tensor of `shape`; with `row_pad`, that many fenced elements follow each row of the last axis."""
        *lead, columns = shape
        wide = torch.empty((*lead, columns + row_pad), dtype=dtype, device=device)
        tensor = self.around(wide)[..., :columns]
        if row_pad:
            gap = _bytes(tensor)[FENCE_BYTES:-FENCE_BYTES].view(-1, wide.shape[-1] * wide.element_size())
            gap = gap[:, columns * wide.element_size() :].fill_(FENCE)
            self._bands.append((f"between the rows of {_name(tensor)}", gap))
        return tensor

    def around(self, fresh: torch.Tensor) -> torch.Tensor:
        """A fenced, poisoned tensor with the shape and strides of `fresh`; very large ones are only poisoned."""
        if type(fresh) is not torch.Tensor or fresh.device.type not in ("cpu", "cuda"):
            return fresh
        size = fresh.untyped_storage().nbytes()
        byte = POISON_FLOAT if fresh.dtype.is_floating_point or fresh.dtype.is_complex else POISON_INTEGER
        byte = 1 if fresh.dtype == torch.bool else byte
        if size > LARGEST_FENCED:
            _bytes(fresh).fill_(byte)
            return fresh
        buffer = torch.full((size + 2 * FENCE_BYTES,), FENCE, dtype=torch.uint8, device=fresh.device)
        buffer[FENCE_BYTES : FENCE_BYTES + size] = byte
        self._bands.append((f"before {_name(fresh)}", buffer[:FENCE_BYTES]))
        self._bands.append((f"after {_name(fresh)}", buffer[FENCE_BYTES + size :]))
        offset = FENCE_BYTES // fresh.element_size()
        tensor = torch.empty(0, dtype=fresh.dtype, device=fresh.device)
        tensor.set_(buffer.untyped_storage(), offset, fresh.shape, fresh.stride())
        return tensor.requires_grad_(fresh.requires_grad)

    def check(self) -> None:
        """Raise AssertionError with the place and the count if a fence was written to; forget all fences."""
        bands, self._bands = self._bands, []
        for where, band in bands:
            written = (band != FENCE).nonzero()
            if len(written):
                raise AssertionError(f"{len(written)} bytes written {where}, the first at {written[0].tolist()}")


def poison(array: np.ndarray) -> np.ndarray:
    """Fill a NumPy array in place with NaN, or with the integer pattern; returns it."""
    values = {"f": np.nan, "c": np.nan, "b": True, "u": POISON_INTEGER, "i": POISON_INTEGER - 256}
    if array.dtype.kind in values:
        array.fill(values[array.dtype.kind])
    return array


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The whole storage behind a tensor as bytes."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def _name(tensor: torch.Tensor) -> str:
    return f"a {str(tensor.dtype).removeprefix('torch.')} buffer of shape {list(tensor.shape)}"
