"""linear on NVIDIA GPUs with 16-bit activations: CUDA C++ kernels, compiled when first needed.

Two kernels serve every weight that decode.cuh can decode: stream.cu keeps x in shared memory and lets the weight
stream past (few tokens; compute capability 8.0 and later), tile.cu feeds wgmma with weights decoded in registers
(many tokens; Hopper). config.py chooses between them and their shapes. Both read the weight in the layout of
quantize/layouts_gpu.py; a weight in another one is converted on every call, so QuantLinear.prepare does it once.

Nothing here synchronises, and memory comes from torch's allocator alone, so calls may be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from nybble.formats.spec import BlockFormat, TableFormat
from nybble.ops import _nvrtc
from nybble.ops._declare import Implementation
from nybble.ops.linear import config, macros
from nybble.quantize import QuantTensor
from nybble.quantize.layouts import Layout
from nybble.quantize.layouts_gpu import SPREAD_TILES, TILES

_STREAM, _TILE = (Path(__file__).with_name(name) for name in ("stream.cu", "tile.cu"))
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int
_SUM_THREADS = 256
_OLDEST = (8, 0)
_MOST_ELEMENTS = 2**31  # of an offset within the kernels


class _Stream(ctypes.Structure):
    """stream.cu's Arguments."""

    _fields_ = [
        *((name, _POINTER) for name in ("codes", "scale", "zero", "tensor_scale", "x", "table", "bias", "y")),
        *((name, _LONG) for name in ("x_row", "x_column")),
        *((name, _INT) for name in ("m", "n", "k", "tiles", "chunks", "slice", "shift")),
        ("factor", ctypes.c_float),
    ]


class _Sum(ctypes.Structure):
    """stream.cu's SumArguments."""

    _fields_ = [(name, _POINTER) for name in ("parts", "bias", "y")] + [("count", _LONG), ("n", _INT), ("slices", _INT)]


class _Tile(ctypes.Structure):
    """tile.cu's Arguments; the tensor map's alignment of 64 bytes rounds the size up."""

    _fields_ = [
        ("x", ctypes.c_uint64 * 16),
        *((name, _POINTER) for name in ("codes", "scale", "zero", "tensor_scale", "bias", "y")),
        *((name, _INT) for name in ("m", "n", "blocks", "chunks", "slice", "shift", "token_tiles")),
        ("factor", ctypes.c_float),
        ("padding", ctypes.c_uint64 * 6),
    ]


def layout_for(fmt: BlockFormat) -> Layout:
    """The layout in which the kernels read a format."""
    return SPREAD_TILES if macros.describe(fmt)["CODE"] == 1 else TILES


@cache
def machine(device: int) -> config.Machine:
    """What config.py wants to know of a device."""
    found = torch.cuda.get_device_properties(device)
    shared: int = found.shared_memory_per_block_optin  # type: ignore[attr-defined]
    speed = config.H200.terabytes_per_second
    return config.Machine((found.major, found.minor), found.multi_processor_count, shared, speed)


def problem(x: Tensor, w: QuantTensor) -> config.Problem:
    """config.py's description of a call."""
    n, k = w.shape
    rows = x.numel() // k
    return config.Problem(rows, n, k, w.format, x.dtype == torch.float16, machine(x.device.index))


@cache
def _kernel(source: Path, defines: tuple[tuple[str, int], ...], name: str, device: int) -> _nvrtc.Kernel:
    (major, minor), shared = machine(device).capability, machine(device).shared_bytes
    arch = f"{major}{minor}{'a' if major >= 9 else ''}"
    return _nvrtc.Kernel.load(_nvrtc.build(source, dict(defines), arch), name, shared)


@cache
def _values(element: TableFormat, device: torch.device) -> Tensor:
    return torch.tensor(element.values, dtype=torch.float32, device=device)


def _pointers(*parts: Tensor | None) -> tuple[int | None, ...]:
    return tuple(None if part is None else part.data_ptr() for part in parts)


def stream(
    x: Tensor, w: QuantTensor, bias: Tensor | None, plan: config.Stream, y: Tensor, overlap: bool = True
) -> None:
    """y [M, N] = x [M, K] w^T + bias with stream.cu, for M up to 8 * plan.mt and w in `layout_for(w.format)`."""
    p, fmt, device = problem(x, w), w.format, x.device.index
    split = plan.slices > 1
    target = torch.empty((plan.slices, p.m, p.n), dtype=torch.float32, device=x.device) if split else y
    table = _values(fmt.element, x.device) if isinstance(fmt.element, TableFormat) else None
    arguments = _Stream(
        *_pointers(w.codes, w.scale, w.zero_point, w.tensor_scale, x, table, None if split else bias, target),
        *x.stride(), p.m, p.n, p.k, p.tiles, p.chunks, plan.slice_chunks(p), macros.group_shift(fmt),
        macros.factor(fmt, p.fp16),
    )  # fmt: skip
    defines = tuple(sorted({**macros.defines(fmt, p.fp16), **plan.defines(p.m)}.items()))
    current = torch.cuda.current_stream(x.device).cuda_stream
    kernel = _kernel(_STREAM, defines, "linear_stream", device)
    kernel.launch(plan.grid(p), plan.threads, plan.shared_bytes(p), arguments, overlap, current)
    if split:
        count = p.m * p.n
        total = _Sum(*_pointers(target, bias, y), count, p.n, plan.slices)
        kernel = _kernel(_STREAM, defines, "linear_stream_sum", device)
        kernel.launch((-(-count // _SUM_THREADS), 1), _SUM_THREADS, 0, total, overlap, current)


def tile(x: Tensor, w: QuantTensor, bias: Tensor | None, plan: config.Tile, y: Tensor, overlap: bool = True) -> None:
    """y [M, N] = x [M, K] w^T + bias with tile.cu; w in `layout_for(w.format)`."""
    p, fmt = problem(x, w), w.format
    x = _aligned(x)
    tokens, columns = plan.tokens * plan.wgmmas, macros.COLUMNS // 2
    arguments = _Tile(
        _nvrtc.tensor_map(x.data_ptr(), (p.m, x.shape[1]), x.stride(0), (tokens, columns), p.fp16),
        *_pointers(w.codes, w.scale, w.zero_point, w.tensor_scale, bias, y), p.m, p.n, w.codes.shape[0], p.chunks,
        plan.slice_chunks(p), macros.group_shift(fmt), plan.token_tiles(p), macros.tile_factor(fmt, p.fp16),
    )  # fmt: skip
    found = {**macros.defines(fmt, p.fp16), **macros.tile_defines(fmt, p.fp16), **plan.defines(p.m)}
    kernel = _kernel(_TILE, tuple(sorted(found.items())), "linear_tile", x.device.index)
    current = torch.cuda.current_stream(x.device).cuda_stream
    kernel.launch(plan.grid(p), plan.threads, plan.shared_bytes(p), arguments, overlap, current)


def _aligned(x: Tensor) -> Tensor:
    """x with rows of whole 16-byte pieces at multiples of 16 bytes, ended by zeros; x itself if it is so already."""
    m, k = x.shape
    row = x.stride(0) if m > 1 else k
    if x.stride(1) == 1 and row % 8 == 0 and row >= k and k % 8 == 0 and x.data_ptr() % 16 == 0 and m > 1:
        return x
    wide = x.new_zeros((m, -(-k // 8) * 8))
    wide[:, :k] = x
    return wide


def run(x: Tensor, w: QuantTensor, bias: Tensor | None, plan: config.Stream | config.Tile) -> Tensor:
    """x [..., K] times w^T plus bias, as `plan` says; w in any layout."""
    n, k = w.shape
    y = x.new_empty((*x.shape[:-1], n))
    rows, out = x.reshape(-1, k), y.view(-1, n)
    w = w.to_layout(layout_for(w.format))
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    with torch.cuda.device(x.device):
        if isinstance(plan, config.Tile):
            tile(rows, w, bias, plan, out)
        else:
            for first in range(0, len(rows), 8 * plan.mt):
                part = slice(first, first + 8 * plan.mt)
                stream(rows[part], w, bias, plan, out[part])
    return y


def _refusal(x: Tensor, w: QuantTensor, activation: BlockFormat | None) -> str | None:
    if activation is not None:
        return f"keeps activations as they are; {activation.name} was asked for"
    if x.dtype not in (torch.bfloat16, torch.float16):
        return f"takes bfloat16 or float16 activations, got {x.dtype}"
    if x.numel() == 0 or w.shape[0] == 0:
        return f"nothing to compute: x is {tuple(x.shape)}, the weight {w.shape}"
    if max(x.numel(), x.numel() // w.shape[1] * w.shape[0]) >= _MOST_ELEMENTS:
        return f"x {tuple(x.shape)} or the result has 2^31 elements or more"
    if machine(x.device.index).capability < _OLDEST:
        return f"needs compute capability 8.0, this is {machine(x.device.index).capability}"
    try:
        macros.describe(w.format)
    except ValueError as reason:
        return f"cannot decode {w.format.name}: {reason}"
    return _nvrtc.available()


def _implementation(name: str, kind: type, what: str) -> Implementation:
    def supports(
        x: Tensor, w: QuantTensor, bias: Tensor | None, activation: BlockFormat | None, amax: Tensor | None
    ) -> str | None:
        refusal = _refusal(x, w, activation)
        if refusal is not None:
            return refusal
        try:
            choice = config.choose(problem(x, w))
        except ValueError as reason:
            return str(reason)
        if isinstance(choice.plan, kind):
            return None
        best, mine = choice.scored[0][0], [time for time, plan in choice.scored if isinstance(plan, kind)]
        if not mine:
            return next(
                c.refusal(choice.problem) or what for c in config.candidates(choice.problem) if isinstance(c, kind)
            )
        return f"{what}: predicted {mine[0]:.1f} us, the other kernel {best:.1f} us"

    def execute(
        x: Tensor, w: QuantTensor, bias: Tensor | None, activation: BlockFormat | None, amax: Tensor | None
    ) -> Tensor:
        return run(x, w, bias, config.choose(problem(x, w)).plan)

    return Implementation(name, execute, supports, native=True, layout=lambda w: layout_for(w.format))


IMPLEMENTATIONS = (
    _implementation("linear_wna16_tile_cuda_sm90", config.Tile, "fewer tokens than it pays for"),
    _implementation("linear_wna16_stream_cuda_sm80", config.Stream, "more tokens than it pays for"),
)
