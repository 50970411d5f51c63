"""silu_mul_exact on NVIDIA GPUs: _exact/silu.cu."""

from __future__ import annotations

import ctypes

from torch import Tensor

from nybble.ops._declare import Implementation
from nybble.ops._exact.launch import INT, LONG, POINTER, defines, launch, pointers, refusal

_THREADS = 256


class _Arguments(ctypes.Structure):
    _fields_ = [("x", POINTER), ("y", POINTER), ("count", LONG), ("columns", INT)]


def _cuda(x: Tensor) -> Tensor:
    x = x.contiguous()
    columns = x.shape[-1] // 2
    y = x.new_empty((*x.shape[:-1], columns))
    argument = _Arguments(*pointers(x, y), y.numel(), columns)
    grid = (-(-y.numel() // _THREADS), 1)
    launch(x, "silu", "silu_mul_exact", defines(x.dtype, THREADS=_THREADS), grid, _THREADS, argument)
    return y


IMPLEMENTATIONS = (Implementation("silu_mul_exact_cuda_sm80", _cuda, refusal, native=True),)
