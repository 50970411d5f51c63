"""Measuring a promise about equal bits on a whole model, op by op.

    repeats      the same call again                                      run-to-run
    batches      the prompt beside others, first, in the middle and last  batch-invariant
    steps        token by token as all at once                            batch-invariant
    recorded     hashes that another machine wrote (models/fingerprint.py)   cross-machine

Every op's result is compared bit by bit in the order in which ops run, so that what differs first is named. With the
promise "none" the model runs as transformers runs it, module by module: the control that shows what the comparison
can see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nybble.errors import BadInput, UnknownName
from nybble.models.decode import Runner
from nybble.models.promised import PromisedRunner
from nybble.ops._declare import Promise
from nybble.ops._promise import ORDER, covers

Seen = dict[str, Tensor]
"""Name of an op or module -> its result [B, T, ...], in the order in which they ran."""

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_PROMPT, _SEED = 12, 0


@dataclass(frozen=True)
class Check:
    """One comparison: what it was, and the first difference ("" where there is none)."""

    what: str
    difference: str = ""

    @property
    def holds(self) -> bool:
        """Whether every bit was the same."""
        return not self.difference


@dataclass(frozen=True)
class Verified:
    """What `verify_promise` found; as text, a line a check.

    Attributes:
        promise: what was measured.
        checks: every comparison.
        unchecked: what of the promise was not measured, and why.
    """

    promise: Promise
    checks: tuple[Check, ...]
    unchecked: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether every comparison held."""
        return all(check.holds for check in self.checks)

    def __str__(self) -> str:
        lines = [f"{self.promise}: {'holds' if self.holds else 'does not hold'} in {len(self.checks)} comparisons"]
        lines += [f"  {check.what}: {check.difference or 'the same bits'}" for check in self.checks]
        return "\n".join([*lines, *(f"  not measured: {what}" for what in self.unchecked)])


def verify_promise(
    model: nn.Module,
    promise: Promise = "batch-invariant",
    prompt: Tensor | None = None,
    batches: Sequence[int] = (2, 7, 16, 33),
    repeats: int = 2,
    steps: int = 4,
    recorded: str | Path | Mapping[str, Any] | None = None,
) -> Verified:
    """Measure whether a model keeps a promise where it is.

    Args:
        model: a transformers causal LM of the Llama family; with "none" any causal LM.
        promise: which; "none" measures the model as transformers runs it, against "batch-invariant".
        prompt: int64 [T], None takes random tokens.
        batches: sizes to try, each at least 2. The prompt stands first, in the middle and last of each.
        repeats: how often the prompt alone is run again.
        steps: tokens decoded one by one and then compared with reading them at once; with "none" the prompt's own
            tokens are, unless this is 0.
        recorded: a fingerprint of another machine (its file or its content), for "cross-machine".

    Returns:
        Every comparison, with the first op that differs and where.

    Raises:
        Unsupported: the model cannot run under the promise.
        BadInput: a prompt or batches that are too short, or a fingerprint of something else.
    """
    if promise not in ORDER:
        raise UnknownName("promise", promise, ORDER)
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    generator = torch.Generator().manual_seed(_SEED)
    ids = torch.randint(vocabulary, (_PROMPT,), generator=generator) if prompt is None else prompt.cpu()
    if ids.ndim != 1 or not len(ids) or any(batch < 2 for batch in batches):
        raise BadInput(f"a prompt [T] of tokens and batches of 2 or more, got {tuple(ids.shape)}, {batches}")
    observe = _stock(model) if promise == "none" else _promised(model, promise)
    alone = observe(ids[None])
    checks = [Check(f"again, {n + 1}", first_difference(alone, observe(ids[None]))) for n in range(repeats)]
    if promise == "none" or covers(promise, "batch-invariant"):
        for batch in batches:
            tokens = torch.randint(vocabulary, (batch, len(ids)), generator=generator)
            places = sorted({0, batch // 2, batch - 1})
            tokens[places] = ids
            beside = observe(tokens)
            for place in places:
                row = {name: result[place : place + 1] for name, result in beside.items()}
                checks.append(Check(f"row {place} of {batch}", first_difference(alone, row)))
        if steps and promise == "none":
            checks.append(Check("token by token, and read at once", first_difference(alone, _stock_steps(model, ids))))
        elif steps:
            checks.append(_steps(model, promise, ids, steps))
    unchecked: tuple[str, ...] = ()
    if promise == "cross-machine":
        unchecked = () if recorded is not None else ("another machine: no recorded fingerprint was given",)
        checks += [] if recorded is None else [_recorded(model, recorded)]
    return Verified(promise, tuple(checks), unchecked)


def first_difference(expected: Seen, seen: Seen) -> str:
    """The first op whose results differ, with the place and both values; "" where none does."""
    for name, before in expected.items():
        after = seen[name]
        wrong = (_bits(before) != _bits(after)).flatten(2).any(-1)[0].nonzero().flatten()
        if len(wrong):
            token = int(wrong[0])
            a, b = before[0, token].flatten(), after[0, token].flatten()
            value = int((_bits(a) != _bits(b)).nonzero()[0])
            return f"{name} differs first: token {token}, value {value}: {float(a[value])!r}, {float(b[value])!r}"
    return ""


def _bits(t: Tensor) -> Tensor:
    return t.contiguous().view(_BITS[t.element_size()])


def _promised(model: nn.Module, promise: Promise) -> Callable[[Tensor], Seen]:
    """Whole sequences through a PromisedRunner, every op's result kept."""

    def observe(tokens: Tensor) -> Seen:
        runner, seen = PromisedRunner(model, promise, tokens.shape[1], len(tokens), graph=False), {}
        runner.trace = lambda name, result: seen.update({name: result.unflatten(0, tokens.shape).cpu()})
        runner.whole(tokens)
        return seen

    return observe


def _stock(model: nn.Module) -> Callable[[Tensor], Seen]:
    """Whole sequences through transformers' own forward, the result of every module with weights kept."""

    def observe(tokens: Tensor) -> Seen:
        with _watched(model, tuple(tokens.shape)) as seen, torch.no_grad():
            model(input_ids=tokens.to(next(model.parameters()).device), use_cache=False)
        return seen

    return observe


def _stock_steps(model: nn.Module, ids: Tensor) -> Seen:
    """The same of one sequence token by token, through transformers' own cache."""
    runner, parts = Runner(model), []
    for number, token in enumerate(ids):
        with _watched(model, (1, 1)) as seen, torch.no_grad():
            runner.step(int(token)) if number else runner.start(token[None])
        parts.append(seen)
    return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}


@contextmanager
def _watched(model: nn.Module, shape: tuple[int, ...]) -> Iterator[Seen]:
    """Meanwhile, every result that starts with these sizes of a module with weights is kept."""
    seen: Seen = {}

    def keep(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, result: Any) -> None:
            first = result[0] if isinstance(result, tuple) else result
            if isinstance(first, Tensor) and first.shape[:2] == shape:
                seen[f"{name} ({type(module).__name__})"] = first.detach().cpu()

        return hook

    weighted = ((name, m) for name, m in model.named_modules() if name and any(True for _ in m.parameters()))
    hooks = [module.register_forward_hook(keep(name)) for name, module in weighted]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


def _steps(model: nn.Module, promise: Promise, ids: Tensor, steps: int) -> Check:
    """Decoding, captured where it would be, against the same tokens read at once."""
    runner = PromisedRunner(model, promise, len(ids) + steps)
    stepped = [runner.prefill(ids[None]).clone(), *(runner.step().clone() for _ in range(steps))]
    whole = runner.whole(runner.tokens)[:, len(ids) - 1 :]
    logits = {"lm_head": torch.stack(stepped, 1).cpu()}, {"lm_head": whole.cpu()}
    return Check(f"{steps} steps, and read at once", first_difference(*logits))


def _recorded(model: nn.Module, recorded: str | Path | Mapping[str, Any]) -> Check:
    from nybble.models import fingerprint

    known = recorded if isinstance(recorded, Mapping) else fingerprint.read(recorded)
    return Check(f"recorded on {known['machine']}", fingerprint.check(model, known))
