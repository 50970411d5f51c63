"""Producers on a GPU: one pass from bf16 to codes and scales, beside the separate passes and a plain copy.

    python benchmarks/producers.py [--out FILE] [--commit HASH] [--only 0,4,…] [--warm I/N]

Every kernel that takes a case is timed, and every output that is timed is compared with the definition first, bit for
bit. Times are medians of replays of a CUDA graph over inputs that rotate past the L2 cache; the share is bytes read and
written (once each) over the time, of what a copy reaches in the same run. *separate* is the op of the prologue and then
the plain producer, both of nybble.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import record
from nybble.bench import copy_bandwidth, machine, timed
from nybble.errors import Mismatch
from nybble.formats import table
from nybble.ops._declare import Implementation
from nybble.ops.quantize_rows import QUANTIZE_ROWS, cost, quantize_rows
from nybble.ops.quantize_rows.gpu import KERNELS
from nybble.ops.rmsnorm import add_rmsnorm
from nybble.ops.silu_mul import silu_mul
from nybble.quantize import QuantTensor

FORMATS = ("int8_token", "fp8_token", "fp8_g128", "nvfp4", "mxfp4")
BEYOND_CACHE, EPS = 300_000_000, 1e-5
Case = tuple[str, str, int, int, int]  # format, prologue, M, K, rotation


def cases() -> Iterator[Case]:
    """What is measured: every format after every prologue, widths that are no power of two, rotations."""
    for name in FORMATS:
        for prologue in ("plain", "rmsnorm", "add_rmsnorm", "silu_mul"):
            yield name, prologue, 4096, 4096, 0
        yield name, "plain", 4096, 4096, 16
        yield name, "rmsnorm", 4096, 4096, 16
    for name in ("int8_token", "mxfp4"):
        for rotation in (32, 128):
            yield name, "plain", 4096, 4096, rotation
    for name in ("int8_token", "fp8_token"):
        yield name, "plain", 4096, 4608, 0
        yield name, "add_rmsnorm", 4096, 4608, 0
        yield name, "silu_mul", 2048, 14336, 0
        yield name, "silu_mul", 4096, 12288, 0


class Inputs:
    """Copies of one case's arguments, enough to leave the cache."""

    def __init__(self, case: Case) -> None:
        name, self.prologue, m, k, self.rotation = case
        width = 2 * k if self.prologue == "silu_mul" else k
        generator = torch.Generator("cuda").manual_seed(m + k)
        normal = partial(torch.randn, generator=generator, device="cuda", dtype=torch.bfloat16)
        number = 2 + BEYOND_CACHE // (m * width * 2)
        self.fmt = table.block(name)
        self.x = [normal(m, width) for _ in range(number)]
        self.residual = [normal(m, width) for _ in range(number)] if self.prologue == "add_rmsnorm" else [None] * number
        self.gain = normal(k)
        self.amax = torch.full((), 5.0, device="cuda") if self.fmt.tensor_scale else None

    def arguments(self, i: int) -> tuple[Any, ...]:
        """The op's arguments."""
        prologue = "rmsnorm" if self.prologue == "add_rmsnorm" else self.prologue
        normal = (self.residual[i], self.gain, EPS) if prologue == "rmsnorm" else (None, None, 0.0)
        return self.x[i], self.fmt, prologue, *normal, self.amax, self.rotation

    def kernels(self) -> list[Implementation]:
        """The kernels that take it."""
        return [kernel for kernel in KERNELS if kernel.supports(*self.arguments(0)) is None]

    def separate(self, i: int) -> tuple[QuantTensor, Tensor | None]:
        """The op of the prologue, then the plain producer."""
        y, h = silu_mul(self.x[i]), None
        if self.prologue != "silu_mul":
            y, h = add_rmsnorm(self.x[i], self.residual[i], self.gain, EPS)
        return quantize_rows(y, self.fmt, tensor_amax=self.amax, hadamard=self.rotation), h

    def reference(self, i: int) -> QuantTensor:
        """The definition; the gate by the kernel, whose exponential is the device's."""
        if self.prologue != "silu_mul":
            return QUANTIZE_ROWS.reference(*self.arguments(i))[0]
        return QUANTIZE_ROWS.reference(silu_mul(self.x[i]), self.fmt, tensor_amax=self.amax, hadamard=self.rotation)[0]


def check(q: QuantTensor, expected: QuantTensor, what: str) -> None:
    """The same bytes."""
    for part, tensor in q.parts.items():
        if not torch.equal(tensor, expected.parts[part]):
            different = int((tensor != expected.parts[part]).sum())
            raise Mismatch(f"{what}: {different} of {tensor.numel()} {part} differ from the definition")


def medians(call: Callable[[int], Any], number: int) -> tuple[float, list[Any]]:
    """(microseconds, outputs) of calls over all copies, at least sixteen."""
    return timed([partial(call, i) for i in range(number)] * max(1, 16 // number))


def measure(case: Case, bandwidth: float) -> Iterator[dict[str, Any]]:
    """A row of the result for every kernel."""
    name, prologue, m, k, rotation = case
    inputs, what = Inputs(case), f"{name} after {prologue}, [{m}, {k}], rotation {rotation}"
    number = len(inputs.x)
    separate = {} if prologue == "plain" else {"separate_us": medians(inputs.separate, number)[0]}
    nbytes = cost(*inputs.arguments(0)[:4]).nbytes
    expected = {i: inputs.reference(i) for i in (0, number - 1)}
    for kernel in inputs.kernels():

        def call(i: int, kernel: Implementation = kernel) -> Any:
            return kernel.run(*inputs.arguments(i))

        us, outputs = medians(call, number)
        for i, q in expected.items():
            check(outputs[i][0], q, f"{kernel.name}: {what}")
        speed = nbytes / us / 1e6
        if speed > 1.15 * bandwidth:
            raise Mismatch(f"{what}: faster than memory ({speed / bandwidth:.2f} of a copy)")
        row = {"kernel": kernel.name, "format": name, "prologue": prologue, "m": m, "k": k, "rotation": rotation,
               "us": us, "mbytes": nbytes / 1e6, "tb_per_s": speed, "of_copy": speed / bandwidth}  # fmt: skip
        yield row | ({**separate, "over_separate": separate["separate_us"] / us} if separate else {})


def warm(share: int, shares: int) -> None:
    """Compile a share of the kernels, so that several processes fill Triton's cache together."""
    for case in list(cases())[share::shares]:
        small = (*case[:2], 8, *case[3:])
        inputs = Inputs(small)
        for kernel in inputs.kernels():
            kernel.run(*inputs.arguments(0))
    torch.cuda.synchronize()


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of this tree, where git is not at hand")
    parser.add_argument("--only", default="", help="numbers of cases, separated by commas")
    parser.add_argument("--warm", help="I/N: only compile the I-th of N shares")
    options = parser.parse_args()
    if options.warm:
        warm(*map(int, options.warm.split("/")))
        return
    bandwidth = copy_bandwidth()
    result = {
        "what": "producers", **machine(), "commit": options.commit or record.head(), "copy_tb_per_s": bandwidth,
        "rows": [],
    }  # fmt: skip
    print(f"{result['device']}: a copy moves {bandwidth:.2f} TB/s")
    only = {int(number) for number in options.only.split(",") if number}
    chosen = (case for number, case in enumerate(cases()) if not only or number in only)
    for row in itertools.chain.from_iterable(measure(case, bandwidth) for case in chosen):
        result["rows"].append(row)
        shape = f"{row['format']:10} {row['prologue']:12} {row['m']}x{row['k']:<6} h{row['rotation']:<4}"
        beside = f"{row['over_separate']:5.2f}x separate" if "over_separate" in row else ""
        print(f"{shape} {row['us']:7.1f} us {row['of_copy']:5.0%} of a copy {row['kernel']:24} {beside}")
        sys.stdout.flush()
        if options.out:
            record.write(options.out, result)


if __name__ == "__main__":
    with torch.no_grad():
        main()
