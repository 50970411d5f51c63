"""Other libraries' weight-only products, for `nybble bench --rivals`: used when installed, never needed.

`contenders` yields what can run a given problem here. A rival that takes our codes and scales computes the very same
product and owes the op's agreement; one that quantizes the weight itself is held to `near`: as close to the original
product as its bits allow.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from nybble.errors import Mismatch
from nybble.quantize import QuantTensor

PACKAGES = ("humming-kernels", "bitsandbytes")
_NEAR = 0.25  # ||y - original|| / ||original||: four bits give 0.1, a wrong product 1

Contender = tuple[str, int, Callable[[int], Tensor], bool]


def near(y: Tensor, x: Tensor, original: Tensor, what: str) -> float:
    """The distance of a rival's own quantized product to the original one; Mismatch if it is no such product."""
    expected = x.double() @ original.double().t()
    distance = float((y.double() - expected).norm() / expected.norm())
    if not distance <= _NEAR:
        raise Mismatch(f"{what}: {distance:.3g} from the original product, expected at most {_NEAR}")
    return distance


def contenders(w: QuantTensor, x: Tensor, original: Tensor, copies: int) -> Iterator[Contender]:
    """(name, copies, call(i) with the i-th copy, whether it computes with w's own codes and scales)."""
    if w.format.name == "int4_g128" and x.dtype == torch.bfloat16:
        yield _tinygemm(w, x, copies)
        if find_spec("humming") is not None:
            yield _humming(x, original, copies)
    if w.format.name == "nf4_g64" and find_spec("bitsandbytes") is not None:
        yield _bitsandbytes(x, original, copies)


def _tinygemm(w: QuantTensor, x: Tensor, copies: int) -> Contender:
    """torch's own int4 kernel (torchao's tile_packed_to_4d)."""
    unsigned = w.unpack() ^ 8  # two's complement to ascending order
    bytes_ = unsigned[:, ::2] << 4 | unsigned[:, 1::2]
    scale = w.scales()[0].to(torch.bfloat16)
    pairs = torch.stack([scale, torch.zeros_like(scale)], -1).transpose(0, 1).contiguous()
    packed = [torch.ops.aten._convert_weight_to_int4pack(bytes_, 8) for _ in range(copies)]
    group = w.shape[1] // scale.shape[1]
    return "torch_tinygemm", copies, lambda i: torch.ops.aten._weight_int4pack_mm(x, packed[i], group, pairs), True


def _humming(x: Tensor, original: Tensor, copies: int) -> Contender:
    HummingLayer: Any = import_module("humming.layer").HummingLayer

    n, k = original.shape
    layers = []
    for _ in range(copies):
        layer = HummingLayer(
            shape_n=n, shape_k=k, weight_config={"dtype": "int4", "group_size": 128}, torch_dtype=x.dtype
        ).cuda()
        layer.load_from_unquantized(original.to(x.dtype))
        layer.transform()
        layers.append(layer)
    return "humming", copies, lambda i: layers[i](x), False


def _bitsandbytes(x: Tensor, original: Tensor, copies: int) -> Contender:
    bnb: Any = import_module("bitsandbytes")
    stored = [bnb.functional.quantize_4bit(original.to(x.dtype), blocksize=64, quant_type="nf4") for _ in range(copies)]
    return "bitsandbytes", copies, lambda i: bnb.matmul_4bit(x, stored[i][0].t(), stored[i][1]), False
