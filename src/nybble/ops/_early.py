"""Triton kernels that start before the kernel ahead of them has ended (programmatic dependent launch, sm_90 and later).

A decode step is hundreds of kernels of a few microseconds each, and what passes between the end of one and the first
instruction of the next would be a good part of it. A kernel that calls `begin` first is set up while its predecessor
ends, lets its own successor be set up, and waits until everything before it is done and visible, so that nothing it
does afterwards is early. Large kernels that come next must not crowd on the few processors that are free at that
moment: those of ops/linear ask for enough shared memory to be spread evenly.

    _kernel[grid](..., **early(x.device))          with EARLY: tl.constexpr among the kernel's arguments

While a small kernel runs, the memory idles, although the next kernel is known to read a large weight. A small op
therefore takes `ahead`, memory that will be read next: programs beyond its own, one for each processor, wait for
nothing and ask for evenly spaced pieces of it to be brought into the L2 cache. It is a hint that no result depends on.

    programs = rows + spare(ahead, device)         with AHEAD and LANES: tl.constexpr, and in the kernel
    _kernel[(programs,)](..., **fetching(ahead, device, warps))
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

_OLDEST = (9, 0)
VARIANT = {
    "fetched": 8 << 20,
    "kind": 1,
    "spread": 1,
}  # bytes; bulk pieces or lines; spread or from the start: to be measured


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


@triton.jit
def fetch(
    start: tl.tensor, size: tl.tensor, step: tl.tensor, program: tl.tensor, pieces: tl.tensor,
    KIND: tl.constexpr, LANES: tl.constexpr,
) -> None:  # fmt: skip
    """Ask for `pieces` pieces, `step` bytes apart, each program for its own; what lies beyond `size` is left out."""
    lane = tl.arange(0, LANES)
    index = lane % 32 * (LANES // 32) + lane // 32  # warps take turns, since each asks slowly
    for turn in range(0, pieces, LANES):
        at = (program * pieces + turn + index).to(tl.int64) * step
        wanted = ((turn + index < pieces) & (at + (2048 if KIND == 1 else 128) <= size)).to(tl.int32)
        if KIND == 1:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], 2048; mov.u32 $0, 0; }",  # noqa: E501
                "=r,l,r", [start + at, wanted], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        else:
            tl.inline_asm_elementwise(
                "{ .reg .pred p; setp.ne.s32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.u32 $0, 0; }",
                "=r,l,r", [start + at, wanted], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@cache
def early(device: torch.device) -> dict[str, bool]:
    """Launch arguments: whether a kernel on `device` starts early, for the kernel and for the launcher."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < _OLDEST:
        return {"EARLY": False}
    return {"EARLY": True, "launch_pdl": True}


def spare(ahead: Tensor | None, device: torch.device) -> int:
    """How many programs are added to fetch `ahead`."""
    if ahead is None or not early(device)["EARLY"] or not VARIANT["fetched"]:
        return 0
    return torch.cuda.get_device_properties(device).multi_processor_count


def fetching(ahead: Tensor | None, device: torch.device, warps: int) -> dict[str, Any]:
    """Launch arguments for the kernel whose grid was widened by `spare`."""
    programs = spare(ahead, device)
    if ahead is None or not programs:
        return {"ahead": 0, "ahead_bytes": 0, "step": 0, "pieces": 0, "KIND": 0, "LANES": 32 * warps}
    size, piece = ahead.numel() * ahead.element_size(), 2048 if VARIANT["kind"] == 1 else 128
    pieces = -(-VARIANT["fetched"] // (programs * piece))
    step = size // (programs * pieces) // 128 * 128 if VARIANT["spread"] else 0
    return {"ahead": ahead.data_ptr(), "ahead_bytes": size, "step": max(piece, step), "pieces": pieces,
            "KIND": VARIANT["kind"], "LANES": 32 * warps}  # fmt: skip
