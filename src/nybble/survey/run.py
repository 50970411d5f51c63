"""A whole survey: what is asked for, what is kept from an earlier run, what is measured now, what is written."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from pathlib import Path
from typing import Protocol

import torch
from torch import nn

from nybble import machine
from nybble.errors import BadInput, UnknownName
from nybble.methods.compose import plan
from nybble.models import load, load_tokenizer, precision, resolve
from nybble.models import text as texts
from nybble.quantize.schemes import scheme as find_scheme
from nybble.survey import measure, report
from nybble.survey.recommend import recommend
from nybble.survey.rows import DEFAULT_SCHEMES, Identity, Original, Result, Row
from nybble.survey.steady import reviewed
from nybble.survey.store import Store, fingerprint

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
WINDOW = 1024


@dataclass(frozen=True)
class Request:
    """What a user asks for.

    Attributes:
        model: a Hugging Face directory, a .gguf file, or "smollm2-135m".
        schemes: names, in the order of the table.
        methods: how weights are rounded, each with every scheme.
        tokens: how many of the text's last tokens quality is measured on.
        text: a UTF-8 file, or None for the default text.
        device: "cpu", "cuda", "cuda:1"; None takes a GPU where there is one.
        dtype: "auto" (models/precision.py), or a key of DTYPES for quality and speed alike.
        seed: of methods that draw numbers.
        out: the folder for results.
        max_kl, max_bytes: limits for the recommendation.
        force: whether another survey in `out` is replaced.
    """

    model: str
    schemes: Sequence[str] = DEFAULT_SCHEMES
    methods: Sequence[str] = ("rtn",)
    tokens: int = 4096
    text: str | None = None
    device: str | None = None
    dtype: str = "auto"
    seed: int = 0
    out: Path = Path()
    max_kl: float | None = None
    max_bytes: int | None = None
    force: bool = False


class Display(Protocol):
    """Who watches."""

    def begin(self, title: str, total: int) -> None:
        """The survey starts; `total` rows are asked for."""

    def step(self, text: str) -> None:
        """What is being done."""

    def original(self, original: Original) -> None:
        """The original was measured."""

    def row(self, row: Row, kept: bool) -> None:
        """A row is there; `kept` if it comes from an earlier run."""


def survey(request: Request, display: Display) -> Result:
    """Measure every scheme that has no row yet, and write the results.

    Raises:
        NybbleError: anything in the request that cannot be worked with; rows that are finished stay.
    """
    names = list(dict.fromkeys(find_scheme(name).name for name in request.schemes))
    pairs = [(name, method) for name in names for method in dict.fromkeys(request.methods)]
    for method in request.methods:
        plan(method)
    if request.dtype not in ("auto", *DTYPES):
        raise UnknownName("dtype", request.dtype, ["auto", *DTYPES])
    source, text, device = resolve(request.model), texts.read_text(request.text), machine.find_device(request.device)
    here = machine.describe(str(device))
    identity = Identity(
        nybble=import_module("nybble").__version__,
        torch=here.torch,
        model=request.model,
        files=fingerprint(source.path),
        text=text.name,
        text_sha256=text.sha256,
        tokens=request.tokens,
        window=WINDOW,
        seed=request.seed,
        device=here.sentence(),
        dtype=request.dtype,
    )
    store = Store(request.out, identity)
    store.open(request.force)
    display.begin(f"{request.model} on {here.name}", len(pairs))
    original, rows = _rows(request, pairs, text, device, store, display)
    result = Result(identity, here.as_dict(), _steady(original, rows), rows)
    result = replace(result, recommendation=recommend(rows, result.original, request.max_kl, request.max_bytes))
    report.write_all(result, request.out, request.max_kl)
    return result


def _rows(
    request: Request,
    pairs: list[tuple[str, str]],
    text: texts.Text,
    device: torch.device,
    store: Store,
    display: Display,
) -> tuple[Original, list[Row]]:
    """Every row, from the folder or measured now; the model is loaded only if something is missing."""
    original = store.original()
    found = {pair: store.row(*pair) for pair in pairs}
    bench = None
    if original is None or None in found.values():
        bench = _bench(request, text, device, original, display)
        original = bench.original
        store.save_original(original)
    display.original(original)
    rows = []
    for pair in pairs:
        row = found[pair]
        if row is None and bench is not None:
            row = measure.measure(bench, *pair, display.step)
            store.save(row)
        if row is not None:
            display.row(row, kept=found[pair] is not None)
            rows.append(row)
    for before, row in zip(rows, judged := reviewed(rows), strict=True):
        if row != before:
            store.save(row)
    return original, judged


def _bench(
    request: Request, text: texts.Text, device: torch.device, known: Original | None, display: Display
) -> measure.Bench:
    display.step("reading the text")
    ids = texts.encode(load_tokenizer(request.model), text)
    texts.split(ids, request.tokens, WINDOW, text.name)  # a text that is too short is found before the model is read
    display.step("loading the model")
    dtype = precision.judged(device.type, precision.stored(request.model), DTYPES.get(request.dtype))
    model = load(request.model, device, dtype)
    window = min(WINDOW, _positions(model))
    choices = [dtype] if request.dtype != "auto" or device.type != "cpu" else [torch.float32, torch.bfloat16]
    windows = texts.split(ids, request.tokens, window, text.name)
    few, many = (
        texts.calibration(ids, request.tokens, count, min(512, window)) for count in (texts.RANGES, texts.LEARNING)
    )
    return measure.prepare(model, windows, few, choices, request.seed, known, display.step, many)


def _positions(model: nn.Module) -> int:
    limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if limit is not None and limit < 2:
        raise BadInput(f"the model takes {limit} positions: none is left to predict")
    return limit or WINDOW


def _steady(original: Original, rows: Sequence[Row]) -> Original:
    """The original with the median of its speeds beside every scheme, the steadiest there is."""
    beside = [row.beside for row in rows if row.beside is not None and not row.busy]
    return replace(original, tokens_per_second=statistics.median(beside)) if beside else original
