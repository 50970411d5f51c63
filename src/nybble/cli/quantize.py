"""nybble quantize: load, calibrate, round, save; alone, or as one of the processes that torchrun started.

    torchrun --nproc-per-node=2 -m nybble quantize MODEL W4A16 --method gptq -o DIR

Every process calibrates and rounds its share of each layer's rows (methods/share.py); the first one writes.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from nybble.cli import STOPPED
from nybble.cli.console import Plain
from nybble.cli.models import hush
from nybble.errors import BadInput, UnknownName
from nybble.machine import find_device

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from nybble.models.text import Text
    from nybble.quantize.schemes import Scheme

_EVALUATED = 4096  # tokens at the default text's end that calibration leaves to evaluation


def quantize(options: argparse.Namespace) -> int:
    """Load, quantize, save; what cannot be written or read is found before the model is loaded."""
    from nybble.quantize.schemes import scheme as find_scheme

    scheme, overrides = find_scheme(options.scheme), _overrides(options.override)
    settings = _settings(options.method, options.set)
    text = _text(options, (scheme, *overrides.values()))
    with _together(find_device(options.device)) as (rank, device):
        _writable(options)
        hush()
        try:
            _run(options, scheme, overrides, settings, text, rank, device)
        except KeyboardInterrupt:
            if options.work_dir and rank == 0:
                Plain(stderr=True).print(f"nybble: stopped; the same command goes on from {options.work_dir}")
                return STOPPED
            raise
    return 0


def _run(
    options: argparse.Namespace, scheme: Scheme, overrides: dict[str, Scheme | None], settings: Any, text: Text | None,
    rank: int, device: torch.device,
) -> None:  # fmt: skip
    from nybble.methods import quantize_
    from nybble.models import check_saveable, load, load_tokenizer, save

    home = "cpu" if options.offload else device
    model, tokenizer = load(options.model, home), load_tokenizer(options.model)
    check_saveable(model, scheme, options.ignore, options.method, settings, overrides=overrides)
    batches = None if text is None else _calibration(options, text, tokenizer, home)
    with _progress(rank == 0) as progress:
        quantize_(model, scheme, options.method, ignore=options.ignore, overrides=overrides, calibration=batches,
                  config=settings, progress=progress, work_dir=_work_dir(options, rank), device=device,
                  spill=options.spill)  # fmt: skip
    if rank == 0:
        _convert(model, options)
        save(model, options.out, tokenizer)
        _report(model, options, scheme)


def _writable(options: argparse.Namespace) -> None:
    """Refuse an output that is there already, and folders that cannot be written to."""
    if options.out.exists() and (not options.out.is_dir() or any(options.out.iterdir())):
        raise BadInput(f"{options.out} is there already: name a new folder")
    spill = Path(options.spill) if options.spill and options.spill != "cpu" else None
    for asked, folder in ((options.out, options.out.absolute().parent), (options.work_dir, options.work_dir),
                          (spill, spill)):  # fmt: skip
        if folder is None:
            continue
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=".nybble", dir=folder):
                pass
        except OSError as error:
            raise BadInput(f"{asked}: cannot be written: {error.strerror or error}") from error


def _text(options: argparse.Namespace, schemes: Sequence[Scheme | None]) -> Text | None:
    """What is learned from, or None where nothing is learned; a text that was named in vain is said to be."""
    from nybble.methods.compose import plan
    from nybble.models import text

    learns = plan(options.method).needs_batches
    if learns or any(row.static_input_scale for row in schemes if row is not None):
        return text.read_text(options.calibration)
    if options.calibration or options.samples:
        warnings.warn(f"nothing is learned from a text: {options.method} looks at weights alone", stacklevel=2)
    return None


def _overrides(asked: list[str]) -> dict[str, Scheme | None]:
    """The scheme by pattern, from arguments `PATTERN=SCHEME`; `none` leaves the layers as they are."""
    from nybble.quantize.schemes import scheme as find_scheme

    found: dict[str, Scheme | None] = {}
    for one in asked:
        pattern, equals, name = one.rpartition("=")
        if not (pattern and equals and name):
            raise BadInput(f"--override {one!r}: write PATTERN=SCHEME, such as '*.v_proj=W4A8_G32' or 'down_proj=none'")
        found[pattern] = None if name.lower() == "none" else find_scheme(name)
    return found


def _settings(method: str, given: Sequence[str]) -> Any:
    """Settings from words like "hadamard.plain=true"; None where there are none.

    Raises:
        UnknownName: a method that is not asked for, or a setting it does not have.
        BadInput: a value of another type.
    """
    from nybble.methods import Settings
    from nybble.methods.compose import plan

    parts = {part.name: part.config for part in (*plan(method).changes, plan(method).rounds)}
    for word in given:
        target, _, value = word.partition("=")
        name, _, field = target.rpartition(".")
        if name not in parts:
            raise UnknownName("method to set", name or word, sorted(parts))
        known = {f.name: getattr(parts[name], f.name) for f in dataclasses.fields(parts[name])}
        if field not in known:
            raise UnknownName(f"setting of {name}", field, sorted(known))
        parts[name] = dataclasses.replace(parts[name], **{field: _value(word, value, known[field])})
    return Settings(parts=parts) if given else None


def _value(word: str, text: str, default: Any) -> Any:
    """A setting's value in the type of its default; a name where the default is none."""
    kinds: dict[type, Callable[[str], Any]] = {bool: {"true": True, "false": False}.__getitem__, int: int, float: float}
    try:
        return kinds.get(type(default), str)(text)
    except (KeyError, ValueError):
        raise BadInput(f"{word}: {type(default).__name__} is wanted, as in {default}") from None


@contextmanager
def _together(device: torch.device) -> Iterator[tuple[int, torch.device]]:
    """(this process's number, its device); under torchrun the processes meet first, and part in the end."""
    if int(os.environ.get("WORLD_SIZE", "1")) < 2:
        yield 0, device
        return
    import torch
    from torch import distributed

    if str(device) == "cuda":  # processes beyond the GPUs there are share them
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    distributed.init_process_group("gloo")  # what is exchanged are codes, in main memory
    try:
        yield distributed.get_rank(), device
        distributed.barrier()
    finally:
        distributed.destroy_process_group()


def _work_dir(options: argparse.Namespace, rank: int) -> Any:
    """Each process keeps its own finished blocks: files that two write at once would be nobody's."""
    return options.work_dir and options.work_dir / f"process-{rank}" if rank else options.work_dir


def _calibration(
    options: argparse.Namespace, content: Text, tokenizer: object, home: torch.device | str
) -> list[dict[str, Tensor]]:
    """Batches of the text, of the default one where evaluation's default tokens do not lie."""
    from nybble.methods.compose import plan
    from nybble.models import text

    count = options.samples or (text.LEARNING if plan(options.method).needs_batches else text.RANGES)
    windows = text.calibration(text.encode(tokenizer, content), 0 if options.calibration else _EVALUATED, count)
    if not windows:
        raise BadInput(f"{content.name} holds no tokens to calibrate on")
    return [{"input_ids": window.to(home)} for window in windows]


@contextmanager
def _progress(shown: bool) -> Iterator[Callable[[int, int, str], None] | None]:
    """A bar with the time left, where a terminal watches."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Plain(stderr=True)
    if not (shown and console.is_terminal):
        yield None
        return
    columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(),
               TextColumn("{task.description}"))  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("calibrating", total=None)
        yield lambda done, total, name: bar.update(task, completed=done, total=total, description=name)


def _convert(model: nn.Module, options: argparse.Namespace) -> None:
    """Bring what was not quantized into its dtype; quantized weights were rounded from their own."""
    import torch

    from nybble.models import resolve

    dtype: str | None = options.dtype or ("bfloat16" if resolve(options.model).kind == "gguf" else None)
    if dtype is not None:
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))


def _report(model: nn.Module, options: argparse.Namespace, scheme: Scheme) -> None:
    from nybble.methods import record

    done = record(model)
    if done is None:
        return
    share = sum(skipped.share for skipped in done.skipped)
    others = f", {len(done.others)} of them in {', '.join(sorted({s.name for s in done.others.values()}))}"
    Plain().print(
        f"{options.out}: {len(done.quantized)} layers in {scheme.name}{others if done.others else ''}; "
        f"{len(done.skipped)} weights kept "
        f"({share:.0%} of the original's bytes)", soft_wrap=True,
    )  # fmt: skip
    if done.unreached:
        Plain().print(f"rounded to nearest, for no input reached them: {', '.join(done.unreached)}", soft_wrap=True)
