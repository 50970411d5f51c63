"""The device's clock, read in the candidate's process, and what a baseline needs there.

Before each timed call 256 MB are written, which empties the L2 cache, and lines that a kernel asked to keep
(cudaAccessPolicyWindow, cheat 15) are given up. The call is queued behind that write, so that what launching it costs
the host is hidden, and timed between two events on the current stream. Then the host's clock measures for how long the
*whole* device outlasts the second event: an honest call's work has ended with it, work on another stream (cheat 1) has
not; the baselines show what waiting for an idle device costs. All functions are bound before the candidate is imported.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch

_FLUSHED = 256 << 20
_PERSISTING = 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE
_clock, _event = time.perf_counter, torch.cuda.Event
_record, _wait, _elapsed = torch.cuda.Event.record, torch.cuda.Event.synchronize, torch.cuda.Event.elapsed_time
_WARM = 3  # calls before a capture: libraries choose and allocate in them


def synchronize() -> None:
    """Until the whole device is idle."""
    torch._C._cuda_synchronize()


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def persisting_limit() -> int:
    """Bytes of L2 that kernels may keep for themselves."""
    value = ctypes.c_size_t(0)
    return int(value.value) if _driver().cuCtxGetLimit(ctypes.byref(value), _PERSISTING) == 0 else 0


def give_up_kept_lines() -> None:
    """Lines of the L2 cache that were asked to stay become ordinary ones, which the next write evicts."""
    _driver().cuCtxResetPersistingL2Cache()


def measure(run: Callable[[str], Any], slots: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """(times, outputs): for each slot milliseconds on the stream, and for how many more the device was busy."""
    flush = torch.empty(_FLUSHED, dtype=torch.uint8, device="cuda")
    device, beside, outputs = [], [], []
    for slot in slots:
        start, end = _event(enable_timing=True), _event(enable_timing=True)
        synchronize()
        give_up_kept_lines()
        flush.fill_(1)
        _record(start)
        outputs.append(run(slot))
        _record(end)
        _wait(end)
        ended = _clock()
        synchronize()
        beside.append(1e3 * (_clock() - ended))
        device.append(_elapsed(start, end))
    return {"device": device, "beside": beside}, outputs


def poison(byte: int) -> None:
    """Fill what torch's pool hands out next: blocks of every size it has free."""
    kept = []
    for power in range(9, 27):
        for _ in range(8 if power < 21 else 2):
            kept.append(torch.empty(1 << power, dtype=torch.uint8, device="cuda").fill_(byte ^ 0xFF))
    synchronize()


class Replayed:
    """A model as a CUDA graph for each set of addresses: the baseline that pays nothing for launching.

    Inputs are read where they lie; new values at the same addresses are seen, and each set has outputs of its own.
    """

    def __init__(self, model: Callable[..., Any]) -> None:
        self.model = model
        self.graphs: dict[tuple[int, ...], tuple[torch.cuda.CUDAGraph, Any]] = {}

    def __call__(self, *values: Any) -> Any:
        key = tuple(v.data_ptr() if isinstance(v, torch.Tensor) else id(v) for v in values)
        if key not in self.graphs:
            self.graphs[key] = self._captured(values)
        graph, output = self.graphs[key]
        graph.replay()
        return output

    def _captured(self, values: tuple[Any, ...]) -> tuple[torch.cuda.CUDAGraph, Any]:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(_WARM):
                self.model(*values)
        synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = self.model(*values)
        return graph, output
