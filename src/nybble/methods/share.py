"""One layer's rows over several processes: under torchrun each rounds its share, and all get the whole.

Rows of a weight do not see each other: given H, each is rounded on its own. Every process runs the same calibration,
so that all hold the same H to the bit without exchanging it, takes an equal run of rows (whole blocks of rows where a
scale spans several), and the codes are gathered. The result is that of one process, bit for bit; what is shared out
is the rounding, by far the longest part for large layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TypeVar

import torch
from torch import Tensor
from torch import distributed as dist

from nybble.errors import Mismatch
from nybble.formats.spec import BlockFormat
from nybble.methods.layer import Layer
from nybble.quantize import QuantTensor
from nybble.quantize.tensor import concatenate

Found = TypeVar("Found")


def processes() -> int:
    """How many processes share the work: 1 unless torch.distributed was started."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def agreed(found: Found | None) -> Found | None:
    """What was found, if every process found its own; None in all of them if one did not, so that none waits alone."""
    count = processes()
    if count == 1:
        return found
    everyone: list[bool] = [False] * count
    dist.all_gather_object(everyone, found is not None)
    return found if all(everyone) else None


def shares(rows: int, block: int, count: int) -> list[tuple[int, int]]:
    """Runs (start, stop) of `rows` rows for `count` processes, in whole blocks, equal but for the last ones."""
    each = math.ceil(math.ceil(rows / block) / count) * block
    return [(min(i * each, rows), min((i + 1) * each, rows)) for i in range(count)]


def rounded(layer: Layer, apply: Callable[[Layer], QuantTensor]) -> QuantTensor:
    """The layer rounded by `apply`, its rows shared among all processes.

    Args:
        layer: the same in every process; one with a tensor scale knows its tensor_amax.
        apply: rounds a layer, each block of rows on its own.

    Raises:
        Mismatch: the processes' parts do not fit together.
    """
    count, block = processes(), layer.scheme.weight.block[0]
    if count == 1 or block is None:
        return apply(layer)
    start, stop = shares(layer.weight.shape[0], block, count)[dist.get_rank()]
    mine: dict[str, Tensor] = {}
    if stop > start:
        mine = {k: v.cpu() for k, v in apply(replace(layer, weight=layer.weight[start:stop])).parts.items()}
    gathered: list[dict[str, Tensor]] = [{} for _ in range(count)]
    dist.all_gather_object(gathered, mine)
    fmt, dtype, k = layer.scheme.weight, layer.weight.dtype, layer.weight.shape[1]
    whole = concatenate([_tensor(fmt, k, dtype, parts) for parts in gathered if parts])
    if whole is None:
        raise Mismatch(f"{layer.name}: the parts of {count} processes differ in their tensor scale or shape")
    return whole.to(layer.weight.device)


def _tensor(fmt: BlockFormat, k: int, dtype: torch.dtype, parts: Mapping[str, Tensor]) -> QuantTensor:
    tensor, zero = parts.get("tensor_scale"), parts.get("zero_point")
    return QuantTensor(fmt, (len(parts["codes"]), k), parts["codes"], parts["scale"], tensor, zero, dtype=dtype)
