"""quantize and dequantize: a tensor to codes and scales, and back.

The arithmetic is a contract, equal on every device: the quotient x / e is one float32 division by the stored scale
(e = fl32(block_scale * tensor_scale)), then the element is rounded as formats/exact.py defines. Large tensors are
worked on in pieces of rows that stay in a processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain

import torch
from torch import Tensor

from nybble.errors import BadInput
from nybble.formats import table
from nybble.formats.spec import BlockFormat, IntFormat
from nybble.quantize import elements, scales
from nybble.quantize.blocks import PIECE, Stack, cut, join, matrix, per_block, scale_shape, sides
from nybble.quantize.layouts import DENSE, Layout
from nybble.quantize.rounding import check as check_rounding
from nybble.quantize.rounding import uniform
from nybble.quantize.tensor import QuantTensor

Parts = tuple[Tensor, Tensor, Tensor | None]
"""Codes, stored block scales, zero points."""

_CPU_PIECE = 1 << 18  # its float32 temporaries fit a core's second-level cache


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

    def piecewise() -> Iterator[Parts]:
        for start, piece in _pieces(x, fmt):
            values = piece.to(torch.float32)
            draws = uniform(tuple(values.shape), seed or 0, x.device, start) if stochastic else None
            codes, scale, zero_point = _quantize_piece(values, fmt, propose, rounding, draws, tensor)
            yield DENSE.pack(codes, fmt.element.bits), scale, zero_point

    codes, scale, zero_point = _assemble(piecewise(), fmt, tuple(x.shape))
    decode = None if tensor is None else tensor.decode
    return QuantTensor(fmt, tuple(x.shape), codes, scale, decode, zero_point, DENSE, x.dtype).to_layout(layout)


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
    most = _CPU_PIECE if x.device.type == "cpu" else PIECE
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
) -> Parts:
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


def _assemble(pieces: Iterator[Parts], fmt: BlockFormat, shape: tuple[int, ...]) -> Parts:
    """The parts of the whole tensor, in the plain arrangement, from those of its pieces."""
    first = next(pieces)
    rows = sides(fmt, shape)[0]
    if first[1].shape == scale_shape(fmt, shape):
        return first
    *lead, n, _ = matrix(shape)
    count = math.prod(lead) * n
    codes, scale, zero_point = Stack(count), Stack(-(-count // rows)), Stack(-(-count // rows))
    for piece in chain([first], pieces):
        codes.add(piece[0])
        scale.add(piece[1])
        if piece[2] is not None:
            zero_point.add(piece[2])
    packed, blocks = codes.whole(), scale.whole()
    zeros = None if first[2] is None else zero_point.whole().unflatten(0, (*lead, -1))
    return packed.unflatten(0, (*lead, -1)), blocks.unflatten(0, (*lead, -1)), zeros
