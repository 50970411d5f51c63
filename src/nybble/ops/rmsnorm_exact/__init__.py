"""add_rmsnorm_exact: a residual addition and the RMSNorm after it, with the same bits on every machine.

    h = x + residual                                    rounded to x.dtype
    r = 1 / sqrt(sum(h^2) / H + eps)
    y = weight * (h * r), the inner product rounded to x.dtype, then the outer

The contract of add_rmsnorm (Zhang and Sennrich, arXiv 1910.07467) with every operation pinned: float32, each rounded
once, the squares summed in LANES lanes (_exact/arithmetic.py). A row's bits depend on that row alone.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nybble.errors import BadInput
from nybble.ops import rmsnorm
from nybble.ops._choose import choose
from nybble.ops._exact.arithmetic import check_dtype, lane_sum, narrow, sqrt
from nybble.ops._exact.declare import exact_op

LANES = 256


def add_rmsnorm_exact(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(y, h): the normalised sum and the sum itself; promise: cross-machine.

    Args:
        x: [..., H], float32, bfloat16 or float16.
        residual: the shape and dtype of x, or None for zero.
        weight: [H], x's dtype.
        eps: added to the mean of squares, rounded to float32.

    Raises:
        BadInput: shapes, dtypes or devices that do not fit.
    """
    check_dtype("add_rmsnorm_exact", *(t for t in (x, residual, weight) if t is not None))
    if weight.shape != x.shape[-1:] or (residual is not None and residual.shape != x.shape):
        shapes = tuple(x.shape), tuple(weight.shape), None if residual is None else tuple(residual.shape)
        raise BadInput(f"add_rmsnorm_exact: x, weight and residual are {shapes[0]}, {shapes[1]} and {shapes[2]}")
    return choose(ADD_RMSNORM_EXACT, x.device.type, x, residual, weight, eps).run(x, residual, weight, eps)


def add_rmsnorm_exact_reference(
    x: Tensor, residual: Tensor | None, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The definition, and the twin on a CPU."""
    wide, dtype = x.to(torch.float32), x.dtype
    if residual is not None:
        wide = wide + residual.to(torch.float32)
    h = narrow(wide, dtype)
    wide = h.to(torch.float32)
    total = lane_sum(wide * wide, LANES, -1)[..., None]
    # A divisor in a tensor: by a plain number a GPU would multiply with the reciprocal.
    root = sqrt(total / total.new_full((), float(x.shape[-1] or 1)) + eps)
    scaled = narrow(wide * (torch.ones_like(root) / root), dtype).to(torch.float32)
    return narrow(weight.to(torch.float32) * scaled, dtype), h


ADD_RMSNORM_EXACT = exact_op(
    "add_rmsnorm_exact", add_rmsnorm_exact_reference, rmsnorm.cases, rmsnorm.cost, "nybble.ops.rmsnorm_exact.cuda"
)
