"""How an op with the promise cross-machine is declared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nybble.ops._declare import Agreement, Implementation, Op
from nybble.ops._exact.arithmetic import DTYPES


def exact_op(
    name: str, reference: Callable[..., Any], cases: Callable[..., Any], cost: Callable[..., Any], home: str
) -> Op:
    """An op whose definition is also what runs on a CPU, and to which every implementation is equal in every bit.

    Args:
        name, reference, cases, cost: as Op has them.
        home: the module with the CUDA implementation.
    """
    return Op(
        name=name,
        reference=reference,
        agreement=Agreement(dict.fromkeys(DTYPES, 0.0)),
        cases=cases,
        cost=cost,
        homes={"cuda": home},
        fallback=Implementation(f"{name.rstrip('_')}_torch", reference, native=True),
        promise="cross-machine",
    )
