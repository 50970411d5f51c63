"""silu_mul: the gate of a gated MLP, y = silu(gate) * up, on the fused product [gate | up].

silu(g) = g / (1 + exp(-g)) in float32, rounded to the input's dtype before it multiplies, as transformers' LlamaMLP
does (Shazeer, arXiv 2002.05202). Reads 2I values a token and writes I.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.errors import BadInput
from nybble.ops._choose import choose
from nybble.ops._declare import Agreement, Cost, Implementation, Op

_BLOCK = 1024


def silu_mul(x: Tensor) -> Tensor:
    """[..., 2I] -> [..., I] in x.dtype (float32, bfloat16 or float16): silu(x[..., :I]) * x[..., I:]."""
    if x.shape[-1] % 2:
        raise BadInput(f"silu_mul takes gate and up side by side, an even width; got {tuple(x.shape)}")
    return choose(SILU_MUL, x.device.type, x).run(x)


def silu_mul_reference(x: Tensor) -> Tensor:
    """The definition, in plain torch."""
    gate, up = x.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up


@triton.jit
def _silu_mul_kernel(x: tl.tensor, y: tl.tensor, columns: tl.tensor, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < columns
    gate = tl.load(x + row * 2 * columns + at, inside, 0.0)
    up = tl.load(x + row * 2 * columns + columns + at, inside, 0.0)
    wide = gate.to(tl.float32)
    gated = (wide / (1 + tl.exp(-wide))).to(gate.dtype).to(tl.float32)
    tl.store(y + row * columns + at, (gated * up.to(tl.float32)).to(gate.dtype), inside)


def _triton(x: Tensor) -> Tensor:
    flat = x.contiguous()
    columns = flat.shape[-1] // 2
    y = torch.empty((*flat.shape[:-1], columns), dtype=x.dtype, device=x.device)
    if y.numel():
        _silu_mul_kernel[(triton.cdiv(columns, _BLOCK), y.numel() // columns)](flat, y, columns, _BLOCK)
    return y


def _supports(x: Tensor) -> str | None:
    rows = x.numel() // max(x.shape[-1], 1)
    return f"{rows} rows are more than a grid holds" if rows > 65535 else None


def cases(device: str = "cpu") -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments): odd widths, no rows, every dtype, a strided x, large magnitudes."""
    generator = torch.Generator().manual_seed(0)
    for number, (rows, columns) in enumerate(((0, 8), (1, 1), (1, 1536), (3, 129), (4, 3000), (2, 65))):
        dtype = (torch.float32, torch.bfloat16, torch.float16)[number % 3]
        wide = (torch.randn(rows, 4 * columns, generator=generator) * 8).to(device, dtype)
        yield f"{rows}x{columns}-{dtype}", ((wide[:, ::2] if number % 2 else wide[:, : 2 * columns]),)


def cost(x: Tensor) -> Cost:
    """Four operations a value of the result; three values moved for one."""
    return Cost(2.0 * x.numel(), 1.5 * x.numel() * x.element_size())


SILU_MUL = Op(
    name="silu_mul",
    reference=silu_mul_reference,
    agreement=Agreement({torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}),
    cases=cases,
    cost=cost,
    size=lambda *args: 0.0,
    homes={"cuda": "nybble.ops.silu_mul"},
    fallback=Implementation("silu_mul_torch", silu_mul_reference, lambda *args: None, native=True),
)
IMPLEMENTATIONS = (Implementation("silu_mul_triton", _triton, _supports, native=True),)
