"""The device's clock, read in the candidate's process; the judge holds it against its own.

A call is timed between two events on the current stream and, over the same call, by the host until the *whole* device
is idle. Work on another stream (cheat 1) ends before the first and after the second: an honest call's two times
differ by the cost of a synchronisation only, which the baselines show. Before each call 256 MB are written, which
empties the L2 cache, and lines that a kernel asked to keep (cudaAccessPolicyWindow, cheat 15) are given up. These
functions are bound before the candidate is imported.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch

_FLUSHED = 256 << 20
_PERSISTING = 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE
_clock, _synchronize, _event = time.perf_counter, torch.cuda.synchronize, torch.cuda.Event


def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def persisting_limit() -> int:
    """Bytes of L2 that kernels may keep for themselves."""
    value = ctypes.c_size_t(0)
    return int(value.value) if _driver().cuCtxGetLimit(ctypes.byref(value), _PERSISTING) == 0 else 0


def measure(run: Callable[[str], Any], slots: list[str]) -> tuple[dict[str, Any], list[Any]]:
    """(times, outputs): for each slot milliseconds on the device's clock and on the host's until the device is idle."""
    driver = _driver()
    flush = torch.empty(_FLUSHED, dtype=torch.uint8, device="cuda")
    device, host, outputs = [], [], []
    for slot in slots:
        driver.cuCtxResetPersistingL2Cache()
        flush.fill_(1)
        start, end = _event(enable_timing=True), _event(enable_timing=True)
        _synchronize()
        begun = _clock()
        start.record()
        outputs.append(run(slot))
        end.record()
        _synchronize()
        host.append(1e3 * (_clock() - begun))
        device.append(start.elapsed_time(end))
    return {"device": device, "host": host}, outputs


def poison(byte: int) -> None:
    """Fill what torch's pool hands out next: blocks of every size it has free."""
    kept = []
    for power in range(9, 27):
        for _ in range(8 if power < 21 else 2):
            kept.append(torch.empty(1 << power, dtype=torch.uint8, device="cuda").fill_(byte ^ 0xFF))
    _synchronize()
