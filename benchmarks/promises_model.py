"""Promises about equal bits on whole models: are they kept here, and what do they cost?

    PYTHONPATH=src python3 benchmarks/promises_model.py --device cuda --model MODEL.gguf --speed --out DIR --commit C
    PYTHONPATH=src python3 benchmarks/promises_model.py --device cpu --model smollm2-135m --make

With a model: (1) on a GPU every op against its CPU twin, bit by bit (tests/gpu/test_promises_ops.py); (2) the model's
fingerprint in bf16, W8A16 and W4A16_G64, 256 greedy tokens each, against those in benchmarks/results/cpu; (3) in each
scheme the same prompt alone and in batches of 2, 7, 16 and 33 under batch-invariant; and stock torch beside it, which
may differ (promises_control.py asks more of it).
With --speed: decoding at batch 1 on models of random weights under each promise, by the two known ways, and without any
promise, all captured in CUDA graphs, in turns, alone on the GPU. With --make the CPU's fingerprints are written.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import nybble
import record
from nybble.models import fingerprint
from nybble.models.promised import PromisedRunner
from nybble.models.verify import verify_promise
from nybble.ops import QuantLinear
from nybble.quantize.layouts import DENSE

ROOT = Path(__file__).resolve().parent.parent
RECORDED = ROOT / "benchmarks" / "results" / "cpu" / "fingerprints"
SCHEMES = ("bf16", "W8A16", "W4A16_G64")
BATCHES = (2, 7, 16, 33)
TOKENS = 256
PROMPT = "The three laws of robotics are"
SPEED_PROMPT, NEW, RUNS = 16, 32, 5
CARRIED = 2.0**-3  # as in decode.py: what random weights make of rounding errors


def scheme_of(model: nn.Module, scheme: str, device: str) -> nn.Module:
    """A copy in a scheme on a device, quantized on the CPU so that every machine has the same codes."""
    made = copy.deepcopy(model)
    if scheme != "bf16":
        nybble.quantize_(made, scheme)
        for layer in (m for m in made.modules() if isinstance(m, QuantLinear)):
            layer.set_weight(layer.weight.to_layout(DENSE))
    return made.to(device)


def file_of(scheme: str) -> Path:
    """Where the CPU's fingerprint is."""
    return RECORDED / f"smollm2-135m-{scheme}.json"


def start_ops() -> subprocess.Popen[str]:
    """Every op against its twin, in a process of its own, beside what follows."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu/test_promises_ops.py"]
    return subprocess.Popen(
        [*command, "-p", "no:cacheprovider"], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def end_ops(process: subprocess.Popen[str]) -> str:
    """What pytest found, in a line."""
    text = process.communicate(timeout=150)[0]
    print(text[-6000:], flush=True)
    lines = [line for line in text.splitlines() if " passed" in line or " failed" in line or " error" in line]
    return f"exit {process.returncode}: {lines[-1] if lines else 'no summary'}"


def fingerprints(model: nn.Module, device: str, out: Path) -> dict[str, Any]:
    """Make each scheme's fingerprint here and compare it with the CPU's."""
    found = {}
    for scheme in SCHEMES:
        if not file_of(scheme).is_file():
            found[scheme] = {"model": "not compared: the CPU's fingerprint was not made yet"}
            continue
        known = fingerprint.read(file_of(scheme))
        start = time.perf_counter()
        seen = fingerprint.make(scheme_of(model, scheme, device), torch.tensor(known["prompt"]), len(known["tokens"]))
        fingerprint.write(out / file_of(scheme).name, seen)
        same = "the same model" if seen["model"] == known["model"] else "ANOTHER MODEL"
        difference = fingerprint.difference(known, seen)
        found[scheme] = {"model": same, "difference": difference, "seconds": time.perf_counter() - start}
        print(f"fingerprint {scheme}: {same}; {difference or 'the same bits'}", flush=True)
    return found


def batches(model: nn.Module, prompt: torch.Tensor, tokens: int) -> dict[str, Any]:
    """Greedy tokens and logits of a prompt alone and at three places in batches, under batch-invariant."""
    generator = torch.Generator().manual_seed(0)
    alone, found = decoded(model, prompt[None], tokens), {}
    for batch in BATCHES:
        prompts = torch.randint(model.config.vocab_size, (batch, len(prompt)), generator=generator)
        places = sorted({0, batch // 2, batch - 1})
        prompts[places] = prompt
        made, logits = decoded(model, prompts, tokens)
        rows = {place: torch.equal(made[place], alone[0][0]) for place in places}
        bits = {place: torch.equal(logits[place], alone[1][0]) for place in places}
        found[str(batch)] = {"tokens": all(rows.values()), "last logits": all(bits.values()), "places": places}
        print(f"batch {batch}: tokens {rows}, bits of the last logits {bits}", flush=True)
    return found


def decoded(model: nn.Module, prompts: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(greedy tokens [B, tokens], bits of the last logits [B, V])."""
    runner = PromisedRunner(model, "batch-invariant", prompts.shape[1] + tokens, len(prompts))
    runner.prefill(prompts)
    made = runner.decode(tokens).cpu()
    return made, runner.logits.cpu().view(torch.int16)


def kept(model: nn.Module, options: argparse.Namespace, out: Path) -> dict[str, Any]:
    """Whether the promises hold here."""
    device = options.device
    result: dict[str, Any] = {"ops": "not run", "tokens_in_batches": options.tokens}
    process = None if device == "cpu" or options.skip_ops else start_ops()
    result["fingerprints"] = "not run" if options.skip_fingerprints else fingerprints(model, device, out)
    prompt = torch.tensor(fingerprint.read(file_of("bf16"))["prompt"])
    for scheme in SCHEMES:
        here = scheme_of(model, scheme, device)
        verdict = verify_promise(here, "batch-invariant", prompt, BATCHES)
        print(f"{scheme}: {verdict}", flush=True)
        result[f"batch-invariant {scheme}"] = str(verdict)
        result[f"batches {scheme}"] = batches(here, prompt, options.tokens)
        if scheme == "bf16":
            stock = verify_promise(here, "none", prompt, BATCHES)
            result["stock"] = str(stock)
            print(f"stock torch: {'no difference found' if stock.holds else 'differs'}\n{stock}")
    if process is not None:
        result["ops"] = end_ops(process)
    return result


def rivals(model: nn.Module, capacity: int) -> dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Any]]:
    """Name -> (reads a prompt [T] and returns logits, decodes n tokens)."""
    from known_decoders import WAYS, Decoder
    from nybble.models.llama import Runner

    found: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Any]] = {}
    stock = Runner(model, capacity)
    found["no promise"] = lambda prompt: stock.prefill(prompt[None])[0], stock.decode
    for wanted in ("batch-invariant", "cross-machine"):
        runner = PromisedRunner(model, wanted, capacity)
        found[wanted] = lambda prompt, runner=runner: runner.prefill(prompt[None])[0], runner.decode
    for way in WAYS:
        decoder = Decoder(model, way, capacity)
        found[way] = decoder.read, decoder.decode
    return found


def speed(shape: str) -> dict[str, Any]:
    """Milliseconds a token of every way on a model of random weights; logits are checked before a time counts."""
    from decode import make, milliseconds

    torch.backends.cuda.matmul.allow_tf32 = False
    model = make(shape)
    prompt = torch.randint(model.config.vocab_size, (SPEED_PROMPT,), generator=torch.Generator().manual_seed(1)).cuda()
    with torch.no_grad():
        truth = model(prompt[None]).logits[0, -1].float()
    ways, rows, times = rivals(model, SPEED_PROMPT + NEW + 8), {}, {}
    for name, (read, decode) in ways.items():
        distance = float((read(prompt).float() - truth).norm() / truth.norm())
        decode(2)
        rows[name] = {"logit_error": distance, "agrees": distance < CARRIED}
        times[name] = []
    for _ in range(RUNS):
        for name, (read, decode) in ways.items():
            read(prompt)
            decode(2)
            times[name].append(milliseconds(lambda decode=decode: decode(NEW)) / NEW)
    for name, row in rows.items():
        row["ms"] = statistics.median(times[name]) if row["agrees"] else None
        row["ms_runs"] = times[name]
    for name, row in rows.items():
        for other in ("no promise", "layercast", "replacement"):
            if row["ms"] and rows[other]["ms"]:
                row[f"x {other}"] = rows[other]["ms"] / row["ms"]
        print(f"{shape} {name:16} {row}", flush=True)
    return rows


def make_all(model: nn.Module, name: str) -> None:
    """Write the fingerprints that other machines are held to."""
    RECORDED.mkdir(parents=True, exist_ok=True)
    prompt = torch.tensor(nybble.models.load_tokenizer(name)(PROMPT)["input_ids"])
    for scheme in SCHEMES:
        start = time.perf_counter()
        made = fingerprint.make(scheme_of(model, scheme, "cpu"), prompt, TOKENS)
        fingerprint.write(file_of(scheme), made)
        print(f"{file_of(scheme)}: {time.perf_counter() - start:.0f} s", flush=True)


def main() -> None:
    """Run what was asked for and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--model", help="a .gguf file or smollm2-135m")
    parser.add_argument("--out", type=Path, default=Path())
    parser.add_argument("--tokens", type=int, default=TOKENS, help="decoded in batches (default: 256)")
    parser.add_argument("--make", action="store_true", help="write the fingerprints that the others are held to")
    parser.add_argument("--skip-ops", action="store_true", help="leave out the ops' own tests")
    parser.add_argument("--skip-fingerprints", action="store_true", help="leave them out: minutes on a CPU")
    parser.add_argument("--speed", action="store_true", help="time decoding")
    parser.add_argument("--shapes", default="llama-1b,llama-8b")
    parser.add_argument("--commit", help="of this tree, where git is not at hand")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "what": "promises on whole models", "machine": fingerprint.machine(torch.device(options.device)),
        "nybble": nybble.__version__, "date": datetime.date.today().isoformat(),
        "commit": options.commit or record.head(),
    }  # fmt: skip
    start = time.perf_counter()
    if options.model:
        model = nybble.load(options.model, "cpu", torch.bfloat16)
        if options.make:
            return make_all(model, options.model)
        result |= kept(model, options, options.out)
        print(f"kept: {time.perf_counter() - start:.0f} s", flush=True)
    for shape in options.shapes.split(",") if options.speed else ():
        result.setdefault("decode", {})[shape] = speed(shape)
        torch.cuda.empty_cache()
        print(f"{shape}: {time.perf_counter() - start:.0f} s", flush=True)
    record.write(options.out / f"promises-model-{options.device}.json", result)
    return None


if __name__ == "__main__":
    main()
