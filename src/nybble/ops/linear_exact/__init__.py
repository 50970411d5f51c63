"""linear_exact: y = x W^T + bias with the same bits on every machine (promise: cross-machine).

Tensor cores of different generations round differently inside, and libraries cut the same sum differently on
different chips. So this op leaves both alone: 16-bit numbers are widened exactly where they are used, and multiplied
and added by IEEE 754 float32 fused multiply-adds in an order that K alone decides (reference.py). No tensor cores, no
TF32, no atomics, subnormal numbers kept, nothing that depends on the number of tokens, of processors, or on the clock.

A quantized weight is its float32 value, (code - zero point) * scale with the one rounding that IEEE prescribes; with
BF16 or FP16 scales that product is exact.

NaN results are the one canonical quiet NaN, so that results can be compared and hashed by their bits. A result is
never -0 unless rounding to 16 bits makes it so.

autocast and TF32 switched on by the caller are without effect here; flushing subnormals to zero on the CPU is refused.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nybble.errors import BadInput
from nybble.ops import _promised_linear as shared
from nybble.ops._choose import choose
from nybble.ops._declare import Agreement, Implementation, Op
from nybble.ops.linear_exact.reference import linear_exact_reference


def linear_exact(x: Tensor, w: shared.Weight, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias, the same bits on every machine.

    Args:
        x: [..., K], float32, bfloat16 or float16, any strides, any number of rows from 0 up.
        w: [N, K], a tensor in one of those dtypes or a QuantTensor, on x's device.
        bias: [N] or None; added to the finished float32 sum.

    Returns:
        [..., N] in x.dtype, rounded once.

    Raises:
        BadInput: shapes, dtypes or devices that do not fit, with the values seen; subnormals flushed to zero.
        Unsupported: no implementation serves the call; every one's reason.
    """
    if torch.compiler.is_compiling():
        return _compiled(x, w, bias)
    shared.check("linear_exact", x, w, bias)
    if x.device.type == "cpu" and float(torch.full((1,), 2.0**-149) * 1) == 0:
        raise BadInput("linear_exact: subnormal numbers are flushed to zero (torch.set_flush_denormal(True))")
    return choose(LINEAR_EXACT, x.device.type, x, w, bias).run(x, w, bias)


_compiled = shared.compilable("linear_exact", linear_exact)

LINEAR_EXACT = Op(
    name="linear_exact",
    reference=linear_exact_reference,
    agreement=Agreement(dict.fromkeys(shared.DTYPES, 0.0)),
    cases=shared.cases,
    cost=shared.cost("fp32"),
    homes={"cpu": "nybble.ops.linear_exact.cpu", "cuda": "nybble.ops.linear_exact.cuda"},
    fallback=Implementation("linear_exact_torch", linear_exact_reference, native=True),
    promise="cross-machine",
)

__all__ = ["LINEAR_EXACT", "linear_exact"]
