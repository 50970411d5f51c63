"""add_rmsnorm_exact on NVIDIA GPUs: _exact/rmsnorm.cu, a block a row."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from nybble.ops._declare import Implementation
from nybble.ops._exact.launch import FLOAT, INT, POINTER, defines, launch, pointers, refusal
from nybble.ops.rmsnorm_exact import LANES


class _Arguments(ctypes.Structure):
    _fields_ = [*((n, POINTER) for n in ("x", "residual", "weight", "y", "h")), ("columns", INT), ("eps", FLOAT)]


def _supports(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> str | None:
    return refusal(x)


def _cuda(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x, weight = x.contiguous(), weight.contiguous()
    other = None if residual is None else residual.contiguous()
    y, h, columns = torch.empty_like(x), torch.empty_like(x), x.shape[-1]
    argument = _Arguments(*pointers(x, other, weight, y, h), columns, eps)
    given = defines(x.dtype, LANES=LANES)
    launch(x, "rmsnorm", "add_rmsnorm_exact", given, (x.numel() // columns, 1), LANES, argument)
    return y, h


IMPLEMENTATIONS = (Implementation("add_rmsnorm_exact_cuda_sm80", _cuda, _supports, native=True),)
