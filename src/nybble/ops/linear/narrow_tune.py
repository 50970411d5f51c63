"""Which plan a narrow product runs with: measured once a shape, kept on disk.

The models in narrow_cuda.py and triton.py order a few plans; the first call of a shape on a machine times
them and files the fastest, so that later calls and later processes look it up. While a CUDA graph is being captured
nothing can be timed: the model's favourite runs, and nothing is filed. The result does not depend on the plan, bit for
bit, since sums are exact or taken in the order of K.

    print(narrow_tune.Choices.of(device))      what has been measured, as a table
    nybble ops linear --m 2048 --format int8_channel --activation int8_token      a product's plans
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from nybble.ops import _nvrtc
from nybble.ops.linear.narrow import Problem

_WARM, _RUNS = 2, 5
_FEWEST = 2**30  # multiply-adds of a product that is worth timing


@dataclass
class Choices:
    """Measured choices of one kind of device, and the file they are kept in.

    Attributes:
        path: a JSON file: kernel and problem -> {"plan": …, "us": {plan: microseconds}}.
        found: its contents.
    """

    path: Path
    found: dict[str, dict[str, Any]]

    @staticmethod
    @cache
    def of(device: str) -> Choices:
        """Those of the device called `device`; a file that cannot be read counts as empty and is written anew."""
        import triton

        name = f"{device} triton-{triton.__version__}".replace(" ", "-").lower()
        path = _nvrtc.cache_folder().parent / "plans" / f"linear-narrow-{name}.json"
        try:
            found = json.loads(path.read_text())
        except (OSError, ValueError):
            found = {}
        return Choices(path, found if isinstance(found, dict) else {})

    def add(self, key: str, times: dict[str, float]) -> str:
        """File what was measured, and return the fastest plan."""
        best = min(times, key=lambda plan: times[plan])
        self.found[key] = {"plan": best, "us": times}
        self.path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=self.path.parent)
        with os.fdopen(handle, "w") as file:
            json.dump(self.found, file, indent=1, sort_keys=True)
        os.replace(temporary, self.path)
        return best

    def __str__(self) -> str:
        lines = [f"{self.path}: {len(self.found)} products measured"]
        for key, row in sorted(self.found.items()):
            times = ", ".join(f"{plan} {us:.1f} us" for plan, us in sorted(row["us"].items(), key=lambda pair: pair[1]))
            lines.append(f"  {key}: {times}")
        return "\n".join(lines)


def choose(kernel: ModuleType, p: Problem, run: Callable[[Any], None]) -> Any:
    """The plan for a problem on the current device; `run` runs the product with a plan.

    Args:
        kernel: the module narrow_cuda or triton.
        p: the problem.
        run: takes a plan and runs the product, the result going nowhere.
    """
    plans = {name(plan): plan for plan in kernel.plans(p)}
    favourite = next(iter(plans.values()))
    if len(plans) < 2 or p.m * p.n * p.k < _FEWEST:
        return favourite
    choices, key = Choices.of(torch.cuda.get_device_name()), _key(kernel, p)
    known = choices.found.get(key, {}).get("plan")
    if known in plans:
        return plans[known]
    if torch.cuda.is_current_stream_capturing():
        return favourite
    return plans[choices.add(key, {label: _microseconds(run, plan) for label, plan in plans.items()})]


def describe(kernel: ModuleType, p: Problem, device: str) -> str:
    """A problem's plans in the order of the model, what was measured of them, and which one runs."""
    measured = Choices.of(device).found.get(_key(kernel, p), {})
    plans = [name(plan) for plan in kernel.plans(p)]
    best = measured.get("plan")
    lines = [f"plans for {p.key}, best by the model first:"]
    for plan in plans:
        us = measured.get("us", {}).get(plan)
        time, runs = "" if us is None else f"  {us:.1f} us", plan == (best if best in plans else plans[0])
        lines.append(f"  {plan}{time}{'  runs' * runs}")
    return "\n".join(lines)


def _key(kernel: ModuleType, p: Problem) -> str:
    return f"{kernel.__name__.rpartition('.')[2]}: {p.key}"


def name(plan: Any) -> str:
    """A plan in a word: tokens256-stages4."""
    return "-".join(f"{field}{value}" for field, value in asdict(plan).items()) or "the only one"


def _microseconds(run: Callable[[Any], None], plan: Any) -> float:
    for _ in range(_WARM):
        run(plan)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(_RUNS):
        run(plan)
    end.record()
    end.synchronize()
    return round(start.elapsed_time(end) * 1e3 / _RUNS, 2)
