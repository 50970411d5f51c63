"""`nybble plan` and `nybble machine`: predictions, and what they rest on. Neither imports torch unless it measures."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache, partial
from typing import TYPE_CHECKING, Any

from rich.table import Table

from nybble.cli.console import Plain
from nybble.errors import BadInput
from nybble.planner import here, machines, report, shapes
from nybble.planner import plan as planning
from nybble.planner.machines import Machine

if TYPE_CHECKING:
    from torch import Tensor

    from nybble.quantize import QuantTensor


def _machine(name: str) -> Machine:
    return here.machine() if name == "here" else machines.get(name)


def plan(options: argparse.Namespace) -> None:
    """Predict every scheme for a model or a shape on a machine."""
    model, machine = shapes.read(options.target), _machine(options.machine)
    names = [name for word in options.schemes or planning.DEFAULT_SCHEMES for name in word.split(",") if name]
    budget = None if options.budget_gib is None else options.budget_gib * 2**30
    found = planning.make(model, machine, options.tokens, names, options.context, budget)
    if options.plot is not None:
        report.picture(options.plot, model, machine, list(found.weight_bytes))
    if options.json:
        sys.stdout.write(json.dumps(found.as_dict(), indent=1, ensure_ascii=False) + "\n")
        return
    head, body = report.cells(found)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for heading in head:
        table.add_column(heading, overflow="fold", no_wrap=heading != "bound by")
    for row in body:
        table.add_row(*row)
    Plain().print(table)
    sys.stdout.write("\n" + "\n".join(report.closing(found)) + "\n")


def machine(options: argparse.Namespace) -> None:
    """Show a machine's rates, all machines, or measure this one."""
    if options.example:
        sys.stdout.write(machines.EXAMPLE)
        return
    if options.measure:
        _measure()
    names = [options.name] if options.name else ["here"] if options.measure else list(machines.TABLE)
    for name in names:
        sys.stdout.write("\n".join(report.machine_lines(_machine(name))) + "\n")


def _measure() -> None:
    """Measure this machine, ceilings first and then what our linears add to them, and keep what was found."""
    from nybble.machine import DISTURBED, longest_wait, waited
    from nybble.planner import lines, measure

    device, begin, before = "cuda" if here.gpu_name() else "cpu", time.monotonic(), waited()
    found = measure.ceilings(device, _say)
    if "bandwidth" not in found or "launch" not in found:
        raise BadInput("bandwidth and launches could not be measured; nothing was kept")
    path = here.file_for(here.key())
    measure.save(path, here.key(), found)
    bare, names = here.machine(), (planning.ORIGINAL, *planning.DEFAULT_SCHEMES)
    left = begin + measure.CEILINGS + measure.LINES - time.monotonic()
    timed = measure.timings(names, lambda scheme, n, k, m: _linears(scheme, n, k, m, device), device, _say, left)
    plain = {t: planning.of_linear(t.m, t.n, t.k, t.scheme, bare).roofline for t in timed}
    measure.save(path, here.key(), found, lines.measure(timed, plain))
    _say(f"kept in {path}")
    share = longest_wait(before, waited()) / (time.monotonic() - begin)
    if share > DISTURBED:
        # said afterwards, since a load average neither sees half a minute nor forgets it
        _say(f"other work kept the processors from it for {share:.0%} of the time: measure again when they are free")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


_PAST_CACHES = {"cuda": 1 << 28, "cpu": 1 << 26}  # bytes of weights that go by before one comes again
_MOST_COPIES = 16


@lru_cache(maxsize=4)
def _normal(rows: int, columns: int, device: str) -> Tensor:
    import torch

    generator = torch.Generator(device).manual_seed(rows)
    return torch.randn(rows, columns, generator=generator, device=device).bfloat16()


@lru_cache(maxsize=1)
def _quantized(name: str, n: int, k: int, device: str) -> QuantTensor:
    """One weight in one format; numbers of tokens follow each other, so that the last is the one asked for again."""
    from nybble.quantize import quantize

    return quantize(_normal(n, k, device), name)


def _linears(scheme: str, n: int, k: int, m: int, device: str) -> list[Callable[[], Any]] | None:
    """Calls of one linear with weights of their own, the first one's result checked; None where nothing native
    serves."""
    import torch

    from nybble.ops._choose import choose
    from nybble.ops.linear import LINEAR
    from nybble.quantize.schemes import scheme as row_of

    x, w = _normal(m, k, device), _normal(n, k, device)
    if scheme == planning.ORIGINAL:
        copies = min(_MOST_COPIES, max(1, _PAST_CACHES[device] // (2 * n * k)))
        return [partial(torch.nn.functional.linear, x, w.clone()) for _ in range(copies)]
    row = row_of(scheme)
    q = _quantized(row.weight.name, n, k, device)
    args = (x, q, None, row.activation, None)
    chosen = choose(LINEAR, torch.device(device).type, *args)
    if not chosen.native:
        return None
    layout = chosen.layout(q)
    q = q if layout is None else q.to_layout(layout)
    if n * k <= 1 << 24:  # the larger anchor's reference would take longer than all timings
        LINEAR.check(chosen.run(x, q, *args[2:]), args, f"{chosen.name} under {scheme}, {m}x{n}x{k}")
    copies = min(_MOST_COPIES, max(1, _PAST_CACHES[device] // q.nbytes))
    weights = [q, *(replace(q, codes=q.codes.clone(), scale=q.scale.clone()) for _ in range(copies - 1))]
    return [partial(chosen.run, x, weight, *args[2:]) for weight in weights]
