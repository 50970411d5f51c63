"""rope_attention_ on NVIDIA GPUs with clusters (9.0 and later): attend.cu, for a few sequences."""

from __future__ import annotations

import ctypes
import math
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from nybble.ops import _nvrtc
from nybble.ops._declare import Implementation
from nybble.ops.rope_cache import query_heads

SOURCE = Path(__file__).with_name("attend.cu")
THREADS = 128
_POINTERS = ("qkv", "cos", "sin", "k_cache", "v_cache", "o", "position")
_SIZES = ("capacity", "q_heads", "kv_heads", "parts")
_HEAD_DIMS = (64, 128, 256)
_ALIGNMENT, _LARGEST_CLUSTER, _OLDEST = 16, 8, (9, 0)


class Arguments(ctypes.Structure):
    """attend.cu's Arguments."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in _POINTERS),
        *((name, ctypes.c_int) for name in _SIZES),
        ("scale", ctypes.c_float),
    ]


def cut(batch: int, q_heads: int, kv_heads: int, units: int) -> tuple[int, int, int]:
    """(query heads of a block, clusters a key head, blocks of a cluster) that fill `units` processors once."""
    heads = min(q_heads // kv_heads, 2)
    parts = -(-q_heads // kv_heads // heads)
    room = units // max(batch * kv_heads * parts, 1)
    return heads, parts, min(_LARGEST_CLUSTER, 1 << max(room, 1).bit_length() - 1)


def defines(d: int, heads: int, cluster: int, fp16: bool) -> dict[str, int]:
    """What attend.cu is compiled with."""
    return {"HEAD_DIM": d, "HEADS": heads, "CLUSTER": cluster, "X_FP16": int(fp16)}


def unfit(qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> str | None:
    """Why attend.cu cannot take the call on any machine, or None."""
    batch, _, capacity, d = k_cache.shape
    if qkv.dtype not in (torch.bfloat16, torch.float16):
        return f"reads bfloat16 and float16, not {qkv.dtype}"
    if not batch or d not in _HEAD_DIMS:
        sizes = ", ".join(str(size) for size in _HEAD_DIMS)
        return f"takes one sequence or more and heads of {sizes} columns; the caches are {list(k_cache.shape)}"
    if min(len(cos), len(sin)) < capacity:
        return f"tables of {min(len(cos), len(sin))} positions are shorter than caches of {capacity}"
    for name, part in (("qkv", qkv), ("cos", cos), ("sin", sin), ("k_cache", k_cache), ("v_cache", v_cache)):
        if not part.is_contiguous() or part.data_ptr() % _ALIGNMENT:
            return f"reads {_ALIGNMENT} bytes at once; {name} with strides {part.stride()} does not lie so"
    return None


def _supports(qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> str | None:
    reason = unfit(qkv, cos, sin, k_cache, v_cache, position)
    reason = reason or _nvrtc.refusal(torch.cuda.get_device_capability(qkv.device), _OLDEST)
    batch, kv_heads, *_ = k_cache.shape
    if reason is None and cut(batch, query_heads(qkv, k_cache), kv_heads, _units(qkv.device))[2] < _LARGEST_CLUSTER:
        reason = f"pays with {_LARGEST_CLUSTER} blocks a cluster; {batch} sequences of {kv_heads} key heads leave fewer"
    return reason


def _units(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


@cache
def _kernel(d: int, heads: int, cluster: int, fp16: bool, device: int) -> _nvrtc.Kernel:
    arch = _nvrtc.architecture(torch.cuda.get_device_capability(device))
    cubin = _nvrtc.build(SOURCE, defines(d, heads, cluster, fp16), arch)
    return _nvrtc.Kernel.load(cubin, "rope_attention")


def run(qkv: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, position: Tensor) -> Tensor:
    """The op on a GPU; arguments that `unfit` lets pass."""
    batch, kv_heads, capacity, d = k_cache.shape
    q_heads = query_heads(qkv, k_cache)
    heads, parts, cluster = cut(batch, q_heads, kv_heads, _units(qkv.device))
    o = qkv.new_empty((batch, q_heads, d))
    pointers = [part.data_ptr() for part in (qkv, cos, sin, k_cache, v_cache, o, position)]
    argument = Arguments(*pointers, capacity, q_heads, kv_heads, parts, math.log2(math.e) / math.sqrt(d))
    with torch.cuda.device(qkv.device):
        kernel = _kernel(d, heads, cluster, qkv.dtype == torch.float16, qkv.device.index)
        current = torch.cuda.current_stream(qkv.device).cuda_stream
        kernel.launch((cluster * kv_heads * parts, batch), THREADS, 0, argument, True, current)
    return o


NOTE = "a few sequences"
IMPLEMENTATIONS = (Implementation("rope_attention_cuda_sm90", run, _supports, native=True, note=NOTE),)
