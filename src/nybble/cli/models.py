"""The commands that measure: survey, evaluate; and bench, which has its own options."""

from __future__ import annotations

import argparse
import os
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from nybble.cli import STOPPED
from nybble.cli.console import Plain
from nybble.errors import BadInput
from nybble.machine import find_device

if TYPE_CHECKING:
    from nybble.survey import Result


def hush() -> None:
    """Keep the libraries' own bars and advice away from ours."""
    import logging

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")  # it sets its own level when it is imported, maybe later
    for name in ("transformers", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


def survey(options: argparse.Namespace) -> int:
    """Measure every scheme; finished rows survive Ctrl-C."""
    console = Plain()
    try:
        _survey(options, console)
    except KeyboardInterrupt:
        _stopped(options.out)
        return STOPPED
    return 0


def _survey(options: argparse.Namespace, console: Plain) -> None:
    from nybble.survey import DEFAULT_SCHEMES, Request
    from nybble.survey import survey as run
    from nybble.survey.live import Screen

    hush()
    names = [name for part in options.schemes or DEFAULT_SCHEMES for name in part.split(",") if name]
    request = Request(
        options.model,
        names,
        options.methods,
        options.tokens,
        options.text,
        options.device,
        options.dtype,
        options.seed,
        options.out,
        options.max_kl,
        options.max_bytes,
        options.force,
    )
    with Screen(console) as screen:
        result = run(request, screen)
    _conclude(result, options, console)


def _conclude(result: Result, options: argparse.Namespace, console: Plain) -> None:
    """What is said below the table."""
    from nybble.survey.rows import busy_note
    from nybble.survey.store import PAGE, RESULT

    original, advice = result.original, result.recommendation
    console.print(
        f"\nKL: nats a token to the original, in {original.quality_dtype}; tok/s: one sequence, the original in "
        f"{original.decode_dtype}; ratio: to the original, in turns", soft_wrap=True,
    )  # fmt: skip
    if note := busy_note(original, result.rows):
        console.print(f"\n{note}", soft_wrap=True)
    if options.explain:
        console.print("\n" + "\n".join(f"{row.label}: {row.path}: {row.reason}" for row in result.rows), soft_wrap=True)
    if advice is not None:
        console.print(f"\nrecommended: {advice.label}\n{advice.reason}", soft_wrap=True)
    console.print(f"\nwritten: {options.out / RESULT}, {options.out / PAGE}", soft_wrap=True)


def _stopped(out: Path) -> None:
    from nybble.survey.store import ROWS

    rows = len(list((out / ROWS).glob("*.*.json")))
    kept = f"{rows} finished rows are kept in {out / ROWS}: the same command goes on" if rows else "nothing was kept"
    Plain(stderr=True).print(f"nybble: stopped; {kept}", soft_wrap=True)


def evaluate(options: argparse.Namespace) -> None:
    """Perplexity, and KL and agreement where there is an original to compare with."""
    import torch

    from nybble.models import load, load_tokenizer, precision, text
    from nybble.models.evaluate import by_definition, reference
    from nybble.models.evaluate import evaluate as measure

    hush()
    content, device = text.read_text(options.text), find_device(options.device)
    asked = getattr(torch, options.dtype) if options.dtype else None
    dtype = precision.judged(device.type, precision.stored(options.model), asked)
    ids = text.encode(load_tokenizer(options.model), content)
    windows = text.split(ids, options.tokens, 1024, content.name)
    original = None
    if options.reference is not None:
        if not torch.equal(text.encode(load_tokenizer(options.reference), content), ids):
            raise BadInput(f"{options.reference} and {options.model} read the text as different tokens")
        original = reference(load(options.reference, device, dtype), windows)
    model = load(options.model, device, dtype)
    with by_definition(model):
        quality = measure(model, windows, original)
    console = Plain()
    console.print(f"text        {content.name}; last {options.tokens} tokens", soft_wrap=True)
    console.print(f"activations {str(dtype).removeprefix('torch.')} on {device.type}")
    console.print(f"perplexity  {quality.perplexity:.4f}")
    if original is not None:
        console.print(f"reference   {original.quality.perplexity:.4f}")
        console.print(f"KL          {quality.kl:.6f} nats a token")
        console.print(f"top-1       {quality.top1:.2%}")


def bench(options: argparse.Namespace) -> int | None:
    """Hand over to nybble.bench."""
    if find_spec("nybble.bench") is None:
        raise BadInput("nybble bench is not part of this version")
    code: int | None = import_module("nybble.bench").main(options.rest)
    return code
