"""`nybble bench linear`: our kernels beside cuBLAS and rivals, on this GPU.

No time without a check: first the judge asks its questions about the answer on the op's declared cases of the formats
(nybble.judge.gate), then every output that was timed is compared with the reference by the op's own agreement; either's
failure ends the run. Times are medians over several replays of a CUDA graph that calls the kernel on one copy of the
weight after the other, enough copies that none is still in the L2 cache; inputs are random; ratios are to cuBLAS in
bf16 (or fp16) on the same machine in the same minute. A result faster than the weight can be read is an error.

    nybble bench linear --shapes llama-8b --m 1,16,64,256 --formats int4_g128,nvfp4 --rivals --out result.json
"""

from __future__ import annotations

import argparse
import datetime
import json
import math
import platform
import statistics
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import metadata
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nybble.bench import rivals
from nybble.errors import BadInput, Mismatch
from nybble.files import write_whole
from nybble.formats import table
from nybble.judge.gate import admit
from nybble.ops._choose import choose
from nybble.ops.linear import CASE_FORMATS, LINEAR, config, cuda, linear
from nybble.quantize import QuantTensor, quantize

SHAPES = {
    "llama-8b": ((14336, 4096), (4096, 14336), (4096, 4096)),
    "llama-70b": ((28672, 8192),),
    "all": ((28672, 8192), (14336, 4096), (4096, 14336), (4096, 4096)),
}
"""Names for sets of weights [N, K]."""
FORMATS = ("int4_g128", "nvfp4", "mxfp4", "int8_channel", "fp8_channel")
TOKENS = (1, 16, 64, 256, 2048)
_BEYOND_CACHE = 300_000_000  # bytes that rotate: five times an H200's L2
_RUNS, _REPLAYS = 7, 2
_LONG = 3000.0  # microseconds that a replay need not exceed
_OURS = "linear_"
_LEGEND = 6  # entries in a line
_HOPELESS = 2.5  # times the best prediction, with which --plans times no plan
_FASTER_THAN_A_COPY = 1.15  # reading alone is a little faster than reading and writing


@dataclass(frozen=True)
class Row:
    """One measurement.

    Attributes:
        kernel: which implementation ran, or which rival.
        us: microseconds a call. ratio: times as fast as cuBLAS. error: the checked distance to the reference.
        tb_per_s: bytes of the stored weight over the time.
        plan: how our kernel was instantiated. chosen: whether that is what `linear` runs.
    """

    format: str
    kernel: str
    n: int
    k: int
    m: int
    us: float
    ratio: float
    tb_per_s: float
    error: float
    plan: str = ""
    chosen: bool = True


def timed(calls: Sequence[Callable[[], Tensor]]) -> tuple[float, list[Tensor]]:
    """(microseconds a call, the outputs) of calls captured one after the other in a CUDA graph."""
    for call in dict.fromkeys(calls):
        call()  # compiles, tunes, and asks a weight what has to be known of it, outside the capture
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [call() for call in calls]
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(_RUNS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_REPLAYS):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / (_REPLAYS * len(calls)))
    return statistics.median(times), outputs


def copy_bandwidth() -> float:
    """TB/s of an elementwise kernel, read plus written; a captured copy would use the slower copy engine."""
    source = torch.rand(1 << 29, device="cuda")
    target = torch.empty_like(source)
    us, _ = timed([lambda: torch.neg(source, out=target)] * 4)
    return 2 * source.numel() * source.element_size() / us / 1e6


def _copies(nbytes: int) -> int:
    return max(3, math.ceil(_BEYOND_CACHE / max(1, nbytes)) + 1)


def _calls(number: int, call: Callable[[int], Tensor], us: float = 0.0) -> Sequence[Callable[[], Tensor]]:
    """One call for each copy, repeated until a graph is worth its replay: sixteen, fewer of long ones (`us` each)."""
    wanted = min(16, math.ceil(_LONG / us)) if us else 16
    return [partial(call, i) for i in range(number)] * max(1, wanted // number)


def laid_out(x: Tensor, w: QuantTensor, *rest: Any) -> Tensor:
    """`linear` as it is timed here: on the weight in the layout that the chosen implementation wants."""
    layout = choose(LINEAR, x.device.type, x, w, *rest).layout(w)
    return linear(x, w if layout is None else w.to_layout(layout), *rest)


def judged(formats: list[str], device: str = "cuda") -> str:
    """A line about the judge's verdict on the cases of these formats; Mismatch where it is not correct."""
    asked = [name for name in formats if name in CASE_FORMATS]
    verdict = admit(LINEAR.name, f"{__name__}:laid_out", device, [f"{name}-" for name in asked])
    return f"judged correct in {verdict.seconds:.1f} s: {', '.join(asked) or 'all formats'}"


@dataclass(frozen=True)
class Cell:
    """What is timed with one number of tokens and a weight's shape: the inputs, and cuBLAS to compare with."""

    x: Tensor
    original: Tensor
    dense: Row

    def row(self, fmt: str, kernel: str, us: float, nbytes: int, error: float, **more: Any) -> Row:
        """A measurement beside cuBLAS's."""
        base = self.dense
        return Row(fmt, kernel, base.n, base.k, base.m, us, base.us / us, nbytes / us / 1e6, error, **more)


def cells(shape: tuple[int, int], tokens: list[int], dtype: torch.dtype) -> list[Cell]:
    """cuBLAS on one shape, with every number of tokens."""
    n, k = shape
    generator = torch.Generator("cuda").manual_seed(n + k)
    original = torch.randn(n, k, generator=generator, device="cuda") * k**-0.5
    dense = [original.to(dtype) for _ in range(_copies(2 * n * k))]
    weight, made = dense[0].double().t(), []
    for m in tokens:
        x = torch.randn(m, k, generator=generator, device="cuda").to(dtype)
        us, outputs = timed([partial(torch.nn.functional.linear, x, each) for each in dense] * max(1, 16 // len(dense)))
        error = _checked(outputs, x, weight, "cuBLAS")
        name = "bf16" if dtype == torch.bfloat16 else "fp16"
        made.append(Cell(x, original, Row(name, "cublas", n, k, m, us, 1.0, 2 * n * k / us / 1e6, error)))
    return made


def _checked(outputs: list[Tensor], x: Tensor, weight: Tensor, what: str) -> float:
    """The distance of the first and the last output from x times `weight` [K, N] in float64; Mismatch if too far."""
    expected, size = (
        (x.double() @ weight).to(x.dtype),
        float(x.double().norm() * weight.norm()) / math.sqrt(len(weight)),
    )
    return max(LINEAR.agreement.check(y, expected, what, size) for y in (outputs[0], outputs[-1]))


def measure(made: list[Cell], formats: list[str], bandwidth: float, plans: int = 1) -> Iterator[Row]:
    """Rows of our kernels on one shape; with `plans` above 1 also of so many of every kernel's best plans."""
    for name in formats:
        w = replace(quantize(made[0].original, name), dtype=made[0].x.dtype)
        weight = w.dequantize(torch.float32).double().t()
        layout = choose(LINEAR, "cuda", made[0].x, w, None, None, None).layout(w)
        packed = w if layout is None else w.to_layout(layout)
        copies = [
            replace(packed, codes=packed.codes.clone(), scale=packed.scale.clone()) for _ in range(_copies(w.nbytes))
        ]
        for cell in made:
            kernel = choose(LINEAR, "cuda", cell.x, packed, None, None, None).name
            for number, (plan, call) in enumerate(_ways(cell.x, copies, plans)):
                what = f"{plan or kernel} on {name} {tuple(w.shape)}, M = {len(cell.x)}"
                us, outputs = timed(_calls(len(copies), call, cell.dense.us))
                row = cell.row(name, kernel, us, w.nbytes, _checked(outputs, cell.x, weight, what), plan=plan)
                if row.tb_per_s > bandwidth * _FASTER_THAN_A_COPY:
                    raise Mismatch(f"{what}: {row.tb_per_s:.2f} TB/s, but a copy here reaches {bandwidth:.2f}")
                yield replace(row, chosen=number == 0)


def _ways(x: Tensor, copies: list[QuantTensor], plans: int) -> Iterator[tuple[str, Callable[[int], Tensor]]]:
    """(plan, what makes the i-th call): what `linear` runs, then the best plans of every kernel but the hopeless."""
    served = choose(LINEAR, "cuda", x, copies[0], None, None, None) in cuda.IMPLEMENTATIONS
    scored = config.choose(cuda.problem(x, copies[0])).scored if served else ()
    yield str(scored[0][1]) if scored else "", lambda i: linear(x, copies[i])
    seen: Counter[tuple[type, int]] = Counter()
    for number, (us, plan) in enumerate(scored if plans > 1 else ()):
        kind = type(plan), getattr(plan, "places", 1)
        seen[kind] += 1
        if number and seen[kind] <= plans and us < _HOPELESS * scored[0][0]:
            yield str(plan), partial(_run_plan, x, copies, plan)


def _run_plan(x: Tensor, copies: list[QuantTensor], plan: config.Plan, i: int) -> Tensor:
    return cuda.run(x, copies[i], None, plan)


def beside(made: list[Cell], formats: list[str], given_up: dict[str, str]) -> Iterator[Row]:
    """Rows of rivals on one shape. One that fails or is late is told of in `given_up` and not asked again."""
    for cell, name in product(made, formats):
        w = replace(quantize(cell.original, name), dtype=cell.x.dtype)
        weight = w.dequantize(torch.float32).double().t()
        for kernel, number, make, exact in rivals.contenders(w, cell.x, cell.original, _copies(w.nbytes)):
            what = f"{kernel} on {name}"
            if what in given_up:
                continue
            try:
                with rivals.deadline(what):
                    call = make()
                    call(0)
                us, outputs = timed(_calls(number, call, cell.dense.us))
                error = (
                    _checked(outputs, cell.x, weight, what)
                    if exact
                    else rivals.near(outputs[-1], cell.x, cell.original, what)
                )
            except Exception as problem:  # noqa: BLE001 - whatever a rival raises is what there is to tell
                at = f"[{w.shape[0]}, {w.shape[1]}], M = {len(cell.x)}"
                given_up[what] = f"{at}: {type(problem).__name__}: {str(problem).partition(chr(10))[0]}"
                continue
            yield cell.row(name, kernel, us, w.nbytes, error)


def machine() -> dict[str, Any]:
    """What the numbers depend on: device, driver, versions, date."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda}
    for package in ("nybble", "triton", *rivals.PACKAGES):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    date = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    return {"device": torch.cuda.get_device_name(), "versions": versions, "date": date}


def _commit() -> str | None:
    here = Path(__file__).parent
    found = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def draw(rows: list[dict[str, Any]], path: Path, title: str, copy: float) -> None:
    """Speed over cuBLAS, and the stored weight's TB/s beside a copy's, against tokens: a column a shape, a line a
    format and kernel."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    named = [{**r, "kernel": "ours" if r["kernel"].startswith(_OURS) else r["kernel"]} for r in rows]
    shapes, tokens = list(dict.fromkeys((r["n"], r["k"]) for r in rows)), sorted({r["m"] for r in rows})
    labelled = _apart(tokens)
    figure, axes = pyplot.subplots(
        2, len(shapes), figsize=(4.2 * len(shapes), 7.2), sharex=True, sharey="row", squeeze=False
    )
    lines = [line for line in dict.fromkeys((r["format"], r["kernel"]) for r in named) if line[1] != "cublas"]
    for column, (n, k) in enumerate(shapes):
        for row, (value, limit) in enumerate((("ratio", 1.0), ("tb_per_s", copy))):
            axis = axes[row][column]
            for number, (fmt, kernel) in enumerate(lines):
                mine = [r for r in named if (r["n"], r["k"], r["format"], r["kernel"]) == (n, k, fmt, kernel)]
                axis.plot(*zip(*sorted((r["m"], r[value]) for r in mine), strict=True), marker="o",
                          linestyle="-" if kernel == "ours" else ":", color=f"C{number}",
                          label=f"{fmt}, {kernel}")  # fmt: skip
            axis.axhline(limit, color="black", linewidth=1)
            axis.set(xscale="log")
            axis.set_xticks(labelled, [str(m) for m in labelled])
            axis.minorticks_off()
            axis.grid(alpha=0.3)
        axes[0][column].set_title(f"weight {n} × {k}")
        axes[1][column].set_xlabel("tokens M")
    axes[0][0].set_ylabel("times as fast as cuBLAS (black)")
    axes[1][0].set_ylabel(f"TB/s of weight (black: a copy, {copy:.2f})")
    for row in axes:
        row[0].set_ylim(bottom=0)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="lower center", ncols=_LEGEND, frameon=False)
    figure.suptitle(title)
    figure.tight_layout(rect=(0, 0.02 + 0.03 * math.ceil(len(labels) / _LEGEND), 1, 1))
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def _apart(tokens: list[int]) -> list[int]:
    """Of ascending numbers those whose labels do not run into each other on a logarithmic axis."""
    kept = tokens[:1]
    for m in tokens[1:]:
        if m > kept[-1] * (tokens[-1] / tokens[0]) ** (1 / 9):
            kept.append(m)
    return kept


def _weights(text: str) -> list[tuple[int, int]]:
    if text in SHAPES:
        return list(SHAPES[text])
    try:
        return [(int(n), int(k)) for n, k in (part.lower().split("x") for part in text.split(","))]
    except ValueError:
        raise BadInput(f"shapes {text!r}: give one of {', '.join(SHAPES)}, or N x K as 4096x4096,…") from None


def _parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="nybble bench", description=__doc__.split("\n\n")[1] if __doc__ else None)
    parser.add_argument("op", choices=["linear"])
    parser.add_argument("--shapes", default="llama-8b", help=f"{', '.join(SHAPES)}, or 4096x4096,…")
    parser.add_argument("--m", default=",".join(map(str, TOKENS)), help="numbers of tokens")
    parser.add_argument("--formats", default=",".join(FORMATS))
    parser.add_argument("--dtype", choices=["bf16", "fp16"], default="bf16")
    parser.add_argument("--rivals", action="store_true", help="time installed rivals too")
    parser.add_argument(
        "--plans", type=int, default=1, help="time so many plans of every kernel, not the chosen one alone"
    )
    parser.add_argument("--out", type=Path, help="a JSON file; the picture gets the same name")
    parser.add_argument("--commit", help="recorded instead of what git says")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> int:
    """The command line; returns the exit code."""
    options = _parse(arguments)
    if not torch.cuda.is_available():
        raise BadInput("nybble bench times GPU kernels, and torch sees no GPU here")
    tokens, formats = [int(m) for m in options.m.split(",")], [table.block(f).name for f in options.formats.split(",")]
    dtype = torch.bfloat16 if options.dtype == "bf16" else torch.float16
    bandwidth = copy_bandwidth()
    result = {
        **machine(),
        "commit": options.commit or _commit(),
        "copy_tb_per_s": bandwidth,
        "rows": [],
        "other plans": [],
        "did not run": {},
    }
    _say(f"{result['device']}: a copy moves {bandwidth:.2f} TB/s")
    _say(judged(formats))
    shapes, given_up = _weights(options.shapes), result["did not run"]
    ours = [_ours(shape, tokens, formats, dtype, bandwidth, options.plans) for shape in shapes]
    theirs = [_theirs(shape, tokens, formats, dtype, given_up) for shape in shapes if options.rivals]
    for rows in (*ours, *theirs):
        for row in rows:
            result["rows" if row.chosen else "other plans"].append(vars(row))
            _tell(row)
        if options.out is not None:
            # Every time, so that an interrupted run keeps what it has.
            write_whole(options.out, json.dumps(result, indent=1) + "\n", parents=True)
    for what, reason in given_up.items():
        _say(f"did not run: {what}: {reason}")
    if options.out is not None:
        title = f"linear, {result['device']}, {result['date'][:10]}"
        draw(result["rows"], options.out.with_suffix(".png"), title, bandwidth)
    return 0


def _ours(
    shape: tuple[int, int], tokens: list[int], formats: list[str], dtype: torch.dtype, bandwidth: float, plans: int
) -> Iterator[Row]:
    made = cells(shape, tokens, dtype)
    yield from (cell.dense for cell in made)
    yield from measure(made, formats, bandwidth, plans)


def _theirs(
    shape: tuple[int, int], tokens: list[int], formats: list[str], dtype: torch.dtype, given_up: dict[str, str]
) -> Iterator[Row]:
    """After ours, so that a rival that ruins the process costs nothing; cuBLAS is timed again beside them."""
    yield from beside(cells(shape, tokens, dtype), formats, given_up)


def _tell(row: Row) -> None:
    _say(
        f"{row.n:6d} x {row.k:<6d} M={row.m:<5d} {row.format:14s} {row.us:9.2f} us {row.ratio:5.2f}x "
        f"{row.tb_per_s:5.2f} TB/s  {row.kernel} {row.plan}"
    )


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
