"""linear on GPUs: its implementations in order of preference, and those with narrow activations.

With activations in eight or four bits the input is quantized in one pass (ops/quantize_rows), and the product of the
codes is rescaled as it leaves: `product` takes what that pass gives, so that a caller who fuses it with a
normalization or a gate can call the product alone. On Hopper thousands of tokens in FP8 go through narrow_fp8.cu and
fewer through cuBLAS where its layouts fit, many tokens of integers through narrow.cu, and everything else that
narrow.py describes goes through Triton. NVFP4 and MXFP4 with quantized inputs are triton_scaled.py's.
"""

from __future__ import annotations

import math
from types import ModuleType

import torch
from torch import Tensor

from nybble.errors import BadInput, Unsupported
from nybble.formats.spec import BlockFormat
from nybble.ops._declare import Implementation
from nybble.ops.linear import cuda, narrow, narrow_cuda, narrow_fp8, narrow_torch, narrow_tune, triton, triton_scaled
from nybble.ops.quantize_rows import quantize_rows
from nybble.quantize import QuantTensor, quantize

KERNELS: dict[str, ModuleType] = {
    "linear_narrow_fp8_cuda_sm90": narrow_fp8,
    "linear_narrow_torch": narrow_torch,
    "linear_narrow_cuda_sm90": narrow_cuda,
    "linear_narrow_triton": triton,
}
_TIMED = 2048
"""Tokens from which on narrow_fp8.cu was timed beside the library, and was level or ahead (LOG.md)."""


def product(a: QuantTensor, w: QuantTensor, bias: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """a w^T + bias for an input that is quantized already, as `quantize_rows` gives it.

    Args:
        a: codes and scales of [..., K].
        w: the quantized weight [N, K], on a's device.
        bias: [N] or None.
        dtype: of the result; a.dtype by default.

    Returns:
        [..., N].

    Raises:
        BadInput: shapes that do not fit.
        Unsupported: a pair of formats that no kernel takes, with the reasons.
    """
    if a.shape[-1] != w.shape[1]:
        raise BadInput(f"product: the input is {a.shape} and the weight [N, K] = {w.shape}, which differ in K")
    p = _problem(a.shape, w, a.format, dtype or a.dtype, a.device)
    reasons = {name: _refusal(kernel, p) for name, kernel in KERNELS.items()}
    for name, kernel in KERNELS.items():
        if reasons[name] is None:
            return _run(kernel, a, w, bias, p)
    raise Unsupported("no kernel takes this product", {name: reason or "" for name, reason in reasons.items()})


def describe(name: str, x: Tensor, w: QuantTensor, activation: BlockFormat) -> str:
    """The plans of the implementation called `name` for a call of linear: which one runs, and what was measured."""
    p = _problem(tuple(x.shape), w, activation, x.dtype, x.device)
    return narrow_tune.describe(KERNELS[name], p, torch.cuda.get_device_name(x.device))


def _refusal(kernel: ModuleType, p: narrow.Problem) -> str | None:
    reason: str | None = narrow.refusal(p.weight, p.activation, p.dtype) or kernel.refusal(p)
    if reason is None and kernel is narrow_fp8 and p.m < _TIMED and narrow_torch.refusal(p) is None:
        reason = f"is timed from {_TIMED} tokens on, there are {p.m}; with fewer the library is asked"
    return reason


def _run(kernel: ModuleType, a: QuantTensor, w: QuantTensor, bias: Tensor | None, p: narrow.Problem) -> Tensor:
    w = w.to_layout(narrow.layout_for(w.format))
    y = torch.empty((*a.shape[:-1], p.n), dtype=p.dtype, device=a.device)
    rows = y.view(-1, p.n) if p.n else y.new_empty((p.m, 0))
    with torch.cuda.device(a.device):
        plan = narrow_tune.choose(kernel, p, lambda plan: kernel.run(a, w, bias, p, plan, rows))
        kernel.run(a, w, bias, p, plan, rows)
    return y


def _problem(
    shape: tuple[int, ...], w: QuantTensor, activation: BlockFormat, dtype: torch.dtype, device: torch.device
) -> narrow.Problem:
    (n, k), machine = w.shape, cuda.machine(device.index)
    return narrow.Problem(math.prod(shape[:-1]), n, k, w.format, activation, dtype, machine)


def _implementation(name: str, kernel: ModuleType) -> Implementation:
    def supports(
        x: Tensor, w: QuantTensor, bias: Tensor | None, activation: BlockFormat | None, amax: Tensor | None
    ) -> str | None:
        if activation is None:
            return narrow.refusal(w.format, None)
        return _refusal(kernel, _problem(tuple(x.shape), w, activation, x.dtype, x.device))

    def execute(x: Tensor, w: QuantTensor, bias: Tensor | None, activation: BlockFormat, amax: Tensor | None) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        whole = activation.block[0] is None  # one scale for all tokens: no pass over single rows can know it
        a = quantize(rows, activation, check=False) if whole else quantize_rows(rows, activation)
        p = _problem(tuple(x.shape), w, activation, x.dtype, x.device)
        return _run(kernel, a, w, bias, p).view(*x.shape[:-1], p.n)

    return Implementation(name, execute, supports, native=True, layout=lambda w: narrow.layout_for(w.format))


IMPLEMENTATIONS = (
    *(_implementation(name, kernel) for name, kernel in KERNELS.items()),
    *triton_scaled.IMPLEMENTATIONS,
    *cuda.IMPLEMENTATIONS,
)
