"""The house rules hold over the tree, and every rule can fail."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import house

Rule = Callable[[str, str], list[str]]


def _docstrings(name: str, text: str) -> list[str]:
    return house.docstrings(name, text, house.documented_methods())


PYTHON_RULES: list[Rule] = [
    house.arrows,
    house.constants,
    house.asserts,
    house.swallowed,
    house.too_long,
    _docstrings,
]
CUDA_RULES: list[Rule] = [house.constants, house.too_long]


def _findings(rule: Rule, files: list[Path]) -> list[str]:
    return [finding for path in files for finding in rule(house.below(path), path.read_text())]


@pytest.mark.parametrize("rule", PYTHON_RULES, ids=lambda rule: rule.__name__.strip("_"))
def test_python(rule: Rule) -> None:
    assert _findings(rule, house.python_files()) == []


@pytest.mark.parametrize("rule", CUDA_RULES, ids=lambda rule: rule.__name__)
def test_cuda(rule: Rule) -> None:
    assert _findings(rule, house.cuda_files()) == []


def test_tests_and_tools_are_of_readable_size() -> None:
    files = [p for folder in ("tests", "tools", "benchmarks") for p in sorted((house.ROOT / folder).rglob("*.py"))]
    assert [p for p in files if p.read_text().count("\n") > house.FILE_LINES] == []


def test_every_exception_is_still_needed() -> None:
    named = {house.below(p) for p in [*house.python_files(), *house.cuda_files()]}
    allowed = {name for name, _ in house.CONSTANTS_ALLOWED} | {name.split(":")[0] for name in house.SIZES_ALLOWED}
    assert allowed - named == set()


def test_no_machine_and_no_registry_is_named() -> None:
    texts = ((p, p.read_bytes()) for p in house.tracked_files())
    assert [f for p, raw in texts if b"\0" not in raw for f in house.places(house.below(p), raw.decode())] == []


def test_no_large_files() -> None:
    assert [p.name for p in house.tracked_files() if p.stat().st_size > 1 << 20] == []


def _modules_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sorted({{name.split('.')[0] for name in sys.modules}}))"
    return set(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split())


@pytest.mark.parametrize("module", ["nybble", "nybble.errors", "nybble.formats", "nybble.cli"])
def test_import_is_light(module: str) -> None:
    heavy = {"torch", "triton", "transformers", "matplotlib", "safetensors", "gguf", "cuda"}
    assert _modules_after(f"import {module}") & heavy == set()


INERT = """
import importlib, pathlib, pkgutil, subprocess, sys
import torch
for name in ("transformers", "triton", "matplotlib", "safetensors.torch", "gguf", "numpy"):
    try:
        importlib.import_module(name)
    except ImportError:
        pass
def refuse(*args, **kwargs):
    raise RuntimeError("a GPU was asked for, or a process started, by an import")
for name in ("is_available", "device_count", "get_device_capability", "get_device_properties", "current_device"):
    setattr(torch.cuda, name, refuse)
subprocess.Popen.__init__ = refuse
import nybble
names = [m.name for m in pkgutil.walk_packages(nybble.__path__, "nybble.") if not m.name.endswith("__main__")]
for name in names:
    try:
        importlib.import_module(name)
    except ImportError as error:
        if (error.name or "nybble").split(".")[0] == "nybble":
            raise
print(len(names), torch.cuda.is_initialized())
"""


def test_import_asks_no_gpu_and_starts_no_process() -> None:
    run = subprocess.run([sys.executable, "-c", INERT], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == [str(len(house.python_files()) - _entry_files()), "False"]


def _entry_files() -> int:
    """Files that walk_packages does not count as below nybble: its own __init__, and __main__ that was left out."""
    return 1 + (house.SRC / "__main__.py").is_file()


BREAKS: list[tuple[Rule, str, str]] = [
    (house.arrows, "formats/spec.py", "import torch"),
    (house.arrows, "formats/spec.py", "from nybble.quantize import tensor"),
    (house.arrows, "quantize/tensor.py", "def f():\n    from ..ops import linear"),
    (house.arrows, "quantize/tensor.py", "from nybble import ops"),
    (house.arrows, "methods/gptq.py", "import nybble.survey.report"),
    (house.arrows, "judge/timing.py", "from nybble.ops.linear import reference"),
    (house.arrows, "planner/cost.py", "import nybble.models"),
    (house.arrows, "ops/linear/cpu.py", "import nybble"),
    (house.arrows, "unheard_of/x.py", ""),
    (house.constants, "quantize/scales.py", "limit = 448"),
    (house.constants, "quantize/scales.py", "limit = -448.0"),
    (house.constants, "quantize/scales.py", "limit = 57_344"),
    (house.constants, "quantize/scales.py", "scale = amax / 6.0"),
    (house.constants, "quantize/scales.py", "exponent = e - 127"),
    (house.constants, "ops/linear/cuda.cu", "float s = amax / 448.f;"),
    (house.constants, "ops/linear/cuda.cu", "float s = amax * 6.0f;"),
    (house.asserts, "ops/x.py", "assert x > 0"),
    (house.swallowed, "ops/x.py", "try:\n    f()\nexcept Exception:\n    pass"),
    (house.swallowed, "ops/x.py", "for x in y:\n    try:\n        f()\n    except:\n        continue"),
    (house.swallowed, "ops/x.py", "def f():\n    try:\n        g()\n    except BaseException:\n        return None"),
    (house.too_long, "ops/x.py", "x = 1\n" * 401),
    (house.too_long, "ops/x.py", "def f():\n" + "    x = 1\n" * 41),
    (house.too_long, "ops/x.py", "@triton.jit\ndef f():\n" + "    x = 1\n" * 151),
    (house.too_long, "ops/x.cu", "namespace a {\n__global__ void f(int x) {\n" + "  x += 1;\n" * 151 + "}\n}\n"),
    (_docstrings, "ops/x.py", "def f(): ..."),
    (_docstrings, "ops/x.py", '"""A module."""\nclass A:\n    """A."""\n    def brand_new(self): ...'),
    (house.places, "README.md", "cd /" + "root/project"),
    (house.places, "Makefile", "pip install --" + "index-url x"),
]


@pytest.mark.parametrize(("rule", "name", "text"), BREAKS)
def test_a_rule_can_fail(rule: Rule, name: str, text: str) -> None:
    assert rule(name, text) != []


KEEPS: list[tuple[Rule, str, str]] = [
    (house.arrows, "judge/timing.py", "from nybble.ops import _declare\nfrom nybble.errors import Mismatch"),
    (house.arrows, "survey/report.py", "import json, rich.table\nfrom . import measure\nfrom ..models import load"),
    (house.arrows, "ops/linear/triton.py", "import triton.language as tl\nfrom nybble.formats import get"),
    (house.constants, "formats/table.py", "E4M3_MAX = 448.0"),
    (house.constants, "ops/x.py", "mask = 0xF0\nfor i in range(6):\n    x = 2.0 * 4.0 + 128 + 7"),
    (house.constants, "ops/x.cu", "// 448 is derived\nint lane = threadIdx.x & 127; float y = 0.5f; /* 6.0 */"),
    (house.swallowed, "ops/x.py", "try:\n    f()\nexcept Exception as error:\n    log(error)"),
    (house.swallowed, "ops/x.py", "try:\n    f()\nexcept ImportError:\n    pass"),
    (house.too_long, "ops/x.py", 'def f():\n    """' + "long\n" * 60 + '"""\n' + "    x = 1\n" * 39),
    (_docstrings, "ops/x.py", '"""A module."""\ndef _private(): ...'),
    (house.places, "README.md", "a/root/b, see https://arxiv.org/abs/2310.10537 and ./home"),
]


@pytest.mark.parametrize(("rule", "name", "text"), KEEPS)
def test_a_rule_lets_pass(rule: Rule, name: str, text: str) -> None:
    assert rule(name, text) == []


def test_modules_of_the_probe_are_seen() -> None:
    assert {"json", "decimal"} <= _modules_after("import json, decimal")


def test_sizes_are_reported() -> None:
    report = house.sizes()
    assert "functions" in report
    assert "tokens a line" in report
    assert house.tokens_per_line('"""Doc."""\nx = 1  # why\n\n') == 3
