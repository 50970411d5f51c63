"""What only a GPU shows: streams, out-of-bounds reads of kernels, kept cache lines, captured graphs, real timing."""

from __future__ import annotations

import ctypes
import shutil
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from collection import PROBLEMS, Exhibit, exhibits
from nybble.judge import Limits, Verdict, Zygote, gpu, judge

CHEATS, HONEST = exhibits("cheats", "cuda"), exhibits("honest", "cuda")
PORTABLE = [e for e in exhibits("honest") if e.label == "triton_kernels.Softmax"]
BY_LABEL = {e.label: e for e in [*CHEATS, *HONEST]}
CAUGHT = ("wrong", "cheating", "invalid measurement")
HEAD = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, a, b):\n"
BAD = {
    "takes the GPU's memory": ("        keep = []\n        while True: keep.append(a.new_empty(1 << 26))\n",
                               "wrong", "OutOfMemoryError"),
    "takes main memory": ("        keep = []\n        while True: keep.append(torch.zeros(1 << 24))\n",
                          "crashed", "main memory"),
    "answers on the CPU": ("        return (a @ b).cpu()\n", "wrong", "device cpu, expected cuda"),
    "breaks the context": ("        i = a.new_full((1,), 1e12).long()\n        return a @ b + a.ravel()[i]\n",
                           "wrong", "CUDA error"),
    "dies": ("        import os; print('last words', flush=True); os.abort()\n", "crashed", "last words"),
}  # fmt: skip
PERSISTING, WINDOW, KEPT = 6, 1, 16 << 20

pytestmark = pytest.mark.gpu


class AccessPolicy(ctypes.Structure):
    """CUstreamAttrValue with an access policy window in it."""

    _fields_ = (
        ("start", ctypes.c_void_p), ("size", ctypes.c_size_t), ("share", ctypes.c_float),
        ("hit", ctypes.c_int), ("miss", ctypes.c_int), ("rest", ctypes.c_byte * 32),
    )  # fmt: skip


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[Callable[..., Verdict]]:
    """Judges on the device."""
    zygote = Zygote("cuda")

    def run(problem: Path, candidate: str, **options: object) -> Verdict:
        options = {"seed": 5, "rounds": 4, **options}
        verdict = judge(str(problem), candidate, device="cuda", zygote=zygote, **options)  # type: ignore[arg-type]
        print(verdict.text())
        return verdict

    yield run
    zygote.close()


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer on the PATH")
def test_compute_sanitizer_sees_a_read_past_the_end(on_gpu: Callable[..., Verdict]) -> None:
    cheat = BY_LABEL["k14_bounds_cuda.OverRead"]
    verdict = on_gpu(cheat.problem, cheat.spec, checks=["sanitizer"])
    assert verdict.status == "wrong", verdict.text()


def test_the_baselines_run(on_gpu: Callable[..., Verdict]) -> None:
    kernel, names = BY_LABEL["cuda_kernels.Sums"], ["eager", "compile", "graph"]
    verdict = on_gpu(kernel.problem, kernel.spec, baselines=names, checks=["as_given", "timed"])
    assert set(verdict.ratios) == set(names), verdict.text()


@pytest.mark.parametrize("kernel", [*HONEST, *PORTABLE], ids=lambda e: e.label)
def test_an_honest_kernel_is_let_through(kernel: Exhibit, on_gpu: Callable[..., Verdict]) -> None:
    verdict = on_gpu(kernel.problem, kernel.spec)
    assert verdict.correct, verdict.text()
    assert verdict.roofline is not None
    assert verdict.roofline < 1.1


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda e: e.label)
def test_a_cheat_is_caught(cheat: Exhibit, on_gpu: Callable[..., Verdict]) -> None:
    verdict = on_gpu(cheat.problem, cheat.spec, stop=True)
    assert verdict.status in CAUGHT, verdict.text()
    assert not verdict.speeds


@pytest.mark.alone
def test_timing_alone_sees_another_stream(on_gpu: Callable[..., Verdict]) -> None:
    """The other exhibit of its kind is joined a call late and gains no time by it: other checks have to find that."""
    cheat = BY_LABEL["k01_streams_cuda.Side"]
    assert on_gpu(cheat.problem, cheat.spec, checks=["timed"]).status in CAUGHT


@pytest.mark.parametrize("name", BAD)
def test_a_verdict_with_a_reason(name: str, on_gpu: Callable[..., Verdict], tmp_path: Path) -> None:
    source, status, reason = BAD[name]
    (tmp_path / "candidate.py").write_text(HEAD + source)
    limits = Limits(seconds=10.0, start_seconds=20.0, memory=1 << 30, device_memory=2 << 30)
    verdict = on_gpu(PROBLEMS / "matmul.py", f"{tmp_path}/candidate.py", limits=limits, stop=True)
    assert verdict.status == status, verdict.text()
    assert reason in verdict.text()


@pytest.mark.alone
def test_lines_that_a_kernel_keeps_are_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream that keeps its input in the cache gains where kept lines are not given up, and not in the judge."""
    x, y = torch.randn(KEPT // 4, device="cuda"), torch.zeros((), device="cuda")
    driver, stream = ctypes.CDLL("libcuda.so.1"), torch.cuda.Stream()

    def time() -> float:
        with torch.cuda.stream(stream):
            times, _ = gpu.measure(lambda slot: torch.sum(x, 0, out=y), ["x"] * 40)
        return statistics.median(times["device"])

    plain = time()
    window = AccessPolicy(x.data_ptr(), KEPT, 1.0, 2, 1)
    assert driver.cuCtxSetLimit(PERSISTING, ctypes.c_size_t(KEPT)) == 0
    try:
        assert driver.cuStreamSetAttribute(ctypes.c_void_p(stream.cuda_stream), WINDOW, ctypes.byref(window)) == 0
        judged = time()
        monkeypatch.setattr(gpu, "give_up_kept_lines", lambda: None)
        kept = time()
    finally:
        driver.cuCtxSetLimit(PERSISTING, ctypes.c_size_t(0))
    print(f"16 MB summed, us: {1e3 * plain:.2f} plain, {1e3 * judged:.2f} judged, {1e3 * kept:.2f} with lines kept")
    assert kept < 0.95 * plain
    assert judged > (plain + kept) / 2
