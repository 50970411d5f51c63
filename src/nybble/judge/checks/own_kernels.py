"""Where own kernels were asked for, the framework must not do the work.

Only with `--own-kernels`. A wrapper around torch.mm, or a kernel that fails and falls back in its `except` (13), is
right and says nothing about the kernel. One call is followed through the dispatcher, which also sees what C++
extensions call: allocations, views and copies are housekeeping, anything else computes. Without the option it is a
note that names what did.
"""

from __future__ import annotations

from collections.abc import Iterator

from nybble.judge import cases
from nybble.judge.trial import Trial
from nybble.judge.verdict import Finding

KINDS = (13,)
_HOUSEKEEPING = frozenset({
    "empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "new_zeros", "zeros", "zeros_like",
    "zero_", "fill_", "full", "view", "_unsafe_view", "reshape", "as_strided", "as_strided_", "transpose", "t",
    "permute", "expand", "unsqueeze", "squeeze", "select", "slice", "split", "chunk", "narrow", "unbind", "detach",
    "alias", "clone", "copy_", "contiguous", "_to_copy", "to", "lift_fresh", "set_", "resize_", "is_pinned",
    "_local_scalar_dense", "item", "numel", "view_as_real", "flatten", "unflatten", "constant_pad_nd", "cat",
    "stack", "pin_memory", "_pin_memory", "record_stream", "is_same_size", "equal",
})  # fmt: skip


def run(trial: Trial) -> Iterator[Finding]:
    """Follow one call."""
    trial.put(cases.given(trial.problem, trial.seed, "own kernels").inputs, "own")
    answer, _ = trial.candidate.ask("trace", slot="own")
    names = [str(name).split(".") for name in answer["operations"]]
    computing = sorted({".".join(n[:2]) for n in names if n[0] == "aten" and n[1] not in _HOUSEKEEPING})
    if not computing:
        return
    status, what = (
        ("cheating", "the framework computes") if trial.own_kernels else ("note", "computed by the framework")
    )
    yield Finding("own_kernels", status, f"{what}: {', '.join(computing[:8])}")  # type: ignore[arg-type]
