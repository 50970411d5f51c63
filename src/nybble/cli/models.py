"""The commands that run a model: survey, quantize, evaluate; and bench, which has its own options."""

from __future__ import annotations

import argparse
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from nybble.cli import STOPPED
from nybble.cli.console import Plain
from nybble.errors import BadInput
from nybble.machine import find_device

if TYPE_CHECKING:
    import torch
    from torch import nn

_EVALUATED = 4096  # tokens at the text's end that calibration leaves to evaluation


def _hush() -> None:
    """Keep the libraries' own bars and advice away from ours."""
    import logging

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
    from nybble.survey.rows import busy_note
    from nybble.survey.store import PAGE, RESULT

    _hush()
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
    original, advice = result.original, result.recommendation
    console.print(
        f"\nKL: nats a token to the original, in {original.quality_dtype}; tok/s: one sequence, the original in "
        f"{original.decode_dtype}; ratio: to the original, in turns", soft_wrap=True,
    )  # fmt: skip
    if note := busy_note(result.rows):
        console.print(f"\n{note}", soft_wrap=True)
    if advice is not None:
        console.print(f"\nrecommended: {advice.label}\n{advice.reason}", soft_wrap=True)
    console.print(f"\nwritten: {options.out / RESULT}, {options.out / PAGE}", soft_wrap=True)


def _stopped(out: Path) -> None:
    from nybble.survey.store import ROWS

    rows = len(list((out / ROWS).glob("*.*.json")))
    kept = f"{rows} finished rows are kept in {out / ROWS}: the same command goes on" if rows else "nothing was kept"
    Plain(stderr=True).print(f"nybble: stopped; {kept}", soft_wrap=True)


def quantize(options: argparse.Namespace) -> None:
    """Load, quantize, save."""
    import torch

    from nybble.methods import quantize_, record
    from nybble.methods.compose import plan
    from nybble.models import check_saveable, load, load_tokenizer, resolve, save
    from nybble.quantize.schemes import scheme as find_scheme

    scheme, device = find_scheme(options.scheme), find_device(options.device)
    learns = plan(options.method).needs_batches
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise BadInput(f"{options.out} is there already: name a new folder")
    _hush()
    model = load(options.model, device)
    tokenizer = load_tokenizer(options.model)
    check_saveable(model, scheme, options.ignore, options.method)
    batches = _calibration(tokenizer, device, learns) if learns or scheme.static_input_scale else None
    quantize_(model, scheme, options.method, ignore=options.ignore, calibration=batches)
    dtype = options.dtype or ("bfloat16" if resolve(options.model).kind == "gguf" else None)
    if dtype is not None:
        _convert(model, getattr(torch, dtype))
    save(model, options.out, tokenizer)
    done = record(model)
    if done is not None:
        share = sum(skipped.share for skipped in done.skipped)
        Plain().print(
            f"{options.out}: {len(done.quantized)} layers in {scheme.name}; {len(done.skipped)} weights kept "
            f"({share:.0%} of the original's bytes)", soft_wrap=True,
        )  # fmt: skip


def _convert(model: nn.Module, dtype: torch.dtype) -> None:
    """Bring what was not quantized into `dtype`; quantized weights were rounded from their own."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


def _calibration(tokenizer: object, device: object, learns: bool) -> list[dict[str, object]]:
    """Batches of the default text that evaluation's default tokens do not touch."""
    from nybble.models import text

    count = text.LEARNING if learns else text.RANGES
    windows = text.calibration(text.encode(tokenizer, text.default_text()), _EVALUATED, count)
    return [{"input_ids": ids.to(device)} for ids in windows]  # type: ignore[call-overload]


def evaluate(options: argparse.Namespace) -> None:
    """Perplexity, and KL and agreement where there is an original to compare with."""
    import torch

    from nybble.models import load, load_tokenizer, text
    from nybble.models.evaluate import by_definition, reference
    from nybble.models.evaluate import evaluate as measure

    _hush()
    content, device, dtype = text.read_text(options.text), find_device(options.device), getattr(torch, options.dtype)
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
