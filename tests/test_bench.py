"""The picture of `nybble bench`, on the CPU; what is timed needs a GPU (tests/gpu/test_commands_gpu.py)."""

from __future__ import annotations

from pathlib import Path

import pytest

from nybble import bench


@pytest.mark.parametrize(
    ("tokens", "labelled"),
    [
        ([1, 16, 64, 256, 2048], [1, 16, 64, 256, 2048]),
        ([1, 8, 16, 32, 33, 64, 128, 256, 512, 2048, 8192], [1, 8, 32, 128, 512, 2048, 8192]),
        ([7], [7]),
    ],
)
def test_labels_stand_apart(tokens: list[int], labelled: list[int]) -> None:
    assert bench._apart(tokens) == labelled


def test_a_picture_is_drawn_of_any_rows(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="draws")
    kernels = ["cublas", "linear_wna16_stream_cuda_sm80", "humming"]
    rows = [{"kernel": kernel, "format": "int4_g128", "n": 64, "k": k, "m": m, "ratio": 1.0, "tb_per_s": 2.0}
            for kernel in kernels for k in (32, 64) for m in (1, 33)]  # fmt: skip
    bench.draw(rows, tmp_path / "speed.png", "any", 4.2)
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
