"""linear on NVIDIA GPUs with 16-bit activations: CUDA C++ kernels, compiled when first needed.

Four ways serve the weights that decode.cuh can decode: stream.cu keeps x in shared memory and lets the weight stream
past (few tokens; compute capability 8.0 and later), tile.cu feeds wgmma with weights decoded in registers (tens of
tokens; Hopper), walk.cu does so with blocks that stay (hundreds and more; Hopper), and widen.cu writes the weight out
in bf16 once for cuBLAS (many tokens where those two do not serve; its 2 N K bytes are given back to torch's allocator
after the call, so a model needs room for one layer). config.py chooses among them and their shapes. All read the weight
in the layout of quantize/layouts_gpu.py; a weight in another one is converted on every call, so QuantLinear.prepare
does it once.

Nothing here synchronises but the first call with a weight whose range of scales matters (macros.usual_scales), and
memory comes from torch's allocator alone, so calls may be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from nybble.errors import BadInput
from nybble.formats.spec import BlockFormat, FloatFormat, TableFormat
from nybble.ops import _nvrtc
from nybble.ops._declare import Implementation
from nybble.ops.linear import config, macros
from nybble.quantize import QuantTensor, elements
from nybble.quantize.layouts import Layout
from nybble.quantize.layouts_gpu import SPREAD_TILES, TILES

_STREAM, _TILE, _WALK, _WIDEN = (Path(__file__).with_name(f"{name}.cu") for name in ("stream", "tile", "walk", "widen"))
_POINTER, _LONG, _INT = ctypes.c_void_p, ctypes.c_longlong, ctypes.c_int
_SUM_THREADS = 256
_OLDEST = (8, 0)
_MOST_ELEMENTS = 2**31  # of an offset within the kernels
_LARGEST: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # scale -> its largest value and version


class _Stream(ctypes.Structure):
    """stream.cu's Arguments."""

    _fields_ = [
        *((name, _POINTER) for name in ("codes", "scale", "zero", "tensor_scale", "x", "table", "bias", "y")),
        *((name, _LONG) for name in ("x_row", "x_column")),
        *((name, _INT) for name in ("m", "n", "k", "tiles", "chunks", "slice", "shift")),
        ("factor", ctypes.c_float),
    ]


class _Surrounded(_Stream):
    """The same with what NORM adds."""

    _fields_ = [*((name, _POINTER) for name in ("residual", "gain", "h")), ("eps", ctypes.c_float)]


@dataclass(frozen=True)
class Around:
    """What stream.cu does around its product (around.cuh): RMSNorm of x + residual before it, maybe a gate after it.

    Attributes:
        gain: [K], the norm's weight. eps: added to the mean of squares.
        residual: [M, K] or None for zeros. h: [M, K], becomes x + residual; None without a residual.
        gate: whether w is [gate | up], N / 2 rows each, and the result silu(gate) * up [M, N / 2].

    All start at multiples of 16 bytes, and so do their rows and those of x.
    """

    gain: Tensor
    eps: float
    residual: Tensor | None
    h: Tensor | None
    gate: bool


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
        ("table", _POINTER),
        ("padding", ctypes.c_uint64 * 5),
    ]


class _Walk(ctypes.Structure):
    """walk.cu's Arguments, rounded up likewise."""

    _fields_ = [
        *((name, ctypes.c_uint64 * 16) for name in ("x", "y")),
        *((name, _POINTER) for name in ("codes", "scale", "zero", "tensor_scale", "bias", "parts", "ready")),
        *((name, _INT) for name in ("m", "n", "blocks", "chunks", "shift", "pairs", "token_tiles", "shared")),
        ("factor", ctypes.c_float),
        ("table", _POINTER),
        ("padding", ctypes.c_uint64 * 3),
    ]


class _Widen(ctypes.Structure):
    """widen.cu's Arguments."""

    _fields_ = [
        *((name, _POINTER) for name in ("codes", "scale", "zero", "tensor_scale", "table", "w")),
        *((name, _INT) for name in ("n", "k", "chunks", "shift")),
        ("factor", ctypes.c_float),
    ]


def layout_for(fmt: BlockFormat) -> Layout:
    """The layout in which the kernels read a format."""
    return SPREAD_TILES if macros.describe(fmt)["CODE"] == 1 else TILES


def sound_layout(w: QuantTensor) -> Layout:
    """layout_for(w.format), once it is known that w holds no code that the kernels would take for a number.

    Raises:
        BadInput: NaN or infinite codes of an 8-bit float, negative ones of an 8-bit scale. The device is asked when the
            weight is laid out, so that cannot happen within a capture.
    """
    wanted = layout_for(w.format)
    if w.layout == wanted:
        return wanted
    element, scale = w.format.element, w.format.scale
    if isinstance(element, FloatFormat) and element.has_nan and element.bits == 8:
        _refuse((w.unpack() & (1 << element.magnitude_bits) - 1) > element.max_code, element.name, "elements")
    if isinstance(scale, FloatFormat) and scale.bits == 8:
        codes = w.layout.unpack_scales(w.scale, w.zero_point, w.format, w.shape)[0].view(torch.uint8)
        _refuse(codes > scale.max_code, scale.name, "scales")
    return wanted


def _refuse(bad: Tensor, name: str, what: str) -> None:
    if bad.is_cuda and torch.cuda.is_current_stream_capturing():
        raise BadInput("a weight is laid out for the GPU kernels before a capture: call QuantLinear.prepare first")
    if count := int(bad.sum()):
        raise BadInput(f"{count} {what} of the weight are NaN, infinite or negative codes of {name}")


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
    rows, fp16 = x.numel() // k, x.dtype == torch.float16
    return config.Problem(rows, n, k, w.format, fp16, machine(x.device.index), _usual(w, fp16))


def _usual(w: QuantTensor, fp16: bool) -> bool:
    """Whether w's largest scale lies within macros.usual_scales, asked of the device once for each weight.

    In a capture nothing can be asked; what was not asked before counts as unusual, which costs speed only.
    """
    bounds = macros.usual_scales(w.format, fp16)
    if bounds is None or w.scale.numel() == 0:
        return True
    largest, version = _LARGEST.get(w.scale, (0.0, -1))
    if version != w.scale._version:
        if torch.cuda.is_current_stream_capturing():
            return False
        largest = float(elements.decode(w.format.scale, w.scale).abs().max())
        _LARGEST[w.scale] = largest, w.scale._version
    return bounds[0] <= largest <= bounds[1]


@cache
def _kernel(source: Path, defines: tuple[tuple[str, int], ...], name: str, device: int) -> _nvrtc.Kernel:
    here = machine(device)
    cubin = _nvrtc.build(source, dict(defines), _nvrtc.architecture(here.capability))
    return _nvrtc.Kernel.load(cubin, name, here.shared_bytes)


@cache
def _values(element: TableFormat, device: torch.device) -> Tensor:
    return torch.tensor(element.values, dtype=torch.float32, device=device)


def _table(w: QuantTensor) -> Tensor | None:
    element = w.format.element
    return _values(element, w.device) if isinstance(element, TableFormat) else None


def _pointers(*parts: Tensor | None) -> tuple[int | None, ...]:
    return tuple(None if part is None else part.data_ptr() for part in parts)


def stream(
    x: Tensor,
    w: QuantTensor,
    bias: Tensor | None,
    plan: config.Stream,
    y: Tensor,
    overlap: bool = True,
    around: Around | None = None,
) -> None:
    """y [M, N] = x [M, K] w^T + bias with stream.cu, for M up to 8 * plan.mt and w in `layout_for(w.format)`.

    With `around`, what that says; the plan has to satisfy `plan.surrounded`.
    """
    p, fmt, device = problem(x, w), w.format, x.device.index
    split = plan.slices > 1
    target = torch.empty((plan.slices, p.m, p.n), dtype=torch.float32, device=x.device) if split else y
    table = _table(w)
    common = (
        *_pointers(w.codes, w.scale, w.zero_point, w.tensor_scale, x, table, None if split else bias, target),
        *x.stride(), p.m, p.n, p.k, p.tiles, p.chunks, plan.slice_chunks(p), macros.group_shift(fmt),
        macros.factor(fmt, p.fp16, p.usual),
    )  # fmt: skip
    arguments, found = _Stream(*common), {**macros.defines(fmt, p.fp16, p.usual), **plan.defines(p.m)}
    if around is not None:
        arguments = _Surrounded(*common, *_pointers(around.residual, around.gain, around.h), around.eps)
        found |= {"NORM": p.m, "PIECES": plan.pieces(p), "GATE": int(around.gate)}
    defines = tuple(sorted(found.items()))
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
        plan.slice_chunks(p), macros.group_shift(fmt), plan.token_tiles(p), macros.tile_factor(fmt, p.fp16, p.usual),
        *_pointers(_table(w)),
    )  # fmt: skip
    found = {**macros.defines(fmt, p.fp16, p.usual), **macros.tile_defines(fmt, p.fp16), **plan.defines(p.m)}
    kernel = _kernel(_TILE, tuple(sorted(found.items())), "linear_tile", x.device.index)
    current = torch.cuda.current_stream(x.device).cuda_stream
    kernel.launch(plan.grid(p), plan.threads, plan.shared_bytes(p), arguments, overlap, current)


def walk(x: Tensor, w: QuantTensor, bias: Tensor | None, plan: config.Walk, y: Tensor, overlap: bool = True) -> None:
    """y [M, N] = x [M, K] w^T + bias with walk.cu; w in `layout_for(w.format)`, y's rows at multiples of 16 bytes."""
    p, fmt, half = problem(x, w), w.format, macros.COLUMNS // 2
    x = _aligned(x)
    shared, blocks = plan.shared_tiles(p), plan.grid(p)[0]
    # Flags start at zero in every call: a captured graph may be replayed anywhere, beside anything.
    ready = torch.zeros((blocks, 2), dtype=torch.int32, device=x.device) if shared else None
    parts = x.new_empty((blocks, plan.rows, plan.tokens), dtype=torch.float32) if shared else None
    arguments = _Walk(
        _nvrtc.tensor_map(x.data_ptr(), (p.m, x.shape[1]), x.stride(0), (plan.tokens // 2, half), p.fp16),
        _nvrtc.tensor_map(y.data_ptr(), (p.m, p.n), p.n, (config.OUT_TOKENS, half), p.fp16),
        *_pointers(w.codes, w.scale, w.zero_point, w.tensor_scale, bias, parts, ready), p.m, p.n, w.codes.shape[0],
        p.chunks, macros.group_shift(fmt), plan.pairs(p), plan.token_tiles(p), shared,
        macros.tile_factor(fmt, p.fp16, p.usual), *_pointers(_table(w)),
    )  # fmt: skip
    found = {**macros.defines(fmt, p.fp16, p.usual), **macros.tile_defines(fmt, p.fp16), **plan.defines(p.m)}
    kernel = _kernel(_WALK, tuple(sorted(found.items())), "linear_walk", x.device.index)
    current = torch.cuda.current_stream(x.device).cuda_stream
    kernel.launch(plan.grid(p), plan.threads, plan.shared_bytes(p), arguments, overlap, current)


def widened(w: QuantTensor, overlap: bool = True) -> Tensor:
    """w [N, K] in bf16, each value rounded once; w in `layout_for(w.format)`."""
    (n, k), fmt, usual = w.shape, w.format, _usual(w, False)
    made = torch.empty((n, k), dtype=torch.bfloat16, device=w.device)
    table = _table(w)
    arguments = _Widen(
        *_pointers(w.codes, w.scale, w.zero_point, w.tensor_scale, table, made), n, k, w.codes.shape[1],
        macros.group_shift(fmt), macros.factor(fmt, False, usual),
    )  # fmt: skip
    kernel = _kernel(_WIDEN, tuple(sorted(macros.defines(fmt, False, usual).items())), "linear_widen", w.device.index)
    current = torch.cuda.current_stream(w.device).cuda_stream
    plan, p = config.Widen(), config.Problem(0, n, k, fmt)
    kernel.launch(plan.grid(p), plan.threads, plan.shared_bytes(p), arguments, overlap, current)
    return made


def _aligned(x: Tensor) -> Tensor:
    """x with rows of whole 16-byte pieces at multiples of 16 bytes, ended by zeros; x itself if it is so already."""
    m, k = x.shape
    row = x.stride(0) if m > 1 else k
    if x.stride(1) == 1 and row % 8 == 0 and row >= k and k % 8 == 0 and x.data_ptr() % 16 == 0 and m > 1:
        return x
    wide = x.new_zeros((m, -(-k // 8) * 8))
    wide[:, :k] = x
    return wide


def run(x: Tensor, w: QuantTensor, bias: Tensor | None, plan: config.Plan) -> Tensor:
    """x [..., K] times w^T plus bias, as `plan` says; w in any layout."""
    n, k = w.shape
    w = w.to_layout(sound_layout(w))
    bias = None if bias is None else bias.to(x.dtype).contiguous()
    with torch.cuda.device(x.device):
        if isinstance(plan, config.Widen):
            return torch.nn.functional.linear(x, widened(w), bias)
        y = x.new_empty((*x.shape[:-1], n))
        rows, out = x.reshape(-1, k), y.view(-1, n)
        if isinstance(plan, config.Tile):
            tile(rows, w, bias, plan, out)
        elif isinstance(plan, config.Walk):
            walk(rows, w, bias, plan, out)
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
            tried = (c for c in config.candidates(choice.problem) if isinstance(c, kind))
            return next((c.refusal(choice.problem) or what for c in tried), what)
        return f"{what}: predicted {mine[0]:.1f} us, the other kernel {best:.1f} us"

    def execute(
        x: Tensor, w: QuantTensor, bias: Tensor | None, activation: BlockFormat | None, amax: Tensor | None
    ) -> Tensor:
        return run(x, w, bias, config.choose(problem(x, w)).plan)

    return Implementation(name, execute, supports, native=True, layout=sound_layout)


IMPLEMENTATIONS = (
    _implementation("linear_wna16_walk_cuda_sm90", config.Walk, "fewer tokens than it pays for"),
    _implementation("linear_wna16_tile_cuda_sm90", config.Tile, "not as many tokens as it pays for"),
    _implementation("linear_wna16_stream_cuda_sm80", config.Stream, "more tokens than it pays for"),
    _implementation("linear_wna16_widen_cublas_sm80", config.Widen, "fewer tokens than it pays for"),
)
