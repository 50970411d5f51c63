"""`nybble formats` and `nybble ops`: what there is, in tables. Formats need no torch."""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

from rich.table import Table

from nybble.cli.console import Plain
from nybble.errors import BadInput, UnknownName
from nybble.formats import BlockFormat, ElementFormat, FloatFormat, IntFormat, get, rows
from nybble.formats.exact import decode

if TYPE_CHECKING:
    import torch

    from nybble.ops._declare import Op

_LISTED_BITS = 8  # 256 codes are a page or two; 65,536 are nobody's reading
_SHAPE = (4096, 4096)


def _table(*headings: str, right: tuple[str, ...] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left", overflow="fold")
    return table


def _show(table: Table) -> None:
    Plain().print(table)


def _line(text: str = "") -> None:
    sys.stdout.write(text + "\n")


def formats(options: argparse.Namespace) -> None:
    """Every format, or one."""
    if options.name is not None:
        row = get(options.name)
        return _block(row) if isinstance(row, BlockFormat) else _element(row)
    elements = _table("element", "bits", "smallest", "largest", "source", right=("bits", "smallest", "largest"))
    blocks = _table("block format", "bits/value", "element", "block", "scale", "rule", "source", right=("bits/value",))
    for row in rows():
        if isinstance(row, BlockFormat):
            bits = f"{row.bits_per_value(*_SHAPE):.3f}"
            blocks.add_row(row.name, bits, row.element.name, _sides(row), _scales(row), row.rule, row.source)
        else:
            elements.add_row(row.name, str(row.bits), _smallest(row), _value(row.max), row.source)
    _show(elements)
    _line()
    _show(blocks)
    _line()
    _line(
        f"bits/value: scales included, of a {_SHAPE[0]}x{_SHAPE[1]} matrix. Families go on: int5_g96_asym, nf4_g128, …"
    )
    return None


def _element(row: ElementFormat) -> None:
    _facts(row.name, {"bits": str(row.bits), **_kind(row), "largest": _value(row.max), "lowest": _value(row.min),
                      "smallest positive": _smallest(row), "source": row.source})  # fmt: skip
    _line()
    if row.bits > _LISTED_BITS:
        _line(f"{row.codes:,} codes, not listed; nybble.formats.exact.decode gives each")
        return
    table = _table("code", "bits", "value", right=("code", "value"))
    for code in range(row.codes):
        table.add_row(str(code), f"{code:0{row.bits}b}", _value(decode(row, code)))
    _show(table)


def _kind(row: ElementFormat) -> dict[str, str]:
    if isinstance(row, FloatFormat):
        parts = f"{int(row.signed)} sign, {row.exponent_bits} exponent, {row.mantissa_bits} mantissa bits"
        special = {"none": "every code is finite", "nan": "all ones is NaN", "ieee": "infinity and NaN"}[row.specials]
        return {"kind": f"float: {parts}, bias {row.bias}", "specials": special}
    if isinstance(row, IntFormat):
        step = f", times 2^-{row.fraction_bits}" if row.fraction_bits else ""
        return {"kind": f"integer {row.low} to {row.high}{step}"}
    return {"kind": "table of values"}


def _block(row: BlockFormat) -> None:
    tensor = row.tensor_scale
    _facts(row.name, {
        "value": f"{'(element - zero point)' if row.zero_point else 'element'} x "
                 f"{'(block scale x tensor scale)' if tensor else 'block scale'}",
        "element": f"{row.element.name} ({row.element.bits} bits, up to {_value(row.element.max)})",
        "block": f"{_sides(row)} share a scale",
        "block scale": f"{row.scale.name} ({row.scale.bits} bits, up to {_value(row.scale.max)})",
        **({"tensor scale": f"{tensor.name}, one for all"} if tensor else {}),
        **({"zero point": f"{row.element.bits} bits a block"} if row.zero_point else {}),
        "scale rule": row.rule,
        "bits/value": f"{row.bits_per_value(*_SHAPE):.4f} of a {_SHAPE[0]}x{_SHAPE[1]} matrix",
        "source": row.source,
    })  # fmt: skip
    _line()
    _line(
        f"every code of the element: nybble formats {row.element.name}; of the scale: nybble formats {row.scale.name}"
    )


def _facts(name: str, facts: dict[str, str]) -> None:
    _line(name)
    for key, value in facts.items():
        _line(f"  {key:<18}{value}")


def _sides(row: BlockFormat) -> str:
    names = [
        axis if side is None else str(side) for side, axis in zip(row.block, ("all rows", "whole row"), strict=True)
    ]
    return "whole matrix" if row.block == (None, None) else " x ".join(names)


def _scales(row: BlockFormat) -> str:
    extra = [f"{row.tensor_scale.name} for all"] if row.tensor_scale else []
    return " + ".join([row.scale.name, *extra, *(["zero point"] if row.zero_point else [])])


def _smallest(row: ElementFormat) -> str:
    if isinstance(row, FloatFormat):
        return _value(row.smallest)
    if isinstance(row, IntFormat):
        return _value(math.ldexp(1, -row.fraction_bits))
    return _value(min(v for v in (decode(row, code) for code in range(row.codes)) if v > 0))


def _value(value: float) -> str:
    return f"{value:.9g}"


def ops(options: argparse.Namespace) -> None:
    """Every op, or one: what serves it on this device."""
    from nybble.machine import find_device

    device, known = find_device(options.device), {op.name: op for op in _ops()}
    if options.name is None:
        for op in known.values():
            _overview(op, device.type)
            _line()
        return
    if options.name not in known:
        raise UnknownName("op", options.name, known)
    if options.name != "linear":
        _overview(known[options.name], device.type)
    elif options.format is None:
        if options.activation is not None:
            raise BadInput("--activation needs --format")
        _schemes(options, device)
    else:
        _one(options, device)


def _ops() -> Iterator[Op]:
    """Every op declared in nybble.ops."""
    from nybble.ops._declare import Op

    package = import_module("nybble.ops")
    for info in iter_modules(package.__path__):
        if not info.name.startswith("_"):
            module = import_module(f"nybble.ops.{info.name}")
            yield from (value for value in vars(module).values() if isinstance(value, Op))


def _overview(op: Op, device: str) -> None:
    """How many of an op's declared cases each implementation serves here."""
    from nybble.ops import explain

    total, chosen, refusals = 0, Counter[str](), dict[str, Counter[str]]()
    for _, args in op.cases(device):
        total += 1
        for line in explain(op, device, *args):
            chosen[line.name] += line.chosen
            refusals.setdefault(line.name, Counter())[line.reason] += 1
    _line(f"{op.name} on {device} (equal bits promised: {op.promise}); of {total} declared cases")
    table = _table("implementation", "native", "serves", "most frequent refusal", right=("serves",))
    for one in op.implementations(device):
        reasons = [(reason, n) for reason, n in refusals.get(one.name, Counter()).most_common() if reason]
        why = f"{reasons[0][1]}x: {reasons[0][0]}" if reasons else ""
        table.add_row(one.name, "native" if one.native else "emulated", str(chosen[one.name]), why)
    _show(table)


def _arguments(options: argparse.Namespace, device: torch.device, weight: str, activation: str | None) -> list[Any]:
    """Arguments of `linear` of the asked shape; the weight is zero, since only its form is asked about."""
    import torch

    from nybble.formats import block
    from nybble.quantize import quantize

    w = quantize(torch.zeros(options.n, options.k), weight).to(device)
    x = torch.zeros(options.m, options.k, dtype=getattr(torch, options.dtype), device=device)
    return [x, w, None, block(activation) if activation else None, None]


def _schemes(options: argparse.Namespace, device: torch.device) -> None:
    from nybble.ops import explain
    from nybble.ops.linear import LINEAR
    from nybble.quantize.schemes import SCHEMES

    _line(f"linear, x {options.dtype} [{options.m}, {options.k}], weight [{options.n}, {options.k}], on {device}")
    table = _table("scheme", "weight", "activation", "runs here", "path")
    for scheme in SCHEMES.values():
        activation = scheme.activation.name if scheme.activation else None
        lines = explain(LINEAR, device.type, *_arguments(options, device, scheme.weight.name, activation))
        served = next((line for line in lines if line.chosen), None)
        name, path = (served.name, served.path) if served else ("nothing", "refused")
        table.add_row(scheme.name, scheme.weight.name, activation or "as it is", name, path)
    _show(table)
    _line("why not another: nybble ops linear --format FORMAT [--activation FORMAT]")


def _one(options: argparse.Namespace, device: torch.device) -> None:
    from nybble.ops import explain
    from nybble.ops.linear import LINEAR

    args = _arguments(options, device, options.format, options.activation)
    rounded = f", activations {args[3].name}" if args[3] else ""
    _line(f"linear, x {options.dtype} [{options.m}, {options.k}], weight {args[1].format.name} "
          f"[{options.n}, {options.k}]{rounded}, on {device}")  # fmt: skip
    table = _table("implementation", "native", "answer")
    lines = explain(LINEAR, device.type, *args)
    for line in lines:
        answer = "runs" if line.chosen else line.reason or "willing, but comes later"
        table.add_row(line.name, "native" if line.native else "emulated", answer)
    _show(table)
    served = next((line.name for line in lines if line.chosen), "")
    if served.startswith("linear_narrow"):
        from nybble.ops.linear.gpu import describe

        _line(describe(served, args[0], args[1], args[3]))
