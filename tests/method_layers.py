"""Small layers with correlated inputs, for tests of methods."""

import torch
from torch import Tensor

from nybble.methods.layer import Inputs, Layer
from nybble.quantize.schemes import Scheme, scheme


def inputs(k: int, tokens: int, generator: torch.Generator) -> Inputs:
    """Inputs whose channels are correlated and of unequal size."""
    mix = torch.randn(k, k, generator=generator) / k**0.5 + 0.3 * torch.eye(k)
    size = torch.rand(k, generator=generator) + 0.1
    seen = Inputs(k)
    seen.add(torch.randn(tokens, k, generator=generator) @ mix * size)
    return seen


def layer(name: str | Scheme, n: int, k: int, seed: int, tokens: int | None = None) -> Layer:
    """A layer [n, k] with heavy-tailed weights, and its inputs."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(n, k, generator=generator)
    weight: Tensor = 0.05 * normal * (1 + normal.square() / 8)
    return Layer("layer", weight, scheme(name), weight.abs().amax(), inputs(k, tokens or 4 * k, generator))
