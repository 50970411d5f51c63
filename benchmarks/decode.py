"""Whole-model decoding on a GPU: the bf16 original and quantized schemes in the very same runner.

    python benchmarks/decode.py [--model llama-8b] [--schemes bf16,W4A16,NVFP4A16] [--batch 1,16] [--out FILE]

A scheme quantizes the linears of the layers and leaves the head in bf16, as checkpoints do; `W4A16+head` takes the
head too. The embedding, of which a step reads one row, always stays.

Weights are random, made on the device from the model's shape. The judge asks the ops that a step consists of, and for
each scheme the runner's logits are checked against the definition before its time counts; times are medians over runs
of captured steps; every ratio is to the bf16 runner of the same process. The roofline is the bytes of the weights a
step reads over the bandwidth of a copy measured in the same process.
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nybble
import record
from nybble.errors import Mismatch
from nybble.judge.gate import admit
from nybble.judge.op_problem import PREFIX, OpProblem
from nybble.models.evaluate import by_definition
from nybble.models.llama import Runner
from nybble.ops import QuantLinear
from nybble.ops._declare import Op
from nybble.ops.linear import LINEAR
from nybble.quantize import schemes

SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "vocab_size": 128256},
    "llama-1b": {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16, "num_attention_heads": 32,
                 "num_key_value_heads": 8, "vocab_size": 128256, "head_dim": 64, "tie_word_embeddings": True},
    "smollm2-135m": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9,
                     "num_key_value_heads": 3, "vocab_size": 49152, "tie_word_embeddings": True},
}  # fmt: skip
OPS = {"rmsnorm": "add_rmsnorm", "silu_mul": "silu_mul", "rope_cache": "rope_cache_",
       "decode_attention": "decode_attention", "embed_token": "embed_token_",
       "greedy_token": "greedy_token_", "rmsnorm_linear": "rmsnorm_linear",
       "rope_attention": "rope_attention_"}  # fmt: skip
PROMPT, NEW, FAR, RUNS = 128, 128, 4096, 3
_HEAD = "+head"
CARRIED = 2.0**-3  # random weights carry rounding errors on: two bf16 evaluations of the 8B shape differ by 0.058


def make(shape: str) -> nn.Module:
    """A bf16 model of that shape with random weights on the device."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        **SHAPES[shape], max_position_embeddings=8192, rope_parameters={"rope_type": "default", "rope_theta": 5e5}
    )
    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            model = LlamaForCausalLM(config)
        finally:
            torch.set_default_dtype(torch.float32)
    return model.eval()


def copy_bandwidth() -> float:
    """Bytes a second of a large device-to-device copy, read and written bytes counted."""
    a = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    b = torch.empty_like(a)
    times = [milliseconds(lambda: b.copy_(a)) for _ in range(10)]
    return 2 * a.numel() / (statistics.median(times) / 1e3)


def milliseconds(work: Any) -> float:
    """Time of work() on the device."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


@torch.no_grad()
def check(model: nn.Module, runner: Runner, prompt: torch.Tensor) -> float:
    """||runner - definition|| / ||definition|| of the logits of eight steps."""
    logits = [runner.prefill(prompt).clone()]
    logits += [runner.step().clone() for _ in range(8)]
    tokens = runner.tokens[:, : runner.length]
    with by_definition(model):
        full = model(tokens[:1]).logits[:, prompt.shape[1] - 1 :].float()
    got = torch.stack(logits, 1)[:1].float()
    distance = float((got - full).norm() / full.norm())
    if not distance < CARRIED:
        raise Mismatch(f"the runner's logits are {distance:.3g} away from the definition's")
    return distance


def weight_bytes(model: nn.Module) -> int:
    """Bytes of the weights that a step reads: every linear once."""
    total = 0
    for module in model.modules():
        if isinstance(module, QuantLinear):
            total += module.weight.nbytes
        elif isinstance(module, nn.Linear):
            total += module.weight.numel() * module.weight.element_size()
    return total


def measure(model: nn.Module, batch: int, bandwidth: float) -> dict[str, Any]:
    """Milliseconds a step after a short prompt and far into the cache, with what they mean."""
    generator = torch.Generator().manual_seed(1)
    vocabulary = model.config.vocab_size
    prompt = torch.randint(0, vocabulary, (batch, PROMPT), generator=generator).cuda()
    runner = Runner(model, FAR + NEW + 16, batch)
    distance = check(model, runner, prompt)
    near, far = [], []
    for _ in range(RUNS):
        runner.prefill(prompt)
        runner.decode(2)
        near.append(milliseconds(lambda: runner.decode(NEW)) / NEW)
        runner.position.fill_(FAR)
        runner.length = FAR
        far.append(milliseconds(lambda: runner.decode(NEW)) / NEW)
    step, size = statistics.median(near), weight_bytes(model)
    return {
        "batch": batch, "ms": step, "ms_runs": near, "ms_at_4096": statistics.median(far), "logit_error": distance,
        "weight_bytes": size, "roofline_share": size / bandwidth / (step / 1e3),
        "tokens_per_second": batch / (step / 1e3),
    }  # fmt: skip


def judged(asked: list[str]) -> None:
    """Ask the judge about the ops of a step and about linears with the schemes' formats, all in bf16."""
    for name, function in OPS.items():
        admit(name, f"nybble.ops.{name}:{function}", "cuda", bf16_cases(OpProblem(PREFIX + name).op))
    formats = [schemes.scheme(name.removesuffix(_HEAD)).weight.name for name in asked if name != "bf16"]
    if formats:
        words = tuple(f"{name}-a16" for name in formats)
        admit("linear", "nybble.bench:laid_out", "cuda", [x for x in bf16_cases(LINEAR) if x.startswith(words)])


def bf16_cases(op: Op) -> list[str]:
    """Labels of an op's cases in bf16."""
    return [label for label, _ in op.cases() if "bfloat16" in label]


def rows(asked: list[str], original: nn.Module, batches: list[int], bandwidth: float) -> Iterator[dict[str, Any]]:
    """A row for each scheme and batch; the first scheme is what the others are compared with."""
    base: dict[int, dict[str, Any]] = {}
    for scheme in asked:
        model, quantized = original, "nothing"
        if scheme != "bf16":
            name, head = scheme.removesuffix(_HEAD), scheme.endswith(_HEAD)
            model = nybble.quantize_(copy.deepcopy(original), name, ignore=() if head else ("lm_head",))
            quantized = "linears of the layers" + (", lm_head" if head else "")
        for batch in batches:
            row = {"scheme": scheme, "quantized": quantized, **measure(model, batch, bandwidth)}
            first = base.setdefault(batch, row)
            row["ratio"], row["ratio_at_4096"] = first["ms"] / row["ms"], first["ms_at_4096"] / row["ms_at_4096"]
            yield row
        del model
        torch.cuda.empty_cache()


def main() -> None:
    """Measure, print a table, write JSON as rows come."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-8b", choices=SHAPES)
    parser.add_argument("--schemes", default="bf16,W4A16,NVFP4A16,W4A16+head")
    parser.add_argument("--batch", default="1,16")
    parser.add_argument("--commit", help="of this tree, where git is not at hand")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    asked, done = options.schemes.split(","), []
    judged(asked)
    bandwidth = copy_bandwidth()
    print(f"copy {bandwidth / 1e12:.2f} TB/s")
    for row in rows(asked, make(options.model), [int(x) for x in options.batch.split(",")], bandwidth):
        print(
            f"{row['scheme']:10} batch {row['batch']:3}: {row['ms']:.3f} ms a step, {row['ratio']:.2f}x {asked[0]} "
            f"({row['ratio_at_4096']:.2f}x at {FAR}), {row['roofline_share']:.0%} of the roofline, "
            f"logits off by {row['logit_error']:.2g}"
        )
        done.append(row)
        if options.out:
            write(options, bandwidth, done)


def write(options: argparse.Namespace, bandwidth: float, done: list[dict[str, Any]]) -> None:
    """The rows with what they were measured on."""
    result = {
        "what": "whole-model decode", "model": options.model, "shape": SHAPES[options.model],
        "prompt": PROMPT, "new": NEW, **record.origin("cuda", options.commit), "device": torch.cuda.get_device_name(),
        "copy_bytes_per_second": bandwidth, "rows": done,
    }  # fmt: skip
    record.write(options.out, result)


if __name__ == "__main__":
    main()
