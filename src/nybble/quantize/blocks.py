"""Cutting a matrix into the blocks that share a scale, and spreading the scales back over it.

A block format shares scales over (rows, columns) of the last two axes. `cut` views [..., N, K] as
[..., N', rows, K', columns], padding with zeros where a side does not divide: zeros change neither a largest
magnitude nor an extreme that includes zero. A vector is a matrix of one row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nybble.formats.spec import BlockFormat

Shape = tuple[int, ...]
PIECE = 1 << 20
"""Values that are worked on at once where a tensor is large: far fewer than a layer has."""


class Stack:
    """Pieces that come one by one, written below each other into one tensor so that no second copy is made.

    Args:
        length: of the whole's first axis.
    """

    def __init__(self, length: int) -> None:
        self._length, self._filled = length, 0
        self._whole: Tensor | None = None

    def add(self, piece: Tensor) -> None:
        """The next piece [rows, ...]; the first one decides dtype, device and the other axes."""
        if self._whole is None:
            self._whole = piece.new_empty((self._length, *piece.shape[1:]))
        self._whole[self._filled : self._filled + len(piece)] = piece
        self._filled += len(piece)

    def whole(self) -> Tensor:
        """Everything; ValueError where the pieces do not add up to the length."""
        if self._whole is None or self._filled != self._length:
            raise ValueError(f"{self._filled} of {self._length} rows were given")
        return self._whole


def sides(fmt: BlockFormat, shape: Shape) -> tuple[int, int]:
    """The block's (rows, columns) for a tensor of `shape`, whole axes filled in."""
    n, k = matrix(shape)[-2:]
    rows, columns = fmt.block
    return rows or max(n, 1), columns or max(k, 1)


def matrix(shape: Shape) -> Shape:
    """`shape` with at least two axes."""
    return (1, *shape) if len(shape) == 1 else tuple(shape)


def scale_shape(fmt: BlockFormat, shape: Shape) -> Shape:
    """The shape of the block scales of a tensor of `shape`: [..., ceil(N/rows), ceil(K/columns)]."""
    *lead, n, k = matrix(shape)
    rows, columns = sides(fmt, shape)
    return (*lead, -(-n // rows), -(-k // columns))


def cut(x: Tensor, fmt: BlockFormat) -> Tensor:
    """[..., N, K] as blocks [..., N', rows, K', columns], padded with zeros at the ends."""
    *lead, n, k = matrix(tuple(x.shape))
    rows, columns = sides(fmt, tuple(x.shape))
    x = x.reshape(*lead, n, k)
    if n % rows or k % columns:
        x = torch.nn.functional.pad(x, (0, -k % columns, 0, -n % rows))
    return x.reshape(*lead, -(-n // rows), rows, -(-k // columns), columns)


def join(blocks: Tensor, shape: Shape) -> Tensor:
    """Blocks back to a tensor of `shape`, the padding cut off."""
    *lead, n, k = matrix(shape)
    flat = blocks.flatten(-2).flatten(-3, -2)
    return flat[..., :n, :k].reshape(shape)


def per_block(scale: Tensor) -> Tensor:
    """Scales [..., N', K'] shaped to broadcast over blocks [..., N', rows, K', columns]."""
    return scale[..., :, None, :, None]


def expand(scale: Tensor, fmt: BlockFormat, shape: Shape) -> Tensor:
    """Scales [..., N', K'] spread over a tensor of `shape`."""
    rows, columns = sides(fmt, shape)
    *_, n, k = matrix(shape)
    if scale.shape[-1] > 1 or k == 0:
        scale = scale.repeat_interleave(columns, -1)[..., :k]
    if scale.shape[-2] > 1 or n == 0:
        scale = (scale if rows == 1 else scale.repeat_interleave(rows, -2))[..., :n, :]
    return scale.expand(matrix(shape)).reshape(shape)
