"""The commands that can hold a model to a promise about equal bits: generate and fingerprint."""

from __future__ import annotations

import argparse
import sys
from contextlib import nullcontext
from typing import TYPE_CHECKING

from nybble.cli.console import Plain
from nybble.cli.models import hush
from nybble.machine import find_device

if TYPE_CHECKING:
    from torch import nn

DIFFERS = 3


def generate(options: argparse.Namespace) -> None:
    """Write a continuation as it comes."""
    from nybble.models import load_tokenizer, promised
    from nybble.models.decode import generate as continuation
    from nybble.ops._promise import promise

    heat = options.temperature
    pick = promised.greedy if heat is None else promised.drawn(heat, options.seed)
    model = _load(options, options.dtype) if options.promise else _deployed(options)
    tokenizer = load_tokenizer(options.model)
    with promise(options.promise) if options.promise else nullcontext():
        for piece in continuation(model, tokenizer, options.prompt, options.tokens, pick):
            sys.stdout.write(piece)
            sys.stdout.flush()
    sys.stdout.write("\n")


def fingerprint(options: argparse.Namespace) -> int:
    """Write a model's fingerprint, or compare one with what is computed here; 3 where they differ."""
    import torch

    from nybble.models import fingerprint as prints
    from nybble.models import load_tokenizer

    if options.check is not None:
        known = prints.read(options.check)
        model = _load(options, options.dtype or known["dtype"])
        difference = prints.check(model, known)
        where = f"{options.check} (recorded on {known['machine']})"
        count = f"{len(known['ops'])} ops, {len(known['tokens'])} tokens"
        Plain().print(f"{where}: {difference or f'the same bits: {count}'}", soft_wrap=True)
        return DIFFERS if difference else 0
    model = _load(options, options.dtype)
    ids = torch.tensor(load_tokenizer(options.model)(options.prompt)["input_ids"])
    made = prints.make(model, ids, options.tokens, options.promise)
    prints.write(options.out, made)
    Plain().print(f"{options.out}: {len(made['ops'])} ops, {len(made['tokens'])} tokens, {options.promise}")
    return 0


def _deployed(options: argparse.Namespace) -> nn.Module:
    """The model in the dtype in which one runs it on this device."""
    import torch

    from nybble.models import load, precision

    hush()
    device, asked = find_device(options.device), getattr(torch, options.dtype) if options.dtype else None
    return load(options.model, device, precision.deployed(device.type, precision.stored(options.model), asked))


def _load(options: argparse.Namespace, dtype: str | None) -> nn.Module:
    """The model as a promise takes it, the same on every device: its own dtype, bfloat16 for a .gguf file, whose
    tensors are dequantized."""
    import torch

    from nybble.models import load, resolve

    hush()
    if dtype is None and resolve(options.model).kind == "gguf":
        dtype = "bfloat16"
    return load(options.model, find_device(options.device), getattr(torch, dtype) if dtype else None)
