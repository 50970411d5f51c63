"""What a number format *is*: frozen rows of facts that check themselves.

Two kinds of rows. An *element* format codes one value in a few bits; it is a float (sign, exponent, mantissa), an
integer (two's complement, with an implied power of two), or a table (a value for each code). A *block* format says
which elements share a scale, how that scale is coded, and whether a second scale covers the whole tensor:

    value = (element - zero_point) * (block_scale * tensor_scale)

Only facts are stored; limits, counts of bits and everything else are derived from them, so that no constant of a
format can disagree with its definition. How a code becomes a value is in exact.py, and nowhere else.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Literal

Specials = Literal["none", "nan", "ieee"]


def _check(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


@dataclass(frozen=True)
class ElementFormat:
    """What every element format has: a name, its width in bits, and where it is defined (paper or standard)."""

    name: str
    bits: int
    source: str

    def __post_init__(self) -> None:
        _check(1 <= self.bits <= 32, f"{self.name}: {self.bits} bits, expected 1 to 32")

    def __str__(self) -> str:
        return self.name

    @property
    def codes(self) -> int:
        """How many codes there are: 2^bits."""
        return 1 << self.bits

    @property
    def max(self) -> float:
        """The largest finite value."""
        raise NotImplementedError

    @property
    def min(self) -> float:
        """The smallest (most negative) finite value."""
        raise NotImplementedError

    @property
    def has_nan(self) -> bool:
        """Whether some code means NaN, so that a NaN survives encoding."""
        return False

    @property
    def sign_magnitude(self) -> bool:
        """Whether the top bit is a sign and the rest a magnitude, so that -0 exists."""
        return False


@dataclass(frozen=True)
class FloatFormat(ElementFormat):
    """A small float: [sign] exponent mantissa, most significant bit first.

    Attributes:
        exponent_bits, mantissa_bits, bias: value = (1 + m/2^M) * 2^(e - bias) for a normal code.
        signed: whether a sign bit stands in front.
        specials: "none": every code is finite. "nan": only the all-ones magnitude is NaN (OCP E4M3).
            "ieee": the top exponent holds infinity and NaN.
        subnormals: whether exponent 0 means m/2^M * 2^(1 - bias); without them exponent 0 is an ordinary one
            and zero does not exist (E8M0).
    """

    exponent_bits: int = 0
    mantissa_bits: int = 0
    bias: int = 0
    signed: bool = True
    specials: Specials = "none"
    subnormals: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        total = self.signed + self.exponent_bits + self.mantissa_bits
        _check(total == self.bits, f"{self.name}: sign, exponent and mantissa make {total} bits, not {self.bits}")
        _check(self.exponent_bits >= 1, f"{self.name}: a float needs an exponent bit")

    @property
    def magnitude_bits(self) -> int:
        """Bits without the sign."""
        return self.exponent_bits + self.mantissa_bits

    @property
    def max_code(self) -> int:
        """The magnitude code of the largest finite value."""
        if self.specials == "ieee":
            return (((1 << self.exponent_bits) - 1) << self.mantissa_bits) - 1
        return (1 << self.magnitude_bits) - (2 if self.specials == "nan" else 1)

    @property
    def min_exponent(self) -> int:
        """The exponent of the smallest normal value."""
        return (1 - self.bias) if self.subnormals else -self.bias

    @cached_property
    def max_exponent(self) -> int:
        """The exponent of the largest finite value."""
        return math.frexp(self.max)[1] - 1

    @cached_property
    def max(self) -> float:
        return float(self.magnitude(self.max_code))

    @cached_property
    def min(self) -> float:
        return -self.max if self.signed else float(self.magnitude(0))

    @cached_property
    def smallest(self) -> float:
        """The smallest positive value, subnormal where the format has them."""
        return float(self.magnitude(int(self.subnormals)))

    @property
    def has_nan(self) -> bool:
        return self.specials != "none"

    @property
    def sign_magnitude(self) -> bool:
        return self.signed

    def magnitude(self, code: int) -> Fraction:
        """The finite value that the magnitude bits `code` stand for, as if no code were special."""
        exponent, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        if exponent or not self.subnormals:
            mantissa += 1 << self.mantissa_bits
            exponent += -self.bias
        else:
            exponent = 1 - self.bias
        return Fraction(mantissa) * Fraction(2) ** (exponent - self.mantissa_bits)


@dataclass(frozen=True)
class IntFormat(ElementFormat):
    """Two's complement (or unsigned) integers with an implied scale of 2^-fraction_bits.

    Attributes:
        low, high: the integers that are used; the other codes carry no value.
        fraction_bits: value = integer * 2^-fraction_bits (MXINT8 has six).
    """

    low: int = 0
    high: int = 0
    fraction_bits: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        span = range(-(1 << self.bits - 1), 1 << self.bits - 1) if self.low < 0 else range(1 << self.bits)
        _check(self.low < self.high, f"{self.name}: low {self.low} is not below high {self.high}")
        _check(self.low in span and self.high in span, f"{self.name}: {self.low}…{self.high} outside {self.bits} bits")

    @property
    def max(self) -> float:
        return math.ldexp(self.high, -self.fraction_bits)

    @property
    def min(self) -> float:
        return math.ldexp(self.low, -self.fraction_bits)


@dataclass(frozen=True)
class TableFormat(ElementFormat):
    """A value for each code, for formats whose grid follows no formula (NF4). Values are exact in float32."""

    values: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(len(self.values) == self.codes, f"{self.name}: {len(self.values)} values for {self.codes} codes")
        _check(all(map(math.isfinite, self.values)), f"{self.name}: a value is not finite")

    @property
    def max(self) -> float:
        return max(self.values)

    @property
    def min(self) -> float:
        return min(self.values)

    @cached_property
    def ranked(self) -> tuple[tuple[float, int], ...]:
        """(value, code) in ascending order of value, one code a value (the lowest; +0 stands for -0)."""
        first: dict[float, int] = {}
        for code, value in enumerate(self.values):
            first.setdefault(value, code)
        return tuple(sorted((value + 0.0, code) for value, code in first.items()))


@dataclass(frozen=True)
class BlockFormat:
    """Elements that share a scale.

    Attributes:
        element: how one value is coded.
        block: (rows, columns) of the last two axes under one scale; None is the whole axis.
            (1, 16) is sixteen neighbours of a row, (1, None) a row, (None, None) the whole matrix.
        scale: how the block's scale is coded.
        rule: name of the scale rule used when none is asked for (quantize/scales.py).
        tensor_scale: the format of a second scale over the whole tensor, or None.
        scale_target: with a tensor scale, the block scale that the tensor's largest block is given.
        zero_point: whether each block also stores the element that means 0.
        zero_scale: what replaces a scale that rounds to zero; by default the smallest positive scale.
        source: paper or standard.
    """

    name: str
    element: ElementFormat
    block: tuple[int | None, int | None]
    scale: ElementFormat
    rule: str
    source: str
    tensor_scale: ElementFormat | None = None
    scale_target: float | None = None
    zero_point: bool = False
    zero_scale: float | None = None

    def __post_init__(self) -> None:
        for size in self.block:
            _check(size is None or size >= 1, f"{self.name}: block {self.block} has a side below 1")
        _check(isinstance(self.scale, FloatFormat), f"{self.name}: the scale must be a float format")
        _check(
            self.scale_target is None or self.tensor_scale is not None,
            f"{self.name}: a scale target means nothing without a tensor scale",
        )
        _check(
            not self.zero_point or isinstance(self.element, IntFormat),
            f"{self.name}: only integers have a zero point",
        )

    def __str__(self) -> str:
        return self.name

    @property
    def target(self) -> float:
        """The block scale of the tensor's largest block when a tensor scale is chosen from the tensor's amax."""
        return self.scale.max if self.scale_target is None else self.scale_target

    @property
    def scale_floor(self) -> float:
        """What a block scale that rounds to zero is replaced by."""
        if self.zero_scale is not None:
            return self.zero_scale
        return self.scale.smallest if isinstance(self.scale, FloatFormat) else self.scale.min

    @property
    def power_of_two_scale(self) -> bool:
        """Whether every scale is a power of two (the MX family)."""
        return isinstance(self.scale, FloatFormat) and self.scale.mantissa_bits == 0

    def bits_per_value(self, rows: int, columns: int) -> float:
        """Bits stored for each value of a [rows, columns] matrix: elements, scales, zero points, tensor scale."""
        if rows * columns == 0:
            return float(self.element.bits)
        blocks = math.prod(-(-n // (b or n)) for n, b in zip((rows, columns), self.block, strict=True))
        per_block = self.scale.bits + (self.element.bits if self.zero_point else 0)
        tensor = self.tensor_scale.bits if self.tensor_scale else 0
        return self.element.bits + (blocks * per_block + tensor) / (rows * columns)
