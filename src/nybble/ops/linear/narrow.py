"""Products of narrow operands: which pairs of formats the kernels take, and how a product is described to them.

    y[m, n] = sum_g sx[m, g] sw[n, g] sum_{k in g} cx[m, k] cw[n, k]  + bias[n]

With one scale a row (a token, a channel) there is one group: the inner sum is exact in int32, whatever the order, and
the rescale waits until the end, three roundings in a fixed order: float32(sum), times sx, times sw. With groups along
K every group's sum is rescaled and added up in float32; that takes scalar instructions for each output and group,
which hide behind the products only where groups are long (planner/granularity.py).

Integers of four bits are widened to eight, sixteen times their value: no product of theirs exists on recent GPUs.
FP8 products are summed by the tensor cores to about fourteen bits, so their sums are taken out every 128 columns, for
results in float16 every 64; float32 results would promise more than that.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from nybble.formats.spec import BlockFormat, FloatFormat, IntFormat
from nybble.formats.table import E4M3
from nybble.ops.linear.config import H200, Machine
from nybble.quantize import QuantTensor
from nybble.quantize.layouts import DENSE, Layout, register

STEP = 32
"""Columns that the tensor cores take at once."""
CHUNK = 128
_GROUPS = (32, 64, 128)
_WIDE_SCALES = {"bf16": 0, "fp16": 1, "fp32": 2}


@dataclass(frozen=True)
class Halves(Layout):
    """4-bit codes, two in a byte: byte j of a row's chunk of 128 columns holds columns j (the low bits) and j + 64.

    So one shift and one mask a word give four neighbours in the order in which the other operand has them. Columns are
    padded to 128 with code 0.
    """

    def pack(self, codes: Tensor, bits: int) -> Tensor:
        chunks = torch.nn.functional.pad(codes, (0, -codes.shape[-1] % CHUNK)).unflatten(-1, (-1, 2, CHUNK // 2))
        return (chunks[..., 0, :] | chunks[..., 1, :] << 4).flatten(-2)

    def unpack(self, packed: Tensor, shape: tuple[int, ...], bits: int) -> Tensor:
        bytes_ = packed.unflatten(-1, (-1, 1, CHUNK // 2))
        return torch.cat([bytes_ & 0xF, bytes_ >> 4], -2).flatten(-3)[..., : shape[-1]].contiguous()


HALVES = register(Halves("halves128"))


@dataclass(frozen=True)
class Problem:
    """A product x[M, K] @ W[N, K]^T of narrow operands, stored in bf16, fp16 or fp32."""

    m: int
    n: int
    k: int
    weight: BlockFormat
    activation: BlockFormat
    dtype: torch.dtype = torch.bfloat16
    machine: Machine = H200

    @property
    def float8(self) -> bool:
        """Whether the products are FP8's; otherwise they are int8's."""
        return isinstance(self.weight.element, FloatFormat)

    @property
    def nibbles(self) -> bool:
        """Whether the weight comes in four bits."""
        return self.weight.element.bits == 4

    @property
    def group(self) -> int:
        """Columns after which sums are taken out and rescaled; 0 where they stay until the end."""
        columns = [fmt.block[1] for fmt in (self.weight, self.activation) if grouped(fmt)]
        if self.float8:
            return CHUNK if self.dtype == torch.bfloat16 else CHUNK // 2
        return min(c for c in columns if c) if columns else 0

    @property
    def key(self) -> str:
        """What a measured choice of kernel is filed under; numbers of tokens that fill the same tiles share it."""
        tokens = -(-self.m // 64) * 64
        return f"{self.weight.name} x {self.activation.name} [{tokens}, {self.n}, {self.k}]"


def grouped(fmt: BlockFormat) -> bool:
    """Whether scales change along K."""
    return fmt.block[1] is not None


def refusal(weight: BlockFormat, activation: BlockFormat | None, dtype: torch.dtype = torch.bfloat16) -> str | None:
    """Why no kernel takes the pair of formats with results in `dtype`, or None."""
    if activation is None:
        return "takes activations in eight or four bits; none were asked for"
    if weight.element == E4M3 and dtype == torch.float32:
        return "tensor cores sum FP8 products to fewer bits than a float32 result promises"
    return _element_refusal(weight, activation) or _block_refusal(weight, activation)


def _element_refusal(weight: BlockFormat, activation: BlockFormat) -> str | None:
    pair = (weight.element, activation.element)
    ints = all(
        isinstance(e, IntFormat) and e.bits in (4, 8) and e.low == -(1 << e.bits - 1) and not e.fraction_bits
        for e in pair
    )
    floats = all(isinstance(e, FloatFormat) and e == E4M3 for e in pair)
    if not (ints or floats):
        return f"multiplies int8, int4 or e4m3 codes; asked for {weight.name} and {activation.name}"
    if weight.zero_point or activation.zero_point:
        return f"rescales symmetric codes; {(weight if weight.zero_point else activation).name} has zero points"
    return None


def _block_refusal(weight: BlockFormat, activation: BlockFormat) -> str | None:
    for fmt in (weight, activation):
        if fmt.scale.name not in _WIDE_SCALES or fmt.tensor_scale:
            return f"rescales by bf16, fp16 or fp32; {fmt.name} has {fmt.scale.name} scales"
        if fmt.block[1] not in (None, *_GROUPS):
            return f"folds groups of {_GROUPS} columns; {fmt.name} has {fmt.block[1]}"
    if activation.block[0] not in (None, 1):
        return f"takes scales of a token; {activation.name} has them for {activation.block[0]}"
    if weight.block[0] not in (None, 1, CHUNK):
        return f"takes scales of 1 or {CHUNK} rows; {weight.name} has {weight.block[0]}"
    columns = {fmt.block[1] for fmt in (weight, activation) if grouped(fmt)}
    if len(columns) > 1:
        return f"folds one length of group; {weight.name} and {activation.name} have {sorted(c for c in columns if c)}"
    return None


def scales(q: QuantTensor, p: Problem) -> Tensor:
    """A [M, K] or [N, K] operand's scales, one for each of the problem's groups where there are groups."""
    scale, columns = q.scale.view(-1, q.scale.shape[-1]), q.format.block[1]
    return scale.repeat_interleave(columns // p.group, -1) if columns and columns > p.group else scale


def layout_for(fmt: BlockFormat) -> Layout:
    """The layout in which the kernels read a weight."""
    return HALVES if fmt.element.bits == 4 else DENSE
