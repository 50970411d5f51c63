"""A grader as benchmarks usually have them, to show what the judge's checks buy.

It follows KernelBench's rules: the candidate is imported into the grader's process, reference and candidate get the
same seeded inputs (five trials, seeds derived from 42), torch.allclose with 1e-4 for float32 and 1e-2 for 16 bits
decides, the first input of the problem is timed on the process's own clock, over and over. `python naive.py` reads
lines "problem candidate:Name", forks for each, so that one candidate cannot disturb the next, and prints a line of
JSON for each: {"passed", "speedup", "error"}.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

SEED, TRIALS, TIMED, SECONDS = 42, 5, 20, 20.0


def load(path: str) -> Any:
    """A file as a module."""
    spec = importlib.util.spec_from_file_location(f"naive_{Path(path).stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make(factory: Any, init: list[Any]) -> Any:
    """A model under the seed, so that both draw the same weights."""
    torch.manual_seed(SEED)
    return factory(*init)


def timed(model: Any, inputs: list[Any]) -> float:
    """The mean over calls on the same inputs."""
    for _ in range(3):
        model(*inputs)
    start = time.perf_counter()
    for _ in range(TIMED):
        model(*inputs)
    return (time.perf_counter() - start) / TIMED


def grade(problem: str, candidate: str, name: str) -> dict[str, Any]:
    """Whether it passes, and how fast it seems."""
    task = load(problem)
    init = getattr(task, "get_init_inputs", list)()
    factory = getattr(load(candidate), name)
    with torch.no_grad():
        reference, subject = make(task.Model, init), make(factory, init)
        for trial in range(TRIALS):
            torch.manual_seed(SEED + trial)
            inputs = task.get_inputs()
            expected = reference(*inputs)
            if not agree(subject(*inputs), expected):
                return {"passed": False, "speedup": 0.0, "error": f"trial {trial} differs"}
        torch.manual_seed(SEED)
        inputs = task.get_inputs()
        return {"passed": True, "speedup": timed(reference, inputs) / max(timed(subject, inputs), 1e-9), "error": ""}


def agree(seen: Any, expected: Any) -> bool:
    """allclose with a fixed tolerance."""
    if isinstance(expected, tuple | list):
        return len(seen) == len(expected) and all(agree(a, b) for a, b in zip(seen, expected, strict=True))
    tolerance = 1e-4 if expected.dtype == torch.float32 else 1e-2
    return bool(seen.shape == expected.shape) and bool(torch.allclose(seen, expected, atol=tolerance, rtol=tolerance))


def grade_apart(problem: str, candidate: str, name: str) -> dict[str, Any]:
    """`grade` in a fork, ended after a while."""
    receive, send = os.pipe()
    pid = os.fork()
    if pid == 0:
        with contextlib.suppress(BaseException), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 1)
            os.dup2(nowhere.fileno(), 2)
            try:
                result = grade(problem, candidate, name)
            except Exception as error:  # noqa: BLE001 - whatever the candidate raises is its result
                result = {"passed": False, "speedup": 0.0, "error": f"{type(error).__name__}: {error}"}
            os.write(send, json.dumps(result).encode())
        os._exit(0)
    os.close(send)
    ready, _, _ = select.select([receive], [], [], SECONDS)
    data = os.read(receive, 1 << 16) if ready else b""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(receive)
    return json.loads(data) if data else {"passed": False, "speedup": 0.0, "error": "no result"}


if __name__ == "__main__":
    torch.set_num_threads(1)
    for row in sys.stdin:
        problem_, _, candidate_ = row.strip().partition(" ")
        path_, _, name_ = candidate_.rpartition(":")
        print(json.dumps(grade_apart(problem_, path_, name_)), flush=True)
