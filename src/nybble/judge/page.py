"""A verdict as a page: what a person reads who wants to know why."""

from __future__ import annotations

from html import escape
from pathlib import Path

from nybble.judge.verdict import Finding, Verdict

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem }
body { color: #1a1a1a; background: #fff }
h1, h3 { overflow-wrap: anywhere }
h1 span { padding: 0 .4em; border-radius: .2em; color: #fff; background: #a12622 }
h1.correct span { background: #21703a }
table { border-collapse: collapse; margin: .5rem 0 1.5rem }
th, td { text-align: left; padding: .2rem .9rem .2rem 0; vertical-align: top }
th { font-weight: 600; white-space: nowrap }
td { white-space: pre-wrap; overflow-wrap: anywhere }
td.lines { font: 85%/1.4 ui-monospace, monospace }
.note { color: #555 } code { font-size: 90% }
@media (prefers-color-scheme: dark) { body { color: #ddd; background: #161616 } .note { color: #aaa } }
"""


def page(verdict: Verdict) -> str:
    """One self-contained HTML page: the verdict, the evidence, what held, and the speeds of a correct candidate."""
    kind = "correct" if verdict.correct else "not"
    notes = [f for f in verdict.findings if f.status == "note"]
    apart = "inputs, reference, clock and verdict" if verdict.device == "cpu" else "inputs, reference and verdict"
    held = ", ".join(f.check for f in verdict.findings if f.status == "ok")
    return "\n".join([
        "<!doctype html><html lang=en><meta charset=utf-8><meta name=viewport content='width=device-width'>",
        f"<title>{_e(verdict.status)}: {_e(Path(verdict.candidate).name)}</title><style>{_STYLE}</style>",
        f"<h1 class={kind}><span>{_e(verdict.status)}</span> {_e(Path(verdict.candidate).name)}</h1>",
        f"<p>for <code>{_e(verdict.problem)}</code> on {_e(verdict.device)}; "
        f"the same questions again: <code>--seed {verdict.seed}</code></p>",
        *[_finding(f) for f in verdict.against],
        *(["<h2>Speed</h2>", _speeds(verdict)] if verdict.speeds else []),
        *(["<h2>Notes</h2>", *[_finding(f) for f in notes]] if notes else []),
        f"<h2>What held</h2><p>{_e(held) or 'nothing'}</p>",
        f"<p class=note>{verdict.seconds:.1f} s. The candidate ran in a process of its own; {apart} did not.</p>",
        "</html>",
    ])  # fmt: skip


def _finding(finding: Finding) -> str:
    rows = "".join(f"<tr><th>{_e(key)}{_cell(value)}" for key, value in finding.evidence.items())
    table = f"<table>{rows}</table>" if rows else ""
    return f"<h3>{_e(finding.status)}: {_e(finding.what)}</h3><p class=note>check: {_e(finding.check)}</p>{table}"


def _cell(value: str) -> str:
    return f"<td class=lines>{_e(value)}" if "\n" in value else f"<td>{_e(value)}"


def _speeds(verdict: Verdict) -> str:
    head = "<tr><th>who<th>median, ms<th>quartiles<th>rounds<th>over the candidate"
    rows = [
        f"<tr><td>{_e(s.name)}<td>{s.median:.4g}<td>{s.low:.4g} to {s.high:.4g}<td>{s.rounds}"
        f"<td>{f'{verdict.ratios[s.name]:.2f}x' if s.name in verdict.ratios else ''}"
        for s in verdict.speeds
    ]
    best = min(verdict.ratios.values(), default=None)
    said = f"{best:.2f}x over the best baseline" if best is not None else "no baseline ran"
    share = f"; {verdict.roofline:.0%} of this machine's roofline" if verdict.roofline is not None else ""
    floor = f"; an empty call takes {verdict.resolution:.2g} ms, contained in every time" if verdict.resolution else ""
    return f"<table>{head}{''.join(rows)}</table><p>{said}{share}{floor}.</p>"


def _e(text: str) -> str:
    return escape(text, quote=True)
