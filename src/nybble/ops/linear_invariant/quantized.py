"""linear_invariant on NVIDIA GPUs, quantized weights: `linear`'s kernels held to one order of the sum.

Those kernels choose freely how K is cut, by the number of tokens among other things. Here only the shapes are allowed
that add up in one order: tile.cu (Hopper) without a cluster, one accumulator over all chunks of columns, whatever its
number of tokens; where it refuses the format or the chip, stream.cu with eight warps over the columns. Which of the two
is decided by the weight and the machine, never by the number of tokens. Where neither fits (stream.cu keeps all of x in
shared memory, up to K of about 12,000), `linear_exact` serves the call.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from itertools import product

import torch
from torch import Tensor

from nybble.ops import _promised_linear as shared
from nybble.ops._declare import Implementation
from nybble.ops.linear import config, cuda
from nybble.quantize import QuantTensor

_HALVES = (torch.bfloat16, torch.float16)
_WIDTHS = ((16, 1), (32, 1), (64, 1), (128, 1), (128, 2))
_TILES = tuple(
    config.Tile(groups, *width, stages) for groups, width, stages in product((1, 2, 3, 4), _WIDTHS, (5, 8, 3))
)
_STREAMS = tuple(config.Stream(mt, rt=1, wn=2, wk=8, stages=stages) for mt, stages in product((1, 2, 4), (2, 3, 4)))


@lru_cache(maxsize=4096)
def plan(p: config.Problem) -> config.Stream | config.Tile:
    """What runs: the cheapest of the shapes that share the weight's order. ValueError where there is none."""
    tiles = [c for c in _TILES if c.registers_fit and c.refusal(p) is None and c.tokens * c.wgmmas < 2 * max(p.m, 16)]
    # As if every pass were full: what fits must not depend on the number of tokens either.
    streams = [c for c in _STREAMS if c.refusal(replace(p, m=8 * c.mt)) is None]
    if not tiles and not streams:
        raise ValueError(f"no kernel of one order fits: {_STREAMS[0].refusal(replace(p, m=8))}")
    found: list[config.Stream | config.Tile] = [*tiles] or [*streams]
    return min(found, key=lambda c: c.score(p))


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
        "linear_invariant_wna16_cuda_sm80", _run, _supports, native=True, layout=lambda w: cuda.layout_for(w.format)
    ),
)
