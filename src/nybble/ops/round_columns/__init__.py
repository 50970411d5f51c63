"""round_columns: columns rounded one after the other under given scales, each error repaired by those still to come.

The inner loop of GPTQ and its kin (methods/columns.py). With U upper triangular, for j = 0, 1, … R - 1

    q_j = s round(w_j / s)        in float32, as formats round: one division, nearest, ties to even
    e_j = (w_j - q_j) / U_jj      in float64, as everything below
    w_k <- w_k - e_j U_jk         for k > j

for every output on its own, under C candidate scales at once. What is returned are the errors e, from which all else
follows: what was rounded to is w - e U, and the loss that no later column can repair is the sum of their squares.

R steps depend on each other; all else is parallel. 2 R^2 C N operations in float64, R C N values read and written.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nybble.formats.spec import ElementFormat
from nybble.formats.table import BLOCKS
from nybble.ops._choose import choose
from nybble.ops._declare import Agreement, Cost, Implementation, Op
from nybble.ops.round_columns.reference import round_columns_reference


def round_columns(
    columns: Tensor, upper: Tensor, scale: Tensor, zero_point: Tensor | None, element: ElementFormat
) -> Tensor:
    """The errors e, float64 [R, C, N].

    Args:
        columns: w, finite float64 [R, C, N], any strides; not changed.
        upper: U, float64 [R, R] with a positive diagonal; what lies below it is not looked at.
        scale: s, finite float32 [C, N], above zero.
        zero_point: float32 [N], for integers that have one, or None.
        element: what w / s is rounded to.
    """
    args = (columns, upper, scale, zero_point, element)
    return choose(ROUND_COLUMNS, columns.device.type, *args).run(*args)


def cases(device: str = "cpu") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments): every kind of element, zero points, one column, no outputs, columns that are expanded."""
    generator = torch.Generator().manual_seed(0)
    shapes = (("nvfp4", 16, 3, 40), ("int4_g128", 32, 1, 33), ("int4_g32_asym", 20, 2, 17), ("fp8_channel", 7, 1, 65),
              ("mxint8", 5, 2, 3), ("mxfp6_e3m2", 32, 2, 70), ("nvfp4", 1, 4, 1), ("nvfp4", 16, 2, 0))  # fmt: skip
    for name, rows, count, n in shapes:
        element = BLOCKS[name].element
        w = torch.randn(rows, 1, n, generator=generator, dtype=torch.float64).expand(rows, count, n)
        upper = torch.randn(rows, rows, generator=generator, dtype=torch.float64).triu() / rows**0.5
        upper.diagonal().abs_().add_(0.5)
        scale = (torch.rand(count, n, generator=generator) + 0.5) * 4 / float(element.max)
        zero = torch.randint(-3, 4, (n,), generator=generator).float() if BLOCKS[name].zero_point else None
        moved = [None if t is None else t.to(device) for t in (w, upper, scale, zero)]
        yield f"{name}-{rows}x{count}x{n}", (*moved, element)


def cost(columns: Tensor, *rest: Any) -> Cost:
    """2 R^2 operations a column of C N; w read and e written once."""
    return Cost(2.0 * len(columns) * columns.numel(), 16.0 * columns.numel())


ROUND_COLUMNS = Op(
    name="round_columns",
    reference=round_columns_reference,
    # Fused multiply-adds move e by some units in its last place, and nothing else.
    agreement=Agreement({torch.float64: 2.0**-40}),
    cases=cases,
    cost=cost,
    homes={"cuda": "nybble.ops.round_columns.triton"},
    fallback=Implementation("round_columns_torch", round_columns_reference, native=True),
)
