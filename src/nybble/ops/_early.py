"""Triton kernels that start before the kernel ahead of them has ended (programmatic dependent launch, sm_90 and later).

A decode step is hundreds of kernels of a few microseconds each, and what passes between the end of one and the first
instruction of the next would be a good part of it. A kernel that calls `begin` first is set up while its predecessor
ends, lets its own successor be set up, and waits until everything before it is done and visible, so that nothing it
does afterwards is early. Large kernels that come next must not crowd on the few processors that are free at that
moment: those of ops/linear ask for enough shared memory to be spread evenly.

    _kernel[grid](..., **early(x.device))          with EARLY: tl.constexpr among the kernel's arguments
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_OLDEST = (9, 0)


@triton.jit
def begin(EARLY: tl.constexpr) -> None:
    """The first statement of a kernel launched with `early`."""
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()


@triton.jit
def touch(start: tl.tensor, size: tl.tensor, EARLY: tl.constexpr, LANES: tl.constexpr) -> None:
    """Ask for up to LANES lines of 128 bytes from `start` on to be brought into the L2 cache; before `begin`."""
    if EARLY:
        at = tl.arange(0, LANES) * 128
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }", "=r,l,r",
            [start.to(tl.int64) + at, (at < size).to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@cache
def early(device: torch.device) -> dict[str, bool]:
    """Launch arguments: whether a kernel on `device` starts early, for the kernel and for the launcher."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _OLDEST:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}
