"""What each method buys and what it costs: perplexity of SmolLM2-135M by scheme and method.

    python benchmarks/methods.py --schemes NVFP4A16,W4A16 --methods rtn,gptq,schur --seeds 0,1,2
    python benchmarks/methods.py --device cuda --jobs 12 --alone NVFP4A16:gptq,NVFP4A16:schur --runs W4A4:rtn,W4A4:gptq

Quality is measured as `nybble survey` does: the last 4,096 tokens of the text in windows of 1,024, float32, every
layer by its definition. Calibration is `--samples` windows of 512 tokens out of those of the same text that stand
before them, drawn without replacement by the seed: disjoint from what is measured, but of the same kind, which
flatters every method that learns from data; `--calibration FILE` draws from another text. Runs are scheme:method; a
method may be one of VARIANTS below, which are distillations with other settings.

On a GPU a model of this size leaves most of the machine idle, so that `--jobs` processes share it; runs of `--alone`
go first and have it for themselves, and only their times are worth reading. Rows are written as they are measured,
and kept.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, multiprocessing, nn

import record
from nybble.errors import NybbleError
from nybble.methods import Settings, distill, quantize_
from nybble.models import load, load_tokenizer
from nybble.models import text as texts
from nybble.models.evaluate import by_definition, evaluate, reference
from nybble.survey.measure import share

MODEL, TOKENS, WINDOW, LENGTH = "smollm2-135m", 4096, 1024, 512
VARIANTS = {
    "distill": distill.Config(steps=100, lr=2e-4),
    "distill_weights": distill.Config(steps=100, lr=2e-4, weights_only=True),
    "distill_slow": distill.Config(steps=100, lr=6e-5),
    "distill_fast": distill.Config(steps=100, lr=5e-4),
    "distill_r16": distill.Config(steps=100, lr=1e-3, rank=16),
    "distill_few": distill.Config(steps=36, lr=2e-4, warmup=3),
    "distill_few_weights": distill.Config(steps=36, lr=2e-4, warmup=3, weights_only=True),
    "distill_short": distill.Config(steps=3),
    "distill_short_r16": distill.Config(steps=3, rank=16),
}


@dataclass(frozen=True)
class Task:
    """One row to measure."""

    scheme: str
    method: str
    seed: int
    alone: bool = False


def windows(ids: Tensor, samples: int, seed: int, measured: int = TOKENS, batch: int = 1) -> list[Tensor]:
    """`samples` windows of 512 tokens of what stands before the measured ones, drawn without replacement.

    Returns:
        Batches int64 [<= batch, 512].
    """
    before = ids[: len(ids) - measured]
    pieces = before[: len(before) // LENGTH * LENGTH].view(-1, LENGTH)
    drawn = torch.randperm(len(pieces), generator=torch.Generator().manual_seed(seed))[:samples]
    return list(pieces[drawn].split(batch))


class Bench:
    """A model with what it is calibrated and measured on.

    Args:
        asked: the command's options.
    """

    def __init__(self, asked: argparse.Namespace) -> None:
        torch.set_num_threads(asked.threads)
        self.asked, text = asked, texts.read_text(asked.text)
        tokenizer = load_tokenizer(asked.model)
        ids = texts.encode(tokenizer, text)
        self.source = (ids, TOKENS)
        if asked.calibration:
            self.source = (texts.encode(tokenizer, texts.read_text(asked.calibration)), 0)
        self.text, self.evaluation = text, texts.split(ids, TOKENS, WINDOW)
        self.model: nn.Module = load(asked.model, dtype=getattr(torch, asked.dtype))

    def start(self) -> None:
        """Go to the device and measure the original."""
        self.model = self.model.to(self.asked.device)
        self.kept = reference(self.model, self.evaluation)

    def calibration(self, seed: int) -> list[dict[str, Tensor]]:
        """Batches for a seed, on the device."""
        ids, measured = self.source
        drawn = windows(ids, self.asked.samples, seed, measured, self.asked.batch)
        return [{"input_ids": batch.to(self.asked.device)} for batch in drawn]

    def measure(self, task: Task) -> dict[str, Any]:
        """Quantize a copy that shares the model's parameters, and measure it."""
        batches, config = self.calibration(task.seed), VARIANTS.get(task.method)
        learns = config is not None
        # Training in full float32 takes three times as long; what is rounded and exported is the same either way.
        torch.set_float32_matmul_precision("high" if learns else "highest")
        cuda = torch.device(self.asked.device).type == "cuda"
        _wait(cuda)
        others = torch.cuda.memory_allocated() - sum(p.nbytes for p in self.model.parameters()) if cuda else 0
        begin, begin_cpu = time.perf_counter(), time.process_time()
        method = "distill" if learns else task.method
        settings = config or Settings(seed=task.seed)
        quantized = quantize_(share(self.model), task.scheme, method, calibration=batches, config=settings)
        peak = torch.cuda.max_memory_allocated() - others if cuda else None
        _wait(cuda)
        seconds, cpu_seconds = time.perf_counter() - begin, time.process_time() - begin_cpu
        torch.set_float32_matmul_precision("highest")
        with by_definition(quantized):
            quality = evaluate(quantized, self.evaluation, self.kept)
        return {
            **vars(task), "samples": self.asked.samples, "perplexity": quality.perplexity, "kl": quality.kl,
            "top1": quality.top1, "seconds": seconds, "cpu_seconds": cpu_seconds, "peak_bytes": peak,
            "threads": torch.get_num_threads(), "jobs": 1 if task.alone else self.asked.jobs,
            **({"settings": str(config), "batch": self.asked.batch} if learns else {}),
        }  # fmt: skip


def _wait(cuda: bool) -> None:
    """Until all is done; peak memory is counted from here."""
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()


def serve(asked: argparse.Namespace, gate: Any, tasks: Any, rows: Any) -> None:
    """A process that measures tasks until none is left, or the time is over."""
    bench, end = Bench(asked), None
    gate.wait()
    bench.start()
    while (task := tasks.get()) is not None:
        end = end or time.monotonic() + asked.seconds
        if time.monotonic() > end:
            rows.put(f"{task}: no time left")
            continue
        try:
            rows.put(bench.measure(task))
        except (NybbleError, RuntimeError):
            rows.put(f"{task}: {traceback.format_exc()}")


def measured(asked: argparse.Namespace, tasks: Sequence[Task]) -> Iterator[dict[str, Any] | str]:
    """Rows as they come: first those that need the machine alone, then the others from `--jobs` processes.

    The first item describes the run.
    """
    context = multiprocessing.get_context("spawn")
    gate, queue, rows = context.Event(), context.Queue(), context.Queue()
    shared = [task for task in tasks if not task.alone]
    count = min(asked.jobs, len(shared)) if asked.jobs > 1 else 0
    workers = [context.Process(target=serve, args=(asked, gate, queue, rows)) for _ in range(count)]
    for worker in workers:
        worker.start()  # they load the model while the runs that need the machine alone go on
    for task in [*shared, *[None] * count]:
        queue.put(task)
    if not any(task.alone for task in tasks):
        gate.set()
    bench = Bench(asked)
    bench.start()
    yield {
        "model": asked.model, "text": bench.text.name, "text_sha256": bench.text.sha256, "machine": machine(asked),
        "calibration": str(asked.calibration or "the same text"), "original": bench.kept.quality.perplexity,
    }  # fmt: skip
    for task in tasks:
        if task.alone or not workers:
            yield bench.measure(task)
    del bench
    gate.set()
    for _ in shared if workers else ():
        yield rows.get()
    for worker in workers:
        worker.join()


def machine(asked: argparse.Namespace) -> dict[str, Any]:
    """Where this runs."""
    cuda = torch.device(asked.device).type == "cuda"
    return {
        "processor": torch.cuda.get_device_name() if cuda else platform.processor() or platform.machine(),
        "cores": os.cpu_count(), "torch": torch.__version__, "commit": asked.commit or record.head(),
        "date": time.strftime("%Y-%m-%d"),
    }  # fmt: skip


def table(result: dict[str, Any]) -> Iterator[str]:
    """Lines of Markdown: mean over seeds, the spread, and the share of the gap to round-to-nearest that is closed.

    Seconds are those of one process that had the machine alone, where there was one.
    """
    original = result["original"]
    yield f"original: perplexity {original:.3f}"
    yield ""
    yield "| scheme | method | seeds | perplexity | spread | gap closed | KL | s |"
    yield "|---|---|---|---|---|---|---|---|"
    grouped: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in result["rows"]:
        grouped.setdefault((row["scheme"], row["method"]), []).append(row)
    for (scheme, method), rows in sorted(grouped.items()):
        seeds = {row["seed"]: row for row in rows}
        values = [row["perplexity"] for row in seeds.values()]
        mean = sum(values) / len(values)
        nearest = [row["perplexity"] for row in grouped.get((scheme, "rtn"), [])]
        closed = f"{(nearest[0] - mean) / (nearest[0] - original):.0%}" if nearest and method != "rtn" else "-"
        kl = sum(row["kl"] for row in seeds.values()) / len(seeds)
        spread = f"{min(values):.3f} … {max(values):.3f}" if len(values) > 1 else "-"
        quiet = [row["seconds"] for row in rows if row.get("jobs", 1) == 1]
        seconds = f"{min(quiet):.0f}" if quiet else "-"
        yield f"| {scheme} | {method} | {len(seeds)} | {mean:.3f} | {spread} | {closed} | {kl:.4f} | {seconds} |"


def options() -> argparse.Namespace:
    """The command's options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--text", type=Path, help="a text to measure on in place of the default one")
    parser.add_argument("--schemes", default="NVFP4A16,MXFP4A16,W4A16")
    parser.add_argument("--methods", default="rtn,gptq,schur")
    parser.add_argument("--runs", help="scheme:method pairs in place of all combinations")
    parser.add_argument("--alone", help="scheme:method pairs that are run first, one by one, with the first seed")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--samples", type=int, default=128)
    parser.add_argument("--batch", type=int, default=1, help="windows that go through the model at once")
    parser.add_argument("--calibration", type=Path, help="a text to calibrate on in place of the default one")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", help="of the model; quality is meant to be measured in float32")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="after which a process takes no further run")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--commit", help="of this tree, where git is not at hand")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "cpu-2core" / "methods.json")
    return parser.parse_args()


def wanted(asked: argparse.Namespace) -> list[Task]:
    """The tasks in the order they are taken: those with the first seed first."""
    split = lambda runs: [run.split(":") for run in runs.split(",") if run]  # noqa: E731
    pairs: list[Any] = list(product(asked.schemes.split(","), asked.methods.split(",")))
    pairs = split(asked.runs) if asked.runs is not None else pairs
    seeds = list(map(int, asked.seeds.split(",")))
    found = [Task(scheme, method, seeds[0], True) for scheme, method in split(asked.alone or "")]
    once = ("rtn", "four_over_six", *VARIANTS)
    found += [Task(s, m, 0 if m in once else seed) for seed, (s, m) in product(seeds, pairs)]
    return list(dict.fromkeys(found))


def main() -> None:
    """Measure what is asked for and not there yet; write JSON after each row and print the table."""
    asked = options()
    result: dict[str, Any] = {"rows": []}
    if asked.out.exists():
        result["rows"] = json.loads(asked.out.read_text())["rows"]
    done = {(r["scheme"], r["method"], r["seed"], r.get("alone", False)) for r in result["rows"]}
    tasks = [task for task in wanted(asked) if tuple(vars(task).values()) not in done]
    for row in measured(asked, tasks):
        print(json.dumps(row) if isinstance(row, dict) else row, flush=True)
        if isinstance(row, dict):
            result = {**row, **result} if "original" in row else {**result, "rows": [*result["rows"], row]}
            record.write(asked.out, result)
    print("\n".join(table(result)))


if __name__ == "__main__":
    main()
