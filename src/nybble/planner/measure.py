"""Ceilings of this machine, measured: bandwidth, products, the least that a launch costs, and what linears add.

What is measured is what torch's own calls reach on large operands (8192 cubed on a GPU, 2048 cubed on a CPU) of random
data, the best of several runs: other work on the machine can only slow one, and a ceiling is what can be reached.
`launch` is the time of the smallest product, on a GPU inside a captured graph, where no Python stands between one and
the next.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nybble.files import write_whole
from nybble.planner.lines import Lines, Timing, to_json

CEILINGS, LINES = 22.0, 30.0
"""Seconds that each may take; what does not fit is left out, by name. Together with imports, a minute; lines also get
what ceilings leave."""

_REPEATS, _SLICE = 7, 2.0


def ceilings(
    device: str = "cpu", say: Callable[[str], None] = lambda text: None, limit: float = CEILINGS
) -> dict[str, float]:
    """What this machine reaches: operations and bytes a second, seconds of a launch, bytes of memory.

    Args:
        device: "cpu" or "cuda".
        say: told each figure as it is found.
        limit: seconds.
    """
    gpu, end = device.startswith("cuda"), time.monotonic() + limit - _SLICE
    size = 8192 if gpu else 2048
    found = {"memory": float(_memory(device))}
    for name, make in {"bandwidth": _bandwidth, "launch": _launch, **_PRODUCTS}.items():
        if time.monotonic() > end:
            say(f"{name}: left out, time is over")
            continue
        try:
            work, amount = make(device, size)
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            say(f"{name}: not here ({str(error).splitlines()[0][:80]})")
            continue
        seconds = _seconds(work, gpu, repeats=_REPEATS if gpu or amount else _CALLS)
        found[name] = amount / seconds if amount else seconds / (_LAUNCHES if gpu else 1)
        say(f"{name}: {found[name]:.4g}")
    return found


TOKENS = {"cpu": (1, 16, 256), "cuda": (1, 4, 16, 64, 256, 1024, 4096)}
ANCHORS = {"cpu": ((1024, 1024), (4096, 4096)), "cuda": ((4096, 4096), (28672, 8192))}
"""Shapes [N, K] that lines are measured on."""
Prepare = Callable[[str, int, int, int], "list[Callable[[], Any]] | None"]


def timings(
    schemes: Sequence[str],
    prepare: Prepare,
    device: str,
    say: Callable[[str], None] = lambda text: None,
    limit: float = LINES,
) -> list[Timing]:
    """Times of real linears on the anchors, for lines.py.

    Args:
        schemes: which.
        prepare: (scheme, N, K, M) -> calls that take turns, each with weights of its own so that no cache holds
            them, or None where nothing native serves.
        device: "cpu" or "cuda".
        say: told each scheme that is left out.
        limit: seconds.
    """
    kind, end = device.split(":")[0], time.monotonic() + limit - _SLICE
    found: list[Timing] = []
    for scheme in schemes:
        for (n, k), m in itertools.product(ANCHORS[kind], TOKENS[kind]):
            works = prepare(scheme, n, k, m) if time.monotonic() < end else None
            if works is None:
                say(f"{scheme}: no line, {'nothing native serves' if time.monotonic() < end else 'time is over'}")
                found = [timing for timing in found if timing.scheme != scheme]
                break
            seconds = _seconds(_in_turn(works, kind == "cuda"), kind == "cuda", _SLICE / 4) / len(works)
            found.append(Timing(scheme, m, n, k, seconds))
    return found if len({timing.scheme for timing in found}) > 1 else []  # one alone has nothing to be compared with


def _in_turn(works: list[Callable[[], Any]], gpu: bool) -> Callable[[], Any]:
    def run() -> None:
        for work in works:
            work()

    return _captured(run) if gpu else run


def save(path: Path, key: str, found: dict[str, float], lines: Lines | None = None) -> dict[str, Any]:
    """Write ceilings and lines with today's date, so that the file is there as a whole or not at all."""
    record = {"key": key, "date": datetime.date.today().isoformat(), "torch": torch.__version__, "ceilings": found,
              "lines": to_json(lines or {})}  # fmt: skip
    write_whole(path, json.dumps(record, indent=1), parents=True)
    return record


Made = tuple[Callable[[], Any], float]


def _bandwidth(device: str, size: int) -> Made:
    a = torch.ones(size << 17 if device != "cpu" else size << 15, dtype=torch.float32, device=device)
    b = torch.empty_like(a)
    return (lambda: b.copy_(a), 2.0 * a.numel() * 4) if device != "cpu" else (a.sum, a.numel() * 4.0)


_LAUNCHES, _CALLS = 100, 1000


def _launch(device: str, size: int) -> Made:
    """The smallest product, on a GPU a hundred of them in a graph; amount 0 means that the time itself is wanted."""
    x, w = (torch.ones(shape, dtype=torch.bfloat16, device=device) for shape in ((1, 64), (64, 64)))

    def run() -> None:
        for _ in range(_LAUNCHES):
            torch.nn.functional.linear(x, w)

    return (lambda: torch.nn.functional.linear(x, w)) if device == "cpu" else _captured(run), 0.0


def _captured(run: Callable[[], Any]) -> Callable[[], Any]:
    """What replays `run` as a CUDA graph."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _matmul(dtype: torch.dtype) -> Callable[[str, int], Made]:
    def make(device: str, size: int) -> Made:
        a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
        torch.mm(a[:16], b)  # refuses here what it cannot multiply
        return lambda: torch.mm(a, b), 2.0 * size**3

    return make


def _int8(device: str, size: int) -> Made:
    a, b = (torch.randint(-100, 100, (size, size), dtype=torch.int8, device=device) for _ in range(2))
    torch._int_mm(a[:32], b.t())
    return lambda: torch._int_mm(a, b.t()), 2.0 * size**3


def _fp8(device: str, size: int) -> Made:
    if device == "cpu":
        raise NotImplementedError("no fp8 products on a CPU")
    a, b = (torch.randn(size, size, device=device).to(torch.float8_e4m3fn) for _ in range(2))
    one = torch.ones((), device=device)

    def run() -> Any:
        return torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    run()
    return run, 2.0 * size**3


_PRODUCT_FP32 = _matmul(torch.float32)
_PRODUCTS: dict[str, Callable[[str, int], Made]] = {
    "fp32": _PRODUCT_FP32,
    "bf16": _matmul(torch.bfloat16),
    "fp8": _fp8,
    "int8": _int8,
    "fp64": _matmul(torch.float64),
}


def _seconds(work: Callable[[], Any], gpu: bool, limit: float = _SLICE, repeats: int = _REPEATS) -> float:
    """The best of a few runs, fewer where one takes long."""
    work()
    times: list[float] = []
    end = time.monotonic() + limit
    while len(times) < repeats and (not times or time.monotonic() < end):
        if gpu:
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if gpu:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return min(times)


def _memory(device: str) -> int:
    if device != "cpu":
        return int(torch.cuda.get_device_properties(device).total_memory)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
