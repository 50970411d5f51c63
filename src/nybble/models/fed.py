"""A linear and what feeds it: a normalization or a gate that hands over codes where the linear multiplies codes.

A linear with narrow activations quantizes its input in a pass of its own. Where that input is made by a normalization
or by the gate of an MLP, ops/quantize_rows makes the codes in the same pass: the 16-bit input is neither written nor
read again, and a launch is saved. The product is the same. The squares of the normalization are summed in another
order than in the op add_rmsnorm, which is within that op's agreement.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from nybble.ops import QuantLinear
from nybble.ops.linear import product, takes_codes
from nybble.ops.quantize_rows import rmsnorm_quantize, silu_mul_quantize
from nybble.ops.rmsnorm import add_rmsnorm
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
        y, h = add_rmsnorm(x, residual, norm.weight, norm.variance_epsilon)
        return projection(y), h
    a, h = rmsnorm_quantize(
        x, residual, norm.weight, norm.variance_epsilon, layer.activation, tensor_amax=layer.activation_amax
    )  # fmt: skip
    return product(a, layer.weight, layer.bias), h


def gated(projection: Projection, x: Tensor) -> Tensor:
    """The projection of silu(gate) * up, of x = [gate | up] [..., 2K]."""
    layer = _multiplies_codes(projection, x[..., : x.shape[-1] // 2])
    if layer is None:
        return projection(silu_mul(x))
    a = silu_mul_quantize(x, layer.activation, tensor_amax=layer.activation_amax)
    return product(a, layer.weight, layer.bias)


def _multiplies_codes(projection: Projection, x: Tensor) -> Any:
    """The projection as a layer whose input may come as codes, or None; hooks want the input itself."""
    if not isinstance(projection, QuantLinear) or projection._forward_pre_hooks or projection._forward_hooks:
        return None
    return projection if takes_codes(x, projection.weight, projection.bias, projection.activation) else None
