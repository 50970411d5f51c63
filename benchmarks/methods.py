"""What each method buys and what it costs: perplexity of SmolLM2-135M by scheme and method.

    python benchmarks/methods.py --schemes NVFP4A16,W4A16 --methods rtn,gptq,schur --seeds 0,1,2
    python benchmarks/methods.py --runs W4A4:rtn,W4A4:hadamard+gptq,MXFP4A16:schur

Quality is measured as `nybble survey` does: the last 4,096 tokens of the default text in windows of 1,024, float32,
every layer by its definition. Calibration is `--samples` windows of 512 tokens out of the 109,012 tokens of the same
text that stand before those, drawn without replacement by the seed: disjoint from what is measured, but of the same
kind, which flatters every method that learns from data; `--calibration FILE` draws from another text. Rows are written
as they are measured, and kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nybble.methods import Settings, quantize_
from nybble.models import load, load_tokenizer
from nybble.models import text as texts
from nybble.models.evaluate import Reference, by_definition, evaluate, reference
from nybble.survey.measure import share

MODEL, TOKENS, WINDOW, LENGTH = "smollm2-135m", 4096, 1024, 512


def windows(ids: Tensor, samples: int, seed: int, measured: int = TOKENS) -> list[Tensor]:
    """`samples` windows [1, 512] of what stands before the measured tokens, drawn without replacement."""
    before = ids[: len(ids) - measured]
    pieces = before[: len(before) // LENGTH * LENGTH].view(-1, LENGTH)
    drawn = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed))[:samples]
    return [pieces[i][None] for i in drawn.tolist()]


def measure(
    model: nn.Module,
    kept: Reference,
    evaluation: list[Tensor],
    batches: list[Tensor],
    scheme: str,
    method: str,
    seed: int,
) -> dict[str, Any]:
    """Quantize a copy that shares the model's parameters, and measure it."""
    begin, begin_cpu = time.perf_counter(), time.process_time()
    calibration = [{"input_ids": ids} for ids in batches]
    quantized = quantize_(share(model), scheme, method, calibration=calibration, config=Settings(seed=seed))
    seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
    with by_definition(quantized):
        quality = evaluate(quantized, evaluation, kept)
    return {
        "scheme": scheme,
        "method": method,
        "seed": seed,
        "samples": len(batches),
        "perplexity": quality.perplexity,
        "kl": quality.kl,
        "top1": quality.top1,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "threads": torch.get_num_threads(),
    }


def table(result: dict[str, Any]) -> Iterator[str]:
    """Lines of Markdown: mean over seeds, the spread, and the share of the gap to round-to-nearest that is closed."""
    original = result["original"]
    yield f"original: perplexity {original:.3f}"
    yield ""
    yield "| scheme | method | seeds | perplexity | spread | gap closed | KL | CPU s |"
    yield "|---|---|---|---|---|---|---|---|"
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        grouped.setdefault((row["scheme"], row["method"]), []).append(row)
    for (scheme, method), rows in sorted(grouped.items()):
        values = [row["perplexity"] for row in rows]
        mean = sum(values) / len(values)
        nearest = [row["perplexity"] for row in grouped.get((scheme, "rtn"), [])]
        closed = f"{(nearest[0] - mean) / (nearest[0] - original):.0%}" if nearest and method != "rtn" else "-"
        kl, seconds = (sum(row[key] for row in rows) / len(rows) for key in ("kl", "cpu_seconds"))
        spread = f"{min(values):.3f} … {max(values):.3f}" if len(values) > 1 else "-"
        yield f"| {scheme} | {method} | {len(rows)} | {mean:.3f} | {spread} | {closed} | {kl:.4f} | {seconds:.0f} |"


def main() -> None:
    """Measure what is asked for and not there yet; write JSON after each row and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default="NVFP4A16,MXFP4A16,W4A16")
    parser.add_argument("--methods", default="rtn,gptq,schur")
    parser.add_argument("--runs", help="scheme:method pairs in place of all combinations")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--calibration", type=Path, help="a text to calibrate on in place of the default one")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu-2core" / "methods.json")
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    tokenizer = load_tokenizer(MODEL)
    ids, model = texts.encode(tokenizer, texts.default_text()), load(MODEL, dtype=torch.float32)
    evaluation = texts.split(ids, TOKENS, WINDOW)
    source = (ids, TOKENS)
    if asked.calibration:
        source = (texts.encode(tokenizer, texts.read_text(asked.calibration)), 0)
    kept = reference(model, evaluation)
    machine = {
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "torch": torch.__version__,
    }
    result: dict[str, Any] = {
        "model": MODEL, "text": texts.default_text().name, "machine": machine,
        "calibration": str(asked.calibration or "the same text"), "original": kept.quality.perplexity, "rows": [],
    }  # fmt: skip
    if asked.out.exists():
        result["rows"] = json.loads(asked.out.read_text())["rows"]
    pairs: list[Any] = list(product(asked.schemes.split(","), asked.methods.split(",")))
    if asked.runs:
        pairs = [run.split(":") for run in asked.runs.split(",")]
    for seed, (scheme, method) in product(map(int, asked.seeds.split(",")), pairs):
        key = (scheme, method, 0 if method == "rtn" else seed)
        if any((r["scheme"], r["method"], r["seed"]) == key for r in result["rows"]):
            continue
        row = measure(model, kept, evaluation, windows(source[0], asked.samples, seed, source[1]), *key)
        print(json.dumps(row), flush=True)
        result["rows"].append(row)
        asked.out.parent.mkdir(parents=True, exist_ok=True)
        asked.out.write_text(json.dumps(result, indent=1) + "\n")
    print("\n".join(table(result)))


if __name__ == "__main__":
    main()
