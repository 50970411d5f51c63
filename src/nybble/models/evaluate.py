"""How good a quantized model is: perplexity, divergence from the original, agreement with it.

With p the original's distribution over the next token, q the quantized model's, and the text's tokens t:

    perplexity   exp( mean -log q(t) )                  what the model makes of the text
    KL           mean sum_v p(v) log( p(v) / q(v) )     nats a token; how far it moved from the original, text aside
    top-1        share of tokens where both have the same most likely successor

Perplexity alone can fall by luck; KL cannot. Means are taken over every predicted token of all windows.

The original's logits are computed once and kept as float16 distances to each token's largest logit: 2 bytes a value,
400 MB for 4,096 tokens of a vocabulary of 49,152. A distance z is off by at most |z| 2^-12, and probability lies where
|z| is small, so the stored distribution is a KL of about 6e-8 away from the true one (SmolLM2-135M) and a measured KL
moves by about 1e-7: far below the smallest of interest, 1e-4. bfloat16 in place of float32 activations, by
comparison, is a KL of 1.1e-3. Two models that both run in bfloat16 round apart, so that what is nearly equal looks
further off than it is (SmolLM2-135M, W8A16: 0.0045 in bfloat16, 0.0028 in float32); that is also what a user of both
would see. So quality is measured in float32 on a CPU, and on a GPU in what is deployed there (models/precision.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nybble.errors import BadInput
from nybble.models import promised
from nybble.ops import QuantLinear
from nybble.ops._promise import in_force
from nybble.ops.linear import LINEAR
from nybble.quantize.layouts import DENSE

Progress = Callable[[int, int], None]
_ROWS = 256  # tokens worked on at a time: bounds the float32 copies of a large vocabulary


@dataclass(frozen=True)
class Quality:
    """What was measured.

    Attributes:
        perplexity: exp of the mean loss; infinite where that overflows.
        tokens: how many tokens were predicted.
        kl: mean KL to the original, nats a token; None without an original.
        top1: share of tokens whose most likely successor is the original's, 0 to 1; None without an original.
    """

    perplexity: float
    tokens: int
    kl: float | None = None
    top1: float | None = None


@dataclass(frozen=True)
class Reference:
    """The original's predictions on the windows.

    Attributes:
        quality: the original's own.
        distances: for each window, logits minus the token's largest, float16 [predicted, V].
    """

    quality: Quality
    distances: Sequence[Tensor]


@contextmanager
def by_definition(model: nn.Module) -> Iterator[nn.Module]:
    """Within this context every QuantLinear computes as its op is defined: dequantize, multiply in float32.

    Quality then is a property of the format, the same on every machine, whichever kernels serve there; that the
    kernels agree with the definition is checked where they are timed (models/decode.py).
    """
    layers = [module for module in model.modules() if isinstance(module, QuantLinear)]
    try:
        for layer in layers:
            layer.__dict__["forward"] = _defined(layer)
        yield model
    finally:
        for layer in layers:
            layer.__dict__.pop("forward", None)


def _defined(layer: QuantLinear) -> Callable[[Tensor], Tensor]:
    weight = layer.weight.to_layout(DENSE)

    def forward(x: Tensor) -> Tensor:
        return LINEAR.fallback.run(x, weight, layer.bias, layer.activation, layer.activation_amax)

    return forward


def logits(model: nn.Module, ids: Tensor) -> Tensor:
    """The model's logits [n, V] for tokens ids [n] as one sequence, without a cache; under the promise in force."""
    if in_force() != "none":
        return promised.whole(model, ids, in_force())
    device = next(model.parameters()).device
    result: Tensor = model(input_ids=ids[None].to(device), use_cache=False).logits[0]
    return result


def reference(model: nn.Module, windows: Sequence[Tensor], progress: Progress | None = None) -> Reference:
    """Run the original over the windows (int64 [n] each) and keep its predictions.

    Raises:
        BadInput: its logits hold NaN.
    """
    distances: list[Tensor] = []
    losses = []
    with torch.no_grad():
        for number, ids in enumerate(windows):
            z = _predictions(model, ids, number)
            floor = torch.finfo(torch.float16).min  # a token the model forbids has -inf
            distances.append((z - z.amax(-1, keepdim=True)).clamp_(min=floor).to(torch.float16))
            losses.append(_losses(z, ids))
            _tell(progress, number + 1, len(windows))
    return Reference(Quality(_perplexity(losses), _count(losses)), distances)


def evaluate(
    model: nn.Module,
    windows: Sequence[Tensor],
    original: Reference | None = None,
    progress: Progress | None = None,
) -> Quality:
    """Measure a model on windows (int64 [n] each), against the original's predictions on the same ones if given.

    Raises:
        BadInput: the logits hold NaN.
    """
    losses, divergences, agreements = [], [], []
    with torch.no_grad():
        for number, ids in enumerate(windows):
            z = _predictions(model, ids, number)
            losses.append(_losses(z, ids))
            if original is not None:
                for rows, kept in zip(z.split(_ROWS), original.distances[number].split(_ROWS), strict=True):
                    divergences.append(divergence(kept, rows))
                    agreements.append(kept.argmax(-1) == rows.argmax(-1))
            _tell(progress, number + 1, len(windows))
    quality = Quality(_perplexity(losses), _count(losses))
    if original is None:
        return quality
    kl, top1 = _mean(divergences), _mean(agreements)
    return Quality(quality.perplexity, quality.tokens, max(0.0, kl), top1)


def divergence(kept: Tensor, z: Tensor) -> Tensor:
    """KL(p || q) for each row, float32 [n]: p from kept distances [n, V], q from logits [n, V]."""
    p = kept.to(torch.float32).log_softmax(-1)
    q = z.to(torch.float32).log_softmax(-1).clamp_(min=torch.finfo(torch.float16).min)
    return (p.exp() * (p - q)).sum(-1)


def _predictions(model: nn.Module, ids: Tensor, number: int) -> Tensor:
    """Logits of every token that has a successor: [n - 1, V]."""
    z = logits(model, ids)[:-1]
    if bool(z.isnan().any()):
        raise BadInput(f"the model's logits hold NaN (window {number + 1})")
    return z


def _losses(z: Tensor, ids: Tensor) -> Tensor:
    """-log q(t) of each successor, float32 [n - 1]."""
    targets = ids[1:].to(z.device).split(_ROWS)
    parts = [
        nn.functional.cross_entropy(rows.to(torch.float32), target, reduction="none")
        for rows, target in zip(z.split(_ROWS), targets, strict=True)
    ]
    return torch.cat(parts)


def _mean(parts: Sequence[Tensor]) -> float:
    return float(torch.cat([part.flatten() for part in parts]).to(torch.float64).mean())


def _count(parts: Sequence[Tensor]) -> int:
    return sum(part.numel() for part in parts)


def _perplexity(losses: Sequence[Tensor]) -> float:
    mean = _mean(losses)
    return math.exp(mean) if mean < math.log(torch.finfo(torch.float64).max) else math.inf


def _tell(progress: Any, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)
