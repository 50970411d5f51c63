"""quantize_rows on GPUs: the kernel that was faster on an H200 (benchmarks/results/h200/producers.json) comes first.

Without a prologue that is rows.cu, rotated or not. After RMSNorm or a gate it leads only for blocks of 16 columns, of
which Triton's kernel computes every scale in two threads. With a residual, and for other blocks after a prologue,
Triton's is faster or within 3 % of it. Formats that were not timed are left to Triton's as well.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor

from nybble.formats.spec import BlockFormat
from nybble.ops.quantize_rows import cuda, triton

TIMED = ("int8_token", "fp8_token", "fp8_g128", "nvfp4", "mxfp4")
KERNELS = (*triton.IMPLEMENTATIONS, *cuda.IMPLEMENTATIONS)
"""Each wherever it can serve."""


def slower(fmt: BlockFormat, prologue: str, residual: Tensor | None) -> str | None:
    """Why rows.cu is not the first choice for a call that it could serve, or None where it is."""
    if fmt.name not in TIMED:
        return f"{fmt.name} was not timed; chosen for {', '.join(TIMED)}"
    if prologue == "plain" or (residual is None and fmt.block[1] == cuda.COLUMNS):
        return None
    return f"no faster than Triton's for {fmt.name} after {prologue}{'' if residual is None else ' with a residual'}"


def _supports(x: Tensor, fmt: BlockFormat, prologue: str, residual: Tensor | None, *rest: Any) -> str | None:
    first = cuda.IMPLEMENTATIONS[0]
    return slower(fmt, prologue, residual) or first.supports(x, fmt, prologue, residual, *rest)


IMPLEMENTATIONS = (replace(cuda.IMPLEMENTATIONS[0], supports=_supports), *triton.IMPLEMENTATIONS)
