"""A linear and what feeds it, a normalization or the gate of an MLP, in as few kernels as the linear allows.

A linear with narrow activations quantizes its input in a pass of its own. Where that input is made by a normalization
or by a gate, ops/quantize_rows makes the codes in the same pass: the 16-bit input is neither written nor read again,
and a launch is saved. A linear that only streams its weights past a few tokens takes the normalization into its own
kernel, and the gate that follows it (ops/rmsnorm_linear). The product is the same. The squares of the normalization are
summed in another order than in the op add_rmsnorm, which is within that op's agreement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nybble.ops import QuantLinear
from nybble.ops.linear import product, takes_codes
from nybble.ops.quantize_rows import rmsnorm_quantize, silu_mul_quantize
from nybble.ops.rmsnorm import add_rmsnorm
from nybble.ops.rmsnorm_linear import fuses, rmsnorm_linear
from nybble.ops.silu_mul import silu_mul

Projection = Callable[[Tensor], Tensor]


def normed(projection: Projection, norm: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """The projection of RMSNorm(x + residual), and x + residual.

    Args:
        projection: [..., K] -> [..., N].
        norm: a module with `weight` [K] and `variance_epsilon`.
        x, residual: [..., K]; no residual counts as zeros.
    """
    layer = _multiplies_codes(projection, x)
    if layer is None:
        alone = _takes_in(projection, norm, x, residual, gate=False)
        if alone is not None:
            return rmsnorm_linear(x, residual, norm.weight, norm.variance_epsilon, alone.weight, alone.bias)
        y, h = add_rmsnorm(x, residual, norm.weight, norm.variance_epsilon)
        return projection(y), h
    a, h = rmsnorm_quantize(
        x, residual, norm.weight, norm.variance_epsilon, layer.activation, tensor_amax=layer.activation_amax
    )  # fmt: skip
    return product(a, layer.weight, layer.bias), h


def mlp(gate_up: Projection, down: Projection, norm: Any, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
    """A gated MLP of RMSNorm(x + residual), down(silu(gate) * up) with [gate | up] from `gate_up`, and x + residual."""
    alone = _takes_in(gate_up, norm, x, residual, gate=True)
    # What a gate hands over as codes, down need not quantize; and that saves as much as the gate in gate_up.
    if alone is None or getattr(down, "activation", None) is not None:
        y, h = normed(gate_up, norm, x, residual)
        return gated(down, y), h
    y, h = rmsnorm_linear(x, residual, norm.weight, norm.variance_epsilon, alone.weight, alone.bias, gate=True)
    return down(y), h


def gated(projection: Projection, x: Tensor) -> Tensor:
    """The projection of silu(gate) * up, of x = [gate | up] [..., 2K]."""
    layer = _multiplies_codes(projection, x[..., : x.shape[-1] // 2])
    if layer is None:
        return projection(silu_mul(x))
    a = silu_mul_quantize(x, layer.activation, tensor_amax=layer.activation_amax)
    return product(a, layer.weight, layer.bias)


def _plain(projection: Projection) -> QuantLinear | None:
    """The projection as a layer, or None; hooks want its input and its output as they are."""
    if not isinstance(projection, QuantLinear) or projection._forward_pre_hooks or projection._forward_hooks:
        return None
    return projection


def _multiplies_codes(projection: Projection, x: Tensor) -> Any:
    """The projection as a layer whose input may come as codes, or None."""
    layer = _plain(projection)
    return layer if layer is not None and takes_codes(x, layer.weight, layer.bias, layer.activation) else None


def _takes_in(projection: Projection, norm: Any, x: Tensor, residual: Tensor | None, gate: bool) -> Any:
    """The projection as a layer whose kernel takes in the norm (and a gate), or None."""
    layer = _plain(projection)
    if layer is None or layer.activation is not None:
        return None
    fused = fuses(x, residual, norm.weight, norm.variance_epsilon, layer.weight, layer.bias, gate)
    return layer if fused else None
