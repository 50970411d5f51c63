"""Whole models with narrow activations on a GPU: Llama-3.1-8B's prefill, and one step of a diffusion transformer.

    python benchmarks/prefill.py [--out FILE] [--commit HASH] [--only llama-8b|dit] [--tiny]

Weights are random. Layers share one layer's weights where that changes no time (they are far larger than the L2
cache). Each model runs in one captured CUDA graph, so that Python's part is the same for all: bf16, W8A8, FP8, and
(the diffusion transformer) *fake*, which quantizes, dequantizes and multiplies in bf16, as deployed "INT8" linears
once did. `linears` is the time of the bf16 linears alone over the step's, so that Amdahl's bound can be read off.

The diffusion transformer has Ideogram 4.0's shape (arXiv 2606.14598): 34 blocks of width 4608 with heads of 256 and
MLPs of 12288, adaptive layer norms, one projection of the text's features 53248 wide.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
import sys
import unittest.mock
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import record
from nybble.bench import machine
from nybble.models.llama import Runner
from nybble.ops import QuantLinear
from nybble.ops.linear import LINEAR
from nybble.ops.linear.reference import round_activation
from nybble.quantize import quantize, schemes

RUNS, TOKENS_CHECKED = 7, 1024
LLAMA = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
         "num_key_value_heads": 8, "vocab_size": 128256}  # fmt: skip
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": 256}  # fmt: skip


class Block(nn.Module):
    """A block as timm's DiT has it: norm, shift and scale, attention, gate; the same with an MLP."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor, modulation: Tensor) -> Tensor:
        """x [1, T, width] and six vectors [6, width] that a condition gives."""
        shift1, scale1, gate1, shift2, scale2, gate2 = modulation
        q, k, v = self.qkv(self.norm1(x) * (1 + scale1) + shift1).unflatten(-1, (3, self.heads, -1)).unbind(-3)
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = x + gate1 * self.proj(attended)
        hidden = torch.nn.functional.gelu(self.fc1(self.norm2(x) * (1 + scale2) + shift2), approximate="tanh")
        return x + gate2 * self.fc2(hidden)


class Diffusion(nn.Module):
    """Blocks over image tokens, to which a projection of the text's features is added."""

    def __init__(self, width: int, heads: int, hidden: int, text: int, depth: int) -> None:
        super().__init__()
        self.text = nn.Linear(text, width)
        block = Block(width, heads, hidden)
        self.blocks = nn.ModuleList([block] * depth)

    def forward(self, x: Tensor, text: Tensor, modulation: Tensor) -> Tensor:
        """x [1, T, width], text [1, T, text], modulation [6, width]."""
        x = x + self.text(text)
        for block in self.blocks:
            x = block(x, modulation)
        return x


class Fake(nn.Module):
    """A linear that quantizes and dequantizes both operands and multiplies in bf16."""

    def __init__(self, layer: QuantLinear) -> None:
        super().__init__()
        self.activation, self.bias, self.weight = layer.activation, layer.bias, layer.weight

    def forward(self, x: Tensor) -> Tensor:
        """[..., K] -> [..., N]."""
        rounded, weight = round_activation(x, self.activation).to(x.dtype), self.weight.dequantize(x.dtype)
        return torch.nn.functional.linear(rounded, weight, self.bias)


def milliseconds(step: Callable[[], Tensor]) -> tuple[float, Tensor]:
    """(median of a captured step, its result)."""
    if not torch.cuda.is_available():
        return float("nan"), step().clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = step()
    times = []
    for _ in range(RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end))
    return statistics.median(times[1:]), y.clone()


def linears(step: Callable[[], Tensor]) -> float:
    """Milliseconds of a bf16 step's linears alone: what they are given is recorded, then they run in the same order."""
    calls: list[tuple[Tensor, Tensor, Tensor | None]] = []
    multiply = torch.nn.functional.linear

    def recorded(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        calls.append((torch.randn_like(x), weight, bias))
        return multiply(x, weight, bias)

    with unittest.mock.patch.object(torch.nn.functional, "linear", recorded):
        step()

    def alone() -> Tensor:
        for call in calls:
            y = multiply(*call)
        return y

    return milliseconds(alone)[0]


def checked(model: nn.Module) -> float:
    """The largest distance of a quantized linear from its definition, on random tokens; Mismatch beyond the agreement.

    The whole model's result is no check: random layers carry every rounding on.
    """
    distances = []
    for layer in {m for m in model.modules() if isinstance(m, QuantLinear | Fake)}:
        weight = layer.weight
        x = torch.randn(TOKENS_CHECKED, weight.shape[1], device=weight.device).bfloat16()
        args = (x, weight, layer.bias, layer.activation, None)
        distances.append(LINEAR.check(layer(x), args, f"a linear of {weight.format.name} {weight.shape}"))
    return max(distances)


def measure(
    name: str, model: nn.Module, schemes: list[str], prepare: Callable[[nn.Module], Callable[[], Tensor]]
) -> Iterator[dict[str, Any]]:
    """A row for bf16 and for every scheme; `prepare` makes a model's step."""
    step = prepare(model)
    alone = linears(step)
    base, original = milliseconds(step)
    yield {"model": name, "scheme": "bf16", "ms": base, "linears_ms": alone, "linears": alone / base}
    for scheme in schemes:
        quantized = _quantized(model, "W8A8" if scheme == "fake" else scheme, fake=scheme == "fake")
        error = checked(quantized)
        ms, y = milliseconds(prepare(quantized))
        distance = float((y.float() - original.float()).norm() / original.float().norm())
        yield {"model": name, "scheme": scheme, "ms": ms, "ratio": base / ms, "worst_linear": error,
               "distance_from_bf16": distance}  # fmt: skip


def _quantized(model: nn.Module, scheme: str, fake: bool) -> nn.Module:
    """A copy with the linears quantized, those that layers share once."""
    row, model = schemes.scheme(scheme), copy.deepcopy(model)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear) and name != "lm_head":
                weight = quantize(child.weight.detach(), row.weight, check=False)
                layer = QuantLinear(weight, child.bias, row.activation).prepare(child.weight.dtype)
                setattr(parent, name, Fake(layer) if fake else layer)
    return model


def llama(tiny: bool, device: str) -> Iterator[dict[str, Any]]:
    """A prompt of 2,048 tokens through Llama-3.1-8B's shape."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape, tokens = (TINY, 96) if tiny else (LLAMA, 2048)
    config = LlamaConfig(**{**shape, "num_hidden_layers": 1})
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        model = LlamaForCausalLM(config).eval()
        torch.set_default_dtype(torch.float32)
    model.model.layers = nn.ModuleList([model.model.layers[0]] * shape["num_hidden_layers"])
    prompt = torch.randint(0, shape["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(1)).to(device)

    def prepare(model: nn.Module) -> Callable[[], Tensor]:
        runner = Runner(model, tokens + 8)
        return lambda: runner.prefill(prompt)

    return measure("llama-8b", model, ["W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "W4A8"], prepare)


def diffusion(tiny: bool, device: str) -> Iterator[dict[str, Any]]:
    """A step over 4,096 tokens of a diffusion transformer of Ideogram 4.0's shape."""
    width, heads, hidden, text, depth, tokens = (64, 4, 128, 96, 2, 96) if tiny else (4608, 18, 12288, 53248, 34, 4096)
    torch.manual_seed(0)
    with torch.device(device):
        model = Diffusion(width, heads, hidden, text, depth).bfloat16().eval()
        inputs = torch.randn(1, tokens, width).bfloat16(), torch.randn(1, tokens, text).bfloat16()
        modulation = (torch.randn(6, width) * 0.2).bfloat16()
    return measure(
        "dit", model, ["W8A8", "FP8_DYNAMIC", "fake"], lambda model: lambda: model(*inputs, modulation)
    )  # fmt: skip


def main() -> None:
    """Measure, print, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of this tree, where git is not at hand")
    parser.add_argument("--only", choices=("llama-8b", "dit"))
    parser.add_argument("--tiny", action="store_true", help="small sizes, without times where there is no GPU")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    result: dict[str, Any] = {"what": "whole models with narrow activations", "rows": []}
    result |= (machine() if device == "cuda" else {}) | {"commit": options.commit or record.head()}
    with torch.no_grad():
        models = {"llama-8b": llama, "dit": diffusion}
        wanted = [model for name, model in models.items() if options.only in (None, name)]
        for row in itertools.chain.from_iterable(model(options.tiny, device) for model in wanted):
            result["rows"].append(row)
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
            if options.out:
                record.write(options.out, result)


if __name__ == "__main__":
    main()
