"""What distillation buys, on a model small enough to be trained here: held-out KL by format and by what is rounded.

    python benchmarks/distill.py --steps 200

A Llama of bytes (4 blocks, 128 wide, about 0.9 million parameters) learns Python's help topics but for their last
16,384 bytes; the same part is what distillation sees, and the last bytes are what KL is measured on. "weights" trains
with inputs left alone, "both" with inputs rounded as well; each is measured as it would run, A16 schemes with inputs
left alone and the others with inputs rounded.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import record
from nybble.methods import distill, quantize_
from nybble.models import text as texts

HELD_OUT, LENGTH, BATCH = 16384, 128, 8
PLAN = (("NVFP4A16", False), ("NVFP4", False), ("NVFP4", True), ("MXFP4A16", False), ("MXFP4", False), ("MXFP4", True))
"""Scheme, and whether training leaves inputs alone although the scheme rounds them."""


def model() -> nn.Module:
    """A Llama that reads bytes."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=256, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256)  # fmt: skip
    return LlamaForCausalLM(config)


def batches(data: Tensor, count: int, seed: int) -> list[dict[str, Tensor]]:
    """Windows drawn at random."""
    starts = torch.randint(0, len(data) - LENGTH, (count, BATCH), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": torch.stack([data[s : s + LENGTH] for s in row])} for row in starts.tolist()]


def train(student: nn.Module, data: Tensor, steps: int) -> float:
    """Plain language modelling; the last loss, nats a byte."""
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for batch in batches(data, steps, seed=1):
        loss = student(**batch, labels=batch["input_ids"]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return float(loss.detach())


def kl(original: nn.Module, changed: nn.Module, data: Tensor) -> float:
    """Mean KL on consecutive windows of the held-out bytes, nats a byte."""
    windows = data[: len(data) // LENGTH * LENGTH].view(-1, LENGTH)
    with torch.no_grad():
        found = [distill.divergence(original(w).logits, changed(w).logits) for w in windows.split(2 * BATCH)]
    return float(torch.stack(found).mean())


def main() -> None:
    """Train, distil, measure; write JSON and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--training", type=int, default=500, help="steps of training the original")
    parser.add_argument("--steps", type=int, default=200, help="of distillation")
    parser.add_argument("--lr", type=float, default=3e-4)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu-2core" / "distill.json")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    data = torch.tensor(list(texts.default_text().content.encode()), dtype=torch.int64)
    seen, held_out = data[:-HELD_OUT], data[-HELD_OUT:]
    original = model()
    loss = train(original, seen, asked.training)
    print(f"trained to {loss:.3f} nats a byte", flush=True)
    original.eval()
    result: dict[str, Any] = {**vars(asked), "out": None, "loss": loss, **record.origin(),
                              "text": texts.default_text().name, "rows": []}  # fmt: skip
    lessons = batches(seen, 64, seed=2)
    for scheme, weights_only in PLAN:
        begin = time.process_time()
        config = distill.Config(steps=asked.steps, lr=asked.lr, weights_only=weights_only)
        nearest = quantize_(copy.deepcopy(original), scheme, calibration=lessons[:2])
        learned = quantize_(copy.deepcopy(original), scheme, "distill", calibration=lessons, config=config)
        before, after = (kl(original, changed, held_out) for changed in (nearest, learned))
        trained = "weights" if weights_only or scheme.endswith("A16") else "both"
        row = {"scheme": scheme, "trained": trained, "rtn": before, "distill": after,
               "cpu_seconds": time.process_time() - begin}  # fmt: skip
        result["rows"].append(row)
        print(json.dumps(row), flush=True)
        record.write(asked.out, result)
    print("| scheme | trained | KL of rtn | KL of distill | less |\n|---|---|---|---|---|")
    for row in result["rows"]:
        less = 1 - row["distill"] / row["rtn"]
        print(f"| {row['scheme']} | {row['trained']} | {row['rtn']:.4f} | {row['distill']:.4f} | {less:.0%} |")


if __name__ == "__main__":
    main()
