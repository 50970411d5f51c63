"""W8A8 and W4A4 with other schemes for v and down: perplexity of SmolLM2-135M.

    python benchmarks/mixed.py [--out FILE] [--only NAME,…]

Quality is measured as `nybble survey` does: the last 4,096 tokens of the text in windows of 1,024, float32, every
layer by its definition. Weights are rounded to nearest unless a row says gptq (16 windows of 512 tokens before those);
"hadamard" rotates the inputs of every linear as they come. The mix of APEX4 (arXiv 2606.08761) has one scale a channel
and a token, and groups of 32 in v and down.
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch

import record
from nybble.methods import quantize_
from nybble.models import load, load_tokenizer
from nybble.models import text as texts
from nybble.models.evaluate import by_definition, evaluate, reference

MODEL, TOKENS, WINDOW = "smollm2-135m", 4096, 1024
FINE = {"*.v_proj": "W4A4_G32", "*.down_proj": "W4A4_G32"}
ROWS: dict[str, tuple[str, str, dict[str, str]]] = {
    "W8A8": ("W8A8", "rtn", {}),
    "W8A8, smoothquant": ("W8A8", "smoothquant+rtn", {}),
    "W8A8, hadamard": ("W8A8", "hadamard+rtn", {}),
    "W4A4 g128": ("W4A4", "rtn", {}),
    "W4A4 channel, v and down g32": ("W4A4_CHANNEL", "rtn", FINE),
    "W4A4 g128, v and down g32": ("W4A4", "rtn", FINE),
    "W4A4 g128, hadamard": ("W4A4", "hadamard+rtn", {}),
    "W4A4 channel, v and down g32, hadamard": ("W4A4_CHANNEL", "hadamard+rtn", FINE),
    "W4A4 g128, v and down g32, hadamard": ("W4A4", "hadamard+rtn", FINE),
    "W4A4 channel, hadamard": ("W4A4_CHANNEL", "hadamard+rtn", {}),
    "W4A4 g128, hadamard, gptq": ("W4A4", "hadamard+gptq", {}),
    "W4A4 channel, v and down g32, hadamard, gptq": ("W4A4_CHANNEL", "hadamard+gptq", FINE),
}


def main() -> None:
    """Measure, print a line a row, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="names of rows, separated by semicolons")
    parser.add_argument("--commit")
    options = parser.parse_args()
    content = texts.default_text()
    ids = texts.encode(load_tokenizer(MODEL), content)
    windows = texts.split(ids, TOKENS, WINDOW, content.name)
    seen = {count: [{"input_ids": one} for one in texts.calibration(ids, TOKENS, count)] for count in (2, 16)}
    model = load(MODEL, dtype=torch.float32)
    original = reference(model, windows)
    print(f"original {original.quality.perplexity:.4f}", flush=True)
    result: dict[str, Any] = {
        "what": "mixed", "model": MODEL, "tokens": TOKENS, "window": WINDOW, **record.origin(commit=options.commit),
        "original": original.quality.perplexity, "rows": [],
    }  # fmt: skip
    for name, (scheme, method, overrides) in ROWS.items():
        if options.only and name not in options.only.split(";"):
            continue
        start = time.perf_counter()
        count = 16 if "gptq" in method else 2 if "smoothquant" in method else 0
        calibration = seen[count] if count else None  # windows of 512 tokens, none of those measured
        narrow = quantize_(copy.deepcopy(model), scheme, method, overrides=overrides, calibration=calibration)
        with by_definition(narrow):
            quality = evaluate(narrow, windows, original)
        row = {"name": name, "scheme": scheme, "method": method, "overrides": overrides,
               "perplexity": quality.perplexity, "kl": quality.kl, "top1": quality.top1,
               "seconds": time.perf_counter() - start}  # fmt: skip
        result["rows"].append(row)
        print(f"{name:42} {quality.perplexity:9.4f}  KL {quality.kl:.4f}  top-1 {quality.top1:.2%}", flush=True)
        if options.out:
            record.write(options.out, result)


if __name__ == "__main__":
    with torch.no_grad():
        main()
