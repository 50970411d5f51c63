"""What only a GPU shows: streams, out-of-bounds reads of kernels, kept cache lines, captured graphs, real timing."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest

from collection import PROBLEMS, Exhibit, exhibits
from nybble.judge import Verdict, Zygote, judge

CHEATS, HONEST = exhibits("cheats", "cuda"), exhibits("honest", "cuda")
PORTABLE = [e for e in exhibits("honest") if e.label == "triton_kernels.Softmax"]

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def on_gpu() -> Iterator[Callable[..., Verdict]]:
    """Judges on the device."""
    zygote = Zygote("cuda")

    def run(exhibit: Exhibit, **options: object) -> Verdict:
        options = {"seed": 5, "rounds": 4, **options}
        return judge(str(exhibit.problem), exhibit.spec, device="cuda", zygote=zygote, **options)  # type: ignore[arg-type]

    yield run
    zygote.close()


@pytest.mark.parametrize("cheat", CHEATS, ids=lambda e: e.label)
def test_a_cheat_is_caught(cheat: Exhibit, on_gpu: Callable[..., Verdict]) -> None:
    verdict = on_gpu(cheat, stop=True)
    print(verdict.text())
    assert verdict.status in ("wrong", "cheating", "invalid measurement"), verdict.text()


@pytest.mark.parametrize("kernel", [*HONEST, *PORTABLE], ids=lambda e: e.label)
def test_an_honest_kernel_is_let_through(kernel: Exhibit, on_gpu: Callable[..., Verdict]) -> None:
    verdict = on_gpu(kernel)
    print(verdict.text())
    assert verdict.correct, verdict.text()
    assert verdict.roofline is not None
    assert verdict.roofline < 1.1


@pytest.mark.parametrize("cheat", [e for e in CHEATS if e.kind == 1], ids=lambda e: e.label)
def test_timing_alone_sees_another_stream(cheat: Exhibit, on_gpu: Callable[..., Verdict]) -> None:
    assert not on_gpu(cheat, checks=["timed"]).correct


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer on the PATH")
def test_compute_sanitizer_sees_a_read_past_the_end(on_gpu: Callable[..., Verdict]) -> None:
    verdict = on_gpu(next(e for e in CHEATS if e.label == "k14_bounds_cuda.OverRead"), checks=["sanitizer"])
    print(verdict.text())
    assert verdict.status == "wrong", verdict.text()


def test_the_baselines_run(on_gpu: Callable[..., Verdict]) -> None:
    kernel = next(e for e in HONEST if e.label == "cuda_kernels.Sums")
    verdict = on_gpu(kernel, baselines=["eager", "compile"], checks=["as_given", "timed"])
    print(verdict.text())
    assert set(verdict.ratios) == {"eager", "compile"}, verdict.text()
    assert (PROBLEMS / "row_sums_gpu.py").is_file()
