"""The definition of `linear`: dequantize, multiply in float64, round once.

    y[m, n] = sum_k a[m, k] * w[n, k] + bias[n]

a is x, or x quantized to the activation format and back (each token on its own, under `activation_amax` where the
format has a tensor scale: the whole input's largest magnitude if not given). w is the dequantized weight.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nybble.formats.spec import BlockFormat
from nybble.quantize import QuantTensor, quantize


def linear_reference(
    x: Tensor,
    w: QuantTensor,
    bias: Tensor | None = None,
    activation: BlockFormat | None = None,
    activation_amax: Tensor | None = None,
) -> Tensor:
    """[..., K] x [N, K] -> [..., N] in x.dtype; arguments as for nybble.ops.linear."""
    y = round_activation(x, activation, activation_amax).double() @ w.dequantize(torch.float32).double().t()
    return (y if bias is None else y + bias.double()).to(x.dtype)


def round_activation(x: Tensor, activation: BlockFormat | None, amax: Tensor | None = None) -> Tensor:
    """x rounded to the activation format, in float32 (x itself without one)."""
    if activation is None:
        return x
    tokens = x.reshape(-1, x.shape[-1])  # blocks never reach across tokens, and a lone token is a row
    q = quantize(tokens, activation, tensor_amax=amax, check=False, name="the activation")
    return q.dequantize(torch.float32).view(x.shape)
