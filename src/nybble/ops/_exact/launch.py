"""Starting the kernels of exact ops: compiled when first needed, one for each dtype and shape that they fix."""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from struct import pack

import torch
from torch import Tensor

from nybble.ops import _nvrtc
from nybble.ops._exact import arithmetic

CODES = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int, ctypes.c_float
Defines = tuple[tuple[str, int], ...]


def constants() -> dict[str, int]:
    """The constants of arithmetic.exp for exact.cuh, as the bits of float32."""
    named = {"LOG2_E": arithmetic.LOG2_E, "LN2_HIGH": arithmetic.LN2_HIGH, "LN2_LOW": arithmetic.LN2_LOW,
             "LOWEST": arithmetic.LOWEST, "HIGHEST": arithmetic.HIGHEST}  # fmt: skip
    named |= {f"C{7 - k}": value for k, value in enumerate(arithmetic.TAYLOR)}
    return {f"EXP_{name}": int.from_bytes(pack(">f", value), "big") for name, value in named.items()}


def defines(dtype: torch.dtype, **more: int) -> Defines:
    """What a source is compiled with."""
    return tuple(sorted({"DTYPE": CODES[dtype], **more, **constants()}.items()))


def source(name: str) -> Path:
    """A .cu file of this folder."""
    return Path(__file__).with_name(f"{name}.cu")


def launch(
    x: Tensor, file: str, kernel: str, given: Defines, grid: tuple[int, int], threads: int, argument: ctypes.Structure
) -> None:
    """Start a kernel on x's device and torch's current stream."""
    with torch.cuda.device(x.device):
        current = torch.cuda.current_stream(x.device).cuda_stream
        _kernel(file, kernel, given, x.device.index).launch(grid, threads, 0, argument, False, current)


@cache
def _kernel(file: str, kernel: str, given: Defines, device: int) -> _nvrtc.Kernel:
    arch = _nvrtc.architecture(torch.cuda.get_device_capability(device))
    return _nvrtc.Kernel.load(_nvrtc.build(source(file), dict(given), arch), kernel)


def pointers(*parts: Tensor | None) -> tuple[int | None, ...]:
    """Addresses for a kernel's argument."""
    return tuple(None if part is None else part.data_ptr() for part in parts)


def refusal(x: Tensor) -> str | None:
    """Why no kernel can serve, or None."""
    if x.numel() == 0:
        return f"nothing to compute: x is {tuple(x.shape)}"
    return _nvrtc.refusal(torch.cuda.get_device_capability(x.device))
