"""What every layout of quantized linears shares: what is read, and how calibrated inputs are told."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from nybble.checkpoints.huggingface import Weights
from nybble.errors import BadInput, DamagedFile
from nybble.formats.spec import BlockFormat
from nybble.quantize import QuantTensor, scales
from nybble.quantize.blocks import scale_shape


@dataclass(frozen=True)
class StoredLinear:
    """A quantized linear layer as a checkpoint holds it.

    Attributes:
        weight: QuantTensor [N, K].
        activation: what the inputs are rounded to, or None.
        activation_amax: float32 [], the calibrated input magnitude, or None.
    """

    weight: QuantTensor
    activation: BlockFormat | None = None
    activation_amax: Tensor | None = None


class Ledger:
    """The tensors of a checkpoint, with a note of which were used.

    Attributes:
        used: the names that were read, or declared to be of no use here.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.used: set[str] = set()

    def names(self) -> set[str]:
        """The names of all tensors."""
        return self._weights.names()

    def __contains__(self, name: str) -> bool:
        return name in self._weights

    def dtype(self, names: Iterable[str]) -> torch.dtype | None:
        """The floating dtype that most of the values of these tensors have."""
        return self._weights.dtype(names)

    def get(self, name: str, shape: Iterable[int] | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor, of the given shape and dtype; DamagedFile where it is missing or something else."""
        if name not in self._weights:
            raise DamagedFile(f"{self._weights.directory}: has no {name}")
        tensor = self._weights[name]
        if shape is not None and tuple(tensor.shape) != tuple(shape):
            raise DamagedFile(f"{self._weights.directory}: {name} is {tuple(tensor.shape)}, expected {tuple(shape)}")
        if dtype is not None and tensor.dtype != dtype:
            raise DamagedFile(f"{self._weights.directory}: {name} is {tensor.dtype}, expected {dtype}")
        self.used.add(name)
        return tensor

    def scale(self, name: str, fmt: BlockFormat, shape: tuple[int, int]) -> Tensor:
        """Block scales of a weight of `shape`, brought to [N', K']; layouts drop axes of one."""
        tensor, expected = self.get(name), scale_shape(fmt, shape)
        if tensor.numel() != math.prod(expected):
            raise DamagedFile(
                f"{self._weights.directory}: {name} is {tuple(tensor.shape)}, expected {expected} for {fmt.name}"
            )
        return tensor.reshape(expected)

    def scalar(self, name: str) -> Tensor:
        """A tensor of one value as float32 []; DamagedFile where it is not positive and finite."""
        value = self.get(name)
        if value.numel() != 1 or not bool((value > 0) & value.isfinite()):
            raise DamagedFile(f"{self._weights.directory}: {name} is {value.tolist()}, expected one positive number")
        return value.to(torch.float32).reshape(())


def encode_of(activation: BlockFormat, amax: Tensor) -> Tensor:
    """What inputs of largest magnitude `amax` are multiplied by before rounding: fl32(target * E / amax)."""
    scale = scales.tensor_scale(activation.rule, activation, amax)
    if scale is None:
        raise BadInput(f"{activation.name} has no tensor scale")
    return scale.encode


def amax_of(activation: BlockFormat, encode: Tensor) -> Tensor:
    """The input magnitude that gives this encode factor, exactly for every factor that some magnitude gives.

    `encode_of` rounds twice (torch divides a number by a tensor through the reciprocal), so that the quotient may be
    a unit away from the magnitude; its two neighbours are tried as well. A test goes through all mantissas.
    """
    guess = torch.tensor(activation.target * activation.element.max, device=encode.device) / encode
    amax = guess
    for candidate in (torch.nextafter(guess, guess * 2), torch.nextafter(guess, guess / 2)):
        amax = torch.where(encode_of(activation, amax) == encode, amax, candidate)
    return torch.where(encode_of(activation, amax) == encode, amax, guess)
