"""THE TABLE: one row per format. A new format is one row here; limits, tests and documents follow from it.

Families whose members differ by a number (a group length, a count of bits) are functions that return a row, and
`get` knows their grammar: `int4_g128`, `int3_g64_asym`, `int8_channel`, `fp8_g128`, `nf4_g64`, `int4_g128_fp16` …
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from nybble.errors import UnknownName
from nybble.formats.spec import BlockFormat, ElementFormat, FloatFormat, IntFormat, TableFormat

OCP = "OCP Microscaling Formats (MX) v1.0"
OFP8 = "OCP 8-bit Floating Point v1.0"
IEEE = "IEEE 754-2019"


def _float(name: str, e: int, m: int, bias: int, source: str, **facts: object) -> FloatFormat:
    bits = int(bool(facts.get("signed", True))) + e + m
    return FloatFormat(name, bits, source, exponent_bits=e, mantissa_bits=m, bias=bias, **facts)  # type: ignore[arg-type]


def _int(bits: int, signed: bool = True) -> IntFormat:
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if signed else (0, (1 << bits) - 1)
    return IntFormat(f"{'' if signed else 'u'}int{bits}", bits, "two's complement" if signed else "binary", low, high)


E2M1 = _float("e2m1", 2, 1, 1, OCP)
E1M2 = _float("e1m2", 1, 2, 1, "UFP4, arXiv 2606.20381")
E3M0 = _float("e3m0", 3, 0, 3, "LLM-FP4, arXiv 2310.16836")
E2M3 = _float("e2m3", 2, 3, 1, OCP)
E3M2 = _float("e3m2", 3, 2, 3, OCP)
E4M3 = _float("e4m3", 4, 3, 7, OFP8, specials="nan")
E5M2 = _float("e5m2", 5, 2, 15, OFP8, specials="ieee")
E8M0 = _float("e8m0", 8, 0, 127, OCP, signed=False, specials="nan", subnormals=False)
# Two variants are in circulation: one keeps the top exponent for specials, one has a single NaN ("fn": finite).
UE5M3 = _float("ue5m3", 5, 3, 15, "arXiv 2609.02846", signed=False, specials="ieee")
UE5M3FN = _float("ue5m3fn", 5, 3, 15, "CUDA 13.4 __nv_fp8_ue5m3", signed=False, specials="nan")
FP16 = _float("fp16", 5, 10, 15, IEEE, specials="ieee")
BF16 = _float("bf16", 8, 7, 127, "bfloat16 (Wang and Kanwar, 2019)", specials="ieee")
FP32 = _float("fp32", 8, 23, 127, IEEE, specials="ieee")

INT = {bits: _int(bits) for bits in range(2, 9)}
UINT4 = _int(4, signed=False)
MXINT8_ELEMENT = IntFormat("int8f6", 8, OCP + " (INT8 with 6 fraction bits)", -128, 127, fraction_bits=6)
TERNARY = IntFormat("ternary", 2, "BitNet b1.58, arXiv 2402.17764", -1, 1)
BINARY = TableFormat("binary", 1, "XNOR-Net, arXiv 1603.05279", (-1.0, 1.0))

NF4 = TableFormat(
    "nf4",
    4,
    "QLoRA, arXiv 2305.14314, appendix E",
    (
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
        -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
        0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
        0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ),
)  # fmt: skip
_BNB_MAGNITUDES = (0.0, 0.0052083334885537624, 0.6666666865348816, 1.0,
                   0.3333333432674408, 0.5, 0.1666666716337204, 0.25)  # fmt: skip
FP4BNB = TableFormat(
    "fp4bnb",
    4,
    "bitsandbytes FP4: (0, 1/16, 8, 12, 4, 6, 2, 3)/12 with a sign bit, in float32",
    _BNB_MAGNITUDES + tuple(-v for v in _BNB_MAGNITUDES),
)

ELEMENTS: dict[str, ElementFormat] = {}
BLOCKS: dict[str, BlockFormat] = {}


def _register(*rows: ElementFormat | BlockFormat) -> None:
    for row in rows:
        if row.name in ELEMENTS or row.name in BLOCKS:
            raise ValueError(f"format {row.name!r} stands in the table twice")
        if isinstance(row, BlockFormat):
            BLOCKS[row.name] = row
        else:
            ELEMENTS[row.name] = row


def mx(name: str, element: ElementFormat) -> BlockFormat:
    """A microscaling format: 32 elements under a power of two."""
    return BlockFormat(name, element, (1, 32), E8M0, "ct175", OCP)


def int_group(bits: int, group: int, symmetric: bool = True) -> BlockFormat:
    """Integers by groups of `group` neighbours of a row, BF16 scale, with or without a zero point."""
    suffix = "" if symmetric else "_asym"
    rule = "amax" if symmetric else "minmax"
    name = f"int{bits}_g{group}{suffix}"
    return BlockFormat(name, INT[bits], (1, group), BF16, rule, "GPTQ, arXiv 2210.17323", zero_point=not symmetric)


def int_row(bits: int, by: str, symmetric: bool = True) -> BlockFormat:
    """Integers with one scale a row: an output `channel` of a weight (BF16 scale), or a `token` (FP32 scale)."""
    suffix = "" if symmetric else "_asym"
    rule = "amax" if symmetric else "minmax"
    scale = BF16 if by == "channel" else FP32
    source = "LLM.int8(), arXiv 2208.07339"
    return BlockFormat(f"int{bits}_{by}{suffix}", INT[bits], (1, None), scale, rule, source, zero_point=not symmetric)


def fp8(by: str, block: tuple[int | None, int | None]) -> BlockFormat:
    """E4M3 under one FP32 scale for each block of the given shape."""
    return BlockFormat(f"fp8_{by}", E4M3, block, FP32, "amax", "DeepSeek-V3, arXiv 2412.19437")


def table_group(element: ElementFormat, group: int) -> BlockFormat:
    """Table-coded elements by groups of a row, FP32 scale (bitsandbytes calls it absmax)."""
    return BlockFormat(f"{element.name}_g{group}", element, (1, group), FP32, "amax", element.source)


_register(E2M1, E1M2, E3M0, E2M3, E3M2, E4M3, E5M2, E8M0, UE5M3, UE5M3FN, *INT.values(), UINT4)
_register(MXINT8_ELEMENT, TERNARY, BINARY, NF4, FP4BNB, FP16, BF16, FP32)

_register(
    mx("mxfp4", E2M1),
    BlockFormat("mxfp4_encode", E2M1, (1, 32), E8M0, "encode_centric", "arXiv 2509.17791", tensor_scale=FP32),
    mx("mxfp6_e2m3", E2M3),
    mx("mxfp6_e3m2", E3M2),
    mx("mxfp8_e4m3", E4M3),
    mx("mxfp8_e5m2", E5M2),
    mx("mxint8", MXINT8_ELEMENT),
    BlockFormat("nvfp4", E2M1, (1, 16), E4M3, "two_level", "arXiv 2509.25149", tensor_scale=FP32),
    BlockFormat(
        "ue5m3fp4", E2M1, (1, 16), UE5M3, "two_level", "arXiv 2609.02846",
        tensor_scale=FP32, scale_target=E4M3.max, zero_scale=1.0,
    ),
    BlockFormat("ufp4", E1M2, (1, 16), FP32, "amax", "arXiv 2606.20381"),
    *(int_group(bits, group, sym) for bits in (2, 3, 4, 8) for group in (32, 64, 128) for sym in (True, False)),
    *(int_row(bits, by, sym) for bits in (2, 3, 4, 8) for by in ("channel", "token") for sym in (True, False)),
    fp8("tensor", (None, None)),
    fp8("channel", (1, None)),
    fp8("token", (1, None)),
    fp8("g128", (1, 128)),
    fp8("block128", (128, 128)),
    table_group(NF4, 64),
    table_group(FP4BNB, 64),
    BlockFormat("ternary_channel", TERNARY, (1, None), BF16, "absmean", TERNARY.source),
    BlockFormat("binary_channel", BINARY, (1, None), BF16, "absmean", BINARY.source),
)  # fmt: skip

_FAMILY = re.compile(r"(?:int([2-8])|(nf4|fp4bnb)|(fp8))_(?:g([1-9]\d*)|(channel|token))(_asym)?")


def _family(name: str) -> BlockFormat | None:
    match = _FAMILY.fullmatch(name)
    if match is None:
        return None
    bits, table, float8, group, row, asym = match.groups()
    if bits:
        return int_group(int(bits), int(group), not asym) if group else int_row(int(bits), row, not asym)
    if asym or not group:
        return None
    return table_group(ELEMENTS[table], int(group)) if table else fp8(f"g{group}", (1, int(group)))


def with_scale(fmt: BlockFormat, scale: ElementFormat) -> BlockFormat:
    """The same format with its scales in another wide float, as some checkpoints store them: `int4_g128_fp16`."""
    return fmt if scale == fmt.scale else replace(fmt, name=f"{fmt.name}_{scale.name}", scale=scale)


def _rescaled(name: str) -> BlockFormat | None:
    base, _, scale = name.rpartition("_")
    row = BLOCKS.get(base) or _family(base)
    return with_scale(row, ELEMENTS[scale]) if row and scale in ("fp16", "bf16", "fp32") else None


@cache
def get(name: str) -> ElementFormat | BlockFormat:
    """The row called `name` (case and dashes do not matter); an unknown name raises UnknownName with the nearest."""
    key = name.lower().replace("-", "_")
    row = BLOCKS.get(key) or ELEMENTS.get(key) or _family(key) or _rescaled(key)
    if row is None:
        raise UnknownName("format", name, names())
    return row


def block(name: str | BlockFormat) -> BlockFormat:
    """The block format called `name`; an element's name is refused, since it says nothing of scales."""
    row = get(name) if isinstance(name, str) else name
    if not isinstance(row, BlockFormat):
        raise UnknownName("block format (that is an element format)", row.name, BLOCKS)
    return row


def names() -> list[str]:
    """Every name in the table, elements first."""
    return [*ELEMENTS, *BLOCKS]


def rows() -> Iterator[ElementFormat | BlockFormat]:
    """Every row in the table, elements first."""
    yield from ELEMENTS.values()
    yield from BLOCKS.values()
