"""Promises about equal bits, and the context that holds every op to one.

    run-to-run       the same call on the same machine gives the same bits
    batch-invariant  and a row's bits do not depend on the rows beside it
    cross-machine    and not on the machine either

Each includes the ones before it. Inside `with promise("cross-machine"):` every nybble op must have declared that
promise or a stronger one; any other is refused by name, with the nearest that would do. Nothing falls back in silence.

The context belongs to the thread or task that entered it (a context variable). Nested promises keep the strongest:
what was promised outside cannot be taken back inside. Leaving restores what held before, also after an exception.

What the caller switched on elsewhere:

    autocast             refused: it would change dtypes between ops
    flush to zero        refused: subnormal numbers are numbers
    float64 inputs       refused: no promise covers them
    torch.nn modules     refused where they compute; containers, lookups and exact ones pass
    TF32, "medium"       without effect: no op with a promise multiplies through a library that knows these modes

Functions of torch called directly (`a @ b`) are not nybble's and are not seen.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

from nybble.errors import BadInput, UnknownName, Unsupported
from nybble.ops._declare import Promise

ORDER: tuple[Promise, ...] = ("none", "run-to-run", "batch-invariant", "cross-machine")
_asked: ContextVar[Promise] = ContextVar("nybble_promise", default="none")

_EXACT_MODULES = (
    nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.Identity, nn.Flatten, nn.Unflatten, nn.Embedding, nn.ReLU,
)  # fmt: skip


def in_force() -> Promise:
    """The promise that holds here: "none" outside every context."""
    return _asked.get()


def covers(has: Promise, wanted: Promise) -> bool:
    """Whether one promise includes another."""
    return ORDER.index(has) >= ORDER.index(wanted)


@contextmanager
def promise(wanted: Promise) -> Iterator[Promise]:
    """Hold every nybble op inside to a promise; yields the one in force.

    Args:
        wanted: "run-to-run", "batch-invariant" or "cross-machine"; the strongest of nested ones holds.

    Raises:
        UnknownName: no such promise.
        BadInput: autocast or flushing to zero is switched on.
    """
    if wanted not in ORDER[1:]:
        raise UnknownName("promise", str(wanted), ORDER[1:])
    _refuse_autocast()
    _refuse_flushing()
    strongest = max(wanted, in_force(), key=ORDER.index)
    token = _asked.set(strongest)
    hook = nn.modules.module.register_module_forward_pre_hook(_refuse_module)
    try:
        yield strongest
    finally:
        hook.remove()
        _asked.reset(token)


def demand(name: str, has: Promise, args: tuple[Any, ...]) -> None:
    """Refuse a call that the promise in force does not allow; called for every op before it runs.

    Args:
        name: the op's.
        has: what it promises.
        args: its arguments.

    Raises:
        Unsupported: it promises too little; with the nearest op that promises enough.
        BadInput: an input is float64, or autocast is on.
    """
    wanted = _asked.get()
    if wanted == "none":
        return
    if not covers(has, wanted):
        raise _refusal(name, has, wanted)
    _refuse_autocast()
    wide = [tuple(a.shape) for a in args if isinstance(a, Tensor) and a.dtype == torch.float64]
    if wide:
        raise BadInput(f"{name}: float64 {wide[0]} under the promise {wanted!r}; it covers float32 and 16-bit inputs")


def nearest(name: str, wanted: Promise) -> list[str]:
    """Names of ops that keep a promise, those like `name` first; all of them where none is like it."""
    from nybble.ops import declared

    able = [op.name for op in declared().values() if covers(op.promise, wanted)]
    stem = name.strip("_").lower()
    same = [found for found in able if found.startswith(stem)]
    return same or difflib.get_close_matches(stem, able, n=2, cutoff=0.5) or able


def _refusal(name: str, has: Promise, wanted: Promise) -> Unsupported:
    promised = "makes no promise" if has == "none" else f"promises no more than {has}"
    able = nearest(name, wanted)
    hint = f"nearest that does: {', '.join(able)}" if able else "no op does"
    return Unsupported(f"{name} {promised} and {wanted} was asked for; {hint}")


def _refuse_module(module: nn.Module, args: Any) -> None:
    wanted = _asked.get()
    of_torch = type(module).__module__.startswith("torch.nn.")
    idle = isinstance(module, nn.Dropout) and not module.training
    if wanted != "none" and of_torch and not idle and type(module) not in _EXACT_MODULES:
        raise _refusal(type(module).__name__, "none", wanted)


def _refuse_autocast() -> None:
    for device in ("cpu", "cuda"):
        if torch.is_autocast_enabled(device):
            raise BadInput(f"autocast is switched on for {device}: a promise refuses it, since it changes dtypes")


def _refuse_flushing() -> None:
    if float(torch.full((1,), 2.0**-149) * 1) == 0:
        raise BadInput("subnormal numbers are flushed to zero (torch.set_flush_denormal): a promise needs them kept")
