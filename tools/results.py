"""docs/results.md: what was measured, from the files under benchmarks/results. No number in it is typed by hand."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
Record = dict[str, Any]
EARLIER = ("c03fb57", "533cb11", "0c9c869", "91a84fb")
"""Commits of earlier decoding runs that hold what the latest one did not time."""
LIBRARIES = ("humming-kernels", "gemlite", "bitsandbytes", "sgl-deep-gemm")


def table(head: list[str], body: Iterable[list[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def best_by_shape(rows: list[Record], columns: Mapping[str, Callable[[Record], bool]]) -> str:
    """A table of the best ratio of the rows that each column asks for, a line a weight and number of tokens."""
    body = []
    for m, n, k in dict.fromkeys((row["m"], row["n"], row["k"]) for row in rows):
        found = [row for row in rows if (row["m"], row["n"], row["k"]) == (m, n, k)]
        best = [max((row["ratio"] for row in found if asked(row)), default=None) for asked in columns.values()]
        body.append([f"{n} × {k}", str(m), *("" if ratio is None else f"{ratio:.2f}x" for ratio in best)])
    return table(["weight", "M", *columns], body)


def load(name: str) -> Record | None:
    """A result by its path under benchmarks/results, or None where it was not made yet."""
    path = RESULTS / name
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None


def survey(record: Record) -> str:
    """The survey of the demo model."""
    original = record["reference"]
    head = ["scheme", "bits a weight", "MB", "perplexity", "KL", "same top-1", "speed", "path"]
    first = [
        "original",
        "16",
        f"{original['bytes'] / 1e6:.0f}",
        f"{original['perplexity']:.2f}",
        "0",
        "100 %",
        "1",
        "native",
    ]
    body = [
        [
            row["scheme"],
            f"{row['bits_per_weight']:.3g}",
            f"{row['bytes'] / 1e6:.0f}",
            f"{row['perplexity']:.4g}",
            f"{row['kl']:.3g}",
            f"{100 * row['top1']:.1f} %",
            "" if row.get("speedup") is None else f"{row['speedup']:.2f}x",
            row["path"],
        ]
        for row in record["rows"]
        if row["path"] != "refused"
    ]
    return (
        f"SmolLM2-135M, rounded to nearest, on {record['device']}. Quality over the last {record['tokens']} tokens of "
        f"{record['text']}, in {original['quality_dtype']}; speed is decoding at batch 1 over the original's in the "
        f"same run.\n\n"
        f"{table(head, [first, *body])}\n\n"
        f"**{record['recommendation']['scheme']}** is recommended: {record['recommendation']['reason']}"
    )


def decode(record: Record) -> str:
    """Whole-model decoding on a GPU, the latest run and those before it."""
    runs = [record, *filter(None, (load(f"h200/decode-llama-8b-{commit}.json") for commit in EARLIER))]
    head = ["commit", "scheme", "batch", "ms a step", "over bf16", "over bf16 at position 4,096", "of the roofline"]
    body = [
        [
            run["commit"],
            row["scheme"],
            str(row["batch"]),
            f"{row['ms']:.2f}",
            f"{row['ratio']:.2f}x",
            f"{row['ratio_at_4096']:.2f}x",
            f"{100 * row['roofline_share']:.0f} %",
        ]
        for run in runs
        for row in run["rows"]
    ]
    notes = " ".join(f"{run['commit']}: {run['note']}" for run in runs if "note" in run)
    return (
        f"{record['model']} with random weights on one {record['device']} ({where(record)}): {record['prompt']} tokens "
        f"of prompt, then {record['new']} tokens. The bf16 original runs in the same runner and process. The "
        "roofline is the bytes of the weights over a copy's bandwidth in that process, "
        f"{record['copy_bytes_per_second'] / 1e12:.2f} TB/s in the latest. {notes}\n\n{table(head, body)}"
    )


def linear(record: Record) -> str:
    """Weight-only linears on a GPU."""
    rows = [row for row in record["rows"] if row["kernel"].startswith("linear_")]
    shapes = sorted({(row["n"], row["k"]) for row in rows}, reverse=True)
    of = {(row["format"], row.get("x", ""), row["m"], row["n"], row["k"]): row for row in rows}
    body = []
    for fmt, x, m in sorted({key[:3] for key in of}):
        found = [of.get((fmt, x, m, n, k)) for n, k in shapes]
        shown = [f"{c['ratio']:.2f}x ({c['us']:.1f}, {c['tb_per_s']:.2f})" if c else "" for c in found]
        body.append([fmt, x or "bf16", str(m), *shown])
    torch = record["versions"]["torch"]
    return (
        f"Times as fast as cuBLAS with the same inputs in the same minutes, on one {record['device']} (torch "
        f"{torch}, {record['date'][:10]}, commit {record['commit']}). In brackets: microseconds, and the stored "
        "weight's TB/s, where "
        f"a copy reaches {record['copy_tb_per_s']:.2f}. {record['note']} What was tried and where the time goes is "
        f"in [LOG.md](../LOG.md).\n\n{table(['weight', 'x', 'M', *(f'{n} × {k}' for n, k in shapes)], body)}\n\n"
        f"![speed over cuBLAS against M](../benchmarks/results/h200/{record.get('picture', 'linear.png')})"
    )


def rivals(record: Record) -> str:
    """Weight-only linears beside other libraries' in one run."""
    rows = [
        {**row, "kernel": "nybble" if row["kernel"].startswith("linear_") else row["kernel"]} for row in record["rows"]
    ]
    rows = [row for row in rows if row["kernel"] != "cublas"]
    shapes = sorted({(row["n"], row["k"]) for row in rows}, reverse=True)
    of = {(row["format"], row["m"], row["kernel"], row["n"], row["k"]): row for row in rows}
    body = []
    for fmt, m, kernel in sorted(dict.fromkeys(key[:3] for key in of), key=lambda key: key[:2]):
        found = [of.get((fmt, m, kernel, n, k)) for n, k in shapes]
        body.append([fmt, str(m), kernel, *(f"{c['ratio']:.2f}x ({c['us']:.1f})" if c else "" for c in found)])
    picture = record.get("picture")
    libraries = ", ".join(f"{name} {record['versions'][name]}" for name in LIBRARIES if name in record["versions"])
    return (
        f"Times as fast as cuBLAS, and microseconds, on one {record['device']} (torch {record['versions']['torch']}, "
        f"{libraries}; {record['date'][:10]}, commit {record['commit']}), every output that was timed checked first. "
        f"A rival's part of the run comes minutes after ours, so compare ratios. {record.get('note', '')}".rstrip()
        + f"\n\n{table(['weight', 'M', 'library', *(f'{n} × {k}' for n, k in shapes)], body)}"
        + (f"\n\n![speed over cuBLAS, beside rivals](../benchmarks/results/h200/{picture})" if picture else "")
    )


def activations(record: Record) -> str:
    """Linears with narrow activations on a GPU."""
    int8, int4 = "int8_channel", "int4_channel"
    columns: dict[str, Callable[[Record], bool]] = {
        "W8A8": lambda r: r["kernel"].startswith("narrow_cuda") and r["weight"] == int8,
        "and its pass over x": lambda r: r["kernel"].startswith("linear,") and r["weight"] == int8,
        "W4A8": lambda r: (
            r["kernel"].startswith("narrow_cuda") and (r["weight"], r["activation"][:4]) == (int4, "int8")
        ),
        "and its pass over x ": lambda r: (
            r["kernel"].startswith("linear,") and (r["weight"], r["activation"][:4]) == (int4, "int8")
        ),
        "FP8 by row": lambda r: r["kernel"] == "torch._scaled_mm" and r["weight"] == "fp8_channel",
        "FP8 by block": lambda r: r["kernel"] == "torch._scaled_mm" and r["weight"] == "fp8_block128",
        "`_int_mm`, then rescaled": lambda r: "two passes" in r["kernel"],
    }
    return (
        f"Times as fast as cuBLAS in bf16 in the same minutes, on one {record['device']} (torch "
        f"{record['versions']['torch']}, {record['date']}, commit {record['commit']}). W8A8 and W4A8 have a scale for "
        "every channel and every token; their integer sums are exact and were compared bit for bit. FP8 is "
        "`torch._scaled_mm`, which served it then, without fast accumulation.\n\n"
        f"{best_by_shape(record['rows'], columns)}"
    )


def fp8(record: Record) -> str:
    """FP8 products beside the library's and a rival's."""
    kernels = {"nybble": "narrow_fp8", "`_scaled_mm`": "torch._scaled_mm", "DeepGEMM": "DeepGEMM"}
    columns = {f"by row, {name}": ("fp8_channel", kernel) for name, kernel in list(kernels.items())[:2]}
    columns |= {f"by block, {name}": ("fp8_block128", kernel) for name, kernel in kernels.items()}
    asked = {name: partial(_is_fp8, *column) for name, column in columns.items()}
    return (
        f"Products alone, times as fast as cuBLAS in bf16 in the same minutes, on one {record['device']} "
        f"(torch {record['versions']['torch']}, {record['date'][:10]}, commit {record['commit']}); "
        f"the better of two tiles.\n\n"
        f"{best_by_shape(record['rows'], asked)}"
    )


def _is_fp8(weight: str, kernel: str, row: Record) -> bool:
    exact = "fast accumulation" not in row["kernel"]
    return exact and row.get("weight") == weight and row["kernel"].startswith(kernel)


def producers(record: Record) -> str:
    """One pass to codes and scales, by both kernels, beside the separate passes."""
    kernels = {"Triton": "quantize_rows_triton", "CUDA": "quantize_rows_cuda_sm80"}
    cases: dict[tuple[object, ...], dict[str, Record]] = {}
    for row in record["rows"]:
        case = tuple(row[key] for key in ("format", "prologue", "m", "k", "rotation"))
        cases.setdefault(case, {})[row["kernel"]] = row
    body = []
    for (fmt, prologue, m, k, rotation), rows in cases.items():
        found = [rows[kernel] for kernel in kernels.values()]
        times = [f"{row['us']:.1f} µs, {100 * row['of_copy']:.0f} %" for row in found]
        separate = [f"{row['over_separate']:.2f}x" if "over_separate" in row else "" for row in found]
        body.append([str(fmt), str(prologue), f"{m} × {k}", str(rotation or ""), *times, *separate])
    head = ["format", "after", "M × K", "rotation", *kernels, *(f"{name} over separate" for name in kernels)]
    return (
        f"`quantize_rows` from bf16 on one {record['device']} (torch {record['versions']['torch']}, "
        f"{record['date'][:10]}, commit {record['commit']}): time, and bytes read and written over it, of the "
        f"{record['copy_tb_per_s']:.2f} TB/s of a copy. *Triton* is `{kernels['Triton']}`, *CUDA* `{kernels['CUDA']}`. "
        "All outputs that were timed equal the definition bit for bit. "
        f"*add_rmsnorm* reads a residual and writes the sum as well. {record['note']}\n\n{table(head, body)}"
    )


def mixed(record: Record) -> str:
    """W8A8, W4A4 and mixtures on the demo model."""
    body = [
        [row["name"], f"{row['perplexity']:.2f}", f"{row['kl']:.3g}", f"{100 * row['top1']:.1f} %"]
        for row in record["rows"]
    ]
    first = ["original", f"{record['original']:.2f}", "0", "100 %"]
    return (
        f"SmolLM2-135M, weights rounded to nearest but for GPTQ ({where(record)}): the last {record['tokens']} tokens "
        "of the survey's text. *hadamard* rotates the inputs of every linear; *channel* is one scale a channel and a "
        "token.\n\n"
        f"{table(['scheme', 'perplexity', 'KL', 'same top-1'], [first, *body])}"
    )


def distillation(record: Record) -> str:
    """What training with the rounding in place buys on the demo model."""
    trained = {"rtn": "not", "distill_weights": "with weights rounded", "distill": "with weights and inputs rounded"}
    nearest = {row["scheme"]: row["kl"] for row in record["rows"] if row["method"] == "rtn"}
    body = [
        [
            row["scheme"],
            trained[row["method"]],
            f"{row['perplexity']:.2f}",
            f"{row['kl']:.3f}",
            f"{100 * (1 - row['kl'] / nearest[row['scheme']]):.0f} %" if row["method"] != "rtn" else "",
            f"{100 * row['top1']:.1f} %",
        ]
        for row in record["rows"]
    ]
    first = ["original", "", f"{record['original']:.2f}", "0", "", "100 %"]
    at = record["machine"]
    return (
        f"SmolLM2-135M on one {at['processor']} (torch {at['torch']}, {at['date']}, commit {at['commit']}), "
        "weights and inputs rounded when it is measured: the last 4,096 tokens of the survey's text, in float32. It is "
        f"trained on windows of the same text that stand before them. {record['note']}\n\n"
        f"{table(['scheme', 'trained', 'perplexity', 'KL', 'KL less', 'same top-1'], [first, *body])}"
    )


def promises(record: Record) -> str:
    """What equal bits cost, one linear at a time."""
    names = {
        "cublas_bf16": ("none", "cuBLAS, bf16"),
        "linear_invariant": ("batch-invariant", "`linear_invariant`"),
        "batch_invariant_replacement": ("batch-invariant", "one fixed tile for all"),
        "linear_exact": ("cross-machine", "`linear_exact`"),
        "layercast": ("none, but rarely differs", "LayerCast"),
        "cublas_fp32": ("none, but rarely differs", "cuBLAS, weights kept in float32"),
    }
    again = load("h200/promises-2048.json")  # after the tiles for many tokens were rewritten
    runs = [run for run in (record, again) if run]
    shapes = list(dict.fromkeys((row["n"], row["k"]) for row in record["rows"]))
    cells = {(row["m"], row["kernel"], row["n"], row["k"]): row for run in runs for row in run["rows"]}
    latest = {row["m"]: run for run in runs for row in run["rows"]}
    body = []
    for m in sorted(latest):
        for name, (promise, way) in names.items():
            found = [cells[m, name, n, k] for n, k in shapes]
            body.append([str(m), promise, way, *(f"{c['ratio']:.3g}x ({c['us']:.0f} µs)" for c in found)])
    dates = [
        f"M = {', '.join(str(m) for m in sorted(latest) if latest[m] is run)}: {run['date'][:10]}, commit "
        f"{run['commit'][:7]}"
        for run in runs
    ]
    many = [cells[max(latest), "linear_exact", n, k]["tflop_per_s"] for n, k in shapes]
    return (
        f"Times as fast as cuBLAS in bf16 in the same minutes, on one {record['device']} (torch "
        f"{record['versions']['torch']}; {'; '.join(dates)}), bf16 weights and CUDA graphs. A copy moved "
        f"{record['copy_tb_per_s']:.2f} TB/s; a loop of float32 multiply-adds alone reached "
        f"{runs[-1]['fma_tflop_per_s']:.1f} TFLOP/s, `linear_exact` {min(many):.1f} to {max(many):.1f} of them with "
        f"{max(latest):,} tokens. What the promises mean is in [why/determinism.md](why/determinism.md).\n\n"
        f"{table(['M', 'promise', 'way', *(f'{n} × {k}' for n, k in shapes)], body)}"
    )


def promised_models(record: Record) -> str:
    """Whether promises are kept on a whole model, and what they cost while decoding."""
    names = {
        "no promise": "none",
        "batch-invariant": "batch-invariant",
        "replacement": "batch-invariant: one fixed tile for all",
        "cross-machine": "cross-machine",
        "layercast": "none, but rarely differs: LayerCast",
    }
    decode = record.get("decode", {})
    body = [
        [text, *(f"{rows[name]['ms']:.2f} ms, {rows[name]['x no promise']:.2f}x" for rows in decode.values())]
        for name, text in names.items()
    ]
    cross = " and ".join(f"{rows['cross-machine']['x layercast']:.2f}x" for rows in decode.values())
    kept = [f"{scheme}: {row['difference'] or 'the same bits'}" for scheme, row in record["fingerprints"].items()]
    return (
        f"SmolLM2-135M on {record['machine']} ({record['date']}, commit {record['commit']}) against the CPU, every op "
        f"and 256 greedy tokens: {'; '.join(kept)}. Ops against their CPU twins: {record['ops']}.\n\n"
        "Decoding at batch 1, random weights, captured steps: time of a token, and speed over no promise. "
        f"Cross-machine is {cross} as fast as LayerCast.\n\n{table(['promise', *decode], body)}"
    )


def prefill(record: Record) -> str:
    """Whole models with narrow activations, beside bf16."""
    names = {"llama-8b": "Llama-3.1-8B's shape, 2,048 tokens", "dit": "a diffusion transformer, 4,096 tokens"}
    bf16 = {row["model"]: row for row in record["rows"] if row["scheme"] == "bf16"}
    body = []
    for row in record["rows"]:
        first = bf16[row["model"]]
        linears = row["ms"] - first["ms"] + first["linears_ms"]
        share, faster = 100 * first["linears"], first["linears_ms"] / linears
        whole = f"{row['ratio']:.2f}x" if "ratio" in row else ""
        within = f"{linears:.1f} ms, {f'{share:.0f} %' if row is first else f'{faster:.2f}x'}"
        body.append([names[row["model"]], row["scheme"], f"{row['ms']:.1f}", whole, within])
    return (
        f"Random weights on one {record['device']} (torch {record['versions']['torch']}, {record['date'][:10]}, commit "
        f"{record['commit']}), each step one captured CUDA graph. Every quantized linear is compared with its "
        "definition first. In bf16 the time of the linears was measured by itself; for the others it is what is left "
        "of the step if the rest takes as long as in bf16, with the passes over the inputs in it. "
        f"{record['note']}\n\n" + table(["model", "scheme", "ms", "over bf16", "of it linears"], body)
    )


def quantize(record: Record) -> str:
    """Throughput of quantize()."""
    head = ["format", "M values/s in", "M values/s back", "time of a copy"]
    body = [
        [
            row["format"],
            f"{row['quantize_mvalues_per_s']:.0f}",
            f"{row['dequantize_mvalues_per_s']:.0f}",
            f"{row['quantize_over_copy']:.1f}x",
        ]
        for row in record["rows"]
    ]
    rows, columns = record["shape"]
    return (
        f"A float32 tensor of {rows} × {columns}, {record['threads']} threads ({where(record)}); codes are compared "
        f"with the definition before a time counts.\n\n{table(head, body)}"
    )


def where(record: Record) -> str:
    """Versions and date of a record."""
    commit = f", commit {record['commit']}" if record.get("commit") else ""
    return f"torch {record['torch']}, {record['date']}{commit}"


SECTIONS: list[tuple[str, str, Callable[[Record], str]]] = [
    ("A survey on two CPU cores", "cpu-2core/survey.json", survey),
    ("A survey on an H200", "h200/survey.json", survey),
    ("Whole-model decoding on an H200", "h200/decode-llama-8b.json", decode),
    ("Weight-only linears on an H200", "h200/linear.json", linear),
    ("NF4 and FP8 by block on an H200", "h200/linear-nf4-fp8block.json", linear),
    ("Beside rivals on an H200", "h200/linear-rivals.json", rivals),
    ("Beside rivals on an H200, other formats", "h200/linear-rivals-one-token.json", rivals),
    ("Linears with narrow activations on an H200", "h200/activations.json", activations),
    ("FP8 products on an H200", "h200/activations-fp8.json", fp8),
    ("Producers on an H200", "h200/producers.json", producers),
    ("Whole models with narrow activations on an H200", "h200/prefill.json", prefill),
    ("A diffusion transformer with narrow activations on an H200", "h200/prefill-dit.json", prefill),
    ("Eight and four bits, mixed", "cpu-2core/mixed.json", mixed),
    ("Distillation on an H200", "h200/distill.json", distillation),
    ("What equal bits cost on an H200", "h200/promises.json", promises),
    ("Promises on whole models", "h200/promises-model-cuda.json", promised_models),
    ("Quantizing on two CPU cores", "cpu-2core/quantize.json", quantize),
]


def results() -> str:
    """docs/results.md."""
    parts = [
        "# Results\n\nGenerated from `benchmarks/results` by `make docs`. "
        "Speeds are ratios within one run; machines are noisy."
    ]
    for title, name, render in SECTIONS:
        record = load(name)
        if record is not None:
            parts.append(f"## {title}\n\n{render(record)}")
    return "\n\n".join(parts) + "\n"
