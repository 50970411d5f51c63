"""Scaling input channels without changing the model: x / s for the inputs, W s for the weights.

A linear's inputs come from somewhere. Where they come from a normalization, or from another linear whose outputs
pass nothing that mixes or bends channels, the division can be done *there*, in weights that exist anyway:

    normalization -> q k v, gate up        its weight (and bias) / s
    up            -> down                  rows of up / s: silu(gate) * up is linear in up
    v             -> o                     rows of v / s: attention mixes tokens, not channels; where several query
                                           heads share a key-value head they must share s

Normalizations are found by watching which module made the very tensor that a linear was fed, the others by the names
that projections have in practice. Neither is believed: after each fold the block is run on a batch again, and a fold
that changes its output is undone and warned about (a normalization that adds one to its weight, an output that
something else reads too).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nybble.methods.layer import Inputs
from nybble.methods.stages import Stage

_PRODUCTS = (("up_proj", "down_proj"), ("w3", "w2"), ("v_proj", "o_proj"))
# Rounding in the block's own arithmetic moves its output by about one unit in the last place for each addition that
# is not exact; a fold that is wrong changes it by its own size.
_UNITS = 2.0**8
_LEAST = 1e-5


@dataclass(frozen=True)
class Edge:
    """Linears that are fed the same tensor, and the module whose output channels can be divided instead.

    Attributes:
        names: the linears' full names.
        linears: themselves.
        producer: a normalization or a linear.
        heads: (number of heads, how many of them share a producer's, channels of a head), for v -> o.
    """

    names: tuple[str, ...]
    linears: tuple[nn.Linear, ...]
    producer: nn.Module
    heads: tuple[int, int, int] | None = None

    def tied(self, per_channel: Tensor, reduce: Callable[[Tensor], Tensor] = lambda x: x.amax(1)) -> Tensor:
        """One number a channel [K], equal where channels come from the same output of the producer."""
        if self.heads is None:
            return per_channel
        count, share, size = self.heads
        grouped = per_channel.view(count // share, share, size)
        return reduce(grouped)[:, None].expand_as(grouped).reshape(-1)

    def at_producer(self, scale: Tensor) -> Tensor:
        """A tied scale [K] as the producer's output channels have it."""
        if self.heads is None:
            return scale
        count, share, size = self.heads
        return scale.view(count // share, share, size)[:, 0].reshape(-1)


def edges(stage: Stage, inputs: Mapping[str, Inputs], products: bool) -> Iterator[Edge]:
    """The edges of a block along which scales can be folded.

    Args:
        stage: the block.
        inputs: what its linears were fed.
        products: whether up -> down and v -> o count.
    """
    fed: dict[int, list[str]] = {}
    for name in stage.linears:
        if name in inputs:
            fed.setdefault(id(inputs[name]), []).append(name)
    for names in fed.values():
        producer = inputs[names[0]].producer
        if producer is not None:
            yield Edge(tuple(names), tuple(stage.linears[name] for name in names), producer)
        elif products and len(names) == 1:
            yield from _product(stage, names[0])


def _product(stage: Stage, name: str) -> Iterator[Edge]:
    parent, _, kind = name.rpartition(".")
    linear = stage.linears[name]
    for made_by, consumer in _PRODUCTS:
        producer = stage.linears.get(f"{parent}.{made_by}")
        if kind != consumer or producer is None:
            continue
        if producer.out_features == linear.in_features:
            yield Edge((name,), (linear,), producer)
        size = getattr(_owner(stage, linear), "head_dim", None)
        grouped = linear.in_features % producer.out_features == 0 and linear.in_features > producer.out_features
        if grouped and size and producer.out_features % size == 0:
            share = linear.in_features // producer.out_features
            yield Edge((name,), (linear,), producer, (linear.in_features // size, share, size))


def _owner(stage: Stage, linear: nn.Module) -> nn.Module | None:
    return next((m for m in stage.module.modules() if any(child is linear for child in m.children())), None)


def fold_edges(
    stage: Stage,
    inputs: Mapping[str, Inputs],
    chosen: Sequence[tuple[Edge, Tensor]],
    probe: Callable[[], Tensor],
) -> dict[str, Inputs]:
    """Divide inputs by scales [K] and multiply weights by them, one edge after the other.

    Args:
        stage: the block; its parameters are replaced, not written to.
        inputs: what its linears were fed.
        chosen: scales, float32 [K] and positive, for edges.
        probe: gives the block's output for one batch.

    Returns:
        What the linears would have been fed, for those whose inputs changed.
    """
    changed: dict[str, Inputs] = {}
    for edge, scale in chosen:
        before, kept = probe(), _parameters(edge)
        _fold(edge, scale)
        after = probe()
        allowed = _UNITS * torch.finfo(before.dtype).eps
        if float((after - before).to(torch.float32).norm()) > allowed * float(before.to(torch.float32).norm()):
            _put_back(edge, kept)
            warnings.warn(
                f"scales cannot be folded into {type(edge.producer).__name__} before {edge.names[0]}: the block's "
                "output would change; these layers stay as they are",
                stacklevel=2,
            )
            continue
        mapped = inputs[edge.names[0]].mapped(1 / scale)
        changed.update(dict.fromkeys(edge.names, mapped))
    return changed


def _fold(edge: Edge, scale: Tensor) -> None:
    for linear in edge.linears:
        _set(linear, "weight", linear.weight.detach().to(torch.float32) * scale)
    divisor = edge.at_producer(scale)
    weight = edge.producer.get_parameter("weight")
    rows = divisor if weight.ndim == 1 else divisor[:, None]
    _set(edge.producer, "weight", weight.detach().to(torch.float32) / rows)
    bias = getattr(edge.producer, "bias", None)
    if isinstance(bias, nn.Parameter):
        _set(edge.producer, "bias", bias.detach().to(torch.float32) / divisor)


def _set(module: nn.Module, name: str, value: Tensor) -> None:
    old = module.get_parameter(name)
    setattr(module, name, nn.Parameter(value.to(old.dtype), requires_grad=old.requires_grad))


def _parameters(edge: Edge) -> list[tuple[nn.Module, str, nn.Parameter]]:
    modules = (*edge.linears, edge.producer)
    return [(module, name, p) for module in modules for name, p in module.named_parameters(recurse=False)]


def _put_back(edge: Edge, kept: Sequence[tuple[nn.Module, str, nn.Parameter]]) -> None:
    for module, name, parameter in kept:
        setattr(module, name, parameter)


def positive(scale: Tensor) -> Tensor:
    """Scales fit for dividing: where one is not a positive finite number, 1."""
    fit = scale.isfinite() & (scale > _LEAST)
    return torch.where(fit, scale, 1.0)
