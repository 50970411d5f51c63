"""What the CUDA kernels of `linear` are compiled for: macros derived from a format's row, in decode.cuh's names.

So no constant of a format stands in a kernel.
"""

from __future__ import annotations

from functools import cache

from nybble.formats.spec import BlockFormat, ElementFormat, FloatFormat, IntFormat, TableFormat
from nybble.formats.table import BF16, FP16

ROWS, COLUMNS = 16, 128
"""Of a tile; columns come in chunks of 128."""
INT_SCALE_UP = 96
"""decode.cuh's: how far bf16 scales are raised to meet integers that lie among the subnormals."""
FP16_SCALE_UP = 12
"""tile.cu raises scales for fp16, where decode.cuh's integers are 2^-9 too small."""
_POWERS_UP = -32
"""The same in bf16 for powers of two that 8-bit floats take in: undoing their biases' difference alone takes 2^120."""
_LOST = 30  # what falls below the smallest wide float may be 2^-30 of the largest weight
_POWER_UP = 63
"""The same for scales that are bare powers of two, with bf16: half of the exponents' range keeps both ends far away."""

_INT, _FLOAT4, _FLOAT8, _TABLE = range(4)
_WIDE_SCALES = {"bf16": 0, "fp16": 1, "fp32": 2}
_FLOAT8_SCALE = 3
_WHOLE_AXIS = 31  # a shift that leaves every chunk of columns in group 0
_PAIRS = 256 * 32 * 4  # bytes of a table of pairs of 4-bit codes, one for each lane


@cache
def describe(fmt: BlockFormat) -> dict[str, int]:
    """Macros and sizes of a weight format, sizes in bytes of a lane (or, TILE and TABLE, in all).

    Raises:
        ValueError: for a format that decode.cuh cannot decode; the message ends a sentence about the weight.
    """
    columns = fmt.block[1]
    if columns is not None and (columns < ROWS or columns & columns - 1):
        raise ValueError(f"groups of {columns} columns; the kernels take powers of two from {ROWS} on")
    group = min(columns or COLUMNS, COLUMNS)
    within = COLUMNS // group
    found = {"ZERO_POINT": int(fmt.zero_point), "ROW_SCALE": int(columns is None), "GROUP": group}
    found |= {**_element(fmt.element), **_scale(fmt.scale)}
    found["TILE_BYTES"] = ROWS * COLUMNS * found["BITS"] // 8
    found["SCALE_BYTES"] = 0 if found["ROW_SCALE"] else 2 * within * fmt.scale.bits // 8
    found["ZERO_BYTES"] = 2 * within * found["ZERO_POINT"]
    found["TABLE_BYTES"] = 2 * _PAIRS if found["CODE"] == _TABLE else 0
    return found


def usual_scales(fmt: BlockFormat, fp16: bool) -> tuple[float, float] | None:
    """Between what the largest scale of a weight must lie for the kernels' shortcuts to be exact; None: anywhere.

    Integers and tables in fp16 through tile.cu: raised, scales stay finite, and the weights that count clear of the
    subnormals. 4-bit floats under powers of two, in bf16, and 8-bit floats that take in their scale's power of two:
    raised, scales stay finite, and what is lost is 2^-30 of the largest.
    """
    if fp16 and isinstance(fmt.element, IntFormat | TableFormat) and fmt.block[1] is not None:
        return 2.0**FP16.min_exponent, FP16.max / 2**FP16_SCALE_UP / _reach(fmt.element)
    if sums_take_scale(fmt) and isinstance(fmt.element, FloatFormat):
        wide, element, up = FP16 if fp16 else BF16, fmt.element, _powers_up(fp16)
        lost = wide.min_exponent - wide.mantissa_bits - 1
        most = max(wide.bias - element.bias, element.max_exponent)
        return 2.0 ** (_LOST + lost - element.max_exponent - up), 2.0 ** (wide.max_exponent - most - up)
    if not fp16 and _power_scales(fmt):
        return 2.0**-30, 2.0 ** (BF16.max_exponent - _POWER_UP)
    return None


def defines(fmt: BlockFormat, fp16: bool, usual: bool = True) -> dict[str, int]:
    """All the macros that a weight format and the activations' dtype decide; `usual`: the largest scale is."""
    found = {name: value for name, value in describe(fmt).items() if not name.endswith("_BYTES")}
    up = _fold_up(fmt, fp16, usual)
    return {**found, "X_FP16": int(fp16), "FOLD": int(up is not None), "FOLD_UP": up or 0}


def factor(fmt: BlockFormat, fp16: bool, usual: bool = True) -> float:
    """The power of two that undoes what decode.cuh scales elements by."""
    wide, up = FP16 if fp16 else BF16, _fold_up(fmt, fp16, usual)
    if isinstance(fmt.element, IntFormat):
        return 2.0 ** (wide.mantissa_bits - 1 - fmt.element.fraction_bits)
    return 1.0 if up is None or not isinstance(fmt.element, FloatFormat) else 2.0 ** (wide.bias - fmt.element.bias - up)


def group_shift(fmt: BlockFormat) -> int:
    """log2 of the chunks of columns that share a scale."""
    columns = fmt.block[1]
    return _WHOLE_AXIS if columns is None else max(0, (columns // COLUMNS).bit_length() - 1)


def tile_defines(fmt: BlockFormat, fp16: bool) -> dict[str, int]:
    """The macros of tile.cu that say where the scale goes."""
    takes, sums = _int_takes_scale(fmt, fp16), sums_take_scale(fmt)
    scaled = describe(fmt)["CODE"] in (_INT, _TABLE) and fmt.block[1] is not None and not takes
    up = _powers_up(fp16) if sums else FP16_SCALE_UP if fp16 and scaled else 0
    return {"INT_TAKES_SCALE": int(takes), "SUM_SCALE": int(sums), "SCALE_UP": up}


def tile_factor(fmt: BlockFormat, fp16: bool, usual: bool = True) -> float:
    """The power of two that undoes what tile.cu scales weights by."""
    # stream.cu's integers are raised by the wide format's bias, tile.cu's by INT_SCALE_UP where they take their scale.
    extra = INT_SCALE_UP - BF16.bias if _int_takes_scale(fmt, fp16) else 0
    return factor(fmt, fp16, usual) * 2.0 ** -(extra + tile_defines(fmt, fp16)["SCALE_UP"])


def tile_refusal(fmt: BlockFormat, fp16: bool, usual: bool = True) -> str | None:
    """Why tile.cu, which rounds element times scale to the activations' dtype, would round too much; None if not.

    Row scales wait until the end; short elements times short scales are exact; sums take the part of a scale that 8-bit
    floats would be rounded by; roundings of integers, and of a table's values by small groups, average out. A table's
    values in whole rows, or other floats under a wide scale, do not.
    """
    kind, sums, whole = describe(fmt)["CODE"], sums_take_scale(fmt), fmt.block[1] is None
    if whole and kind != _TABLE:
        return None
    if fmt.scale.bits == 8 and (fp16 and _fold_up(fmt, fp16, usual) is None):
        return f"{fmt.scale.name} scales reach beyond fp16"
    if not usual and (sums or (fp16 and kind in (_INT, _TABLE))):
        low, high = usual_scales(fmt, fp16) or (0.0, 0.0)
        return f"the largest scale is outside {low:.2g} to {high:.4g} (or not known yet, within a capture)"
    if kind == _INT or fmt.scale.bits == 8 or sums or (kind == _TABLE and not whole):
        return None
    return f"the product of {fmt.element.name} and {fmt.scale.name} would be rounded the same way over and over"


def sums_take_scale(fmt: BlockFormat) -> bool:
    """Whether tile.cu leaves scales' parts in [1, 2) to the sums, chunk by chunk: 8-bit floats under wide scales."""
    found = describe(fmt)
    return found["CODE"] == _FLOAT8 and not found["ROW_SCALE"] and found["GROUP"] == COLUMNS and fmt.scale.bits > 8


def _powers_up(fp16: bool) -> int:
    return FP16_SCALE_UP if fp16 else _POWERS_UP


def _reach(element: ElementFormat) -> float:
    """The largest magnitude of a table; integers are made 2^-9 too small."""
    return max(map(abs, element.values)) if isinstance(element, TableFormat) else 1.0


def _int_takes_scale(fmt: BlockFormat, fp16: bool) -> bool:
    found = describe(fmt)
    plain = not (fmt.zero_point or found["ROW_SCALE"] or fp16)
    return plain and found["CODE"] == _INT and found["SCALE"] == _WIDE_SCALES["bf16"]


def lane_scale_bytes(fmt: BlockFormat, fp16: bool) -> int:
    """Bytes of scales that a lane copies of a tile in stream.cu: where four exchange what they prepare, a quarter."""
    found = describe(fmt)["SCALE_BYTES"]
    return found // 4 if _fold_up(fmt, fp16, False) is not None and fmt.block[1] == ROWS else found


def _power_scales(fmt: BlockFormat) -> bool:
    element, scale = fmt.element, fmt.scale
    if not (isinstance(element, FloatFormat) and isinstance(scale, FloatFormat)):
        return False
    return element.bits == 4 and scale.bits == 8 and not scale.mantissa_bits and fmt.block[1] == 2 * ROWS


def _fold_up(fmt: BlockFormat, fp16: bool, usual: bool) -> int | None:
    """How far up scales can be moved so that short elements take them in exactly; None where they cannot."""
    wide, element, scale = FP16 if fp16 else BF16, fmt.element, fmt.scale
    if _power_scales(fmt):
        return _POWER_UP if usual and not fp16 else None
    if (
        not isinstance(element, FloatFormat)
        or not isinstance(scale, FloatFormat)
        or element.bits != 4
        or scale.bits != 8
    ):
        return None
    up = wide.max_exponent - scale.max_exponent - 1
    exact = element.mantissa_bits + scale.mantissa_bits + 1 <= wide.mantissa_bits
    return up if exact and up >= 0 and scale.mantissa_bits and fmt.block[1] == ROWS else None


def _element(element: ElementFormat) -> dict[str, int]:
    if isinstance(element, IntFormat) and element.low < 0 and element.bits in (2, 3, 4, 8):
        return {"CODE": _INT, "BITS": element.bits}
    if isinstance(element, FloatFormat) and element.signed and element.bits in (4, 8) and element.subnormals:
        return {"CODE": _FLOAT4 if element.bits == 4 else _FLOAT8, "BITS": element.bits,
                "EXPONENT_BITS": element.exponent_bits, "MANTISSA_BITS": element.mantissa_bits,
                "ELEMENT_BIAS": element.bias}  # fmt: skip
    if isinstance(element, TableFormat) and element.bits == 4:
        return {"CODE": _TABLE, "BITS": 4}
    raise ValueError(f"elements of {element.name}")


def _scale(scale: ElementFormat) -> dict[str, int]:
    if scale.name in _WIDE_SCALES:
        return {"SCALE": _WIDE_SCALES[scale.name]}
    if isinstance(scale, FloatFormat) and scale.bits == 8:
        return {"SCALE": _FLOAT8_SCALE, "SCALE_MANTISSA_BITS": scale.mantissa_bits, "SCALE_BIAS": scale.bias,
                "SCALE_CODE_MASK": (1 << scale.magnitude_bits) - 1}  # fmt: skip
    raise ValueError(f"scales of {scale.name}")
