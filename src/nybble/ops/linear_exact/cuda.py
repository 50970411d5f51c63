"""linear_exact on NVIDIA GPUs: CUDA C++ on the float32 units, compiled when first needed.

stream.cu serves few tokens and is bound by reading the weight, tile.cu serves many and is bound by multiply-adds; which
of them runs, and in what shape, does not show in the result. Weights are read as they are: 16-bit or float32 tensors,
int8 and int4 codes with their scales. Other formats are widened to float32 first, which is exact but reads more.

Nothing here synchronises, and memory comes from torch's allocator alone, so calls may be captured in a CUDA graph.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from nybble.formats.spec import IntFormat
from nybble.ops import _nvrtc
from nybble.ops import _promised_linear as shared
from nybble.ops._declare import Implementation
from nybble.ops._promised_linear import RUN
from nybble.quantize import QuantTensor
from nybble.quantize.layouts import DENSE

_STREAM, _TILE = (Path(__file__).with_name(name) for name in ("stream.cu", "tile.cu"))
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
_INT = 3


class _Arguments(ctypes.Structure):
    """numbers.cuh's Arguments."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "w", "scale", "zero", "bias", "y")),
        *((name, ctypes.c_longlong) for name in ("x_row", "w_row")),
        *((name, ctypes.c_int) for name in ("m", "n", "k", "groups")),
    ]


@dataclass(frozen=True)
class Stream:
    """How stream.cu is instantiated: tokens of a pass, a warp's rows, turns asked for at once."""

    tokens: int
    rows: int
    unroll: int
    source, name, threads = _STREAM, "linear_exact_stream", 128

    def shared_bytes(self, x_run: int, w_run: int) -> int:
        """Dynamic shared memory: none."""
        return 0

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Blocks: groups of rows, passes over the weight."""
        return -(-n // (self.rows * self.threads // 32)), -(-m // self.tokens)

    @property
    def defines(self) -> dict[str, int]:
        """Macros."""
        return {"TOKENS": self.tokens, "ROWS": self.rows, "UNROLL": self.unroll}


@dataclass(frozen=True)
class Tile:
    """How tile.cu is instantiated: a thread's tokens and rows (times 16: the tile's), blocks that share a processor."""

    tokens: int
    rows: int = 8
    blocks: int = 2
    source, name, threads = _TILE, "linear_exact_tile", 256

    def grid(self, m: int, n: int) -> tuple[int, int]:
        """Blocks: tiles of tokens, tiles of outputs."""
        return -(-m // (16 * self.tokens)), -(-n // (16 * self.rows))

    def shared_bytes(self, x_run: int, w_run: int) -> int:
        """Totals, two buffers of 16 columns of both operands, and the runs that are on their way."""
        sums, columns = self.tokens * self.rows * self.threads, 16 * (self.tokens + self.rows) + 8
        return 4 * (sums + 2 * 16 * columns) + self.threads * x_run + 2 * 16 * self.rows * w_run

    @property
    def defines(self) -> dict[str, int]:
        """Macros."""
        return {"TOKENS": self.tokens, "ROWS": self.rows, "BLOCKS": self.blocks}


Plan = Stream | Tile
_STREAMS = {1: Stream(1, 2, 4), 2: Stream(2, 2, 4), 4: Stream(4, 4, 2), 8: Stream(8, 4, 2)}
_FEW_ROWS, _FEW = 8192, Stream(1, 1, 8)  # a row a warp, where two would leave processors without work
_STREAM_TOKENS, _TILES = 64, {128: Tile(4), 256: Tile(8)}


def plan(m: int, n: int) -> Plan:
    """What runs for m tokens and n outputs."""
    if m == 1 and n <= _FEW_ROWS:
        return _FEW
    if m <= _STREAM_TOKENS:
        return _STREAMS[next((tokens for tokens in _STREAMS if tokens >= m), max(_STREAMS))]
    return _TILES[next((tokens for tokens in _TILES if tokens >= m), max(_TILES))]


@cache
def _kernel(chosen: Plan, shared_bytes: int, defines: tuple[tuple[str, int], ...], device: int) -> _nvrtc.Kernel:
    major, minor = torch.cuda.get_device_capability(device)
    cubin = _nvrtc.build(chosen.source, dict(defines), f"{major}{minor}")
    return _nvrtc.Kernel.load(cubin, chosen.name, shared_bytes)


def run(x: Tensor, w: shared.Weight, bias: Tensor | None, chosen: Plan | None = None) -> Tensor:
    """x [..., K] times w^T plus bias, by `chosen` or by what `plan` says."""
    n, k = w.shape
    y = x.new_empty((*x.shape[:-1], n))
    rows = shared.whole_runs(shared.rows(x))
    defines, weight, row, groups, scale, zero = _described(w)
    shift = None if bias is None else bias.to(torch.float32).contiguous()
    pointers = (None if t is None else t.data_ptr() for t in (rows, weight, scale, zero, shift, y))
    padded = -(-k // RUN) * RUN
    arguments = _Arguments(*pointers, rows.stride(0) * x.element_size(), row, len(rows), n, padded, groups)
    runs = RUN * x.element_size(), defines["BITS"] if defines["W_KIND"] == _INT else RUN * weight.element_size()
    chosen = chosen or _that_fits(plan(len(rows), n), runs, x.device.index)
    found = tuple(sorted({"X_KIND": _KINDS[x.dtype], **defines, **chosen.defines}.items()))
    with torch.cuda.device(x.device):
        kernel = _kernel(chosen, chosen.shared_bytes(*runs), found, x.device.index)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        kernel.launch(
            chosen.grid(len(rows), n), chosen.threads, chosen.shared_bytes(*runs), arguments, False, stream
        )  # fmt: skip
    return y


def _that_fits(chosen: Plan, runs: tuple[int, int], device: int) -> Plan:
    """The plan, or a smaller tile where a block has too little shared memory for it."""
    found = torch.cuda.get_device_properties(device)
    room: int = found.shared_memory_per_block_optin  # type: ignore[attr-defined]
    return chosen if chosen.shared_bytes(*runs) <= room else Tile(4)


def _described(w: shared.Weight) -> tuple[dict[str, int], Tensor, int, int, Tensor | None, Tensor | None]:
    """(macros, the stored weight, a row's bytes, groups, scales, zero points)."""
    if isinstance(w, QuantTensor) and _integers(w) is None:
        plain, bits = w.to_layout(DENSE), w.format.element.bits
        scale, zero = plain.scales()
        defines = {"W_KIND": _INT, "BITS": bits, "GROUP": w.format.block[1] or 0}
        return defines, plain.codes.contiguous(), w.shape[1] * bits // 8, scale.shape[1], scale.contiguous(), zero
    weight = shared.whole_runs(shared.values(w))
    return {"W_KIND": _KINDS[weight.dtype]}, weight, weight.stride(0) * weight.element_size(), 0, None, None


def _integers(w: QuantTensor) -> str | None:
    """Why the codes cannot be read as they are, or None."""
    element, (rows, columns) = w.format.element, w.format.block
    plain = isinstance(element, IntFormat) and element.low < 0 and element.fraction_bits == 0
    if not plain or element.bits not in (4, 8) or rows != 1:
        return f"reads int8 and int4 codes with scales by rows; the weight is {w.format.name}"
    if w.shape[1] % RUN or (columns or 0) % RUN:
        return f"K = {w.shape[1]} or the group {columns} is not a multiple of {RUN}"
    return None


def _refusal(x: Tensor, w: shared.Weight, bias: Tensor | None = None) -> str | None:
    if x.numel() == 0 or w.shape[0] == 0:
        return f"nothing to compute: x is {tuple(x.shape)}, the weight {tuple(w.shape)}"
    return _nvrtc.refusal(torch.cuda.get_device_capability(x.device))


def _dense(x: Tensor, w: shared.Weight, bias: Tensor | None) -> str | None:
    return f"the weight is {w.format.name}" if isinstance(w, QuantTensor) else _refusal(x, w)


def _coded(x: Tensor, w: shared.Weight, bias: Tensor | None) -> str | None:
    return (_integers(w) or _refusal(x, w)) if isinstance(w, QuantTensor) else "the weight is not quantized"


IMPLEMENTATIONS = (
    Implementation("linear_exact_w16_cuda_sm80", run, _dense, native=True),
    Implementation("linear_exact_wint_cuda_sm80", run, _coded, native=True, layout=lambda w: DENSE),
    Implementation("linear_exact_dequantize_cuda_sm80", run, _refusal, native=False),
)
