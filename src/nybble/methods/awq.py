"""AWQ: the columns whose inputs are large get finer steps, by a scale that is searched for.

The error of a weight counts as much as the input it meets. Multiplying column j by s_j before rounding and dividing
the input by it (folded into what produces the input, fold.py) makes the steps of that column s_j times finer, at the
cost of a wider range for its group. With m_j the mean of |x_j|,

    s = m^a,  scaled so that the largest times the smallest is 1

and a is the point of a grid on [0, 1] with the least error of the linears' outputs after rounding to nearest,
sum tr((W - Ŵ) H (W - Ŵ)^T); a = 0 is the weight as it is, so that no choice is worse than none.

With `clip`, weights beyond a share r of their group's largest are then cut off, so that the others get finer steps:
for each group of each row the r of a grid on [1/2, 1] with the least d H_GG d^T, d the group's error after rounding.
As published, q and k are left alone. What follows ("awq+gptq") would be given the clipped weight as its aim, so that
clipping is for awq on its own.

Source: Lin et al.: AWQ, arXiv 2306.00978.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nybble.errors import BadInput
from nybble.methods import rtn
from nybble.methods.fold import Edge, edges, fold_edges, positive
from nybble.methods.layer import Inputs, Layer
from nybble.methods.stages import Stage
from nybble.quantize.blocks import sides
from nybble.quantize.schemes import Scheme

NEEDS_INPUTS = True
_CLIPS = 11  # points of the grid on [1/2, 1]
_UNCLIPPED = ("q_proj", "k_proj")


@dataclass(frozen=True)
class Config:
    """Settings of AWQ.

    Attributes:
        points: of the grid of exponents, the ends 0 and 1 included.
        products: whether scales are also folded into up (before down) and v (before o).
        clip: whether weights are clipped, which changes what the model computes.
    """

    points: int = 21
    products: bool = True
    clip: bool = False


def fold(
    stage: Stage, inputs: Mapping[str, Inputs], scheme: Scheme, config: Config, probe: Callable[[], Tensor]
) -> dict[str, Inputs]:
    """Scale one block; arguments and result as for smoothquant.fold."""
    if config.points < 2:
        raise BadInput(f"awq: a grid of {config.points} points has no two ends")
    current, changed = dict(inputs), {}
    for edge in list(edges(stage, inputs, config.products)):  # one after the other: `up` is a consumer and a producer
        scale = _search(edge, current[edge.names[0]], scheme, config.points)
        if scale is not None:
            fresh = fold_edges(stage, current, [(edge, scale)], probe)
            current.update(fresh)
            changed.update(fresh)
    for name, linear in stage.linears.items() if config.clip else ():
        if name in current and not name.endswith(_UNCLIPPED):
            weight = clipped(linear.weight.detach(), current[name], scheme)
            linear.weight = nn.Parameter(weight, requires_grad=linear.weight.requires_grad)
    return changed


def clipped(weight: Tensor, seen: Inputs, scheme: Scheme) -> Tensor:
    """A weight [N, K] whose groups are clipped where that serves their outputs, in its own dtype."""
    n, k = weight.shape
    width = sides(scheme.weight, (n, k))[1]
    w = torch.nn.functional.pad(weight.to(torch.float32), (0, -k % width)).view(n, -1, width)
    h = torch.nn.functional.pad(seen.second_moment.to(torch.float32), (0, -k % width, 0, -k % width))
    groups = w.shape[1]
    own = h.view(groups, width, groups, width).diagonal(dim1=0, dim2=2).permute(2, 0, 1)  # H_GG: [groups, width, width]
    amax, best, least = w.abs().amax(2, keepdim=True), w, None
    for step in range(_CLIPS):
        tried = w.clamp(-amax * (1 - step / (2 * (_CLIPS - 1))), amax * (1 - step / (2 * (_CLIPS - 1))))
        rounded = rtn.apply(Layer("clipped", tried.view(n, -1)[:, :k], scheme), rtn.Config()).dequantize(torch.float32)
        d = w - torch.nn.functional.pad(rounded, (0, -k % width)).view(w.shape)
        error = torch.einsum("ngi,gij,ngj->ng", d, own, d)[..., None]
        best = tried if least is None else torch.where(error < least, tried, best)
        least = error if least is None else torch.minimum(error, least)
    return best.reshape(n, -1)[:, :k].to(weight.dtype)


def _search(edge: Edge, seen: Inputs, scheme: Scheme, points: int) -> Tensor | None:
    """The best scale [K]; None where the weight as it is does best."""
    mean = edge.tied(seen.mean_abs, lambda x: x.mean(1))
    h = seen.second_moment.to(torch.float32)
    best, found = _error(edge, torch.ones_like(mean), h, scheme), None
    for step in range(1, points):
        power = positive(mean ** (step / (points - 1)))
        scale = power / (power.amax() * power.amin()).sqrt()
        error = _error(edge, scale, h, scheme)
        if error < best:
            best, found = error, scale
    return found


def _error(edge: Edge, scale: Tensor, h: Tensor, scheme: Scheme) -> float:
    total = 0.0
    for name, linear in zip(edge.names, edge.linears, strict=True):
        weight = linear.weight.detach().to(torch.float32)
        layer = Layer(name, weight * scale, scheme)
        d = weight - rtn.apply(layer, rtn.Config()).dequantize(torch.float32) / scale
        total += float(((d @ h) * d).sum(dtype=torch.float64))
    return total
