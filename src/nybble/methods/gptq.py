"""GPTQ: round column by column, and let the columns still free make up for each error.

Rounding to nearest is best for every weight on its own. The error that matters is that of the outputs, and there
errors of different columns meet: with H the second moment of the inputs, tr((W - Ŵ) H (W - Ŵ)^T). GPTQ minimizes
it greedily: columns are rounded in turn, and after each the columns to its right move to where they compensate best
(columns.py has the formulas). Nothing but the order of rounding is assumed, so that it serves every weight format:
integers and floats, tables, groups, whole rows, zero points, scales on two levels.

A group's scale comes from the scheme's rule, applied to the group as it is when its turn comes.

H must be invertible. With fewer calibration tokens than input channels it is not; a multiple of its mean diagonal
is added, and more only where Cholesky still fails.

Source: Frantar, Ashkboos, Hoefler, Alistarh: GPTQ, arXiv 2210.17323.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from torch import Tensor

from nybble.errors import BadInput
from nybble.methods.columns import GroupScale, Policy, Target, ordered, sweep, target
from nybble.methods.layer import Factor, Layer, absorbed
from nybble.quantize import QuantTensor
from nybble.quantize.blocks import sides

NEEDS_INPUTS = True


@dataclass(frozen=True)
class Config:
    """Settings of GPTQ.

    Attributes:
        rule: the scale rule; None takes the scheme's.
        damping: added to the diagonal of H, in units of its mean.
        act_order: whether groups, and columns within a group, are taken by falling diag(H).
        absorb: where the scheme rounds inputs, whether the weight first moves to where it serves rounded inputs best
            (layer.py).
    """

    rule: str | None = None
    damping: float = 0.01
    act_order: bool = True
    absorb: bool = True


def apply(layer: Layer, config: Config) -> QuantTensor:
    """Quantize one layer.

    Args:
        layer: with its inputs.
        config: the settings.

    Raises:
        BadInput: there are no inputs, or they hold NaN.
    """
    return solved(layer, config, by_rule)


class Settings(Protocol):
    """What GPTQ and its kin have in common."""

    @property
    def rule(self) -> str | None:
        """The scale rule."""

    @property
    def damping(self) -> float:
        """Of H, in units of its mean diagonal."""

    @property
    def act_order(self) -> bool:
        """Whether the largest of diag(H) comes first."""

    @property
    def absorb(self) -> bool:
        """Whether the weight moves towards rounded inputs."""


def solved(layer: Layer, config: Settings, policy: Policy) -> QuantTensor:
    """Sweep a layer's weight under a policy for scales."""
    factor = prepared(layer, config.damping, config.act_order)
    moves = config.absorb and layer.inputs is not None and layer.inputs.cross is not None
    moved = replace(layer, weight=absorbed(layer, config.damping)) if moves else layer
    return replace(sweep(moved, target(moved, config.rule), factor, policy), dtype=layer.weight.dtype)


def prepared(layer: Layer, damping: float, act_order: bool) -> Factor:
    """The factor of a layer's inputs in the order its columns are taken."""
    if layer.inputs is None:
        raise BadInput(f"{layer.name}: this method needs to see inputs: give calibration")
    width = sides(layer.scheme.weight, tuple(layer.weight.shape))[1]
    diagonal = layer.inputs.fed.diagonal().clone()  # a view would hold the whole matrix
    return layer.inputs.factor(damping, ordered(diagonal, width, act_order))


def by_rule(target: Target, group: Tensor, upper: Tensor) -> GroupScale:
    """The scale that the rule gives the group as it is now."""
    return target.propose(group)
