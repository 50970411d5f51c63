"""Habits that every test gets without asking.

Fresh memory that nybble allocates is *poisoned* (NaN, or a pattern no result would show) and *fenced*: bytes before and
after it are checked when the test ends. A kernel that leaves an element unwritten, or writes beside its output,
therefore fails the test that ran it, on any device. `guarded` gives a test the same for buffers it makes itself.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import house
from memory import Fences, poison

if not torch.cuda.is_available():
    # Kernels are then plain Python. Here, since a conftest further down may import triton before pytest_configure runs.
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    """No test asks a hub; child processes find the package; workers that share the cores take one thread each."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(house.SRC.parent), os.environ.get("PYTHONPATH")]))
    if "PYTEST_XDIST_WORKER" in os.environ:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    with torch.device("meta"):
        torch.empty(0)  # torch looks up what a device context governs once, at first use: before a test replaces it
    importlib.import_module("torch._dynamo")  # and the compiler, when it is imported, which functions are torch's


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip `gpu` tests with the reason that applies here."""
    marker = item.get_closest_marker("gpu")
    if marker is None:
        return
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; torch sees none")
    needed, here = marker.kwargs.get("capability", (0, 0)), torch.cuda.get_device_capability()
    if here < needed:
        pytest.skip(f"needs compute capability {needed}, this device has {here}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Report the size of the package with every run, so that growth is seen."""
    terminalreporter.section("size of src/nybble")
    terminalreporter.write_line(house.sizes())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Where Triton's interpreter cannot run a kernel's loop, its tests are skipped with that reason."""
    if interpreter_loops():
        return
    reason = "Triton 3.6's interpreter takes no computed bound of a loop with NumPy 2.4 or newer"
    loops = ("decode_attention_triton]", "triton_kernels.LinearRelu]", "triton_kernels.RowSums]",
             "test_the_tile_kernel_in_the_interpreter[")  # fmt: skip
    for item in items:
        if any(loop in item.nodeid for loop in loops) and "gpu" not in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))


def interpreter_loops() -> bool:
    """Whether `range` over computed bounds works in Triton's interpreter with the NumPy that is here."""
    version = importlib.metadata.version
    old = tuple(map(int, version("triton").split(".")[:2])) < (3, 7)
    return not (old and tuple(map(int, version("numpy").split(".")[:2])) >= (2, 4))


@pytest.fixture
def rng() -> torch.Generator:
    """A seeded CPU generator: pass it to every random call."""
    return torch.Generator().manual_seed(0)


@pytest.fixture
def guarded() -> Iterator[Callable[..., torch.Tensor]]:
    """`guarded(shape, dtype, device="cpu", row_pad=0)`: a poisoned tensor whose surroundings are checked at the end.

    With `row_pad` each row of the last axis is followed by that many fenced elements, so the tensor is strided.
    """
    fences = Fences()
    yield fences.allocate
    fences.check()


@pytest.fixture(autouse=True)
def _untrusted_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Poison and fence what nybble allocates; the mark `raw_memory` opts out."""
    if request.node.get_closest_marker("raw_memory"):
        yield
        return
    fences = Fences()
    for owner, name in [
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
        (np, "empty"),
        (np, "empty_like"),
    ]:
        monkeypatch.setattr(owner, name, _watched(getattr(owner, name), fences))
    yield
    fences.check()


def _watched(allocate: Callable[..., Any], fences: Fences) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        result = allocate(*args, **kwargs)
        # A compiler that traces the call must see the plain allocation, and other packages are not on trial.
        if torch.compiler.is_compiling() or not _called_by_nybble(sys._getframe(1)):
            return result
        if isinstance(result, np.ndarray):
            return poison(result)
        return result if {"out", "pin_memory"} & kwargs.keys() else fences.around(result)

    return watched


def _called_by_nybble(frame: Any) -> bool:
    return frame.f_globals.get("__name__", "").split(".")[0] == "nybble"
