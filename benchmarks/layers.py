"""What each method makes of single layers: output error by kind of layer, SmolLM2-135M.

    python benchmarks/layers.py --scheme NVFP4A16 --blocks 0,10,20,29
    python benchmarks/layers.py --scheme NVFP4A16 --shape 14336x4096 --device cuda

The inputs are those of the original model for `--samples` calibration windows of 512 tokens (see methods.py). The
error is tr(D H D^T) / tr(W H W^T), D the weight's error and H the second moment of the inputs: how much of the
layer's output is lost. For formats with a grid of scales the coverage of Schur's windows is counted too: in how many
groups of a row the best of all scales lies in the window. With `--shape` a random layer of that shape is timed
instead: 8,192 correlated inputs, the best of three times, the factor of H included.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import record
from methods import LENGTH, MODEL, windows
from nybble.methods import gptq, rtn, schur
from nybble.methods.calibrate import call, collect
from nybble.methods.columns import GroupScale, Target, sweep, target
from nybble.methods.layer import Inputs, Layer, relative_error
from nybble.methods.pipeline import weight_amax
from nybble.models import load, load_tokenizer
from nybble.models import text as texts
from nybble.quantize.schemes import Scheme
from nybble.quantize.schemes import scheme as find_scheme

KINDS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
         "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
WINDOWS, STEPS = (0, 1, 4, 8), 3


def coverage(layer: Layer) -> dict[str, float]:
    """For each window, the share of groups of a row where it holds the best scale of the whole grid.

    The window alone counts: that the rule's own scale is a candidate too makes "0" larger, and nothing else. "0 or
    the rule's" says by how much.
    """
    hits, total = dict.fromkeys([*map(str, WINDOWS), "0 or the rule's"], 0), 0

    def policy(t: Target, group: Tensor, upper: Tensor) -> GroupScale:
        nonlocal total
        old, metric = t.propose(group), schur.metric(upper)
        values, _ = schur.grid(t.format, group.device)
        multiplier = torch.ones((), dtype=torch.float64) if t.tensor is None else t.tensor.decode.double()
        every = (values * multiplier).to(torch.float32)[:, None].expand(-1, group.shape[1]).contiguous()
        best = schur.replay(t, group, upper, every, None).argmin(0)
        centre = torch.searchsorted(values, schur.refined(t, group, metric, old, None, STEPS) / multiplier)
        distance, total = (best - centre).abs(), total + len(best)
        for window in WINDOWS:
            hits[str(window)] += int((distance <= window).sum())
        rules = torch.searchsorted(values, old.effective.double() / multiplier * (1 - 2.0**-20))
        hits["0 or the rule's"] += int(((distance == 0) | (best == rules)).sum())
        return schur.choose(t, group, upper, schur.Config().window, STEPS)

    sweep(layer, target(layer), gptq.prepared(layer, 0.01, False), policy)
    return {name: count / total for name, count in hits.items()}


def layers(scheme: Scheme, blocks: list[int], samples: int) -> dict[str, Layer]:
    """The layers of some blocks with what the original model feeds them."""
    model = load(MODEL, dtype=torch.float32)
    ids = texts.encode(load_tokenizer(MODEL), texts.default_text())
    names = [f"model.layers.{block}.{kind}" for block in blocks for kind in KINDS]
    linears: dict[str, Any] = {name: model.get_submodule(name) for name in names}
    with torch.no_grad():
        batches = windows(ids, samples, seed=0)
        seen = collect(linears, (call(model.get_submodule("model"), {"input_ids": one}) for one in batches))
    amax = weight_amax(linears)
    return {name: Layer(name, linear.weight, scheme, amax[name], seen[name]) for name, linear in linears.items()}


def timed(scheme: Scheme, shape: str, device: str) -> dict[str, Any]:
    """Seconds and output errors of a random layer."""
    n, k = map(int, shape.split("x"))
    generator = torch.Generator(device).manual_seed(0)
    draw = lambda *size: torch.randn(*size, generator=generator, device=device)  # noqa: E731
    weight, seen = draw(n, k), Inputs(k, device)
    seen.add(draw(8192, k) @ (draw(k, k) / k**0.5 + 0.3 * torch.eye(k, device=device)))
    layer, row = Layer("layer", weight, scheme, weight.abs().amax(), seen), {"shape": shape, "scheme": scheme.name}
    for method in (rtn, gptq, schur):
        seconds = []
        for _ in range(3):
            seen._factors.clear()
            begin = time.perf_counter()
            rounded = method.apply(layer, method.Config())
            float(rounded.scale[0, 0])  # waits for the device
            seconds.append(time.perf_counter() - begin)
        error = relative_error(weight, rounded, seen.second_moment)
        row[method.__name__.rpartition(".")[2]] = {"seconds": seconds, "error": error}
    return row


def main() -> None:
    """Measure, write JSON, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scheme", default="NVFP4A16")
    parser.add_argument("--blocks", default="0,10,20,29")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--coverage", action="store_true")
    parser.add_argument("--shape", help="NxK of a random layer to time")
    parser.add_argument("--device", default="cpu", help="with --shape")
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    torch.set_num_threads(asked.threads)
    if asked.shape:
        row = timed(find_scheme(asked.scheme), asked.shape, asked.device)
        print(json.dumps(row))
        if asked.out:
            record.write(asked.out, {**record.origin(asked.device), **row})
        return
    rows = []
    with torch.no_grad():
        for name, layer in layers(
            find_scheme(asked.scheme), list(map(int, asked.blocks.split(","))), asked.samples
        ).items():
            h = layer.inputs.second_moment
            errors = {m.__name__.rpartition(".")[2]: relative_error(layer.weight, m.apply(layer, m.Config()), h)
                      for m in (rtn, gptq, schur)}  # fmt: skip
            rows.append({"layer": name, **errors, **({"coverage": coverage(layer)} if asked.coverage else {})})
            print(json.dumps(rows[-1]), flush=True)
    if asked.out:
        facts = {"scheme": asked.scheme, "tokens": asked.samples * LENGTH}
        record.write(asked.out, {**facts, **record.origin(), "rows": rows})
    print("| layer | rtn | gptq/rtn | schur/gptq |\n|---|---|---|---|")
    for kind in KINDS:
        mine = [row for row in rows if row["layer"].endswith(kind)]
        mean = {m: sum(row[m] for row in mine) / len(mine) for m in ("rtn", "gptq", "schur")}
        print(f"| {kind} | {mean['rtn']:.5f} | {mean['gptq'] / mean['rtn']:.3f} | {mean['schur'] / mean['gptq']:.3f} |")
    ratios = [row["schur"] / row["gptq"] for row in rows]
    print(f"mean schur/gptq {sum(ratios) / len(ratios):.3f}, largest {max(ratios):.3f}")


if __name__ == "__main__":
    main()
