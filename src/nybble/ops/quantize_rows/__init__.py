"""quantize_rows: what a linear is fed, as codes and scales, in one pass from where it is made.

A linear whose activations are narrow needs, before its product, a pass that reads bf16 and writes codes; before that
pass another one made the bf16: a normalization, the gate of an MLP, a rotation. Here all are one pass, a *producer*:

    y = prologue(x)       plain | rmsnorm (with a residual before it, which is written too) | silu_mul
    y = y H / sqrt(b)     in blocks of b = 16, 32 or 128 columns, if asked for
    codes, scales = quantize(y)

with y rounded to x's dtype after each line, so that the codes are those that the separate passes would give, bit for
bit (reference.py). Every token is on its own: formats whose scales lie within a row, as activations have them.

The second scale that NVFP4 has over the whole tensor comes from `tensor_amax`, the largest magnitude measured when
the model was calibrated, by the format's own rule (quantize/scales.py: encode = target * E / amax), as checkpoints
store it. Without it y is measured first, which takes the separate passes.

Random signs, as methods/hadamard.py has them before H, are not here: they are folded into what makes y (the gain of
the normalization, the rows of the weight before).
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import torch
from torch import Tensor

from nybble.errors import BadInput
from nybble.formats import table
from nybble.formats.spec import BlockFormat
from nybble.ops._choose import choose
from nybble.ops._declare import Agreement, Cost, Implementation, Op
from nybble.ops.quantize_rows.reference import quantize_rows_reference
from nybble.quantize import QuantTensor
from nybble.quantize.layouts import DENSE

PROLOGUES = ("plain", "rmsnorm", "silu_mul")
ROTATIONS = (0, 16, 32, 128)


def quantize_rows(
    x: Tensor, format: BlockFormat | str, *, tensor_amax: Tensor | None = None, hadamard: int = 0
) -> QuantTensor:
    """x [..., K] to codes and scales by token.

    Args:
        x: float32, bfloat16 or float16, any strides, any number of rows from 0 up; NaN and infinity are not looked
            for: their block decodes to NaN.
        format: a block format with scales within a row ("int8_token", "fp8_g128", "nvfp4", …), or its name.
        tensor_amax: float32 [], the calibrated largest magnitude, for formats with a tensor scale; None measures y.
        hadamard: 0, or the block of columns to rotate, which divides K.

    Returns:
        What quantize() gives for the same values: a QuantTensor of x's shape.

    Raises:
        BadInput: shapes, dtypes or formats that do not fit.
    """
    return _produce(x, format, "plain", None, None, 0.0, tensor_amax, hadamard)[0]


def silu_mul_quantize(
    x: Tensor, format: BlockFormat | str, *, tensor_amax: Tensor | None = None, hadamard: int = 0
) -> QuantTensor:
    """[gate | up] [..., 2K] to silu(gate) * up [..., K], quantized; see `quantize_rows` and the op silu_mul."""
    return _produce(x, format, "silu_mul", None, None, 0.0, tensor_amax, hadamard)[0]


def rmsnorm_quantize(
    x: Tensor,
    residual: Tensor | None,
    gain: Tensor,
    eps: float,
    format: BlockFormat | str,
    *,
    tensor_amax: Tensor | None = None,
    hadamard: int = 0,
) -> tuple[QuantTensor, Tensor]:
    """(RMSNorm of x + residual [..., K], quantized; x + residual); see `quantize_rows` and the op add_rmsnorm."""
    return _produce(x, format, "rmsnorm", residual, gain, eps, tensor_amax, hadamard)


def _produce(
    x: Tensor, format: BlockFormat | str, prologue: str, residual: Tensor | None, gain: Tensor | None, eps: float,
    tensor_amax: Tensor | None, hadamard: int,
) -> tuple[QuantTensor, Tensor]:  # fmt: skip
    fmt = table.block(format)
    check(x, fmt, prologue, residual, gain, hadamard)
    rest = (prologue, residual, gain, eps, tensor_amax, hadamard)
    if torch.compiler.is_compiling():
        parts = torch.ops.nybble.quantize_rows(x, fmt.name, *rest)
        codes, scale, tensor = parts[0], parts[1], parts[2] if fmt.tensor_scale else None
        shape = (*x.shape[:-1], width_of(x, prologue))
        q = _traced(format=fmt, shape=shape, codes=codes, scale=scale, tensor_scale=tensor, dtype=x.dtype)
        return q, parts[-1] if residual is not None else x
    return choose(QUANTIZE_ROWS, x.device.type, x, fmt, *rest).run(x, fmt, *rest)


def _traced(**fields: Any) -> QuantTensor:
    """A dense QuantTensor, made field by field: torch 2.11's tracer cannot follow the initializer of a frozen dataclass
    whose default is an object of ours."""
    q = object.__new__(QuantTensor)
    for name, value in {"zero_point": None, "layout": DENSE, **fields}.items():
        object.__setattr__(q, name, value)
    return q


def width_of(x: Tensor, prologue: str) -> int:
    """K: a gate's input holds both of its halves."""
    return x.shape[-1] // 2 if prologue == "silu_mul" else x.shape[-1]


def check(
    x: Tensor, fmt: BlockFormat, prologue: str, residual: Tensor | None, gain: Tensor | None, hadamard: int
) -> None:
    """Refuse what no implementation could serve."""
    if x.dtype not in QUANTIZE_ROWS.agreement.limits or x.ndim < 2:
        raise BadInput(
            f"{prologue}: x has to be float32, bfloat16 or float16 [..., M, K], got {x.dtype} {tuple(x.shape)}"
        )
    if fmt.block[0] != 1:
        raise BadInput(f"{fmt.name} shares scales between rows; activations need a format with scales within a row")
    if prologue == "silu_mul" and x.shape[-1] % 2:
        raise BadInput(f"silu_mul takes gate and up side by side, an even width; got {tuple(x.shape)}")
    if gain is not None and (tuple(gain.shape) != x.shape[-1:] or gain.dtype != x.dtype):
        raise BadInput(f"rmsnorm: gain is {gain.dtype} {tuple(gain.shape)}, expected {x.dtype} [{x.shape[-1]}]")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise BadInput(f"rmsnorm: residual is {residual.dtype} {tuple(residual.shape)}, x {x.dtype} {tuple(x.shape)}")
    if hadamard not in ROTATIONS or (hadamard and width_of(x, prologue) % hadamard):
        raise BadInput(f"hadamard = {hadamard}: give one of {ROTATIONS} that divides K = {width_of(x, prologue)}")


@torch.library.custom_op("nybble::quantize_rows", mutates_args=())
def _quantize_rows_op(
    x: Tensor, format: str, prologue: str, residual: Tensor | None, gain: Tensor | None, eps: float,
    tensor_amax: Tensor | None, hadamard: int,
) -> list[Tensor]:  # fmt: skip
    q, h = _produce(x, format, prologue, residual, gain, eps, tensor_amax, hadamard)
    tensor = [] if q.tensor_scale is None else [q.tensor_scale.clone()]
    return [q.codes, q.scale, *tensor, *([h] if residual is not None else [])]


@_quantize_rows_op.register_fake
def _(x: Tensor, format: str, prologue: str, residual: Any, gain: Any, eps: float, tensor_amax: Any,
      hadamard: int) -> list[Tensor]:  # fmt: skip
    fmt, width = table.block(format), width_of(x, prologue)
    codes, scale = empty_parts(x, fmt, width)
    tensor = [x.new_empty((), dtype=torch.float32)] if fmt.tensor_scale else []
    return [codes, scale, *tensor, *([x.new_empty(x.shape)] if residual is not None else [])]


def empty_results(
    x: Tensor, fmt: BlockFormat, prologue: str, residual: Tensor | None
) -> tuple[int, Tensor, Tensor, Tensor | None, Tensor]:
    """What a kernel fills: K, and memory for the codes, the scales, the tensor scale and h (x without a residual)."""
    width = width_of(x, prologue)
    codes, scale = empty_parts(x, fmt, width)
    tensor = x.new_empty((), dtype=torch.float32) if fmt.tensor_scale else None
    h = x if residual is None else torch.empty_like(x, memory_format=torch.contiguous_format)
    return width, codes, scale, tensor, h


def empty_parts(x: Tensor, fmt: BlockFormat, width: int) -> tuple[Tensor, Tensor]:
    """Memory for the codes and scales of [..., width] in the dense layout, on x's device."""
    from nybble.quantize.elements import native_dtype

    columns = fmt.block[1] or max(width, 1)
    codes = x.new_empty((*x.shape[:-1], -(-width * fmt.element.bits // 8)), dtype=torch.uint8)
    kind = native_dtype(fmt.scale) or torch.uint8
    return codes, x.new_empty((*x.shape[:-1], -(-width // columns)), dtype=kind)


CASE_FORMATS = ("int8_token", "fp8_token", "fp8_g128", "int4_g128", "nvfp4", "mxfp4", "mxfp8_e4m3", "int4_token")
CASE_SHAPES = ((0, 32), (1, 1), (3, 129), (5, 160), (2, 640), (17, 1152))


def cases(
    device: str = "cpu", dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16, torch.float16)
) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(label, arguments): every format after every prologue, odd sizes, no rows, a strided x, rows of zeros, rows of
    one outlier, tiny and huge rows, rotated where the size divides K."""
    generator = torch.Generator().manual_seed(0)
    for number, (name, prologue, (m, k)) in enumerate(product(CASE_FORMATS, PROLOGUES, CASE_SHAPES)):
        dtype = dtypes[number % len(dtypes)]
        width = 2 * k if prologue == "silu_mul" else k
        x = _rows(m, 2 * width, generator).to(device, dtype)
        x = x[:, 1 : width + 1] if number % 2 else x[:, :width].contiguous()
        normal = prologue == "rmsnorm"
        residual = torch.randn(m, k, generator=generator).to(device, dtype) if normal and number % 4 < 2 else None
        gain = torch.randn(k, generator=generator).to(device, dtype) if normal else None
        rotated = max((r for r in ROTATIONS if r and k % r == 0), default=0) if number // 2 % 2 else 0
        amax = torch.tensor(3.0, device=device) if table.block(name).tensor_scale else None
        label = f"{name}-{prologue}-{m}x{k}-{str(dtype).removeprefix('torch.')}-h{rotated}"
        yield label, (x, table.block(name), prologue, residual, gain, 1e-5 if normal else 0.0, amax, rotated)


def _rows(m: int, k: int, generator: torch.Generator) -> Tensor:
    x = torch.randn(m, k, generator=generator)
    for row, scale in enumerate((0.0, 1e-6, 3e4)[: max(m - 1, 0)]):
        x[row] *= scale
    if m:
        x[m - 1, k // 4] *= 100
    return x


def cost(x: Tensor, fmt: BlockFormat, prologue: str = "plain", *rest: Any) -> Cost:
    """No products; x (and a residual, twice) moves once, codes and scales are written."""
    width = width_of(x, prologue)
    rows = x.numel() // max(x.shape[-1], 1)
    moved = x.numel() * x.element_size() * (3 if rest and rest[0] is not None else 1)
    return Cost(0.0, moved + rows * width * fmt.bits_per_value(rows, width) / 8, "none")


QUANTIZE_ROWS = Op(
    name="quantize_rows",
    reference=quantize_rows_reference,
    agreement=Agreement(dict.fromkeys((torch.bfloat16, torch.float16, torch.float32), 0.0)),  # the same bits
    cases=cases,
    cost=cost,
    homes={"cuda": "nybble.ops.quantize_rows.gpu"},
    fallback=Implementation("quantize_rows_torch", quantize_rows_reference, native=True),
    promise="run-to-run",  # y is measured over all tokens where a tensor scale is needed and none was given
)

__all__ = ["QUANTIZE_ROWS", "quantize_rows", "rmsnorm_quantize", "silu_mul_quantize"]
