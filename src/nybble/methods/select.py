"""What of a model is quantized, what is not, and why: nothing is dropped in silence."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

FUSED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("to_q", "to_k", "to_v"))
"""Projections of one parent that inference engines fuse into one product, so that they share a tensor scale."""

# These read their children's weights themselves instead of calling them.
_READS_WEIGHTS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)


@dataclass(frozen=True)
class Skipped:
    """A weight that keeps its precision.

    Attributes:
        name: the parameter's name.
        reason: why.
        share: its share of the bytes of all parameters, 0 to 1.
    """

    name: str
    reason: str
    share: float


@dataclass(frozen=True)
class Selection:
    """The linears to quantize by name, and every other weight of two axes or more."""

    linears: dict[str, nn.Linear]
    skipped: list[Skipped]


def matches(name: str, patterns: Iterable[str]) -> bool:
    """Whether a module's name is one of `patterns`: the full name, its tail after a dot, or `re:` and an expression
    matched from the start of the full name (compressed-tensors' rule)."""
    for pattern in patterns:
        if pattern.startswith("re:"):
            if re.match(pattern[3:], name):
                return True
        elif name == pattern or name.endswith("." + pattern):
            return True
    return False


def select(model: nn.Module, ignore: Sequence[str], leave: Callable[[str], bool] | None = None) -> Selection:
    """Go through a model: which nn.Linear is quantized, and what is skipped for which reason.

    Args:
        model: any module.
        ignore: patterns of `matches` to leave alone.
        leave: takes a module's name; whether that one is left alone as well.
    """
    owners = _owners(model)
    total = sum(p.numel() * p.element_size() for p in model.parameters()) or 1
    linears: dict[str, nn.Linear] = {}
    skipped: list[Skipped] = []
    for module_name, module, parent in _walk(model):
        for parameter_name, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2:
                continue
            asked = matches(module_name, ignore) or (leave is not None and leave(module_name))
            reason = _refusal(module, parent, parameter_name, parameter, asked, owners)
            if reason is None and isinstance(module, nn.Linear):
                linears[module_name] = module
            elif reason is not None:
                full = f"{module_name}.{parameter_name}" if module_name else parameter_name
                skipped.append(Skipped(full, reason, parameter.numel() * parameter.element_size() / total))
    return Selection(linears, skipped)


def _walk(model: nn.Module) -> Iterator[tuple[str, nn.Module, nn.Module | None]]:
    """(name, module, parent) of every module, each once."""
    parents: dict[str, nn.Module] = {}
    for name, module in model.named_modules():
        parents[name] = module
        yield name, module, parents.get(name.rpartition(".")[0]) if name else None


def _owners(model: nn.Module) -> dict[int, list[tuple[str, nn.Module]]]:
    """Which modules hold each parameter object; more than one means that it is tied."""
    owners: dict[int, list[tuple[str, nn.Module]]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), []).append((name, module))
    return owners


def _refusal(
    module: nn.Module,
    parent: nn.Module | None,
    parameter_name: str,
    parameter: Tensor,
    ignored: bool,
    owners: dict[int, list[tuple[str, nn.Module]]],
) -> str | None:
    """Why this parameter is not quantized; None where it is."""
    if ignored:
        return "ignored on request"
    if isinstance(module, nn.Embedding):
        return "an embedding"
    if type(module) is not nn.Linear:
        stacked = f"stacked weights {list(parameter.shape)} (experts)" if parameter.ndim == 3 else "not a nn.Linear"
        return f"{stacked}, in a {type(module).__name__}"
    if isinstance(parent, _READS_WEIGHTS):
        return f"read directly by its parent, a {type(parent).__name__}"
    other = [(n, m) for n, m in owners[id(parameter)] if m is not module and type(m) is not nn.Linear]
    if other:
        return f"tied to {other[0][0]}, a {type(other[0][1]).__name__}"
    if not parameter.is_floating_point():
        return f"already {parameter.dtype}"
    return None


def fused_groups(names: Iterable[str]) -> list[list[str]]:
    """The names in groups that share a tensor scale; a module that nothing is fused with is a group of one."""
    kinds = {kind: group for group in FUSED for kind in group}
    groups: dict[object, list[str]] = {}
    for name in names:
        parent, _, kind = name.rpartition(".")
        groups.setdefault((parent, kinds[kind]) if kind in kinds else name, []).append(name)
    return list(groups.values())
