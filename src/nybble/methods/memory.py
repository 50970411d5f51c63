"""Whether a calibrated run fits, asked before it starts: what a block needs, and what would fit.

For each distinct input of K channels: its second moment, 8 K^2 bytes, three of them where inputs are rounded too; and
while one is factored, four more matrices of that size. While a weight is rounded, some 16 to 36 bytes a value: as it
is and as repaired in float64, what was chosen in float32, scales that are tried. Beside them lie what enters the block
for all of the calibration, and, where blocks are brought from elsewhere, two blocks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

import torch

from nybble.errors import BadInput
from nybble.methods.select import fused_groups
from nybble.methods.stages import Chain, Stage, Whole
from nybble.quantize.schemes import Scheme

_FACTORING = 4  # matrices: the mean, the Cholesky factor, the identity, the inverse
_VALUE = 36  # bytes a weight while it is rounded; tests/methods/test_room.py measures them


def statistics(stage: Stage, schemes: Mapping[str, Scheme]) -> int:
    """Bytes of a stage's second moments, of the largest factoring and of rounding the largest weight."""
    total, widest, largest = 0, 0, 0
    for names in fused_groups(stage.linears):
        matrix = 8 * stage.linears[names[0]].in_features ** 2
        total += matrix * (1 if schemes[names[0]].activation is None else 3)
        widest = max(widest, matrix)
        largest = max(largest, *(_VALUE * stage.linears[name].weight.numel() for name in names))
    return total + _FACTORING * widest + largest


def free(device: torch.device) -> int:
    """Bytes that can be had on a device: free ones on a GPU, all of main memory on a CPU (caches give way)."""
    if device.type == "cuda":
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return torch.cuda.mem_get_info(device)[0] + unused
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def check(driver: Whole | None, stages: Sequence[Stage], schemes: Mapping[str, Scheme]) -> None:
    """Refuse a run that will not fit.

    Raises:
        BadInput: the block that needs most, what it needs, what is free, and what would fit.
    """
    if driver is None:
        return
    device = driver.device
    moments, name = max((statistics(stage, schemes), stage.name) for stage in stages)
    kept, count, visitors = 0, 1, 0
    if isinstance(driver, Chain):
        kept, count = driver.kept_bytes, driver.count
        blocks = [sum(p.nbytes for p in s.module.parameters()) for s in stages if s.name]
        visitors = 2 * max(blocks, default=0) if driver.visiting else 0
    have = free(device)
    if moments + visitors > have:
        raise BadInput(
            f"not enough memory: {gb(moments + visitors)} are needed for {name or 'the linears outside of blocks'} "
            f"(second moments and rounding {gb(moments)}, blocks {gb(visitors)}) and {device} has {gb(have)}: "
            "work on a larger device, or leave its widest layers alone (ignore)"
        )
    if moments + visitors + kept > have:
        fit = int((have - moments - visitors) / (kept / count))
        raise BadInput(
            f"not enough memory: what enters a block takes {gb(kept)} for {count} batches, {name} needs "
            f"{gb(moments + visitors)} beside it, and {device} has {gb(have)}: {fit} batches would fit, or all of "
            "them kept elsewhere (spill='cpu' or a folder)"
        )


def gb(size: int) -> str:
    """A size in words."""
    return f"{size / 1e9:.3g} GB"
