"""linear_invariant: y = x W^T + bias whose rows do not depend on the rows beside them (promise: batch-invariant).

Fast libraries pick tile sizes and splits of the sum over K by the number of tokens, so a prompt's numbers depend on
what else is in the batch. Here the order of a row's sum is a function of (N, K, dtype or format) alone, whatever M:
batch 1 gives the bits of batch 33. Tensor cores are used, which differ between generations of chips, so the promise
holds on one machine; `linear_exact` keeps it across machines, for a price (docs/why/determinism.md).

autocast and TF32 switched on by the caller are without effect.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nybble.ops import _promised_linear as shared
from nybble.ops._choose import choose
from nybble.ops._declare import Agreement, Implementation, Op
from nybble.ops.linear_exact import linear_exact


def linear_invariant(x: Tensor, w: shared.Weight, bias: Tensor | None = None) -> Tensor:
    """x W^T + bias; a row of the result depends on its own row of x only.

    Args:
        x: [..., K], float32, bfloat16 or float16, any strides, any number of rows from 0 up.
        w: [N, K], a tensor in one of those dtypes or a QuantTensor, on x's device.
        bias: [N] or None.

    Returns:
        [..., N] in x.dtype.

    Raises:
        BadInput: shapes, dtypes or devices that do not fit, with the values seen.
        Unsupported: no implementation serves the call; every one's reason.
    """
    if torch.compiler.is_compiling():
        return _compiled(x, w, bias)
    shared.check("linear_invariant", x, w, bias)
    return choose(LINEAR_INVARIANT, x.device.type, x, w, bias).run(x, w, bias)


def linear_invariant_reference(x: Tensor, w: shared.Weight, bias: Tensor | None = None) -> Tensor:
    """The definition: float64 products and sums, rounded once."""
    y = x.double() @ shared.values(w).double().t()
    return (y if bias is None else y + bias.double()).to(x.dtype)


def size(x: Tensor, w: shared.Weight, bias: Tensor | None = None) -> float:
    """||x|| ||W|| / sqrt(K): the norm of x W^T when its terms are independent."""
    return float(x.double().norm() * shared.values(w).double().norm()) / max(w.shape[1], 1) ** 0.5


_compiled = shared.compilable("linear_invariant", linear_invariant)

LINEAR_INVARIANT = Op(
    name="linear_invariant",
    reference=linear_invariant_reference,
    # As for `linear`: one rounding of the result, and room for an implementation that rounds the weight too.
    agreement=Agreement({torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-18}),
    cases=shared.cases,
    cost=shared.cost(None),
    size=size,
    homes={"cpu": "nybble.ops.linear_invariant.cpu", "cuda": "nybble.ops.linear_invariant.triton"},
    # What is the same on every machine is the same in every batch.
    fallback=Implementation("linear_invariant_exact", linear_exact, native=True),
    promise="batch-invariant",
)

__all__ = ["LINEAR_INVARIANT", "linear_invariant"]
