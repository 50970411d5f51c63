"""quantize_rows on NVIDIA GPUs as one CUDA kernel, rows.cu, for rows of 16-bit values in whole pieces of sixteen.

A thread holds sixteen neighbours: two 16-byte reads, a block of NVFP4 with its scale, a rotation of 16 columns without
an exchange. Triton (triton.py), which serves everything else, spreads a block of sixteen over two threads that both
compute its scale, and moves values between threads for a rotation: 27 instructions a value for NVFP4 where this has
about 20, 11 for int8 where this has about 9, by the machine code for sm_90a. Where that makes it faster is in gpu.py.
"""

from __future__ import annotations

import ctypes
import struct
from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from nybble.formats.spec import BlockFormat
from nybble.ops import _nvrtc
from nybble.ops._declare import Implementation
from nybble.ops.quantize_rows import empty_results, width_of
from nybble.ops.quantize_rows.triton_codes import facts, refusal
from nybble.quantize import QuantTensor, scales
from nybble.quantize.layouts import DENSE

SOURCE = Path(__file__).with_name("rows.cu")
COLUMNS = 16
_ALIGNMENT = 16
_MOST_THREADS, _MOST_PIECES, _MOST_SETS = 512, 256, 8
_SETS = 2  # so that what a thread does once, a scale's reciprocals or a sum over the block, counts half
_PROLOGUES = {"plain": 0, "rmsnorm": 1, "silu_mul": 2}
_DTYPES = (torch.bfloat16, torch.float16)
_POINTERS = ("x", "residual", "gain", "h", "codes", "scale", "amax", "tensor")
Defines = tuple[tuple[str, int], ...]


class Arguments(ctypes.Structure):
    """rows.cu's Arguments."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_longlong) for name in ("x_row", "residual_row")),
        ("columns", ctypes.c_int),
        ("eps", ctypes.c_float),
    ]


def cut(width: int, whole_row: bool) -> tuple[int, int, int]:
    """(threads of a block, pieces a thread holds, blocks a row) for rows of `width` columns."""
    pieces = -(-width // COLUMNS)
    chunks = 1 if whole_row else -(-pieces // _MOST_PIECES)
    together = -(-pieces // chunks)
    sets = max(_SETS if together > 32 else 1, -(-together // _MOST_THREADS))
    return -(-together // (sets * 32)) * 32, sets, chunks


@cache
def defines(
    fmt: BlockFormat, fp16: bool, prologue: str, residual: bool, hadamard: int, width: int, native: bool
) -> tuple[Defines, int, int]:
    """(what rows.cu is compiled with, threads of a block, blocks a row)."""
    threads, sets, chunks = cut(width, fmt.block[1] is None or prologue == "rmsnorm")
    inverse = np.float32(1 / fmt.element.max)
    found = {**facts(fmt), "S_BITS": fmt.scale.bits, "MOST": scales.MAX_ENCODE, "ROOT": max(hadamard, 1) ** -0.5,
             "E_INVERSE": float(inverse), "E_REST": 1 / fmt.element.max - float(inverse)}  # fmt: skip
    bits = {name: _bits(value) if isinstance(value, float) else int(value) for name, value in found.items()}
    shape = {"X_FP16": int(fp16), "PROLOGUE": _PROLOGUES[prologue], "RESIDUAL": int(residual), "HADAMARD": hadamard,
             "THREADS": threads, "SETS": sets, "CHUNKS": chunks, "NATIVE": int(native)}  # fmt: skip
    return tuple(sorted({**bits, **shape}.items())), threads, chunks


def _bits(value: float) -> int:
    return int(struct.unpack("<I", struct.pack("<f", value))[0])


@cache
def _kernel(given: Defines, device: int) -> _nvrtc.Kernel:
    arch = _nvrtc.architecture(torch.cuda.get_device_capability(device))
    return _nvrtc.Kernel.load(_nvrtc.build(SOURCE, dict(given), arch), "quantize_rows")


def launch(x: Tensor, given: Defines, blocks: int, threads: int, argument: Arguments) -> None:
    """Start the kernel on x's device and torch's current stream."""
    with torch.cuda.device(x.device):
        current = torch.cuda.current_stream(x.device).cuda_stream
        _kernel(given, x.device.index).launch((blocks, 1), threads, 0, argument, False, current)


def _supports(
    x: Tensor, fmt: BlockFormat, prologue: str, residual: Tensor | None, gain: Tensor | None, eps: float,
    tensor_amax: Tensor | None, hadamard: int,
) -> str | None:  # fmt: skip
    reason = unfit(x, fmt, prologue, residual, gain, tensor_amax)
    return reason or _nvrtc.refusal(torch.cuda.get_device_capability(x.device))


def unfit(
    x: Tensor, fmt: BlockFormat, prologue: str, residual: Tensor | None, gain: Tensor | None, tensor_amax: Tensor | None
) -> str | None:
    """Why rows.cu cannot take the call on any machine, or None."""
    width = width_of(x, prologue)
    if x.dtype not in _DTYPES:
        return f"reads bfloat16 and float16, not {x.dtype}"
    if not x.numel() or width % COLUMNS or width > _MOST_THREADS * _MOST_SETS * COLUMNS:
        return f"takes rows of {COLUMNS} columns and multiples, at least one row; x is {tuple(x.shape)}"
    for name, part in (("x", x), ("residual", residual), ("gain", gain)):
        if part is not None and not aligned(part):
            return f"reads {_ALIGNMENT} bytes at once; {name} with strides {part.stride()} does not lie so"
    return refusal(fmt, tensor_amax)


def aligned(part: Tensor) -> bool:
    """Whether every row of [..., K], seen as [M, K] without a copy, starts at a multiple of 16 bytes."""
    if part.stride(-1) != 1 or part.data_ptr() % _ALIGNMENT:
        return False
    rows = part.reshape(-1, part.shape[-1])
    step = rows.stride(0) * rows.element_size() if len(rows) > 1 else 0
    return rows.data_ptr() == part.data_ptr() and step % _ALIGNMENT == 0


def run(
    x: Tensor, fmt: BlockFormat, prologue: str, residual: Tensor | None, gain: Tensor | None, eps: float,
    tensor_amax: Tensor | None, hadamard: int,
) -> tuple[QuantTensor, Tensor]:  # fmt: skip
    """The op on a GPU; arguments that `unfit` lets pass."""
    width, codes, scale, tensor, h = empty_results(x, fmt, prologue, residual)
    flat, added = (part.reshape(-1, part.shape[-1]) for part in (x, x if residual is None else residual))
    native = x.device.type == "cuda" and torch.cuda.get_device_capability(x.device) >= (8, 9)
    given, threads, chunks = defines(
        fmt, x.dtype == torch.float16, prologue, residual is not None, hadamard, width, native
    )  # fmt: skip
    pointers = [None if part is None else part.data_ptr() for part in (
        flat, added, gain, h, codes, scale, tensor_amax if fmt.tensor_scale else None, tensor)]  # fmt: skip
    argument = Arguments(*pointers, flat.stride(0), added.stride(0), width, eps)
    launch(x, given, len(flat) * chunks, threads, argument)
    return QuantTensor(fmt, (*x.shape[:-1], width), codes, scale, tensor, None, DENSE, x.dtype), h


NOTE = "first for formats timed on an H200, without a prologue or, for blocks of 16, without a residual"
IMPLEMENTATIONS = (Implementation("quantize_rows_cuda_sm80", run, _supports, native=True, note=NOTE),)
