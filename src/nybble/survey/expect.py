"""What the planner expects of a scheme, to stand beside what is measured.

The prediction is for decoding one token: all linears that the scheme quantizes, by the best kernel the machine could
have, and the head as it is. What lies between the linears is left out. So a measured ratio below it tells what is
lost: to attention and norms, to launches, or to a kernel that could be better. It is a prediction of a native kernel:
where the scheme was emulated it stands in the reason, not in the column (Row.planned).
"""

from __future__ import annotations

import torch
from torch import nn

from nybble.errors import BadInput, Unsupported
from nybble.methods.select import select
from nybble.planner import here, plan
from nybble.quantize.schemes import Scheme


def speedup(model: nn.Module, scheme: Scheme, ignore: tuple[str, ...], original_dtype: str, dtype: str) -> float | None:
    """The original's predicted time over the scheme's; None where the machine is unknown or cannot run it.

    Args:
        model: the original.
        scheme: what is asked about.
        ignore: the names of linears that stay as they are.
        original_dtype, dtype: of the original's activations and of the scheme's, by name.
    """
    inside = select(model, ignore).linears
    linears = {name: module for name, module in model.named_modules() if type(module) is nn.Linear}
    sizes = [(linear.out_features, linear.in_features) for linear in inside.values()]
    kept = [(x.out_features, x.in_features) for name, x in linears.items() if name not in inside]
    try:
        machine = here.machine(cpu=next(model.parameters()).device.type == "cpu")
        itemsizes = (getattr(torch, original_dtype).itemsize, getattr(torch, dtype).itemsize)
        return plan.speedups(sizes, machine, [scheme.name], 1, kept, itemsizes).get(scheme.name)
    except (Unsupported, BadInput):  # no such row, or a file of ceilings that `nybble plan` will complain about
        return None
