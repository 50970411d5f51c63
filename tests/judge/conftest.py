"""One starter of candidates for a whole session: a verdict then costs about a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from collection import PROBLEMS, Exhibit
from nybble.judge import Limits, Verdict, Zygote, judge

SEED = 20261130


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    """Forks candidates' processes."""
    starter = Zygote()
    yield starter
    starter.close()


@pytest.fixture
def verdict_on(zygote: Zygote) -> Callable[..., Verdict]:
    """`verdict_on(exhibit, **options)`, with a fixed seed and few rounds."""

    def run(exhibit: Exhibit, **options: object) -> Verdict:
        options = {"seed": SEED, "rounds": 2, "own_kernels": exhibit.own_kernels, **options}
        return judge(str(exhibit.problem), exhibit.spec, zygote=zygote, **options)  # type: ignore[arg-type]

    return run


@pytest.fixture
def verdict_of(zygote: Zygote, tmp_path) -> Callable[..., Verdict]:  # type: ignore[no-untyped-def]
    """`verdict_of(source, problem="matmul", **options)`: a candidate written in the test."""

    def run(source: str, problem: str = "matmul", **options: object) -> Verdict:
        file = tmp_path / "candidate.py"
        file.write_text(source)
        limits = Limits(seconds=2.0, start_seconds=3.0, memory=1 << 28, printed=1 << 20, processes=16)
        options = {"seed": SEED, "rounds": 1, "limits": limits, "stop": True, **options}
        return judge(str(PROBLEMS / f"{problem}.py"), str(file), zygote=zygote, **options)  # type: ignore[arg-type]

    return run
