"""Other libraries' weight-only products, for `nybble bench --rivals`: used when installed, never needed.

`contenders` yields what can run a given problem here. A rival that takes our codes and scales computes the very same
product and owes the op's agreement; one that quantizes the weight itself, or x as well, is held to `near`: as close to
the original product as its bits allow. What a rival compiles or tunes for a shape happens in its first call, before
anything is timed; GemLite runs with the settings that it ships for the machine, or its defaults.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from nybble.errors import Mismatch
from nybble.quantize import QuantTensor

PACKAGES = ("humming-kernels", "bitsandbytes", "gemlite", "sgl-deep-gemm")
_READY_IN = 30.0
_NEAR = 0.25  # ||y - original|| / ||original||: four bits give 0.1, a wrong product 1

Call = Callable[[int], Tensor]
Contender = tuple[str, int, Callable[[], Call], bool]


def near(y: Tensor, x: Tensor, original: Tensor, what: str) -> float:
    """The distance of a rival's own quantized product to the original one; Mismatch if it is no such product."""
    expected = x.double() @ original.double().t()
    distance = float((y.double() - expected).norm() / expected.norm())
    if not distance <= _NEAR:
        raise Mismatch(f"{what}: {distance:.3g} from the original product, expected at most {_NEAR}")
    return distance


@contextmanager
def deadline(what: str, seconds: float = _READY_IN) -> Iterator[None]:
    """TimeoutError where the body takes longer, as some compile for minutes; without effect beside the main thread."""

    def late(*_: object) -> None:
        raise TimeoutError(f"{what} was not ready within {seconds:g} s")

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def contenders(w: QuantTensor, x: Tensor, original: Tensor, copies: int) -> Iterator[Contender]:
    """(name, copies, what makes call(i) with the i-th copy, whether it computes with w's own codes and scales)."""
    if w.format.name == "int4_g128" and x.dtype == torch.bfloat16:
        yield "torch_tinygemm", copies, partial(_tinygemm, w, x, copies), True
    for name, (module, make) in _RIVALS.get(w.format.name, {}).items():
        if find_spec(module) is not None:
            yield name, copies, partial(make, x, original, copies), False


def _copied(made: Any, copies: int) -> list[Any]:
    return [made, *(deepcopy(made) for _ in range(copies - 1))]


def _tinygemm(w: QuantTensor, x: Tensor, copies: int) -> Call:
    """torch's own int4 kernel (torchao's tile_packed_to_4d)."""
    unsigned = w.unpack() ^ 8  # two's complement to ascending order
    bytes_ = unsigned[:, ::2] << 4 | unsigned[:, 1::2]
    scale = w.scales()[0].to(torch.bfloat16)
    pairs = torch.stack([scale, torch.zeros_like(scale)], -1).transpose(0, 1).contiguous()
    packed = _copied(torch.ops.aten._convert_weight_to_int4pack(bytes_, 8), copies)
    group = w.shape[1] // scale.shape[1]
    return lambda i: torch.ops.aten._weight_int4pack_mm(x, packed[i], group, pairs)


def _humming(**weight: Any) -> Callable[[Tensor, Tensor, int], Call]:
    def make(x: Tensor, original: Tensor, copies: int) -> Call:
        layer: Any = import_module("humming.layer").HummingLayer
        n, k = original.shape
        made = layer(shape_n=n, shape_k=k, weight_config=dict(weight), torch_dtype=x.dtype).cuda()
        made.load_from_unquantized(original.to(x.dtype))
        made.transform()
        layers = _copied(made, copies)
        return lambda i: layers[i](x)

    return make


def _gemlite(kind: str) -> Callable[[Tensor, Tensor, int], Call]:
    def make(x: Tensor, original: Tensor, copies: int) -> Call:
        packer: Any = getattr(import_module("gemlite.helper"), kind)(device=str(x.device), dtype=x.dtype)
        n, k = original.shape
        dense = torch.nn.Linear(k, n, bias=False, dtype=x.dtype, device=x.device)
        dense.weight.data = original.to(x.dtype)
        layers = _copied(packer.from_linear(dense), copies)
        return lambda i: layers[i](x)

    return make


def _gemlite_int4(x: Tensor, original: Tensor, copies: int) -> Call:
    packer: Any = import_module("gemlite.helper").A16W4_HQQ_INT(device=str(x.device), dtype=x.dtype)
    groups = original.unflatten(-1, (-1, 128))
    low, high = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scale = (high - low).clamp_min(1e-8) / 15
    zero = (-low / scale).round()
    codes = (groups / scale + zero).round().clamp(0, 15).to(torch.uint8).flatten(-2)
    parts = scale.squeeze(-1).to(x.dtype), zero.squeeze(-1).to(x.dtype)
    layers = _copied(packer.from_weights(codes, *parts), copies)
    return lambda i: layers[i](x)


def _bitsandbytes(x: Tensor, original: Tensor, copies: int) -> Call:
    bnb: Any = import_module("bitsandbytes")
    stored = [bnb.functional.quantize_4bit(original.to(x.dtype), blocksize=64, quant_type="nf4") for _ in range(copies)]
    return lambda i: bnb.matmul_4bit(x, stored[i][0].t(), stored[i][1])


def _deep_gemm(x: Tensor, original: Tensor, copies: int) -> Call:
    """FP8 times FP8 by blocks of 128; rounding x, which ours does not, is left out of its time."""
    library: Any = import_module("deep_gemm")
    cast: Any = import_module("deep_gemm.utils.math")
    rounded = cast.per_token_cast_to_fp8(x, use_ue8m0=False)
    weights = [cast.per_block_cast_to_fp8(original.to(x.dtype), use_ue8m0=False) for _ in range(copies)]

    def call(i: int) -> Tensor:
        y = x.new_empty(x.shape[0], original.shape[0])
        library.fp8_gemm_nt(rounded, weights[i], y)
        return y

    return call


_RIVALS: dict[str, dict[str, tuple[str, Callable[[Tensor, Tensor, int], Call]]]] = {
    "int4_g128": {
        "humming": ("humming", _humming(dtype="int4", group_size=128)),
        "gemlite": ("gemlite", _gemlite_int4),
    },
    "nvfp4": {
        "humming": ("humming", _humming(dtype="float4e2m1", group_size=16, scale_dtype="float8e4m3",
                                        scale_2_type="tensor")),
    },
    "mxfp4": {
        "humming": ("humming", _humming(dtype="float4e2m1", group_size=32, scale_dtype="float8e8m0")),
        "gemlite": ("gemlite", _gemlite("A16W4_MXFP")),
    },
    "int8_channel": {
        "humming": ("humming", _humming(dtype="int8")),
        "gemlite": ("gemlite", _gemlite("A16W8_INT8")),
    },
    "fp8_channel": {
        "humming": ("humming", _humming(dtype="float8e4m3")),
        "gemlite": ("gemlite", _gemlite("A16W8_FP8")),
    },
    "fp8_block128": {"deep_gemm_w8a8": ("deep_gemm", _deep_gemm)},
    "nf4_g64": {"bitsandbytes": ("bitsandbytes", _bitsandbytes)},
}  # fmt: skip
"""Format -> name -> (module, what makes its calls from x, the original weight and the number of copies)."""
