"""This machine: which row of the table it is, and the ceilings measured on it, kept on disk. No torch is imported.

$XDG_CACHE_HOME/nybble/machines/<name>.json    {"key", "date", "ceilings", …}, written by `nybble machine --measure`
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from nybble.errors import BadInput, Unsupported
from nybble.planner.lines import from_json
from nybble.planner.machines import SCALARS, TABLE, UNITS, Machine, with_measured


def key(cpu: bool = False) -> str:
    """The name of this machine's processor: the first GPU's, or the CPU's model with its number of cores."""
    gpu = None if cpu else gpu_name()
    return gpu or f"{_cpu_name()}, {os.cpu_count()} cores"


def gpu_name() -> str | None:
    """The first CUDA device's name, asked from the driver; None where there is no driver or no device."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, name = ctypes.c_int(), ctypes.create_string_buffer(100)
    done = driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), 0) or driver.cuDeviceGetName(name, 100, device)
    return None if done else name.value.decode()


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    text = path.read_text(errors="replace") if path.is_file() else ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1].strip() if found else platform.processor() or platform.machine()


def row_for(name: str) -> Machine | None:
    """The table's row for a processor's own name ("NVIDIA H200", "AMD EPYC, 2 cores"); None if it has none."""
    words = re.findall(r"[a-z0-9]+", name.lower())
    joined = {"".join(words[i : i + n]) for n in (1, 2, 3) for i in range(len(words))}
    if words[:2] == ["amd", "epyc"] and words[-2:] == ["2", "cores"]:
        return TABLE["epyc-2c"]
    return next((row for row in TABLE.values() if row.name.replace("-", "") in joined), None)


def file_for(name: str) -> Path:
    """Where a machine's measured ceilings are kept."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "nybble" / "machines" / (re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") + ".json")


def load(path: Path) -> dict[str, Any] | None:
    """A file of measured ceilings; None where there is none.

    Raises:
        BadInput: it is there and holds something else.
    """
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        ceilings = {str(name): float(value) for name, value in found["ceilings"].items()}
        if any(not value > 0 for value in ceilings.values()):
            raise ValueError("a ceiling is not positive")
        lines = from_json(found.get("lines", {}))
        return {"key": str(found["key"]), "date": str(found["date"]), "ceilings": ceilings, "lines": lines}
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise BadInput(f"{path}: holds no measured ceilings ({error!r}); remove it or measure again") from error


def machine(cpu: bool = False) -> Machine:
    """This machine: its row, with measured ceilings in place of the table's where there are any.

    Args:
        cpu: whether its CPU is asked for even where there is a GPU.

    Raises:
        Unsupported: no row and nothing measured.
    """
    name = key(cpu)
    found, row = load(file_for(name)), row_for(name)
    if found is None and row is not None:
        return row
    if found is None:
        raise Unsupported(
            f"{name!r} is not in the table and nothing was measured here: run `nybble machine --measure`, "
            f"or describe it in a TOML file (`nybble machine --example`)"
        )
    ceilings, date = found["ceilings"], found["date"]
    own = from_ceilings(name, ceilings, date) if row is None else with_measured(row, ceilings, date)
    return replace(own, lines=found["lines"])


def from_ceilings(name: str, ceilings: Mapping[str, float], date: str) -> Machine:
    """A machine that is known by its measured ceilings alone; scalar units are taken to be what multiplies fp32."""
    lacking = [figure for figure in ("memory", "bandwidth", "launch", "fp32") if figure not in ceilings]
    if lacking:
        raise BadInput(f"measured ceilings of {name!r} lack {', '.join(lacking)}: measure again")
    units = {unit: value for unit, value in ceilings.items() if unit in UNITS}
    row = Machine(
        name, name, ceilings["memory"], ceilings["bandwidth"], units, dict.fromkeys(SCALARS[:-1], units["fp32"] / 2),
        ceilings["launch"], "measured here", ("scalars: half of the measured fp32 rate",), shared="cores" in name,
    )  # fmt: skip
    return replace(row, measured=dict.fromkeys(ceilings, date))
