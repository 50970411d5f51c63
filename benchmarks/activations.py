"""Linears with narrow activations on a GPU, beside cuBLAS in bf16 and the libraries' own narrow products.

    python benchmarks/activations.py [--fp8] [--out FILE] [--commit HASH]

For each shape: cuBLAS bf16; our products alone, every plan, and the whole linear with its pass over the activations
(ops/quantize_rows); `torch._int_mm` alone and followed by the rescale as two elementwise passes; `torch._scaled_mm`
with and without fast accumulation; DeepGEMM where it is installed. Times are medians of replays of a CUDA graph over
weights that rotate past the L2 cache. Every output of ours that is timed is checked: integer sums bit for bit, in the
declared order of the rescale; the others by the op's agreement with the float64 reference.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import record
from nybble.bench import machine, timed
from nybble.errors import Mismatch
from nybble.formats import table
from nybble.ops.linear import LINEAR, cuda, gpu, linear, narrow, narrow_cuda, narrow_fp8, triton
from nybble.ops.quantize_rows import quantize_rows
from nybble.planner import granularity, machines
from nybble.quantize import QuantTensor, elements, quantize

LLAMA = ((28672, 8192), (14336, 4096), (4096, 4096))
IDEOGRAM = ((13824, 4608), (4608, 4608), (12288, 4608), (4608, 12288), (4608, 53248))
W8A8, W4A8, W4A4 = ("int8_channel", "int8_token"), ("int4_channel", "int8_token"), ("int4_channel", "int4_token")
FP8 = (("fp8_channel", "fp8_token"), ("fp8_block128", "fp8_g128"))
GROUPS = tuple((f"int4_g{g}", a) for g in granularity.GROUPS for a in ("int8_token", f"int4_g{g}"))
BEYOND_CACHE, CALLS = 300_000_000, 8
Row = dict[str, Any]


def copies(nbytes: int) -> int:
    """How many of one size leave the cache."""
    return max(2, math.ceil(BEYOND_CACHE / nbytes))


def repeated(call: Callable[[int], Tensor], number: int) -> list[Callable[[], Tensor]]:
    """Calls over `number` copies, enough of them for a graph to be worth its replay."""
    return [partial(call, i % number) for i in range(max(CALLS, number))]


def expected(a: QuantTensor, w: QuantTensor) -> tuple[Tensor, bool]:
    """(the product in bf16, whether it has to be met bit for bit)."""
    p = narrow.Problem(a.shape[0], *w.shape, w.format, a.format)
    if p.group:
        y = a.dequantize(torch.float32).double() @ w.dequantize(torch.float32).double().t()
        return y.bfloat16(), False
    sums = elements.decode_int(a.format.element, a.unpack()).double() @ (
        elements.decode_int(w.format.element, w.unpack()).double().t()
    )
    return (sums.to(torch.float32) * a.scale * w.scales()[0].flatten()).bfloat16(), True


def check(y: Tensor, reference: Tensor, exact: bool, what: str) -> float:
    """The distance; Mismatch where it is not allowed."""
    if exact and not torch.equal(y, reference):
        raise Mismatch(f"{what}: {int((y != reference).sum())} of {y.numel()} elements differ from the exact sums'")
    return LINEAR.agreement.check(y, reference, what)


class Shape:
    """One product's sizes, its bf16 time and its random operands."""

    def __init__(self, m: int, n: int, k: int) -> None:
        self.m, self.n, self.k = m, n, k
        generator = torch.Generator("cuda").manual_seed(n + k + m)
        normal = partial(torch.randn, generator=generator, device="cuda")
        self.x, self.original = normal(m, k).bfloat16(), normal(n, k) * k**-0.5
        dense = [self.original.bfloat16() for _ in range(copies(2 * n * k))]
        self.base, _ = timed(repeated(lambda i: torch.nn.functional.linear(self.x, dense[i]), len(dense)))

    def row(self, kernel: str, us: float, **rest: Any) -> Row:
        """A row of the result, printed as it is made."""
        tops = 2e-6 * self.m * self.n * self.k / us
        row = {"m": self.m, "n": self.n, "k": self.k, "kernel": kernel, "us": round(us, 2),
               "ratio": round(self.base / us, 3), "tops": round(tops), **rest}  # fmt: skip
        more = " ".join(f"{value:.2g}" if isinstance(value, float) else str(value) for value in rest.values())
        sys.stdout.write(f"{self.m:5} {self.n:6}x{self.k:<6} {us:9.1f} us {row['ratio']:6.3f}x {kernel}  {more}\n")
        return row

    def ours(self, weight: str, activation: str, whole: bool, fastest: bool = False) -> Iterator[Row]:
        """Our product with every plan, or the fastest one by its model, and the linear with its pass over x."""
        w = quantize(self.original, weight, check=False).to_layout(narrow.layout_for(table.block(weight)))
        a = quantize_rows(self.x, activation)
        weights = [replace(w, codes=w.codes.clone()) for _ in range(copies(w.nbytes))]
        reference, exact = expected(a, w)
        p = narrow.Problem(self.m, self.n, self.k, w.format, a.format, torch.bfloat16, cuda.machine(0))
        ys = [torch.empty_like(reference) for _ in range(2)]
        formats = {"weight": weight, "activation": activation}
        for kernel in (narrow_fp8 if p.float8 else narrow_cuda, triton):
            plans = kernel.plans(p)[: 1 if fastest or kernel is triton else None]
            for plan in plans if kernel is not triton or (self.n, weight) == (14336, W8A8[0]) else ():

                def call(i: int, kernel: Any = kernel, plan: Any = plan) -> Tensor:
                    kernel.run(a, weights[i], None, p, plan, ys[i % 2])
                    return ys[i % 2]

                us, outputs = timed(repeated(call, len(weights)))
                error = check(outputs[-1], reference, exact, f"{plan} on {p.key}")
                name = f"{kernel.__name__.rpartition('.')[2]} {vars(plan)}"
                yield self.row(name, us, **formats, exact=exact, error=error)
        if whole:
            fmt = table.block(activation)
            us, outputs = timed(repeated(lambda i: linear(self.x, weights[i], None, fmt), len(weights)))
            error = check(outputs[-1], reference, exact, f"linear on {p.key}")
            yield self.row("linear, activations quantized", us, **formats, exact=exact, error=error)

    def integers(self) -> Iterator[Row]:
        """torch._int_mm, alone and with the rescale after it."""
        a, w = quantize_rows(self.x, W8A8[1]), quantize(self.original, W8A8[0], check=False)
        x, weights = a.codes.view(torch.int8), [w.codes.view(torch.int8).clone() for _ in range(copies(w.nbytes))]
        us, outputs = timed(repeated(lambda i: torch._int_mm(x, weights[i].t()), len(weights)))
        sums, row_scale = outputs[-1], w.scales()[0].flatten()
        mine = gpu.product(a, replace(w, codes=weights[0].view(torch.uint8)))
        if not torch.equal((sums.to(torch.float32) * a.scale * row_scale).bfloat16(), mine):
            raise Mismatch(f"our product on {self.n} x {self.k} is not torch._int_mm's, rescaled")
        yield self.row("torch._int_mm", us, note="ours equals it, rescaled, bit for bit")
        wide = torch.empty(sums.shape, dtype=torch.float32, device="cuda")
        y = torch.empty(sums.shape, dtype=torch.bfloat16, device="cuda")

        def rescaled(i: int) -> Tensor:
            torch.mul(torch._int_mm(x, weights[i].t()), a.scale, out=wide)
            return torch.mul(wide, row_scale, out=y)

        us, _ = timed(repeated(rescaled, len(weights)))
        yield self.row("torch._int_mm, then two passes", us)

    def floats(self) -> Iterator[Row]:
        """FP8 rivals: torch._scaled_mm by rows and by blocks, DeepGEMM by blocks."""
        for weight, activation in FP8:
            a, w = quantize_rows(self.x, activation), quantize(self.original, weight, check=False)
            reference, _ = expected(a, w)
            x = a.codes.view(torch.float8_e4m3fn)
            weights = [w.codes.view(torch.float8_e4m3fn).clone() for _ in range(copies(w.nbytes))]
            blocks = narrow.grouped(w.format)
            x_scale = a.scale.t().contiguous().t() if blocks else a.scale
            w_scale = w.scale.t() if blocks else w.scale.t().contiguous()
            for fast in (False,) if blocks else (False, True):
                multiply = partial(_scaled_mm, x, x_scale, weights, w_scale, fast)
                us, outputs = timed(repeated(multiply, len(weights)))
                error = LINEAR.agreement.distance(outputs[-1], reference)
                yield self.row(f"torch._scaled_mm{', fast accumulation' * fast}", us, weight=weight, error=error)
            if blocks and find_spec("deep_gemm"):
                us, outputs = timed(repeated(partial(_deep_gemm, x, x_scale, weights, w.scale), len(weights)))
                error = LINEAR.agreement.distance(outputs[-1], reference)
                yield self.row("DeepGEMM", us, weight=weight, error=error)


def _scaled_mm(x: Tensor, x_scale: Tensor, weights: list[Tensor], w_scale: Tensor, fast: bool, i: int) -> Tensor:
    return torch._scaled_mm(
        x, weights[i].t(), x_scale, w_scale, out_dtype=torch.bfloat16, use_fast_accum=fast
    )  # fmt: skip


def _deep_gemm(x: Tensor, x_scale: Tensor, weights: list[Tensor], w_scale: Tensor, i: int) -> Tensor:
    y = torch.empty((x.shape[0], weights[i].shape[0]), dtype=torch.bfloat16, device="cuda")
    import_module("deep_gemm").fp8_gemm_nt((x, x_scale), (weights[i], w_scale), y)
    return y


def fp8_rows() -> Iterator[Row]:
    """FP8 alone: its products, the whole linear, the libraries'."""
    for m in (2048, 4096):
        for n, k in LLAMA:
            shape = Shape(m, n, k)
            yield shape.row("cuBLAS bf16", shape.base)
            for pair in FP8:
                yield from shape.ours(*pair, whole=True)
            yield from shape.floats()


def rows() -> Iterator[Row]:
    """Everything that is measured."""
    for m in (2048, 4096):
        for n, k in LLAMA:
            shape = Shape(m, n, k)
            yield shape.row("cuBLAS bf16", shape.base)
            yield from shape.ours(*W8A8, whole=True)
            yield from shape.ours(*W4A8, whole=True, fastest=True)
            for pair in FP8:
                yield from shape.ours(*pair, whole=False)
            yield from shape.floats()
            if n == 14336:
                yield from shape.integers()
                yield from shape.ours(*W4A4, whole=True, fastest=True)
                for pair in GROUPS:
                    yield from shape.ours(*pair, whole=False)
    for n, k in IDEOGRAM:
        shape = Shape(4096, n, k)
        yield shape.row("cuBLAS bf16", shape.base)
        yield from shape.integers()
        yield from shape.ours(*W8A8, whole=True)


def main() -> None:
    """Measure, print, write JSON after every row: an interrupted run keeps what it has."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of this tree, where git is not at hand")
    parser.add_argument("--fp8", action="store_true", help="FP8 alone")
    options = parser.parse_args()
    h200 = machines.get("h200")
    model = {str(g): granularity.exposed(h200, g) for g in granularity.GROUPS}
    result: dict[str, Any] = {
        "what": "linears with narrow activations", **machine(), "commit": options.commit or record.head(),
        "exposed_by_the_model": model, "rows": [],
    }  # fmt: skip
    for row in fp8_rows() if options.fp8 else rows():
        result["rows"].append(row)
        if options.out:
            record.write(options.out, result)


if __name__ == "__main__":
    main()
