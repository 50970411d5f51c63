"""Rounding a weight column by column, each error repaired by the columns that come after.

The frame that GPTQ and its kin share. Round column j of W to q_j and let the columns that are still free take the
values that make up best for the error. With (H + damping)^-1 = U^T U, U upper triangular, that is (Frantar et al.,
arXiv 2210.17323)

    e = (w_j - q_j) / U_jj,        w_k <- w_k - e U_jk   for all k > j

and the error that no later column can repair is e^2 for each row. Groups that share a scale are worked on one after
the other: a policy sees the group *as it is by then*, after all repairs, and names its scale; then its columns are
rounded. Weights lie transposed, [K, N], so that a column is contiguous; repairs within a run of columns are made at
once, those beyond it as one matrix product. The cost is about N K^2 multiplications in float64.

Order. Columns are taken as they lie, or largest diag(H) first (act-order, the default): groups are reordered as
wholes, and columns within their group, so that a group's scale can still be chosen when its turn comes and neighbours
in storage still share it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from nybble.errors import BadInput
from nybble.formats.spec import BlockFormat
from nybble.methods.layer import Factor, Layer
from nybble.ops.round_columns import round_columns
from nybble.ops.round_columns.reference import nearest
from nybble.quantize import QuantTensor, elements, scales
from nybble.quantize.blocks import PIECE, cut, sides
from nybble.quantize.layouts import DENSE

RUN = 32  # columns whose repairs stay among themselves until the run is done

Run = tuple[slice, Tensor]
"""Which columns of a group, and their errors, float64 [R, C, N]."""


@dataclass(frozen=True)
class GroupScale:
    """The scale of one group of columns.

    Attributes:
        stored: as the format stores it, [N', 1].
        effective: float32 [N], what elements are multiplied by.
        zero_point: int8 [N', 1] where the format has one.
    """

    stored: Tensor
    effective: Tensor
    zero_point: Tensor | None = None


@dataclass(frozen=True)
class Target:
    """What a weight is rounded to: format, scale rule, number of rows and the scale over the whole tensor."""

    format: BlockFormat
    rule: str
    rows: int
    tensor: scales.TensorScale | None

    def propose(self, group: Tensor) -> GroupScale:
        """The scale that the rule gives a group of columns, [K', N]."""
        blocks = cut(group.t().to(torch.float32), self.format)
        proposal = scales.rule(self.rule)(blocks, self.format, self.tensor)
        return self.scale(scales.store(proposal.scale, self.format), proposal.zero_point)

    def scale(self, stored: Tensor, zero_point: Tensor | None = None) -> GroupScale:
        """A stored scale [N', 1] with what it means."""
        effective = elements.decode(self.format.scale, stored)
        if self.tensor is not None:
            effective = effective * self.tensor.decode
        return GroupScale(stored, self.spread(effective), zero_point)

    def spread(self, scale: Tensor) -> Tensor:
        """One number a block of rows, [N', 1], as one a row, [N]."""
        rows = sides(self.format, (self.rows, 1))[0]
        return (scale if rows == 1 else scale.repeat_interleave(rows, 0)[: self.rows]).flatten()

    def zeros(self, scale: GroupScale) -> Tensor | None:
        """A scale's zero points as float32 [N]."""
        return None if scale.zero_point is None else self.spread(scale.zero_point).to(torch.float32)


class Policy(Protocol):
    """How a group's scale is chosen when its turn comes."""

    def __call__(self, target: Target, group: Tensor, upper: Tensor) -> GroupScale:
        """The scale for a group [K', N] (float64, repaired so far) with its own triangle of U, [K', K']."""


def target(layer: Layer, rule: str | None = None) -> Target:
    """What a layer's weight is rounded to.

    Raises:
        BadInput: the weight is not a matrix.
    """
    fmt = layer.scheme.weight
    if layer.weight.ndim != 2:
        raise BadInput(f"{layer.name}: a weight [N, K] is needed, got {tuple(layer.weight.shape)}")
    name = rule or layer.scheme.rule or fmt.rule
    amax = layer.tensor_amax if layer.tensor_amax is not None else layer.weight.detach().abs().amax()
    whole = scales.tensor_scale(name, fmt, amax.to(torch.float32))
    return Target(fmt, name, layer.weight.shape[0], whole)


def groups(order: Tensor, width: int) -> Iterator[tuple[int, int, int]]:
    """(index of the group, start, stop) of its columns in the order they are worked on."""
    start, k, columns = 0, len(order), order.tolist()
    while start < k:
        index = columns[start] // width
        stop = start + min(width, k - index * width)
        yield index, start, stop
        start = stop


def ordered(diagonal: Tensor, width: int, by_weight: bool) -> Tensor:
    """The order of columns, int64 [K]: as they lie, or groups and columns within them by falling diag(H)."""
    k, weight = len(diagonal), diagonal.cpu()  # one wait for the device in place of one a group
    runs = [torch.arange(a, min(a + width, k)) for a in range(0, k, width)]
    if by_weight:
        runs.sort(key=lambda run: -float(weight[run].mean()))
        runs = [run[weight[run].argsort(descending=True, stable=True)] for run in runs]
    return torch.cat(runs).to(diagonal.device) if runs else torch.arange(k, device=diagonal.device)


def errors(target: Target, columns: Tensor, upper: Tensor, scale: Tensor, zero: Tensor | None) -> Iterator[Run]:
    """Round columns one after the other under each of C scales, run by run.

    Args:
        target: what to round to.
        columns: float64 [K', C, N], changed: the columns of later runs take the repairs of earlier ones.
        upper: their triangle of U, float64 [K', K'].
        scale: float32 [C, N].
        zero: zero points [N] or None.
    """
    for begin in range(0, len(columns), RUN):
        run = slice(begin, min(begin + RUN, len(columns)))
        found = round_columns(columns[run], upper[run, run], scale, zero, target.format.element)
        later = columns[run.stop :]
        if len(later):
            later.view(len(later), -1).addmm_(upper[run, run.stop :].t(), found.view(len(found), -1), alpha=-1)
        yield run, found


def commit(target: Target, group: Tensor, upper: Tensor, scale: GroupScale) -> tuple[Tensor, Tensor]:
    """Round the columns of a group one after the other.

    Args:
        target: what to round to.
        group: contiguous float64 [K', N], changed.
        upper: the group's triangle of U, float64 [K', K'].
        scale: the group's scale.

    Returns:
        (elements float32 [K', N], errors e float64 [K', N]).
    """
    zero, found = target.zeros(scale), []
    rounded = torch.empty(group.shape, dtype=torch.float32, device=group.device)
    for run, e in errors(target, group[:, None], upper, scale.effective[None], zero):
        found.append(e[:, 0])
        value = group[run].addmm(upper[run, run].t(), found[-1], alpha=-1)
        rounded[run] = nearest(target.format.element, value, scale.effective, zero)
    rounded += 0.0 if zero is None else zero  # of what was rounded to zero the sign is chance: +0 for all
    return rounded, torch.cat(found)


def sweep(layer: Layer, target: Target, factor: Factor, policy: Policy) -> QuantTensor:
    """Round a whole weight, group after group.

    Args:
        layer: the layer.
        target: what its weight is rounded to.
        factor: of its inputs.
        policy: chooses each group's scale.
    """
    n, k = layer.weight.shape
    width = sides(target.format, (n, k))[1]
    upper = factor.upper
    free = layer.weight.detach().to(torch.float64).t()[factor.order].contiguous()
    rounded = torch.empty((k, n), dtype=torch.float32, device=free.device)
    chosen: dict[int, GroupScale] = {}
    for index, start, stop in groups(factor.order, width):
        group, triangle = free[start:stop], upper[start:stop, start:stop]
        chosen[index] = policy(target, group, triangle)
        rounded[factor.order[start:stop]], e = commit(target, group, triangle, chosen[index])
        free[stop:].addmm_(upper[start:stop, stop:].t(), e, alpha=-1)
    del free
    codes, step = torch.empty((k, n), dtype=torch.uint8, device=rounded.device), max(1, PIECE // (4 * max(n, 1)))
    for start in range(0, k, step):
        codes[start : start + step] = elements.encode(target.format.element, rounded[start : start + step])
    return _assemble(layer, target, codes, [chosen[index] for index in sorted(chosen)])


def _assemble(layer: Layer, target: Target, codes: Tensor, chosen: list[GroupScale]) -> QuantTensor:
    zeros = [scale.zero_point for scale in chosen if scale.zero_point is not None]
    return QuantTensor(
        target.format,
        tuple(layer.weight.shape),
        DENSE.pack(codes.t().contiguous(), target.format.element.bits),
        torch.cat([scale.stored for scale in chosen], dim=-1),
        None if target.tensor is None else target.tensor.decode,
        torch.cat(zeros, dim=-1) if zeros else None,
        DENSE,
        layer.weight.dtype,
    )
