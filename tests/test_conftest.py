"""The habits of conftest.py can fail: unwritten elements show, writes beside a buffer are caught."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from memory import FENCE_BYTES, Fences

DTYPES = [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e8m0fnu]


def from_nybble(expression: str) -> Any:
    """Evaluate an expression as code of a nybble module would."""
    return eval(expression, {"__name__": "nybble.probe", "torch": torch, "np": np})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_fresh_floats_are_nan(dtype: torch.dtype) -> None:
    name = str(dtype)
    for make in (f"torch.empty(3, 5, dtype={name})", f"torch.empty_like(torch.zeros(3, 5, dtype={name}))"):
        assert from_nybble(make).to(torch.float32).isnan().all()
    assert from_nybble(f"torch.zeros(2, dtype={name}).new_empty((4,))").to(torch.float32).isnan().all()


def test_fresh_integers_carry_the_pattern() -> None:
    assert (from_nybble("torch.empty(7, dtype=torch.uint8)") == 0xA5).all()
    assert (from_nybble("torch.empty(7, dtype=torch.int8)") == -91).all()
    assert np.isnan(from_nybble("np.empty(3)")).all()
    assert (from_nybble("np.empty(3, dtype=np.int32)") == -91).all()


def test_shape_strides_and_alignment_are_those_asked_for() -> None:
    tensor = from_nybble("torch.empty_like(torch.zeros(4, 6).T)")
    assert tensor.shape == (6, 4)
    assert tensor.stride() == (1, 6)
    assert tensor.data_ptr() % 16 == torch.empty(24).data_ptr() % 16
    assert from_nybble("torch.empty(0, 5)").shape == (0, 5)
    assert from_nybble("torch.empty(())").isnan()


def test_other_packages_get_plain_memory() -> None:
    assert torch.empty(3).storage_offset() == 0


def test_a_device_context_governs_what_is_watched() -> None:
    """It once did not: a model made inside had its norms there, and its weights on the CPU."""
    with torch.device("meta"):
        assert torch.nn.Linear(2, 3).weight.is_meta
        assert from_nybble("torch.empty(3)").is_meta


def test_a_compiler_sees_the_plain_allocation(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = ModuleType("nybble.probe")
    monkeypatch.setitem(sys.modules, probe.__name__, probe)  # torch 2.11 looks the module up
    scope: dict[str, Any] = vars(probe)
    scope["torch"] = torch
    exec("def f(x):\n    y = torch.empty_like(x)\n    y.copy_(x)\n    return y + 1", scope)
    compiled = torch.compile(scope["f"], fullgraph=True, backend="eager")
    assert torch.equal(compiled(torch.ones(3)), torch.full((3,), 2.0))


@pytest.mark.parametrize("byte", [FENCE_BYTES - 1, FENCE_BYTES + 24])
def test_a_write_beside_the_buffer_is_caught(byte: int) -> None:
    fences = Fences()
    tensor = fences.around(torch.empty(2, 3))
    tensor.fill_(1)
    fences.check()
    tensor = fences.around(torch.empty(2, 3))
    torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())[byte] = 0
    with pytest.raises(AssertionError, match=r"1 bytes written (before|after) a float32 buffer of shape \[2, 3\]"):
        fences.check()


def test_a_write_between_rows_is_caught() -> None:
    fences = Fences()
    tensor = fences.allocate((2, 3), torch.bfloat16, row_pad=5)
    assert tensor.stride() == (8, 1)
    assert tensor.isnan().all()
    tensor.fill_(1)
    fences.check()
    tensor = fences.allocate((2, 3), torch.bfloat16, row_pad=5)
    tensor.as_strided((2, 4), (8, 1)).fill_(1)
    with pytest.raises(AssertionError, match="4 bytes written between the rows"):
        fences.check()


def test_guarded_gives_such_buffers(guarded: Callable[..., torch.Tensor]) -> None:
    tensor = guarded((3, 4), torch.float16, row_pad=2)
    assert tensor.shape == (3, 4)
    assert tensor.isnan().all()


def test_rng_is_seeded(rng: torch.Generator) -> None:
    again = torch.Generator().manual_seed(0)
    assert torch.equal(torch.rand(4, generator=rng), torch.rand(4, generator=again))


def test_the_test_that_wrote_beside_its_output_fails(tmp_path: Path) -> None:
    tests = Path(__file__).parent
    (tmp_path / "test_it.py").write_text(
        "import torch\n"
        "def test_it():\n"
        "    y = eval('torch.empty(4)', {'__name__': 'nybble.probe', 'torch': torch})\n"
        "    y.as_strided((5,), (1,)).fill_(0)\n"
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tests), str(tests.parent / "src")])}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-p", "no:cacheprovider", "test_it.py"]
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert run.returncode == 1, run.stdout + run.stderr
    assert "4 bytes written after a float32 buffer of shape [4]" in run.stdout
