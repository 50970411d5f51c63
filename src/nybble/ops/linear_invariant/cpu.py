"""linear_invariant on CPUs: one row at a time.

A matrix product of torch's may treat a row by its place in the batch (edge kernels, splits over threads), a product of
one row and W only by N and K. So every row goes through that alone, from a buffer of its own, since its alignment
might decide too. Each call reads the weight once per row: fine for decoding, dear for prompts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nybble.ops import _promised_linear as shared
from nybble.ops._declare import Implementation


def _run(x: Tensor, w: shared.Weight, bias: Tensor | None) -> Tensor:
    weight = shared.values(w)
    given = {x.dtype, weight.dtype} | (set() if bias is None else {bias.dtype})
    # torch's float16 sums are not float32 everywhere.
    dtype = x.dtype if len(given) == 1 and x.dtype != torch.float16 else torch.float32
    rows, weight, shift = shared.rows(x), weight.to(dtype), None if bias is None else bias.to(dtype)
    y = x.new_empty((len(rows), weight.shape[0]))
    with torch.autocast("cpu", enabled=False):
        for number, row in enumerate(rows):
            own = row.to(dtype, copy=True).contiguous()[None]
            y[number] = torch.nn.functional.linear(own, weight, shift)[0]
    return y.view(*x.shape[:-1], y.shape[1])


IMPLEMENTATIONS = (Implementation("linear_invariant_cpu", _run, native=True),)
