"""transform_config: rotations of inputs, as compressed-tensors writes them into `quantization_config`.

Its library knows many transforms; a plain Hadamard rotation of a linear's inputs as they come is the one that needs no
matrix in the file. Rotations that lie in the weights are named there too, and ask nothing of a reader.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from nybble.errors import Unsupported

Rotated = tuple[list[str], list[str], int | None]
"""(targets, ignored, size of the blocks) of one rotation; no size means the whole input."""


def matches(name: str, module: nn.Module, targets: Iterable[str]) -> bool:
    """compressed-tensors' rule: the full name, a class name, or `re:` and an expression matched from the start."""
    classes = {c.__name__ for c in type(module).__mro__}
    return any(re.match(t[3:], name) if t.startswith("re:") else t == name or t in classes for t in targets)


def describe(rotated: Mapping[int, list[str]]) -> dict[str, Any]:
    """Weights are stored rotated, so that only inputs are spoken of."""
    groups = {
        f"hadamard_{block}": {"type": "hadamard", "apply": [{"targets": names, "location": "input"}], "head_dim": block}
        for block, names in rotated.items()
    }
    return {"config_groups": groups}


def parse(config: Mapping[str, Any]) -> list[Rotated]:
    """(targets, ignored, block) of every rotation of inputs; block None is the whole input.

    Raises:
        Unsupported: a transform that is no plain Hadamard rotation of inputs, and is not in the weights already.
    """
    found = []
    for name, scheme in ((config.get("transform_config") or {}).get("config_groups") or {}).items():
        for apply in scheme["apply"]:
            if apply["location"] in ("weight_input", "weight_output"):
                continue
            if scheme["type"] != "hadamard" or apply["location"] != "input" or scheme.get("randomize"):
                raise Unsupported(f"transform_config: {name} ({scheme['type']} of {apply['location']}) is not read")
            found.append((list(apply["targets"]), list(apply.get("ignore") or []), scheme.get("head_dim")))
    return found


def find(rotations: Sequence[Rotated], name: str, module: nn.Module) -> int | None:
    """The size of the blocks that rotate a module's inputs; None for none."""
    for targets, ignored, block in rotations:
        if matches(name, module, targets) and not matches(name, module, ignored):
            return block or int(module.in_features)  # type: ignore[arg-type]
    return None
