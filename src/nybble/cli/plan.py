"""`nybble plan` and `nybble machine`: predictions, and what they rest on. Neither imports torch unless it measures."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from rich.table import Table

from nybble.cli.console import Plain
from nybble.errors import BadInput
from nybble.planner import here, machines, report, shapes
from nybble.planner import plan as planning
from nybble.planner.machines import Machine


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


def _measure() -> Path:
    """Measure this machine and keep what was found."""
    from nybble.planner import measure

    device = "cuda" if here.gpu_name() else "cpu"
    found = measure.ceilings(device, lambda text: print(text, file=sys.stderr))  # noqa: T201 - progress
    if "bandwidth" not in found or "launch" not in found:
        raise BadInput("bandwidth and launches could not be measured; nothing was kept")
    path = here.file_for(here.key())
    measure.save(path, here.key(), found)
    sys.stderr.write(f"kept in {path}\n")
    return path
