"""quantize_rows on GPUs: Triton's kernel, and the CUDA one, which no GPU has timed yet and which is therefore last."""

from __future__ import annotations

from nybble.ops.quantize_rows import cuda, triton

IMPLEMENTATIONS = (*triton.IMPLEMENTATIONS, *cuda.IMPLEMENTATIONS)
