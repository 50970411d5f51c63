"""What the kernels of narrow products on Hopper share, narrow.cu and narrow_fp8.cu: what they take, how they start.

Blocks of two warpgroups that multiply and one that feeds them stay on their processors, two to a cluster, and walk over
the tiles of the product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from nybble.ops import _nvrtc
from nybble.ops.linear.cuda import machine
from nybble.ops.linear.narrow import Problem
from nybble.quantize import QuantTensor

ROWS, CLUSTER, THREADS = 128, 2, 384
ALIGNMENT = 1024
"""Bytes that aligning a block's shared memory for the swizzles can take."""
SCALES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
"""W_SCALE by the dtype of W's scales."""
_FEW_TOKENS = 64  # up to here tiles are mostly empty, and fewer blocks read the weight than memory could feed


class Plan(Protocol):
    """How a kernel is instantiated."""

    def defines(self, p: Problem) -> dict[str, int]:
        """The macros that instantiate the kernel, scales' dtype left out."""

    def shared_bytes(self, p: Problem) -> int:
        """Shared memory of a block."""

    def tiles(self, p: Problem) -> int:
        """Tiles of a cluster."""

    def score(self, p: Problem) -> float:
        """Predicted time."""


P = TypeVar("P", bound=Plan)


def deepest(found: list[P], p: Problem, width: Callable[[P], int]) -> list[P]:
    """Of plans in falling order of stages those that fit with the most stages, one a width, best by the model first."""
    fit = [plan for plan in found if plan.shared_bytes(p) <= p.machine.shared_bytes]
    return sorted({width(plan): plan for plan in reversed(fit)}.values(), key=lambda plan: plan.score(p))


def refusal(p: Problem) -> str | None:
    """Why no such kernel can take a problem, or None."""
    if p.machine.capability != (9, 0):
        return f"needs Hopper's wgmma (compute capability 9.0), this is {'.'.join(map(str, p.machine.capability))}"
    if p.dtype not in (torch.bfloat16, torch.float16):
        return f"stores bfloat16 or float16, {p.dtype} was asked for"
    if not p.m or not p.n or not p.k:
        return f"nothing to compute: M = {p.m}, N = {p.n}, K = {p.k}"
    if p.k % 16 or p.n % 8:
        return f"copies rows of whole 16 bytes: K = {p.k} has to be a multiple of 16 and N = {p.n} of 8"
    if p.m <= _FEW_TOKENS:
        return f"pays from {_FEW_TOKENS + 1} tokens on, there are {p.m}"
    return _nvrtc.available()


def shift(p: Problem) -> int:
    """log2 of the rows of W that share a scale."""
    rows = p.weight.block[0]
    return 31 if rows is None else rows.bit_length() - 1


def launch(source: Path, plan: Plan, p: Problem, w: QuantTensor, argument: ctypes.Structure, y: Tensor) -> None:
    """Start the kernel `linear_<source>` on y's device: no more clusters than there are tiles, or places for them."""
    found = {**plan.defines(p), "W_SCALE": SCALES[w.scale.dtype]}
    kernel = _kernel(source, tuple(sorted(found.items())), y.device.index)
    clusters = min(plan.tiles(p), p.machine.processors // CLUSTER)
    current = torch.cuda.current_stream(y.device).cuda_stream
    kernel.launch((clusters * CLUSTER, 1), THREADS, plan.shared_bytes(p), argument, True, current)


@cache
def _kernel(source: Path, defines: tuple[tuple[str, int], ...], device: int) -> _nvrtc.Kernel:
    cubin = _nvrtc.build(source, dict(defines), "90a")
    return _nvrtc.Kernel.load(cubin, f"linear_{source.stem}", machine(device).shared_bytes)
