"""What the promises about equal bits cost, one linear layer at a time, on this GPU.

    python benchmarks/promises.py --out benchmarks/results/h200/promises.json [--m 1,2048]

linear_exact beside the library's bf16 and float32 products and LayerCast; linear_invariant beside cuBLAS and the
batch-invariant replacement (known_ways.py). Times are medians of CUDA graphs over weights rotated past L2; the very
outputs that were timed are checked: linear_exact's against float64 and against another plan in every bit,
linear_invariant's against float64. The ceilings are measured in the same minutes: a copy, and a loop of multiply-adds.
"""

from __future__ import annotations

import argparse
import ctypes
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import record
from known_ways import fixed_matmul, layercast
from nybble.bench import _calls, _copies, copy_bandwidth, machine, timed
from nybble.errors import Mismatch
from nybble.ops import _nvrtc
from nybble.ops.linear_exact import cuda as exact_cuda
from nybble.ops.linear_exact import linear_exact
from nybble.ops.linear_invariant import LINEAR_INVARIANT, linear_invariant

SHAPES = ((28672, 8192), (14336, 4096), (4096, 14336), (4096, 4096))
FEW, MANY = (1, 16, 64), 2048
_OTHER = {True: exact_cuda.Stream(4, 4, 2), False: exact_cuda.Tile(4)}  # few tokens -> a plan to compare with
_PEAK_BLOCKS, _PEAK_THREADS, _PEAK_ROUNDS, _PEAK_OPS = 32, 256, 400, 256


class _Peak(ctypes.Structure):
    """fma_peak.cu's Arguments."""

    _fields_ = [("out", ctypes.c_void_p), ("rounds", ctypes.c_int), ("a", ctypes.c_float), ("b", ctypes.c_float)]


def fma_peak() -> float:
    """TFLOP/s of float32 multiply-adds that wait for nothing."""
    found = torch.cuda.get_device_properties(0)
    cubin = _nvrtc.build(Path(__file__).with_name("fma_peak.cu"), {}, f"{found.major}{found.minor}")
    kernel = _nvrtc.Kernel.load(cubin, "fma_peak")
    out, blocks = torch.zeros(_PEAK_THREADS, device="cuda"), found.multi_processor_count * _PEAK_BLOCKS

    def call() -> Tensor:
        arguments = _Peak(out.data_ptr(), _PEAK_ROUNDS, 0.999, 0.001)
        stream = torch.cuda.current_stream().cuda_stream
        kernel.launch((blocks, 1), _PEAK_THREADS, 0, arguments, False, stream)
        return out

    us, _ = timed([call] * 4)
    return 2.0 * blocks * _PEAK_THREADS * _PEAK_ROUNDS * _PEAK_OPS / us / 1e6


def _time(number: int, m: int, call: Callable[[int], Tensor]) -> tuple[float, list[Tensor]]:
    return timed(_calls(number, call) if m in FEW else [partial(call, i) for i in range(min(3, number))])


def measure(n: int, k: int, m: int) -> Iterator[dict[str, Any]]:
    """Rows for one shape and number of tokens: kernel, microseconds, times as fast as cuBLAS bf16."""
    generator = torch.Generator("cuda").manual_seed(n + k + m)
    x = torch.randn(m, k, generator=generator, device="cuda").to(torch.bfloat16)
    weights = [
        (torch.randn(n, k, generator=generator, device="cuda") * k**-0.5).to(torch.bfloat16)
        for _ in range(_copies(2 * n * k))
    ]
    count, wide, linear = len(weights), x.to(torch.float32), torch.nn.functional.linear
    reference, size = (x.double() @ weights[0].double().t()).to(torch.bfloat16), float(m * n) ** 0.5
    base = 0.0
    contenders: dict[str, tuple[int, Callable[[int], Tensor]]] = {
        "cublas_bf16": (count, lambda i: linear(x, weights[i])),
        "linear_invariant": (count, lambda i: linear_invariant(x, weights[i])),
        "batch_invariant_replacement": (count, lambda i: fixed_matmul(x, weights[i])),
        "linear_exact": (count, lambda i: linear_exact(x, weights[i])),
        "layercast": (count, lambda i: layercast(wide, weights[i])),
    }
    for name, (number, call) in contenders.items():
        us, outputs = _time(number, m, call)
        base = base or us
        LINEAR_INVARIANT.agreement.check(outputs[0].to(torch.bfloat16), reference, f"{name} [{n}, {k}], M = {m}", size)
        if name.startswith("linear_exact"):
            other = exact_cuda.run(x, weights[0], None, _OTHER[m in FEW])
            if not torch.equal(other, outputs[0]):
                raise Mismatch(f"linear_exact [{n}, {k}], M = {m}: two plans differ")
        yield _row(name, n, k, m, us, base)
    floats = [w.to(torch.float32) for w in weights[: max(2, min(count, _copies(4 * n * k)))]]
    weights.clear()
    us, _ = _time(len(floats), m, lambda i: linear(wide, floats[i]))
    yield _row("cublas_fp32", n, k, m, us, base)


def _row(name: str, n: int, k: int, m: int, us: float, base: float) -> dict[str, Any]:
    weight_bytes = (4 if name == "cublas_fp32" else 2) * n * k
    return {"kernel": name, "n": n, "k": k, "m": m, "us": us, "ratio": base / us,
            "tb_per_s": weight_bytes / us / 1e6, "tflop_per_s": 2.0 * m * n * k / us / 1e6}  # fmt: skip


def _line(row: dict[str, Any]) -> str:
    return (
        f"{row['n']:6d} x {row['k']:<6d} M={row['m']:<5d} {row['us']:9.1f} us {row['ratio']:6.3f}x "
        f"{row['tb_per_s']:5.2f} TB/s {row['tflop_per_s']:6.1f} TFLOP/s  {row['kernel']}"
    )


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--commit", help="of this tree, where git is not at hand")
    parser.add_argument("--m", default=",".join(map(str, (*FEW, MANY))), help="tokens (default: %(default)s)")
    asked = parser.parse_args()
    result = {
        **machine(),
        "commit": asked.commit or record.head(),
        "copy_tb_per_s": copy_bandwidth(),
        "fma_tflop_per_s": fma_peak(),
        "rows": [],
    }
    print(json.dumps({key: value for key, value in result.items() if key != "rows"}), flush=True)
    for n, k in SHAPES:
        for m in map(int, asked.m.split(",")):
            for row in measure(n, k, m):
                result["rows"].append(row)
                print(_line(row), flush=True)
    result["fma_tflop_per_s_after"] = fma_peak()
    if asked.out:
        record.write(asked.out, result)


if __name__ == "__main__":
    main()
