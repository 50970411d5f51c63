"""Can the tests of promises see anything? The same comparisons on stock torch, which makes none and must be found out.

    PYTHONPATH=src python3 benchmarks/promises_control.py --device cuda --model smollm2-135m --out DIR --commit C

(1) torch.nn.functional.linear with M rows against each row alone, for M from 2 to 33: at how many M does any bit of any
row differ, and how many values of the largest batch. (2) verify_promise on transformers' own forward: a prompt alone,
in batches, and token by token through transformers' cache, on SmolLM2-135M and on a wide model of two layers of random
weights; and with the very same prompt and batches under batch-invariant, where nothing may differ.

A control is worth what it asks. A prompt of one token in batches up to 33, as this once was, found nothing in
SmolLM2-135M on a CPU nor on an H200: sums over 576 and 1,536 columns, rounded to bf16, seldom show their order.
"""

from __future__ import annotations

import argparse
import datetime
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import nybble
import record
from nybble.models import fingerprint
from nybble.models.verify import verify_promise
from nybble.ops.linear_invariant import linear_invariant

SHAPES = ((576, 576), (1536, 576), (576, 1536), (4096, 4096), (14336, 4096), (4096, 14336))
DTYPES = {"cuda": (torch.bfloat16,), "cpu": (torch.bfloat16, torch.float32)}
ROWS, BATCHES, TOKENS = 33, (2, 7, 16, 33), 12
WIDE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 2, "num_attention_heads": 32,
        "num_key_value_heads": 8, "vocab_size": 4096}  # fmt: skip


def linear_differs(n: int, k: int, dtype: torch.dtype, device: str) -> dict[str, Any]:
    """One shape: the M at which a row of the batch is not the row alone, of the library's linear and of ours."""
    generator = torch.Generator().manual_seed(n + k)
    x, w = (torch.randn(rows, k, generator=generator).to(device, dtype) for rows in (ROWS, n))
    row: dict[str, Any] = {"n": n, "k": k, "dtype": str(dtype).removeprefix("torch.")}
    for name, run in (("stock", torch.nn.functional.linear), ("linear_invariant", linear_invariant)):
        alone = torch.cat([run(x[i : i + 1], w) for i in range(ROWS)])
        row[f"{name} M"] = [m for m in range(2, ROWS + 1) if not torch.equal(run(x[:m], w), alone[:m])]
        row[f"{name} values"] = float((run(x, w) != alone).double().mean())
    return row


def wide(device: str) -> nn.Module:
    """Two layers of random bf16 weights as wide as an 8B model's."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return LlamaForCausalLM(LlamaConfig(**WIDE)).eval()
        finally:
            torch.set_default_dtype(torch.float32)


def model_differs(model: nn.Module, prompt: Tensor, batches: Sequence[int] = BATCHES) -> dict[str, Any]:
    """What verify_promise finds in transformers' forward, and under batch-invariant."""
    found: dict[str, Any] = {}
    for promise in ("none", "batch-invariant"):
        verdict = verify_promise(model, promise, prompt, batches)  # type: ignore[arg-type]
        checks = {check.what: check.difference for check in verdict.checks}
        found[promise] = {"holds": verdict.holds, "differ": sum(map(bool, checks.values())), "checks": checks}
    return found


def main() -> None:
    """Compare, print, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", help="a .gguf file or smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--commit", help="of this tree, where git is not at hand")
    options = parser.parse_args()
    device = options.device
    result: dict[str, Any] = {
        "what": "stock torch under the tests of promises", "machine": fingerprint.machine(torch.device(device)),
        "date": datetime.date.today().isoformat(), "commit": options.commit or record.head(),
        "rows": ROWS, "linear": [], "models": {},
    }  # fmt: skip
    for n, k in SHAPES if device == "cuda" else SHAPES[:3]:  # our twin on the CPU is no fast one
        for dtype in DTYPES[device]:
            row = linear_differs(n, k, dtype, device)
            result["linear"].append(row)
            print({key: len(value) if isinstance(value, list) else value for key, value in row.items()}, flush=True)
    models = {} if options.model is None else {"SmolLM2-135M": nybble.load(options.model, device, torch.bfloat16)}
    if device == "cuda":
        models["two wide layers"] = wide(device)
    for name, model in models.items():
        vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        prompt = torch.randint(vocabulary, (TOKENS,), generator=torch.Generator().manual_seed(1))
        result["models"][name] = model_differs(model, prompt)
        print(name, json.dumps(result["models"][name], indent=1), flush=True)
    record.write(options.out / f"promises-control-{device}.json", result)


if __name__ == "__main__":
    main()
