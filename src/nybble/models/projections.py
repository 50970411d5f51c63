"""The linears of a Llama-family model as weights, for a runner that calls ops itself.

Projections that share their input are joined along N, so that fewer, larger products run; the modules' own weights
become views of the joined one, and nothing is held twice. A linear's bits do not depend on what it is joined with:
`linear_exact` and `linear_invariant` fix the order of a sum by K and the format.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nybble.errors import Unsupported
from nybble.models.llama import refusal
from nybble.ops import QuantLinear
from nybble.ops._choose import choose
from nybble.ops._declare import Op
from nybble.quantize import QuantTensor
from nybble.quantize.tensor import concatenate, split_rows

Weight = Tensor | QuantTensor
_WIDENED = 1 << 29
"""On a CPU the quantized weights of a model of at most so many values are widened to float32 once, not at each use; the
linears define them by those values, so the bits are the same."""


def refuse(model: nn.Module) -> None:
    """Raise Unsupported where a model cannot run under a promise, with the layer and what is in the way."""
    reason = refusal(model)
    if reason is not None:
        raise Unsupported(f"no promise covers this model: {reason}")
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear | QuantLinear):
            continue
        if module._forward_pre_hooks or module._forward_hooks:
            raise Unsupported(f"no promise covers this model: something is attached to {name}")
        if isinstance(module, QuantLinear) and module.activation is not None:
            raise Unsupported(
                f"no promise covers this model: {name} rounds its inputs to {module.activation.name}; "
                f"nearest: {module.weight.format.name} weights with 16-bit activations"
            )


@dataclass
class Projection:
    """Linears that share their input, outputs side by side: one weight, or several that cannot be joined."""

    name: str
    parts: list[tuple[Weight, Tensor | None]]


def join(name: str, modules: Sequence[nn.Module]) -> Projection:
    """The modules' weights, joined where that is possible; the modules' own become views of the joined one."""
    if len(modules) > 1:
        dense = [m for m in modules if isinstance(m, nn.Linear)]
        quantized = [m for m in modules if isinstance(m, QuantLinear)]
        whole: Weight | None = _join_dense(dense) if len(dense) == len(modules) else None
        whole = _join_quantized(quantized) if len(quantized) == len(modules) else whole
        biases: list[Any] = [m.bias for m in modules]
        if whole is not None and (all(b is None for b in biases) or all(b is not None for b in biases)):
            return Projection(name, [(whole, None if biases[0] is None else torch.cat([b.data for b in biases]))])
    each: list[Any] = list(modules)
    return Projection(name, [(_data(m.weight), _data(m.bias)) for m in each])


def _join_dense(modules: list[nn.Linear]) -> Tensor:
    weights = [module.weight.data for module in modules]
    first, ends = weights[0], [weight.data_ptr() + weight.nbytes for weight in weights]
    if all(w.is_contiguous() for w in weights) and ends[:-1] == [w.data_ptr() for w in weights[1:]]:
        room = first.untyped_storage()
        if ends[-1] <= room.data_ptr() + room.nbytes():  # joined by an earlier runner
            return first.as_strided((sum(map(len, weights)), first.shape[1]), first.stride())
    whole = torch.cat(weights)
    for module, part in zip(modules, whole.split([m.out_features for m in modules]), strict=True):
        module.weight.data = part
    return whole


def _join_quantized(modules: list[QuantLinear]) -> QuantTensor | None:
    whole = concatenate([module.weight for module in modules])
    if whole is not None:
        rows = split_rows(whole, [module.out_features for module in modules])
        for module, part in zip(modules, rows, strict=True):
            if part is not None:
                module.set_weight(part)
    return whole


def _data(weight: Any) -> Any:
    return weight.data if isinstance(weight, nn.Parameter) else weight


def prepare(projections: Sequence[Projection], op: Op, dtype: torch.dtype, device: torch.device) -> None:
    """Bring quantized weights to where `op` reads them without work: its layout, or their float32 values."""
    total = sum(math.prod(weight.shape) for projection in projections for weight, _ in projection.parts)
    widen = device.type == "cpu" and total <= _WIDENED
    for projection in projections:
        projection.parts = [(_ready(weight, bias, op, dtype, widen), bias) for weight, bias in projection.parts]


def _ready(weight: Weight, bias: Tensor | None, op: Op, dtype: torch.dtype, widen: bool) -> Weight:
    if not isinstance(weight, QuantTensor):
        return weight
    if widen:
        return weight.dequantize(torch.float32)
    probe = torch.empty((1, weight.shape[1]), dtype=dtype, device=weight.device)
    return weight.to_layout(choose(op, probe.device.type, probe, weight, bias).layout(weight) or weight.layout)


@dataclass
class Layer:
    """One transformer layer as the runner sees it."""

    input_norm: Any
    qkv: Projection
    o: Projection
    post_norm: Any
    gate_up: Projection
    down: Projection


def split(number: int, module: Any) -> Layer:
    """The layer `number` of a transformers model."""
    attention, mlp, name = module.self_attn, module.mlp, f"layers.{number}"
    return Layer(
        module.input_layernorm,
        join(f"{name}.self_attn.qkv_proj", [attention.q_proj, attention.k_proj, attention.v_proj]),
        join(f"{name}.self_attn.o_proj", [attention.o_proj]),
        module.post_attention_layernorm,
        join(f"{name}.mlp.gate_up_proj", [mlp.gate_proj, mlp.up_proj]),
        join(f"{name}.mlp.down_proj", [mlp.down_proj]),
    )
