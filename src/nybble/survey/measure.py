"""Measuring a scheme: quality by definition, bytes as stored, speed against the original in the same minute.

Quality is computed in one dtype, the original's included: on a GPU the 16 bits in which one deploys, on a CPU float32
(models/precision.py). The original's speed is that of the dtype in which it decodes fastest here, since that is what a
scheme has to beat; a scheme decodes in the same dtype unless only another one has a native implementation. The weights
are quantized once, so that they are the same in all.

Copies of the model share every parameter with the original; quantizing replaces modules and touches no weight.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from nybble.errors import BadInput, Mismatch, Unsupported
from nybble.methods import Settings, quantize_, record
from nybble.methods.compose import plan
from nybble.methods.select import select
from nybble.models.decode import Speed
from nybble.models.evaluate import Reference, by_definition, evaluate, reference
from nybble.ops import QuantLinear
from nybble.quantize.layouts import DENSE
from nybble.quantize.schemes import Scheme
from nybble.quantize.schemes import scheme as find_scheme
from nybble.survey import expect
from nybble.survey.paths import service
from nybble.survey.rows import KEPT_BITS, ORIGINAL, Original, Row, Service
from nybble.survey.steady import Referee

Tell = Callable[[str], None]
_PROMPT = 32
_IGNORE = ("lm_head",)
_AGAIN = "speed again, since something disturbed the machine"


@dataclass(frozen=True)
class Bench:
    """A model ready to be surveyed.

    Attributes:
        model: the original, in the dtype quality is measured in.
        copies: the original in each dtype that decoding may use, by the dtype's name.
        windows: int64 [n] each, what quality is measured on.
        calibration: int64 [1, n] each, none of them part of the windows; may be empty.
        lessons: more of the same, for methods that learn from them.
        seed: for methods that draw numbers.
        reference: the original's predictions.
        original: its figures.
        referee: of its races.
    """

    model: nn.Module
    copies: Mapping[str, nn.Module]
    windows: Sequence[Tensor]
    calibration: Sequence[Tensor]
    lessons: Sequence[Tensor]
    seed: int
    reference: Reference
    original: Original
    referee: Referee = field(default_factory=Referee)

    @property
    def prompt(self) -> Tensor:
        """What decoding starts from."""
        return self.windows[-1][:_PROMPT]

    @property
    def dtypes(self) -> list[str]:
        """What decoding may use, the original's choice first."""
        first = self.original.decode_dtype
        return [first, *(name for name in self.copies if name != first)]


def prepare(
    model: nn.Module,
    windows: Sequence[Tensor],
    calibration: Sequence[Tensor],
    dtypes: Sequence[torch.dtype],
    seed: int = 0,
    known: Original | None = None,
    tell: Tell = lambda text: None,
    lessons: Sequence[Tensor] = (),
) -> Bench:
    """Measure the original.

    Args:
        model: not quantized, in the dtype quality is measured in.
        windows, calibration, seed, lessons: see Bench.
        dtypes: what the original may decode in; the fastest is taken.
        known: its figures if they were measured in an earlier run; then only its predictions are computed again.
        tell: called with what is being done.

    Raises:
        BadInput: a weight holds NaN or infinity (named), or the model is quantized already.
    """
    _check(model)
    tell("original: quality")
    kept = reference(model, windows, lambda done, total: tell(f"original: quality {done}/{total}"))
    copies = {_name(dtype): share(model, dtype) for dtype in dtypes}
    referee = Referee()
    if known is None:
        tell("original: speed")
        speeds, busy = referee.race(copies, windows[-1][:_PROMPT], lambda: tell(f"original: {_AGAIN}"))
        best = max(copies, key=lambda name: speeds[name].tokens_per_second)
        known = _original(model, kept, speeds[best], best, busy)
    referee.fastest = 1 / known.tokens_per_second
    return Bench(model, copies, windows, calibration, lessons or calibration, seed, kept, known, referee)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _original(model: nn.Module, kept: Reference, speed: Speed, dtype: str, busy: bool) -> Original:
    parameters = sum(p.numel() for p in model.parameters())
    return Original(
        perplexity=kept.quality.perplexity,
        tokens_per_second=speed.tokens_per_second,
        bytes=parameters * KEPT_BITS // 8,
        quality_dtype=_name(next(model.parameters()).dtype),
        decode_dtype=dtype,
        parameters=parameters,
        linears=len(select(model, _IGNORE).linears),
        busy=busy,
    )


def _check(model: nn.Module) -> None:
    done = record(model)
    if done is not None:
        raise BadInput(f"the model is quantized already ({done.scheme.name}): survey the original instead")
    for name, parameter in model.named_parameters():
        bad = int((~parameter.isfinite()).sum())
        if bad:
            raise BadInput(f"{name} holds {bad} values that are NaN or infinite (of {parameter.numel()})")


def share(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """A copy of the modules around the same parameters, or around parameters converted to `dtype`.

    Buffers stay as they are: the frequencies of rotary embeddings need their float32.
    """
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for parameter in model.parameters():
        same = dtype is None or parameter.dtype == dtype
        memo[id(parameter)] = parameter if same else nn.Parameter(parameter.detach().to(dtype), requires_grad=False)
    return copy.deepcopy(model, memo)


def measure(bench: Bench, name: str, method: str, tell: Tell = lambda text: None) -> Row:
    """One row. A scheme that cannot be had here is a row too, with the reason.

    Raises:
        BadInput: what is wrong with the model itself and not with the scheme.
    """
    begin, scheme = time.perf_counter(), find_scheme(name)
    try:
        tell(f"{scheme.name}: quantizing by {method}")
        model = _quantized(bench, scheme, method)
        quantized = time.perf_counter()
        tell(f"{scheme.name}: quality")
        with by_definition(model):
            progress = lambda done, total: tell(f"{scheme.name}: quality {done}/{total}")  # noqa: E731
            quality = evaluate(model, bench.windows, bench.reference, progress)
    except Unsupported as error:
        return Row(scheme.name, method, path="refused", why=str(error), seconds=time.perf_counter() - begin)
    total, bits = size(model)
    tell(f"{scheme.name}: speed")
    dtype, fast, path, why = _at_decode(bench, model)
    many = max(len(ids) for ids in bench.windows)
    window_path, _ = service(fast, many, getattr(torch, dtype))
    other = "" if window_path == path else f"at M = {many} {window_path}"
    speeds, note = _speeds(bench, fast, scheme.name, tell)
    return Row(
        scheme=scheme.name,
        method=method,
        bits_per_weight=bits,
        bytes=total,
        perplexity=quality.perplexity,
        kl=quality.kl,
        top1=quality.top1,
        path=path,
        why=_join(why, other, note, _uncalibrated(bench, scheme)),
        seconds=time.perf_counter() - begin,
        dtype=dtype,
        window_path=window_path,
        quantize_seconds=quantized - begin,
        expected=expect.speedup(bench.model, scheme, _IGNORE, bench.original.decode_dtype, dtype),
        **speeds,
    )


def _quantized(bench: Bench, scheme: Scheme, method: str) -> nn.Module:
    """The model in this scheme; parameters that the method leaves alone are shared with the original."""
    device = next(bench.model.parameters()).device
    chosen = bench.lessons if plan(method).needs_batches else bench.calibration
    batches = [{"input_ids": ids.to(device)} for ids in chosen] or None
    settings = Settings(seed=bench.seed)
    return quantize_(share(bench.model), scheme, method, ignore=_IGNORE, calibration=batches, config=settings)


def _at_decode(bench: Bench, quantized: nn.Module) -> tuple[str, nn.Module, Service, str]:
    """(dtype, model, path, why) of decoding: in the original's dtype, or in one that is served natively instead."""
    found = []
    for name in bench.dtypes:
        dtype = getattr(torch, name)
        model = _laid_out(quantized, dtype)
        found.append((name, model, *service(model, 1, dtype)))
        if found[-1][2] == "native":
            return found[-1]
    return found[0]


def _laid_out(quantized: nn.Module, dtype: torch.dtype) -> nn.Module:
    """A copy with the same quantized weights, laid out for decoding in `dtype`, and everything else in it."""
    model = share(quantized, dtype)
    for layer in model.modules():
        if isinstance(layer, QuantLinear):
            layer.prepare(dtype)
    return model


def _speeds(bench: Bench, fast: nn.Module, name: str, tell: Tell) -> tuple[dict[str, Any], str]:
    """(the row's figures of speed, measured in turns with the original; what to say where there are none)."""
    models = {ORIGINAL: bench.copies[bench.original.decode_dtype], name: fast}
    try:
        speeds, busy = bench.referee.race(models, bench.prompt, lambda: tell(f"{name}: {_AGAIN}"))
    except Mismatch as error:
        return {}, f"no speed: {error}"
    own, base = speeds[name], speeds[ORIGINAL]
    figures = {
        "tokens_per_second": own.tokens_per_second,
        "speedup": base.seconds / own.seconds,
        "decode_error": own.error,
        "busy": busy or bench.original.busy,  # it may be held against the original in its slower dtype
    }
    return figures, ""


def _uncalibrated(bench: Bench, scheme: Scheme) -> str:
    if scheme.static_input_scale and not bench.calibration:
        return "no text was left for calibration: input scales are measured on each call"
    return ""


def _join(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def size(model: nn.Module) -> tuple[int, float]:
    """(bytes of all weights, bits for each quantized weight); a shared weight counts once."""
    weights = {id(m.weight.codes): m.weight for m in model.modules() if isinstance(m, QuantLinear)}
    stored = sum(w.to_layout(DENSE).nbytes for w in weights.values())
    values = sum(w.shape[0] * w.shape[1] for w in weights.values())
    kept = sum(p.numel() for p in model.parameters()) * KEPT_BITS // 8
    return stored + kept, 8 * stored / values if values else float(KEPT_BITS)
