"""quantize and dequantize: a tensor to codes and scales, and back.

The arithmetic is a contract, equal on every device: the quotient x / e is one float32 division by the stored scale
(e = fl32(block_scale * tensor_scale)), then the element is rounded as formats/exact.py defines. Large tensors are
worked on in pieces of rows that stay in a processor's cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from nybble.errors import BadInput
from nybble.formats import table
from nybble.formats.spec import BlockFormat, IntFormat
from nybble.quantize import elements, scales
from nybble.quantize.blocks import cut, join, matrix, per_block
from nybble.quantize.layouts import DENSE, Layout
from nybble.quantize.rounding import check as check_rounding
from nybble.quantize.rounding import uniform
from nybble.quantize.tensor import QuantTensor

# Values a piece: on a CPU its float32 temporaries fit a core's second-level cache, elsewhere they stay far below
# the size of a layer.
_PIECE = {"cpu": 1 << 18}
_PIECE_ELSEWHERE = 1 << 22


def quantize(
    x: Tensor,
    format: str | BlockFormat,
    *,
    rule: str | None = None,
    rounding: str = "nearest",
    seed: int | None = None,
    tensor_amax: Tensor | float | None = None,
    layout: Layout = DENSE,
    name: str = "the tensor",
    check: bool = True,
) -> QuantTensor:
    """Quantize a tensor.

    Args:
        x: floating tensor [..., N, K] or [K], any strides; float64 is rounded to float32 first.
        format: a block format or its name ("nvfp4", "int4_g128", …).
        rule: the scale rule (quantize/scales.py); default: the format's own.
        rounding: one of formats.exact.ROUNDINGS; the stochastic ones need `seed`.
        seed: of the counter-based generator; the same seed gives the same codes on every device.
        tensor_amax: the tensor's largest magnitude where it is known or held from earlier (rule "held" needs it).
        layout: where the bytes shall lie.
        name: what to call x in an error.
        check: whether NaN and infinity are refused. Without it a block that holds one decodes to NaN, and nothing
            waits for the device.

    Returns:
        A QuantTensor whose `dtype` is x.dtype.

    Raises:
        BadInput: x is not floating or has no axis, holds NaN or infinity, or a needed argument is missing.
        UnknownName: no such format, rule or rounding.
    """
    fmt = table.block(format)
    rule_name = rule or fmt.rule
    propose = scales.rule(rule_name)
    check_rounding(rounding)
    stochastic = rounding.startswith("stochastic")
    if not x.is_floating_point() or x.ndim == 0:
        raise BadInput(
            f"{name}: quantize takes a floating tensor with at least one axis, got {x.dtype} {tuple(x.shape)}"
        )
    if stochastic and seed is None:
        raise BadInput(f"rounding {rounding!r} needs a seed")
    if rule_name == "held" and tensor_amax is None:
        raise BadInput("rule 'held' needs tensor_amax, the magnitude measured earlier")
    amax = _amax(x, name, check) if check or (fmt.tensor_scale and tensor_amax is None) else None
    if tensor_amax is not None:
        amax = torch.as_tensor(tensor_amax, dtype=torch.float32, device=x.device)
    tensor = None if amax is None else scales.tensor_scale(rule_name, fmt, amax)

    pieces = []
    for start, piece in _pieces(x, fmt):
        values = piece.to(torch.float32)
        draws = uniform(tuple(values.shape), seed or 0, x.device, start) if stochastic else None
        pieces.append(_quantize_piece(values, fmt, propose, rounding, draws, tensor))
    codes, scale, zero_point = _assemble(pieces, fmt, tuple(x.shape), layout)
    return QuantTensor(
        fmt, tuple(x.shape), codes, scale, None if tensor is None else tensor.decode, zero_point, layout, x.dtype
    )


def dequantize(q: QuantTensor, dtype: torch.dtype | None = None) -> Tensor:
    """The values of a QuantTensor; the same as q.dequantize(dtype)."""
    return q.dequantize(dtype)


def _amax(x: Tensor, name: str, check: bool) -> Tensor:
    """The largest magnitude as float32 []; refuses NaN and infinity by the tensor's name."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x)
    amax = torch.maximum(high, -low).to(torch.float32)
    if check and not bool(amax.isfinite()):
        bad = int((~x.to(torch.float32).isfinite()).sum())
        raise BadInput(f"{name} holds {bad} values that are NaN or infinite (of {x.numel()}) and cannot be quantized")
    return amax


def _pieces(x: Tensor, fmt: BlockFormat) -> list[tuple[int, Tensor]]:
    """(index of the first value, piece) for runs of whole blocks of rows; one piece where rows cannot be parted."""
    rows = fmt.block[0]
    whole = matrix(tuple(x.shape))
    most = _PIECE.get(x.device.type, _PIECE_ELSEWHERE)
    if rows is None or x.ndim < 2 or x.numel() <= most:
        return [(0, x)]
    if rows > 1 and x.ndim > 2:
        return [(0, x)]
    flat = x.reshape(-1, whole[-1])
    step = max(1, most // (rows * whole[-1])) * rows
    return [(i * whole[-1], flat[i : i + step]) for i in range(0, flat.shape[0], step)]


def _quantize_piece(
    x: Tensor,
    fmt: BlockFormat,
    propose: scales.Rule,
    rounding: str,
    draws: Tensor | None,
    tensor: scales.TensorScale | None,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(codes of x's shape, stored scales, zero points) of one piece."""
    blocks = cut(x, fmt)
    proposal = propose(blocks, fmt, tensor)
    stored = scales.store(proposal.scale, fmt)
    effective = elements.decode(fmt.scale, stored)
    if tensor is not None:
        effective = effective * tensor.decode
    quotient = blocks / per_block(effective)
    u = None if draws is None else cut(draws, fmt)
    codes = encode_quotient(fmt, quotient, proposal.zero_point, rounding, u)
    return join(codes, tuple(x.shape)), stored, proposal.zero_point


def encode_quotient(
    fmt: BlockFormat, quotient: Tensor, zero_point: Tensor | None, rounding: str = "nearest", u: Tensor | None = None
) -> Tensor:
    """Codes (uint8) of quotients x / e in blocks [..., N', rows, K', columns]; zero points are [..., N', K']."""
    element = fmt.element
    if zero_point is None or not isinstance(element, IntFormat):
        return elements.encode(element, quotient, rounding, u)
    whole = elements.round_to_int(quotient, rounding, u) + per_block(zero_point)
    return elements.encode(element, whole)


def _assemble(
    pieces: list[tuple[Tensor, Tensor, Tensor | None]], fmt: BlockFormat, shape: tuple[int, ...], layout: Layout
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The pieces put together in the layout."""
    bits = fmt.element.bits
    lead = matrix(shape)[:-2] if len(shape) > 1 else ()
    scale = torch.cat([piece[1] for piece in pieces])
    zeros = [piece[2] for piece in pieces if piece[2] is not None]
    zero_point = torch.cat(zeros) if zeros else None
    if lead and len(pieces) > 1:
        scale = scale.unflatten(0, (*lead, -1))
        zero_point = None if zero_point is None else zero_point.unflatten(0, (*lead, -1))
    scale, zero_point = layout.pack_scales(scale, zero_point, fmt, shape)
    if layout == DENSE:  # rows are independent: pack while a piece is in the cache
        packed = torch.cat([layout.pack(piece[0], bits) for piece in pieces])
    else:
        packed = layout.pack(torch.cat([piece[0] for piece in pieces]).view(shape), bits)
    return packed.view(*shape[:-1], packed.shape[-1]) if layout == DENSE else packed, scale, zero_point
