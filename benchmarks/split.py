"""Two workers on this CPU: the share that the planner locks, against an exhaustive search, in turns.

    python benchmarks/split.py [--out FILE]

Each worker multiplies on one thread. What must hold: the locked share's median time is within 3 % of the best share's,
and pairs with the unsplit call, in turns, have a median of at least 0.98x. Wants both cores to itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.nn.functional import linear

import record
from nybble.planner import split

SHARES = tuple(i / 20 for i in range(13))
ROUNDS = 40
WITHIN, NEVER_BELOW = 1.03, 0.98


def clock(m: int, n: int, k: int, worker: split.Worker) -> Callable[[float], float]:
    """What times x [m, k] times w [n, k]^T with a share of the outputs on the worker."""
    generator = torch.Generator().manual_seed(0)
    x, w = torch.randn(m, k, generator=generator), torch.randn(n, k, generator=generator)

    def seconds(share: float) -> float:
        start = time.perf_counter()
        split.split_linear(x, w, share, worker, (linear, linear))
        return time.perf_counter() - start

    return seconds


def trial(seconds: Callable[[float], float]) -> dict[str, Any]:
    """The locked share and how it compares; every share once a round, so that drift meets all of them."""
    for _ in range(3):
        seconds(0.5)
    chosen = split.choose(seconds)
    shares = sorted({*SHARES, chosen.share})
    rounds = [{share: seconds(share) for share in shares} for _ in range(ROUNDS)]
    median = {share: statistics.median(times[share] for times in rounds) for share in shares}
    best = min(median, key=lambda s: median[s])
    pairs = statistics.median(times[0.0] / times[chosen.share] for times in rounds)
    return {"share": chosen.share, "best": best, "over_best": median[chosen.share] / median[best], "gain": pairs,
            "milliseconds": {f"{s:.2f}": round(t * 1e3, 3) for s, t in median.items()}}  # fmt: skip


def main() -> None:
    """Measure and print; write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    load = os.getloadavg()[0]
    torch.set_num_threads(1)
    worker, rows = split.Worker(), []
    for m, n, k in ((1, 4096, 4096), (64, 1024, 1024), (256, 1024, 1024), (512, 2048, 2048)):
        rows.append({"m": m, "n": n, "k": k, **trial(clock(m, n, k, worker))})
        print({key: value for key, value in rows[-1].items() if key != "milliseconds"})
    worker.close()
    if options.out:
        what = "splitting a linear over two workers"
        record.write(options.out, {"what": what, **record.origin(), "load_before": load, "rows": rows})


if __name__ == "__main__":
    main()
