"""What a survey leaves behind: survey.json for programs, survey.html for people."""

from __future__ import annotations

import html
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from nybble.files import write_whole
from nybble.survey import plot, store
from nybble.survey.live import cells, original_cells
from nybble.survey.recommend import DEFAULT_MAX_KL
from nybble.survey.rows import Identity, Original, Recommendation, Result, Row, busy_note

_HEADINGS = ("scheme", "bits/weight", "MB", "perplexity", "KL", "top-1", "tokens/s", "x original", "x planned", "path")

_GGUF = (
    "The model comes from a GGUF file, which may hold fewer than 16 bits a weight itself: the original here are its "
    "weights expanded, and every scheme rounds those."
)
_NOISE = (
    " Both run in 16 bits and round apart, so that what is nearly equal looks 0.002 further off than in float32 "
    "(seen with SmolLM2-135M)."
)


def write_all(result: Result, directory: Path, max_kl: float | None = None) -> None:
    """Write both files into the folder, each in one step."""
    store.write_json(directory / store.RESULT, as_json(result, max_kl))
    write_whole(directory / store.PAGE, page(result, max_kl))


def as_json(result: Result, max_kl: float | None = None) -> dict[str, Any]:
    """The survey as JSON holds it."""
    identity = result.identity
    return {
        "nybble": identity.nybble,
        "model": identity.model,
        "device": identity.device,
        "text": identity.text,
        "text_sha256": identity.text_sha256,
        "tokens": identity.tokens,
        "window": identity.window,
        "seed": identity.seed,
        "max_kl": DEFAULT_MAX_KL if max_kl is None else max_kl,
        "machine": result.machine,
        "reference": result.original.as_dict(),
        "rows": [row.as_dict() for row in result.rows],
        "recommendation": result.recommendation and result.recommendation.as_dict(),
    }


def from_json(found: Mapping[str, Any]) -> Result:
    """A survey as `as_json` wrote it; which files the model had is not in it."""
    identity = Identity(
        **{key: found[key] for key in ("nybble", "model", "text", "text_sha256", "tokens", "window", "seed", "device")},
        torch=found["machine"]["torch"],
        files=[],
        dtype=found["reference"]["quality_dtype"],
    )
    advice = found["recommendation"]
    return Result(
        identity,
        found["machine"],
        Original.from_dict(found["reference"]),
        [Row.from_dict(row) for row in found["rows"]],
        advice and Recommendation.from_dict(advice),
    )


def page(result: Result, max_kl: float | None = None) -> str:
    """The survey as one page that refers to nothing outside itself."""
    identity, original, advice = result.identity, result.original, result.recommendation
    template = Template((Path(__file__).parent / "report.html").read_text(encoding="utf-8"))
    facts = {
        "model": identity.model,
        "machine": identity.device,
        "text": f"{identity.text} (SHA-256 {identity.text_sha256[:12]}…)",
        "tokens": f"{identity.tokens:,}",
        "window": f"{identity.window:,}",
        "reason": advice.reason if advice else "",
        "busy": busy_note(original, result.rows),
        "linears": str(original.linears),
        "parameters": f"{original.parameters / 1e6:.0f}",
        "quality_dtype": original.quality_dtype,
        "decode_dtype": original.decode_dtype,
        "noise": "" if original.quality_dtype == "float32" else _NOISE,
        "source": _GGUF if any(".gguf " in line for line in identity.files) else "",
        "version": identity.nybble,
        "method": ", ".join(sorted({row.method for row in result.rows})),
        "seed": str(identity.seed),
    }
    return template.substitute(
        {key: html.escape(value) for key, value in facts.items()},
        plot=plot.svg(result, max_kl),
        headings="".join(_cell("th", heading, heading == "path") for heading in _HEADINGS),
        rows="\n".join([_line("original", original_cells(original), ""), *(_row(row, result) for row in result.rows)]),
    )


def _row(row: Row, result: Result) -> str:
    chosen = result.recommendation is not None and result.recommendation.names(row)
    return _line("chosen" if chosen else "", (*cells(row)[:-1], row.path), _why(row), folded=row.path == "emulated")


def _why(row: Row) -> str:
    """The reason for its path, and what its method took."""
    took = "" if row.method == "rtn" or row.quantize_seconds is None else f"{row.quantize_seconds / 60:.2f} min"
    return "; ".join(filter(None, [row.reason, took and f"quantized in {took}"]))


def _line(kind: str, shown: tuple[str, ...], why: str, folded: bool = False) -> str:
    *numbers, path = shown
    body = "".join(_cell("td", number) for number in numbers) + _cell("td", path, text=True)
    told = html.escape(why)
    if folded:  # every refusal of every implementation: to be asked for, so that the table can be read
        told = f"<details><summary>what no native kernel takes</summary>{told}</details>"
    return f'<tr class="{kind}">{body}<td class="text why">{told}</td></tr>'


def _cell(tag: str, content: str, text: bool = False) -> str:
    kind = ' class="text"' if text else ""
    return f"<{tag}{kind}>{html.escape(content)}</{tag}>"
