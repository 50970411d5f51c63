"""silu_mul_exact: the gate of a gated MLP, y = silu(gate) * up, with the same bits on every machine.

    silu(g) = g / (1 + exp(-g))     in float32, with the exponential of _exact/arithmetic.py, rounded to x.dtype
    y = silu(gate) * up             rounded to x.dtype

The contract of silu_mul (Shazeer, arXiv 2002.05202), every operation rounded once.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nybble.errors import BadInput
from nybble.ops import silu_mul
from nybble.ops._choose import choose
from nybble.ops._exact.arithmetic import check_dtype, exp, narrow
from nybble.ops._exact.declare import exact_op


def silu_mul_exact(x: Tensor) -> Tensor:
    """[..., 2I] -> [..., I] in x.dtype: silu(x[..., :I]) * x[..., I:]; promise: cross-machine.

    Raises:
        BadInput: an odd width, or a dtype other than float32, bfloat16 and float16.
    """
    check_dtype("silu_mul_exact", x)
    if x.shape[-1] % 2:
        raise BadInput(f"silu_mul_exact takes gate and up side by side, an even width; got {tuple(x.shape)}")
    return choose(SILU_MUL_EXACT, x.device.type, x).run(x)


def silu_mul_exact_reference(x: Tensor) -> Tensor:
    """The definition, and the twin on a CPU."""
    gate, up = (part.to(torch.float32) for part in x.chunk(2, -1))
    silu = narrow(gate / exp(-gate).add_(1.0), x.dtype).to(torch.float32)
    return narrow(silu * up, x.dtype)


SILU_MUL_EXACT = exact_op(
    "silu_mul_exact", silu_mul_exact_reference, silu_mul.cases, silu_mul.cost, "nybble.ops.silu_exact.cuda"
)
