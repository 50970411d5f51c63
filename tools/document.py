"""Write the documents that state facts from the tables that hold them: `python tools/document.py` (or `make docs`).

`--check` writes nothing and exits with 1 if a document is not what the tables say; tests/test_docs.py does the same.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

from nybble.formats import BlockFormat, ElementFormat, FloatFormat, IntFormat, exact, rows
from nybble.survey import plot, report
from results import results, table

DOCS = Path(__file__).resolve().parent.parent / "docs"
SHAPE = (4096, 4096)
SPECIALS = {"none": "every code is finite", "nan": "NaN, no infinity", "ieee": "NaN and infinity"}


def number(value: float) -> str:
    """A number in at most ten digits; very large and very small ones as powers of two, or in six digits."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e6):
        mantissa, exponent = value.hex().split("p")
        return f"2^{int(exponent)}" if float.fromhex(mantissa) == 1.0 else f"{value:.6g}"
    return f"{value:,.10g}"


def coding(fmt: ElementFormat) -> str:
    """How an element's bits are read, in a phrase."""
    if isinstance(fmt, FloatFormat):
        sign = "sign, " if fmt.signed else ""
        fields = f"{sign}{fmt.exponent_bits} exponent (bias {fmt.bias}), {fmt.mantissa_bits} mantissa"
        return f"{fields}; {SPECIALS[fmt.specials]}"
    if isinstance(fmt, IntFormat):
        unit = f" times 2^-{fmt.fraction_bits}" if fmt.fraction_bits else ""
        return f"integers {fmt.low} to {fmt.high}{unit}"
    return "a value for each code"


def smallest(fmt: ElementFormat) -> float:
    """The smallest positive value."""
    if isinstance(fmt, FloatFormat):
        return fmt.smallest
    return min(value for code in range(fmt.codes) if (value := exact.decode(fmt, code)) > 0)


def sharing(fmt: BlockFormat) -> str:
    """Which elements share a scale, in a phrase."""
    height, width = fmt.block
    if (height, width) == (None, None):
        return "whole tensor"
    if width is None:
        return "row" if height == 1 else f"{height} rows"
    return f"{width} of a row" if height == 1 else f"{height} × {width}"


def formats() -> str:
    """docs/formats.md."""
    elements = [row for row in rows() if isinstance(row, ElementFormat)]
    blocks = [row for row in rows() if isinstance(row, BlockFormat)]
    of_elements = table(
        ["name", "bits", "coding", "smallest > 0", "largest", "lowest", "source"],
        (
            [f"`{e.name}`", str(e.bits), coding(e), number(smallest(e)), number(e.max), number(e.min), e.source]
            for e in elements
        ),
    )
    of_blocks = table(
        [
            "name",
            "element",
            "share a scale",
            "scale",
            "tensor scale",
            "zero point",
            "bits a value",
            "scale rule",
            "source",
        ],
        (
            [
                f"`{b.name}`",
                b.element.name,
                sharing(b),
                b.scale.name,
                b.tensor_scale.name if b.tensor_scale else "",
                "yes" if b.zero_point else "",
                f"{b.bits_per_value(*SHAPE):.4g}",
                b.rule,
                b.source,
            ]
            for b in blocks
        ),
    )
    values = table(
        ["name", "the values ≥ 0 in order of their codes"],
        ([f"`{e.name}`", non_negative(e)] for e in elements if e.bits <= 4),
    )
    return FORMATS.format(elements=of_elements, blocks=of_blocks, values=values, rows=SHAPE[0], columns=SHAPE[1])


def non_negative(fmt: ElementFormat) -> str:
    """The values of a narrow format that are not negative."""
    return ", ".join(number(v) for v in (exact.decode(fmt, c) for c in range(fmt.codes)) if str(v)[0] not in "-n")


FORMATS = """\
# Number formats

Generated from `src/nybble/formats/table.py` by `make docs`; edit the table, not this page.
What decoding, rounding and encoding mean is defined in `src/nybble/formats/exact.py`.

## Elements: how one value is coded

{elements}

## Blocks: which elements share a scale

A value is `(element − zero point) × (scale × tensor scale)`. Bits a value count scales and zero points of a
{rows} × {columns} matrix.

{blocks}

The families go on: `int2` to `int8` by any group (`int4_g96`, `int3_g64_asym`), channel or token, `nf4`, `fp4bnb` and
`fp8` by any group (`nf4_g128`, `fp8_g64`).

## Every value of the narrow formats

{values}
"""


def schemes() -> str:
    """docs/schemes.md."""
    from nybble.quantize.schemes import SCHEMES

    body = (
        [
            f"`{s.name}`",
            s.weight.name,
            s.activation.name if s.activation else "as they come",
            s.rule or s.weight.rule,
            f"{s.weight.bits_per_value(*SHAPE):.4g}",
            "yes" if s.preset else "",
        ]
        for s in SCHEMES.values()
    )
    head = ["name", "weights", "activations", "scale rule", "bits a weight", "compressed-tensors preset"]
    return SCHEMES_PAGE.format(table=table(head, body), rows=SHAPE[0], columns=SHAPE[1])


SCHEMES_PAGE = """\
# Schemes

Generated from `src/nybble/quantize/schemes.py` by `make docs`; edit the table, not this page.
A scheme says how a linear layer runs: the format of its weights and the format its inputs are rounded to on the fly.
Bits a weight count scales, of a {rows} × {columns} matrix. Formats are in [formats.md](formats.md).

{table}
"""


def ops() -> str:
    """docs/ops.md."""
    from nybble.ops import declared

    body = []
    for op in declared().values():
        limits = ", ".join(
            f"{str(d).removeprefix('torch.')} {number(limit)}" for d, limit in op.agreement.limits.items()
        )
        for device in ("cpu", "cuda"):
            for one in op.implementations(device):
                if one is op.fallback and device == "cuda":
                    continue
                where = "any" if one is op.fallback else device
                path = "native" if one.native else "emulated"
                body.append([f"`{op.name}`", f"`{one.name}`", where, f"{path}; {one.note}" if one.note else path])
        body.append([f"`{op.name}`", "agreement", "", limits])
    return OPS_PAGE.format(table=table(["op", "implementation", "device", "path"], body))


OPS_PAGE = """\
# Ops

Generated from the declarations in `src/nybble/ops/` by `make docs`. The first implementation that is willing runs;
`nybble ops NAME` says which one that is here, and why not the others. Agreement is the largest
‖y − reference‖ / ‖reference‖ that an implementation may have, by the dtype of y.

{table}
"""


def picture() -> str:
    """docs/survey.svg: the committed survey's plot; an image on its own needs the namespaces that a page leaves out."""
    found = json.loads((DOCS.parent / "benchmarks" / "results" / "cpu-2core" / "survey.json").read_text("utf-8"))
    spaces = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    drawn = plot.svg(report.from_json(found), found["max_kl"])
    return drawn.replace("<svg", f"<svg {spaces}", 1)


DOCUMENTS: dict[str, Callable[[], str]] = {
    "formats.md": formats,
    "schemes.md": schemes,
    "ops.md": ops,
    "results.md": results,
}


def main(arguments: list[str] | None = None) -> int:
    """Write, or with `--check` compare, every generated document; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a document is out of date")
    check = parser.parse_args(arguments).check
    DOCS.mkdir(exist_ok=True)
    old = [name for name, make in DOCUMENTS.items() if _read(name) != make()]
    for name in old:
        print(f"docs/{name} is out of date: run `make docs`" if check else f"wrote docs/{name}")
        if not check:
            (DOCS / name).write_text(DOCUMENTS[name](), encoding="utf-8")
    if not check:  # how glyphs are drawn depends on matplotlib's version, so pictures are not compared
        (DOCS / "survey.svg").write_text(picture(), encoding="utf-8")
    return int(check and bool(old))


def _read(name: str) -> str:
    path = DOCS / name
    return path.read_text(encoding="utf-8") if path.is_file() else ""


if __name__ == "__main__":
    sys.exit(main())
