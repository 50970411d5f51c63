"""What a call costs, whatever the machine: pure functions of shapes and formats, without torch.

An op declares a cost here or in its own file; the planner multiplies it with a machine's rates. A Cost is one launch
(or several alike) and names what it asks of each part of a machine:

    alpha * flops   operations on the multiply units called `unit`     (alpha: products needed for one wanted product)
    beta * nbytes   bytes through memory                               (beta: what is moved over what must be)
    gamma           instructions on the scalar units, by class         (reconstruction: decode, rescale, CRT)
    launches        fixed costs

alpha, beta and gamma are the terms of Tensor-Memory Equilibrium (arXiv 2606.06510). A Route is one way to a result:
costs that run one after the other, on units that a machine may lack. What is counted, and how often, is said at each
constant; nothing here is fitted to a timing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from nybble.errors import Unsupported
from nybble.formats.spec import BlockFormat, ElementFormat, FloatFormat, IntFormat


@dataclass(frozen=True)
class Cost:
    """What one launch must do at least.

    Attributes:
        flops: multiply-adds of the wanted result, counted twice.
        nbytes: bytes read or written once each.
        unit: where the multiply-adds run: fp64, fp32, bf16, fp8, mxfp8, fp4, int8 or int4.
        alpha: operations on `unit` for each of `flops`.
        beta: bytes moved for each of `nbytes`.
        gamma: instruction class -> instructions on the scalar units. Classes: float, logic, shift, convert
            (between integer and float, 32 bits), int32 (multiply-add) and fp64.
        launches: kernels started.
        turns: those of gamma's instructions that take turns with the products; the rest goes on beside them.
    """

    flops: float
    nbytes: float
    unit: str = "bf16"
    alpha: float = 1.0
    beta: float = 1.0
    gamma: Mapping[str, float] = field(default_factory=dict)
    launches: int = 1
    turns: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Route:
    """One way to compute a result.

    Attributes:
        name: what it does, in a few words.
        steps: run one after the other.
        native: whether it computes in the format asked for; otherwise wider numbers stand in.
    """

    name: str
    steps: tuple[Cost, ...]
    native: bool = True

    @property
    def units(self) -> set[str]:
        """The multiply units it needs."""
        return {step.unit for step in self.steps if step.flops}


TOKENS_A_TILE = 128
"""Rows of x that share a decoded weight: a weight is decoded again for every tile of tokens. Common to Marlin-like
kernels and to ops/linear, whose largest tile it is."""

FOLD = {"convert": 1.0, "float": 2.0}
"""An integer accumulator times two scales, added to a float: I2F, FMUL, FFMA for each output and group. Counted in
the SASS that nvcc 13 makes of exactly that loop for sm_80, 86 and 89: 32 of each for 32 accumulators, no others.

Within a loop over groups they take turns with the products, which wait for sums that are free as these do for sums that
are done. Two sets of sums would let both overlap, as kernels for FP8 by blocks do; no kernel for integers was seen to,
ours with two sets included (granularity.py: twelve ratios measured on an H200)."""

FOLD_FLOAT = {"float": 2.0}
"""The same for an accumulator that is a float already."""

QUANTIZE = {"float": 3.0, "convert": 1.0}
"""An activation: its magnitude into a maximum, times the reciprocal scale, clamped, converted."""


def linear(
    m: int, n: int, k: int, weight: BlockFormat | None, activation: BlockFormat | None = None, itemsize: int = 2
) -> tuple[Route, ...]:
    """The ways to x[M, K] W[N, K]^T, in order of preference.

    Args:
        m, n, k: tokens, outputs, inputs.
        weight: the weight's format, or None for a weight in x's own dtype.
        activation: the format x is rounded to, or None.
        itemsize: bytes of an element of x and y.
    """
    if weight is None:
        return (Route("plain", (_product(m, n, k, itemsize * n * k, itemsize * m * k, itemsize, _wide(itemsize)),)),)
    if activation is None:
        return _weight_only(m, n, k, weight, itemsize)
    step = _quantize_step(m, k, activation, itemsize)
    found = [
        Route(name, (step, _narrow(m, n, k, weight, activation, itemsize, unit, folds)), native)
        for name, unit, native, folds in _units(weight, activation)
    ]
    wide = _weight_only(m, n, k, weight, itemsize)
    return (*found, *(Route(f"activations rounded, {r.name}", (step, *r.steps), native=False) for r in wide))


def _wide(itemsize: int) -> str:
    return "bf16" if itemsize == 2 else "fp32"


def _product(
    m: int, n: int, k: int, weight_bytes: float, x_bytes: float, itemsize: int, unit: str, **gamma: float
) -> Cost:
    return Cost(2.0 * m * n * k, weight_bytes + x_bytes + itemsize * m * n, unit, gamma=gamma)


def _weight_only(m: int, n: int, k: int, weight: BlockFormat, itemsize: int) -> tuple[Route, ...]:
    values, stored = float(n * k), weight_bytes(weight, n, k)
    tiles, x_bytes = max(1, -(-m // TOKENS_A_TILE)), itemsize * m * k
    pairs = {name: count * values * tiles for name, count in decode_in_pairs(weight).items()}
    single = {name: count * values * tiles for name, count in decode_singly(weight.element).items()}
    routes = [Route("decoded in registers, one by one",
                    (_product(m, n, k, stored, x_bytes, itemsize, "fp32", **single),))]  # fmt: skip
    if itemsize == 2:
        product = _product(m, n, k, stored, x_bytes, itemsize, "bf16", **pairs)
        routes.insert(0, Route("decoded in registers, in pairs", (product,)))
    return tuple(routes)


def weight_bytes(weight: BlockFormat, n: int, k: int) -> float:
    """Bytes of a stored [N, K] weight, scales included."""
    return n * k * weight.bits_per_value(n, k) / 8


def decode_in_pairs(weight: BlockFormat) -> dict[str, float]:
    """Instructions for each weight where one serves two 16-bit values.

    A narrow integer: one LOP3 takes two codes out of a word and puts an exponent over them, three pairs of four are
    shifted down first, a packed subtraction takes the exponent's value off (counted in SASS for sm_80 and sm_90). An
    8-bit integer has more bits than bf16's mantissa and goes by way of float32: a PRMT and a subtraction each, one
    PRMT to join two. A float's bits are moved to their places under one multiplication by a power of two; a table
    costs a look-up each. A scale that changes along K costs one more packed multiplication.
    """
    element, scaled = weight.element, 0.5 if weight.block[1] is not None else 0.0
    if isinstance(element, IntFormat):
        wide = element.bits == 8
        found = {"logic": 1.5, "float": 1.0 + scaled} if wide else {"logic": 0.5, "shift": 0.375, "float": 0.5 + scaled}
    elif isinstance(element, FloatFormat):
        found = {"logic": 1.0, "shift": 0.5, "float": 0.5 + scaled}
    else:
        found = {"logic": 1.0, "shift": 0.375, "float": scaled}
    return {kind: count for kind, count in found.items() if count}


def decode_singly(element: ElementFormat) -> dict[str, float]:
    """Instructions for each weight without packed arithmetic: a byte is chosen by the conversion itself, anything
    narrower is shifted and masked first."""
    return {"convert": 1.0} if element.bits == 8 else {"shift": 1.0, "logic": 1.0, "convert": 1.0}


def _quantize_step(m: int, k: int, activation: BlockFormat, itemsize: int) -> Cost:
    """x is read, its codes and scales are written."""
    gamma = {name: count * m * k for name, count in QUANTIZE.items()}
    return Cost(0.0, itemsize * m * k + weight_bytes(activation, m, k), "none", gamma=gamma)


def _units(weight: BlockFormat, activation: BlockFormat) -> list[tuple[str, str, bool, bool]]:
    """(name, unit, native, whether scales along K are folded in on scalar units), best first."""
    pair = (weight.element, activation.element)
    widest = max(element.bits for element in pair)
    if all(isinstance(element, IntFormat) and element.low < 0 for element in pair):
        int8 = ("int8 products", "int8", widest == 8, True)
        return [("int4 products", "int4", True, True), int8] if widest == 4 else [int8]
    if not all(isinstance(element, FloatFormat) for element in pair) or widest > 8:
        return []
    if all(fmt.block[1] in (16, 32) and fmt.block[0] == 1 and fmt.scale.bits == 8 for fmt in (weight, activation)):
        scaled = ("block-scaled products", "mxfp8" if widest == 8 else "fp4", True, False)
        return [scaled, ("fp8 products, scales folded in", "fp8", False, True)]
    return [("fp8 products", "fp8", widest == 8, True)]


def _narrow(
    m: int, n: int, k: int, weight: BlockFormat, activation: BlockFormat, itemsize: int, unit: str, folds: bool
) -> Cost:
    """The product of codes: widened where the unit is wider, rescaled for each group along K or once at the end."""
    columns = [fmt.block[1] for fmt in (weight, activation) if fmt.block[1] is not None]
    groups = -(-k // min(columns)) if columns and folds else 1
    whole = unit.startswith("int")
    fold = FOLD if whole else FOLD_FLOAT
    saved = {"float": 1.0} if len(columns) == 1 and folds else {}  # the product of two scales
    gamma = {name: (count - saved.get(name, 0.0)) * float(m * n) * groups for name, count in fold.items()}
    turns = dict(gamma) if groups > 1 and whole else {}
    if unit.endswith("8") and weight.element.bits < 8:  # a mask a word of four codes, a shift for every other word
        tiles = max(1, -(-m // TOKENS_A_TILE))
        gamma["logic"] = 0.25 * float(n * k) * tiles
        gamma["shift"] = 0.125 * float(n * k) * tiles
    x_bytes = weight_bytes(activation, m, k)
    return replace(_product(m, n, k, weight_bytes(weight, n, k), x_bytes, itemsize, unit, **gamma), turns=turns)


OZAKI_INT8, OZAKI_FP8 = 15, 13
"""Moduli of Ozaki-II that reach a native product's accuracy (arXiv 2508.03984, 2603.10634): int8 up to 256, and FP8
with the first six squares (two digit planes), the others three planes; three FP8 products each."""

_OZAKI_FP8_SQUARES = 6


def product_fp64(m: int, n: int, k: int, fused: bool = False) -> tuple[Route, ...]:
    """C[M, N] = A B in double precision: natively, or by Ozaki-II on int8 or FP8 products.

    Unfused, as GEMMul8 does it: residue planes are written and read, one launch a product, each accumulator is
    written (4 bytes), reduced to one or two bytes, and CRT joins them. Fused, only A, B and C move.
    """
    native = Cost(2.0 * m * n * k, 8.0 * (m * k + k * n + m * n), "fp64")
    fp8_planes = 3 * OZAKI_FP8 - _OZAKI_FP8_SQUARES
    return (
        Route("fp64 products", (native,)),
        _ozaki(m, n, k, "int8", OZAKI_INT8, 1, OZAKI_INT8, 1, fused),
        _ozaki(m, n, k, "fp8", OZAKI_FP8, 3, fp8_planes, 2, fused),
    )


def _ozaki(
    m: int, n: int, k: int, unit: str, moduli: int, products: int, planes: int, residue: int, fused: bool
) -> Route:
    inputs, outputs, ideal = float(m * k + k * n), float(m * n), 8.0 * (m * k + k * n + m * n)
    crt = {"fp64": 2.0 * moduli * outputs}  # a high and a low multiply-add for each modulus
    alpha = float(moduli * products)
    name, flops = f"Ozaki-II on {unit} products", 2.0 * m * n * k
    if fused:
        return Route(f"{name}, fused", (Cost(flops, ideal, unit, alpha, gamma=crt),), native=False)
    accumulators = 4.0 * products * moduli * outputs
    reduced = float(residue * moduli) * outputs
    return Route(
        name,
        (
            Cost(0.0, inputs * (8 + planes), "none", launches=2),
            Cost(flops, inputs * planes + accumulators, unit, alpha, launches=moduli * products),
            Cost(0.0, accumulators + reduced, "none", launches=moduli),
            Cost(0.0, reduced + 8 * outputs, "none", gamma=crt),
        ),
        native=False,
    )


def fft3d_fp64(n: int) -> tuple[Route, ...]:
    """An n^3 complex transform in double precision: three passes over the volume, natively or on 8-bit products.

    The emulated counts are the floors of arXiv 2606.23698: 170 FP8 operations and 8.25 INT32 operations a byte moved.
    """
    points = float(n) ** 3
    moved, flops = 6 * 16 * points, 5 * points * 3 * max(1, (n - 1).bit_length())
    fp8, int32 = 170.0, 8.25
    emulated = Cost(flops, moved, "fp8", alpha=fp8 * moved / flops, gamma={"int32": int32 * moved / 2}, launches=3)
    return (
        Route("fp64 vector units", (Cost(flops, moved, "fp64", launches=3),)),
        Route("Ozaki-Bailey on fp8 products", (emulated,), native=False),
    )


DECLARED: dict[str, Callable[..., tuple[Route, ...]]] = {
    "linear": linear,
    "product_fp64": product_fp64,
    "fft3d_fp64": fft3d_fp64,
}
"""Ops whose cost is known from shapes alone: name -> what takes the shapes and returns the routes."""


def routes(op: str, *args: Any, **kwargs: Any) -> tuple[Route, ...]:
    """The routes of an op.

    Raises:
        Unsupported: nobody declared what the op costs; nothing is guessed.
    """
    if op not in DECLARED:
        known = ", ".join(DECLARED)
        raise Unsupported(f"op {op!r} declares no cost, so nothing can be predicted; ops that do: {known}")
    return DECLARED[op](*args, **kwargs)
