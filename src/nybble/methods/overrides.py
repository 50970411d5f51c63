"""Other schemes for some layers: `{"*.v_proj": "W4A4_G32", "*.down_proj": "W8A8", "lm_head": None}`.

Four bits are not equally hard everywhere: APEX4 (arXiv 2606.08761) gives v and down groups of 32 and the rest one scale
a channel, where rescaling by groups is dear. A pattern is a layer's full name or its tail after a dot, with the
wildcards of fnmatch; the last that matches a layer decides, over the scheme of the rest and over `ignore`. None leaves
a layer as it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from fnmatch import fnmatchcase

from torch import nn

from nybble.errors import BadInput
from nybble.methods.select import Selection, matches, select
from nybble.quantize.schemes import Scheme
from nybble.quantize.schemes import scheme as find_scheme

Overrides = Mapping[str, str | Scheme | None]
_SHOWN = 3


def assign(
    model: nn.Module, scheme: Scheme, ignore: Sequence[str], overrides: Overrides | None
) -> tuple[Selection, dict[str, Scheme]]:
    """(what is quantized and what is skipped, the scheme of each linear that is quantized).

    Raises:
        BadInput: a pattern matches no linear; the nearest names are given.
        UnknownName: no such scheme.
    """
    if not overrides:
        selection = select(model, ignore)
        return selection, dict.fromkeys(selection.linears, scheme)
    rows = {pattern: None if value is None else find_scheme(value) for pattern, value in overrides.items()}
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    chosen: dict[str, Scheme | None] = {name: None if matches(name, ignore) else scheme for name in names}
    for pattern, row in rows.items():
        found = [name for name in names if fits(name, pattern)]
        if not found:
            raise BadInput(f"override {pattern!r} matches no linear layer; nearest: {_nearest(pattern, names)}")
        chosen.update(dict.fromkeys(found, row))
    wanted = {name for name, row in chosen.items() if row is not None}
    others = [name for name, _ in model.named_modules() if name not in chosen and matches(name, ignore)]
    selection = select(model, (), lambda name: name in others or (name in chosen and name not in wanted))
    return selection, {name: row for name in selection.linears if (row := chosen[name]) is not None}


def fits(name: str, pattern: str) -> bool:
    """Whether a layer's full name, or its tail after a dot, is what the pattern means."""
    return fnmatchcase(name, pattern) or fnmatchcase(name, f"*.{pattern}")


def _nearest(pattern: str, names: Iterable[str]) -> str:
    """The kinds of layers whose names are most like the pattern."""
    known = list(names)
    tails = dict.fromkeys(name.rpartition(".")[2] for name in known)
    asked = pattern.rpartition(".")[2].strip("*") or pattern
    close = get_close_matches(asked, tails, _SHOWN, 0.4) or get_close_matches(pattern, known, _SHOWN, 0.0)
    return ", ".join(close or known[:_SHOWN]) or "the model has none"
