"""How fast quantize() is: million values a second into each format, beside a plain copy of the same tensor.

    python benchmarks/quantize.py [--formats nvfp4,mxfp4,…] [--device cpu] [--out FILE]

Before a time counts, rows of the very tensor that was timed are compared with the definition (formats/exact.py).
Medians over runs in turns with the copy, so that both see the same machine.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import nybble
import record
from nybble.errors import Mismatch
from nybble.formats import exact
from nybble.quantize.blocks import expand

FORMATS = "nvfp4,mxfp4,mxfp8_e4m3,int4_g128,int4_g128_asym,int8_channel,fp8_channel,fp8_block128,nf4_g64,int3_g64"
SHAPE, RUNS, CHECKED = (4096, 4096), 9, 256


def seconds(work: Callable[[], object], device: str) -> float:
    """Wall time of work(), the device waited for."""
    begin = time.perf_counter()
    work()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begin


def check(x: torch.Tensor, q: nybble.QuantTensor) -> None:
    """Compare a sample of codes with the definition."""
    generator = torch.Generator().manual_seed(1)
    codes, (scale, zero) = q.unpack().cpu(), q.scales()
    e = expand(scale, q.format, q.shape).cpu()
    z = None if zero is None else expand(zero, q.format, q.shape).cpu()
    for _ in range(CHECKED):
        i, j = (int(torch.randint(0, n, (1,), generator=generator)) for n in q.shape)
        zero_point = 0 if z is None else int(z[i, j])
        expected = exact.encode_scaled(q.format.element, float(x[i, j]), float(e[i, j]), zero_point)
        if int(codes[i, j]) != expected:
            raise Mismatch(f"{q.format.name}: code at {i}, {j} is {int(codes[i, j])}, the definition gives {expected}")


def measure(name: str, x: torch.Tensor) -> dict[str, float | str]:
    """Median rates of quantizing and dequantizing, and of a copy made in turns with them."""
    device, target = x.device.type, torch.empty_like(x)
    q = nybble.quantize(x, name)
    check(x, q)
    forth, back, copy = [], [], []
    for _ in range(RUNS):
        copy.append(seconds(lambda: target.copy_(x), device))
        forth.append(seconds(lambda: nybble.quantize(x, name), device))
        back.append(seconds(q.dequantize, device))
    quantize, dequantize, copied = (statistics.median(t) for t in (forth, back, copy))
    rate = x.numel() / 1e6
    return {"format": name, "quantize_mvalues_per_s": rate / quantize, "dequantize_mvalues_per_s": rate / dequantize,
            "copy_mvalues_per_s": rate / copied, "quantize_over_copy": quantize / copied}  # fmt: skip


def main() -> None:
    """Measure, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--formats", default=FORMATS)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    x = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)).to(options.device)
    rows = []
    for name in options.formats.split(","):
        row = measure(name, x)
        rows.append(row)
        rates = f"{row['quantize_mvalues_per_s']:8.0f} M values/s in, {row['dequantize_mvalues_per_s']:8.0f} back"
        print(f"{name:16} {rates}, {row['quantize_over_copy']:5.1f} copies")
    if options.out:
        facts = {"what": "quantize", "shape": SHAPE, "dtype": "float32", "threads": torch.get_num_threads()}
        record.write(options.out, {**facts, **record.origin(options.device), "rows": rows})


if __name__ == "__main__":
    main()
