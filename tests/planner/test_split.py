"""Splitting for real: what two workers compute, which share is chosen, and when it is probed again."""

from __future__ import annotations

import importlib.util
import os
import random
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch.nn.functional import linear

import house
from nybble.planner import split


@pytest.fixture
def worker() -> Iterator[split.Worker]:
    found = split.Worker()
    yield found
    found.close()


class _NoWait(split.Worker):
    """A fault: the call returns without waiting for the second worker."""

    def wait(self) -> None:
        pass


def _late(release: threading.Event) -> split.Product:
    def product(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        release.wait(5)
        return linear(x, w)

    return product


@pytest.mark.parametrize("share", [0.0, 0.01, 0.25, 0.5, 0.99, 1.0])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 17, 129), (64, 200, 96), (0, 16, 8)], ids=str)
def test_a_split_product_equals_the_whole(
    share: float, shape: tuple[int, int, int], worker: split.Worker, rng: torch.Generator
) -> None:
    m, n, k = shape
    x, w = torch.randint(-8, 8, (m, k), generator=rng).double(), torch.randint(-8, 8, (n, k), generator=rng).double()
    assert torch.equal(split.split_linear(x, w, share, worker, (linear, linear)), linear(x, w))


def test_waiting_makes_a_slow_worker_right(worker: split.Worker, rng: torch.Generator) -> None:
    x, w = torch.randint(-8, 8, (4, 32), generator=rng).double(), torch.randint(-8, 8, (16, 32), generator=rng).double()
    release = threading.Event()
    threading.Timer(0.05, release.set).start()
    assert torch.equal(split.split_linear(x, w, 0.5, worker, (linear, _late(release))), linear(x, w))


def test_a_dropped_wait_is_caught(rng: torch.Generator) -> None:
    # Fresh memory is poisoned in every test, so what the second worker has not written yet is no number.
    x, w, release = torch.randn(4, 32, generator=rng), torch.randn(16, 32, generator=rng), threading.Event()
    faulty = _NoWait()
    y = split.split_linear(x, w, 0.5, faulty, (linear, _late(release))).clone()
    release.set()
    split.Worker.wait(faulty)
    faulty.close()
    assert y[:, 8:].isnan().all()
    assert y[:, :8].isfinite().all()


def test_a_workers_error_reaches_the_caller(worker: split.Worker) -> None:
    def broken(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError("theirs")

    with pytest.raises(ZeroDivisionError, match="theirs"):
        split.split_linear(torch.ones(1, 2), torch.ones(4, 2), 0.5, worker, (linear, broken))
    assert torch.equal(
        split.split_linear(torch.ones(1, 2), torch.ones(4, 2), 0.5, worker, (linear, linear)), torch.full((1, 4), 2.0)
    )


def clock(best: float, top: float, noise: float, drift: float = 0.0) -> Callable[[float], float]:
    """Times of a split whose gain rises to `top` at `best` and falls after it, with noise and a machine that slows."""
    draw, calls = random.Random(0), iter(range(10**9))

    def seconds(share: float) -> float:
        gain = 1 + (top - 1) * min(share / best, 1) - max(0.0, share - best) / best
        return (1 + drift * next(calls)) / gain * (1 + draw.gauss(0, noise))

    return seconds


@pytest.mark.parametrize("best", [0.1, 0.25, 0.3, 0.45])
@pytest.mark.parametrize("drift", [0.0, 0.002])
def test_the_chosen_share_is_near_the_best(best: float, drift: float) -> None:
    found = split.choose(clock(best, 1.4, 0.02, drift), rounds=15)
    exact = clock(best, 1.4, 0.0)
    assert exact(found.share) <= 1.07 * exact(best)
    assert abs(found.share - best) <= 0.05 + 1e-9


@pytest.mark.parametrize("top", [0.7, 0.97, 1.0])
def test_no_gain_no_split(top: float) -> None:
    found = split.choose(clock(0.3, top, 0.01), rounds=15)
    assert (found.share, found.gain) == (0.0, 1.0)
    assert "no split" in found.reason


def test_probe_then_lock_and_again_on_drift() -> None:
    choices = iter([split.Choice(0.3, 1.2, ""), split.Choice(0.0, 1.0, "")])
    lock = split.Lock(lambda: next(choices), drift=0.2, window=4)
    for seconds in [1.0] * 40 + [1.1] * 40 + [5.0]:  # a little slower, and one outlier: no probe
        lock.saw(seconds)
    assert (lock.probes, lock.share) == (1, 0.3)
    for _ in range(8):
        lock.saw(1.5)
    assert (lock.probes, lock.share) == (2, 0.0)


@pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="timings of two workers need both cores")
def test_two_workers_on_this_cpu(worker: split.Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """The chosen share is within 3 % of an exhaustive search and never below 0.98x of no split, in turns."""
    if (os.cpu_count() or 1) < 2 or os.getloadavg()[0] > 1.5:
        pytest.skip(f"two idle cores are needed; the load is {os.getloadavg()[0]:.1f}")
    monkeypatch.syspath_prepend(house.ROOT / "benchmarks")  # where it finds record.py
    spec = importlib.util.spec_from_file_location("bench_split", house.ROOT / "benchmarks" / "split.py")
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(bench)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        found = bench.trial(bench.clock(256, 1024, 1024, worker))
    finally:
        torch.set_num_threads(threads)
    assert found["over_best"] <= bench.WITHIN
    assert found["gain"] >= bench.NEVER_BELOW
