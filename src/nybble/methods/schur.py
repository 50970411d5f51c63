"""Schur replay: GPTQ whose group scales are judged by the error that nothing later can repair.

GPTQ takes a group's scale from its largest value. But a scale should be judged in the state it creates: its columns
are rounded one after the other, each repaired by the next, and what counts in the end is the error that the columns
*after* the group cannot make up for. For the error d of a group G that is d S d^T with the Schur complement

    S = H_GG - H_GF H_FF^-1 H_FG = (U_GG^T U_GG)^-1        F: the columns after G,  H^-1 = U^T U

(for a single column it is GPTQ's own e^2). For each group, each row on its own:

    1. propose   from the rule's scale, J times  s <- (q^T S w) / (q^T S q)  with q the elements of w under s
    2. around it take the neighbours on the grid of scales, `window` to either side, and the rule's own scale
    3. replay    round the group's columns under each candidate, privately, from the same w, repairs included
    4. keep the scale with the least d S d^T: the rule's own on a tie, then the smaller; so never worse than the rule

and commit the group as GPTQ does. Replay is vectorized over rows and candidates: K sequential steps in all, as in
GPTQ, each for 2 window + 2 candidates.

Published for NVFP4, whose scales form a grid of 126 values. The argument holds for every format whose scales belong
to one row: MXFP4's powers of two (the grid), and scales in bfloat16 or float32, whose grid is finer than anything
that matters: there the neighbours are 2^(1/16) apart. Zero points stay as the rule gives them.

Source: Ding et al.: Replay the Curvature, arXiv 2609.36654.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from nybble.errors import BadInput, Unsupported
from nybble.formats import array
from nybble.formats.spec import BlockFormat
from nybble.methods.columns import RUN, GroupScale, Target, errors
from nybble.methods.gptq import solved
from nybble.methods.layer import Layer
from nybble.ops.round_columns.reference import nearest
from nybble.quantize import QuantTensor, elements, scales

NEEDS_INPUTS = True
_SMALLEST_NORM = 1e-12  # below it a group's elements are all zero under the scale, and the proposal means nothing
_FINE_STEP = 2 ** (1 / 16)  # between E4M3's widest and narrowest neighbours, 2^(1/6) and 2^(1/11)


@dataclass(frozen=True)
class Config:
    """Settings of Schur replay.

    Attributes:
        rule: the scale rule that candidates must beat; None takes the scheme's.
        window: candidates to either side of the proposal.
        steps: J, how often the proposal is refined.
        damping, act_order, absorb: as for gptq.
    """

    rule: str | None = None
    window: int = 4
    steps: int = 3
    damping: float = 0.01
    act_order: bool = True
    absorb: bool = True


def apply(layer: Layer, config: Config) -> QuantTensor:
    """Quantize one layer.

    Args:
        layer: with its inputs.
        config: the settings.

    Raises:
        Unsupported: the format's scales reach over several rows, or over whole rows.
        BadInput: there are no inputs, or the window is negative.
    """
    fmt = layer.scheme.weight
    if fmt.block[0] != 1 or fmt.block[1] is None:
        raise Unsupported(f"schur needs groups within a row; {fmt.name} shares a scale over {fmt.block} (gptq serves)")
    if config.window < 0 or config.steps < 0:
        raise BadInput(f"schur: window {config.window} and steps {config.steps} must not be negative")

    def policy(target: Target, group: Tensor, upper: Tensor) -> GroupScale:
        return choose(target, group, upper, config.window, config.steps)

    return solved(layer, config, policy)


def metric(upper: Tensor) -> Tensor:
    """S = (U_GG^T U_GG)^-1 of a group's triangle of U: float64 [K', K']."""
    eye = torch.eye(len(upper), dtype=upper.dtype, device=upper.device)
    inverse = torch.linalg.solve_triangular(upper, eye, upper=True)
    return inverse @ inverse.t()


def choose(target: Target, group: Tensor, upper: Tensor, window: int, steps: int) -> GroupScale:
    """The best scale of a group [K', N], each row on its own."""
    old = target.propose(group)
    zero = target.zeros(old)
    s = metric(upper)
    proposal = refined(target, group, s, old, zero, steps)
    stored = candidates(target.format, proposal, old.stored[:, 0], target.tensor, window)
    decoded = elements.decode(target.format.scale, stored)
    effective = decoded if target.tensor is None else decoded * target.tensor.decode
    losses = replay(target, group, upper, effective, zero)
    best = losses.argmin(0, keepdim=True)  # the first of equal ones: the old scale, then the smallest
    return target.scale(stored.gather(0, best).t(), old.zero_point)


def refined(target: Target, group: Tensor, s: Tensor, old: GroupScale, zero: Tensor | None, steps: int) -> Tensor:
    """The proposal, float64 [N]: least squares in the metric, the elements held, `steps` times."""
    scale = old.effective.to(torch.float64)
    for _ in range(steps):
        q = nearest(target.format.element, group, scale.to(torch.float32), zero).to(torch.float64)
        sq = s @ q
        norm = (q * sq).sum(0)
        fresh = (sq * group).sum(0) / norm
        scale = torch.where((norm > _SMALLEST_NORM) & (fresh > 0), fresh, scale)
    return scale


def candidates(
    fmt: BlockFormat, proposal: Tensor, old: Tensor, tensor: scales.TensorScale | None, window: int
) -> Tensor:
    """Stored scales [C, N] to try: the old one first, then ascending around the proposal (effective, float64 [N])."""
    around = proposal if tensor is None else proposal / tensor.decode.to(torch.float64)
    offsets = torch.arange(-window, window + 1, device=old.device)[:, None]
    if elements.native_dtype(fmt.scale) is not None:
        near = scales.store((around * _FINE_STEP**offsets).to(torch.float32), fmt)
    else:
        values, codes = grid(fmt, old.device)
        index = torch.searchsorted(values, around) + offsets
        near = codes[index.clamp(0, len(codes) - 1)]
    return torch.cat([old[None], near])


@cache
def grid(fmt: BlockFormat, device: torch.device) -> tuple[Tensor, Tensor]:
    """A small scale format's positive finite values (float64, ascending) and their codes."""
    values = torch.tensor(array.values(fmt.scale), dtype=torch.float64)
    codes = torch.nonzero(values.isfinite() & (values > 0))[:, 0]
    codes = codes[values[codes].argsort()]
    return values[codes].to(device), codes.to(torch.uint8).to(device)


def replay(target: Target, group: Tensor, upper: Tensor, effective: Tensor, zero: Tensor | None) -> Tensor:
    """The loss of each candidate, float64 [C, N]: d S d^T after the group was rounded under it.

    The columns' errors e are those of `columns.commit`; d S d^T is the sum of their squares, since rounding a column
    leaves d = e U_GG.

    Args:
        target: what to round to.
        group: float64 [K', N], not changed.
        upper: float64 [K', K'].
        effective: float32 [C, N].
        zero: zero points [N] or None.
    """
    columns = group[:, None].expand(-1, len(effective), -1)
    if len(columns) > RUN:  # those of later runs differ from scale to scale
        columns = columns.clone(memory_format=torch.contiguous_format)
    loss = torch.zeros(effective.shape, dtype=group.dtype, device=group.device)
    for _, e in errors(target, columns, upper, effective, zero):
        loss += _total(e.square())
    return loss


def _total(x: Tensor) -> Tensor:
    """The sum over the first axis in an order that does not depend on the others: equal columns have equal sums."""
    while len(x) > 1:
        half = len(x) // 2
        x = torch.cat([x[:half] + x[half : 2 * half], x[2 * half :]])
    return x[0]
