"""NVFP4 and MXFP4 with quantized activations: products of blocks that carry their own scales.

    y[m, n] = tx tw sum_g sx[m, g] sw[n, g] sum_{k in g} cx[m, k] cw[n, k]  + bias[n]

Blackwell's tensor cores take codes and block scales as they are (sm_100: tcgen05.mma, sm_120: mma.sync, both
kind::mxf4nvf4.block_scale or kind::mxf4); Triton writes them for `tl.dot_scaled`. That kernel is *compiled, never
run*: tests find the instruction in the code for both targets, and no machine with it was at hand.

Elsewhere the products are emulated: an E2M1 element has two significant bits and an E4M3 scale four, so that
element * scale is exact in bfloat16 (as is every pair of formats with no more than eight in all), and bf16 products
with float32 sums give what the block-scaled instruction gives but for the order of the sums. Both operands are decoded
in one pass each; the tensor scales wait until the end.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from nybble.formats.spec import BlockFormat, FloatFormat
from nybble.formats.table import BF16, E2M1, E4M3, E8M0, FP32
from nybble.ops._declare import Implementation
from nybble.ops.quantize_rows import quantize_rows
from nybble.ops.quantize_rows.triton import on
from nybble.ops.quantize_rows.triton_codes import float_value
from nybble.quantize import QuantTensor
from nybble.quantize.layouts import DENSE

NEVER_RUN = "compiled, never run"
_NATIVE = (10, 12)
_TILE = (128, 128, 256)  # tokens, rows of W, columns
_DECODED = 1024
_SUBNORMAL_POWER = tl.constexpr(1 << (FP32.mantissa_bits - 1))  # 2^-127, E8M0's code 0, as float32's bits
_MANTISSA = tl.constexpr(FP32.mantissa_bits)


@triton.jit
def _block_scaled_kernel(
    x, w, x_scale, w_scale, x_tensor, w_tensor, bias, y, m, n, code_bytes, scale_columns,
    TOKENS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr, E4M3_SCALES: tl.constexpr,
    HAS_TENSOR: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """A tile of y[M, N]; codes are packed E2M1 [M, bytes] and [N, bytes], scales one byte a block."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    r = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    x_row, w_row = (t % m).to(tl.int64)[:, None], (r % n).to(tl.int64)[:, None]  # rows beyond the end are never stored
    total = tl.zeros((TOKENS, ROWS), tl.float32)
    for piece in range(tl.cdiv(code_bytes, COLUMNS // 2)):
        byte = (piece * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2))[None, :]
        block = (piece * (COLUMNS // BLOCK) + tl.arange(0, COLUMNS // BLOCK))[None, :]
        a = tl.load(x + x_row * code_bytes + byte, byte < code_bytes, 0)
        b = tl.load(w + w_row * code_bytes + byte, byte < code_bytes, 0)
        a_scale = tl.load(x_scale + x_row * scale_columns + block, block < scale_columns, 0)
        b_scale = tl.load(w_scale + w_row * scale_columns + block, block < scale_columns, 0)
        if E4M3_SCALES:
            a_scale, b_scale = a_scale.to(tl.float8e4nv, bitcast=True), b_scale.to(tl.float8e4nv, bitcast=True)
        total = tl.dot_scaled(a, a_scale, "e2m1", b.T, b_scale, "e2m1", total)
    if HAS_TENSOR:
        total *= tl.load(x_tensor) * tl.load(w_tensor)
    if HAS_BIAS:
        total += tl.load(bias + r % n).to(tl.float32)[None, :]
    at = y + t.to(tl.int64)[:, None] * n + r[None, :]
    tl.store(at, total.to(y.dtype.element_ty), (t < m)[:, None] & (r < n)[None, :])


@triton.jit
def _value(code, SIGN: tl.constexpr, MANTISSA: tl.constexpr, BIAS: tl.constexpr, MOST: tl.constexpr, INF: tl.constexpr):
    """The values of codes with a sign at bit SIGN: finite up to the magnitude MOST, infinite at INF, NaN beyond."""
    magnitude = code & ((1 << SIGN) - 1)
    value = float_value(magnitude, MANTISSA, BIAS)
    value = tl.where(magnitude > MOST, tl.where(magnitude == INF, float("inf"), float("nan")), value)
    return tl.where(code >> SIGN == 1, -value, value)


@triton.jit
def _decode_kernel(
    codes, scale, y, columns, code_bytes, scale_columns, chunks,
    BITS: tl.constexpr, E_SIGN: tl.constexpr, E_MANTISSA: tl.constexpr, E_BIAS: tl.constexpr, E_MOST: tl.constexpr,
    E_INF: tl.constexpr, S_SIGN: tl.constexpr, S_MANTISSA: tl.constexpr, S_BIAS: tl.constexpr, S_MOST: tl.constexpr,
    S_INF: tl.constexpr, BLOCK: tl.constexpr, P: tl.constexpr,
):  # fmt: skip
    """y[rows, K] = element * block scale, exact in y's dtype."""
    row = (tl.program_id(0) // chunks).to(tl.int64)
    at = tl.program_id(0) % chunks * P + tl.arange(0, P)
    inside = at < columns
    code = tl.load(codes + row * code_bytes + at * BITS // 8, inside, 0).to(tl.int32)
    if BITS == 4:
        code = (code >> (at % 2 * 4)) & 0xF
    stored = tl.load(scale + row * scale_columns + at // BLOCK, inside, 0).to(tl.int32)
    if S_MANTISSA == 0:
        bits = tl.where(stored == 0, _SUBNORMAL_POWER, stored << _MANTISSA)
        e = tl.where(stored > S_MOST, float("nan"), bits.to(tl.float32, bitcast=True))
    else:
        e = _value(stored, S_SIGN, S_MANTISSA, S_BIAS, S_MOST, S_INF)
    value = _value(code, E_SIGN, E_MANTISSA, E_BIAS, E_MOST, E_INF) * e
    tl.store(y + row * columns + at, value.to(y.dtype.element_ty), inside)


def significant(fmt: BlockFormat) -> int:
    """The significant bits of element * block scale; 0 for formats that the decoder does not know."""
    element, scale = fmt.element, fmt.scale
    if not isinstance(element, FloatFormat) or not isinstance(scale, FloatFormat) or scale.bits != 8:
        return 0
    if element.bits not in (4, 8) or not element.signed or not element.mantissa_bits or fmt.block[0] != 1:
        return 0
    return element.mantissa_bits + 1 + (scale.mantissa_bits + 1 if scale.mantissa_bits else 0)


def decode(q: QuantTensor) -> Tensor:
    """The values of a dense [rows, K] tensor but for its tensor scale, in bfloat16, where they are exact."""
    fmt, (rows, columns) = q.format, q.shape
    element, scale = fmt.element, fmt.scale
    y = torch.empty((rows, columns), dtype=torch.bfloat16, device=q.device)
    if not y.numel() or not isinstance(element, FloatFormat) or not isinstance(scale, FloatFormat):
        return y
    chunks = -(-columns // _DECODED)
    _decode_kernel[(rows * chunks,)](
        q.codes, q.scale, y, columns, q.codes.shape[-1], q.scale.shape[-1], chunks,
        element.bits, *_codes(element), *_codes(scale), fmt.block[1] or columns, _DECODED,
    )  # fmt: skip
    return y


def _codes(fmt: FloatFormat) -> tuple[int, int, int, int, int]:
    """What `_value` has to know: the bit of the sign, mantissa bits, bias, the largest finite magnitude, infinity."""
    infinity = fmt.max_code + 1 if fmt.specials == "ieee" else -1
    return fmt.magnitude_bits, fmt.mantissa_bits, fmt.bias, fmt.max_code, infinity


def emulated_refusal(x: Tensor, w: QuantTensor, activation: BlockFormat | None) -> str | None:
    """Why bf16 products do not serve, or None."""
    if activation is None:
        return "takes quantized activations; none were asked for"
    most = BF16.mantissa_bits + 1
    for fmt in (w.format, activation):
        if not 0 < significant(fmt) <= most:
            return f"decodes short floats under 8-bit scales, exact in {most} bits; {fmt.name} is not"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"sums of bf16 products promise less than {x.dtype}"
    return None


def native_refusal(x: Tensor, w: QuantTensor, activation: BlockFormat | None) -> str | None:
    """Why the block-scaled instruction does not serve, or None."""
    pairs = {(E4M3, 16), (E8M0, 32)}
    for fmt in (w.format, activation):
        if fmt is None or fmt.element != E2M1 or (fmt.scale, fmt.block[1]) not in pairs or fmt.block[0] != 1:
            return f"multiplies NVFP4 or MXFP4 codes; asked for {w.format.name} and {activation}"
    if activation is None or (w.format.scale, w.format.block) != (activation.scale, activation.block):
        return f"multiplies one kind of blocks; asked for {w.format.name} and {activation}"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"writes bfloat16 and float16, not {x.dtype}"
    capability = torch.cuda.get_device_capability(x.device)
    if capability[0] not in _NATIVE:
        return f"needs block-scaled tensor cores (compute capability 10 or 12); this is {capability[0]}.{capability[1]}"
    return None


def block_scaled(a: QuantTensor, w: QuantTensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a w^T + bias [M, N] by `tl.dot_scaled`, from dense operands."""
    (m, n), y = (a.shape[0], w.shape[0]), torch.empty((a.shape[0], w.shape[0]), dtype=dtype, device=a.device)
    tokens, rows, columns = _TILE
    if m and n:
        tensors = (y, y) if a.tensor_scale is None else (a.tensor_scale, w.tensor_scale)
        _block_scaled_kernel[(-(-m // tokens), -(-n // rows))](
            a.codes, w.codes, a.scale, w.scale, *tensors, y if bias is None else bias.contiguous(), y, m, n,
            a.codes.shape[1], a.scale.shape[1], tokens, rows, columns, a.format.block[1], a.format.scale == E4M3,
            a.tensor_scale is not None, bias is not None, num_warps=4, num_stages=3,
        )  # fmt: skip
    return y


def emulated(a: QuantTensor, w: QuantTensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """a w^T + bias [M, N] by bf16 products of exact values."""
    empty = not a.shape[0] or not w.shape[0] or not w.shape[1]
    if empty:
        y = torch.zeros((a.shape[0], w.shape[0]), dtype=torch.float32, device=a.device)
    else:
        y = torch.mm(decode(a), decode(w).t(), out_dtype=torch.float32)
    for scale in (a.tensor_scale, w.tensor_scale):
        y = y if scale is None else y.mul_(scale)
    return (y if bias is None else y.add_(bias)).to(dtype)


def _implementation(name: str, native: bool, note: str = "") -> Implementation:
    refuse, product = (native_refusal, block_scaled) if native else (emulated_refusal, emulated)

    def supports(
        x: Tensor, w: QuantTensor, bias: Tensor | None, activation: BlockFormat | None, amax: Tensor | None
    ) -> str | None:
        return refuse(x, w, activation)

    def run(x: Tensor, w: QuantTensor, bias: Tensor | None, activation: BlockFormat, amax: Tensor | None) -> Tensor:
        a = quantize_rows(x.reshape(-1, x.shape[-1]), activation, tensor_amax=amax)
        with on(x.device):
            return product(a, w.to_layout(DENSE), bias, x.dtype).view(*x.shape[:-1], w.shape[0])

    return Implementation(name, run, supports, native=native, layout=lambda w: DENSE, note=note)


IMPLEMENTATIONS = (
    _implementation("linear_fp4_block_triton_sm100", native=True, note=NEVER_RUN),
    _implementation("linear_fp4_block_bf16_triton", native=False),
)
