"""rmsnorm_linear on NVIDIA GPUs: stream.cu of ops/linear, with what around.cuh puts before and behind its product."""

from __future__ import annotations

import torch
from torch import Tensor

from nybble.ops._declare import Implementation
from nybble.ops.linear import cuda
from nybble.ops.linear.macros import ROWS
from nybble.ops.linear.plans_few import PIECE_COLUMNS
from nybble.ops.quantize_rows.cuda import aligned
from nybble.ops.rmsnorm_linear import config
from nybble.quantize import QuantTensor


def unfit(x: Tensor, residual: Tensor | None, gain: Tensor, w: QuantTensor, gate: bool) -> str | None:
    """Why the kernel cannot take the call on any machine, or None."""
    if gate and w.shape[0] % (2 * ROWS):
        return f"gate and up of {w.shape[0] // 2} rows each are not whole tiles of {ROWS}"
    if x.shape[-1] % PIECE_COLUMNS:
        return f"takes rows of {PIECE_COLUMNS} columns and multiples; x is {tuple(x.shape)}"
    for name, part in (("x", x), ("residual", residual), ("gain", gain)):
        if part is not None and not aligned(part):
            return f"reads 16 bytes at once; {name} {tuple(part.shape)} with strides {part.stride()} does not lie so"
    if residual is not None and not residual.is_contiguous():
        return f"takes a residual in one piece; its strides are {residual.stride()}"
    return None


def _supports(
    x: Tensor, residual: Tensor | None, gain: Tensor, eps: float, w: QuantTensor, bias: Tensor | None, gate: bool
) -> str | None:
    reason = cuda._refusal(x, w, None) or unfit(x, residual, gain, w, gate)
    if reason is not None:
        return reason
    try:
        choice = config.choose(cuda.problem(x, w), gate)
    except ValueError as refusal:
        return str(refusal)
    if choice.pays:
        return None
    return f"predicted {choice.fused:.1f} us, its ops one after the other {choice.apart:.1f} us"


def run(
    x: Tensor, residual: Tensor | None, gain: Tensor, eps: float, w: QuantTensor, bias: Tensor | None, gate: bool
) -> tuple[Tensor, Tensor]:
    """The op on a GPU, arguments that `unfit` lets pass; w in any layout."""
    n, k = w.shape
    w = w.to_layout(cuda.sound_layout(w))
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    with torch.cuda.device(x.device):
        plan = config.choose(cuda.problem(x, w), gate).plan
        y = x.new_empty((*x.shape[:-1], n // (1 + gate)))
        h = None if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
        around = cuda.Around(gain, eps, residual, h, gate)
        cuda.stream(x.reshape(-1, k), w, bias, plan, y, around=around)
    return y, x if h is None else h


NOTE = "a few tokens"
IMPLEMENTATIONS = (Implementation("rmsnorm_linear_stream_cuda_sm80", run, _supports, native=True, note=NOTE),)
