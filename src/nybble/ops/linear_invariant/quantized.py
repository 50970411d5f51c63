"""linear_invariant on NVIDIA GPUs, quantized weights: `linear`'s kernels held to one order of the sum.

Those kernels choose freely how K is cut, by the number of tokens among other things. Here only the shapes are allowed
that add up in one order: tile.cu (Hopper) without a cluster, one accumulator over all chunks of columns, whatever its
number of tokens; where it refuses the format or the chip, stream.cu with eight warps over the columns. Which of the two
is decided by the weight and the machine, never by the number of tokens.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from nybble.ops import _promised_linear as shared
from nybble.ops._declare import Implementation
from nybble.ops.linear import config, cuda
from nybble.quantize import QuantTensor

_WARPS = 8  # over the columns, in stream.cu
_HALVES = (torch.bfloat16, torch.float16)


def _one_order(plan: object, tiled: bool) -> bool:
    if isinstance(plan, config.Tile):
        return tiled and plan.cluster == 1
    return not tiled and isinstance(plan, config.Stream) and (plan.rt, plan.wk, plan.slices) == (1, _WARPS, 1)


@lru_cache(maxsize=4096)
def plan(p: config.Problem) -> config.Plan:
    """What runs: the cheapest of the shapes that share the weight's order. ValueError where there is none."""
    tiled = config.Tile(1, 16, 1, 3).refusal(p) is None
    fit = [c for c in config.candidates(p) if _one_order(c, tiled) and c.refusal(p) is None]
    if not fit:
        raise ValueError(f"no kernel of one order fits K = {p.k}")
    return min(fit, key=lambda c: c.score(p))


def _run(x: Tensor, w: QuantTensor, bias: Tensor | None) -> Tensor:
    return cuda.run(x, w, bias, plan(cuda.problem(x, w)))


def _supports(x: Tensor, w: shared.Weight, bias: Tensor | None) -> str | None:
    if not isinstance(w, QuantTensor):
        return "the weight is not quantized"
    if x.dtype not in _HALVES:
        return f"takes bfloat16 or float16 activations, got {x.dtype}"
    refusal = cuda._refusal(x, w, None)
    if refusal is not None:
        return refusal
    try:
        plan(cuda.problem(x, w))
    except ValueError as reason:
        return str(reason)
    return None


IMPLEMENTATIONS = (
    Implementation(
        "linear_invariant_wna16_cuda", _run, _supports, native=True, layout=lambda w: cuda.layout_for(w.format)
    ),
)
