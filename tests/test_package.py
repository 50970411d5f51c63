"""What is installed: the wheel holds every file, the lock satisfies the declared ranges, public names resolve."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
import zipfile

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import house
import nybble

PYPROJECT = tomllib.loads((house.ROOT / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]
LOCK = [line for line in (house.ROOT / "requirements.lock").read_text().splitlines() if not line.startswith("#")]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """The wheel of a copy of the tree, built with the installed setuptools."""
    pytest.importorskip("setuptools", minversion="77.0.3")
    tree = tmp_path_factory.mktemp("tree")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(house.ROOT / name, tree)
    shutil.copytree(house.SRC, tree / "src" / "nybble", ignore=shutil.ignore_patterns("__pycache__"))
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-w",
        "out",
        ".",
    ]
    run = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
    (path,) = (tree / "out").glob("*.whl")
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_file(wheel: zipfile.ZipFile) -> None:
    here = {p.relative_to(house.SRC.parent).as_posix() for p in house.SRC.rglob("*") if p.is_file()}
    here = {name for name in here if "__pycache__" not in name}
    assert here == {name for name in wheel.namelist() if ".dist-info/" not in name}


def test_the_wheel_says_what_it_is(wheel: zipfile.ZipFile) -> None:
    (info,) = {name.split("/")[0] for name in wheel.namelist() if ".dist-info/" in name}
    assert info == f"nybble-{nybble.__version__}.dist-info"
    assert "nybble = nybble.cli:main" in wheel.read(f"{info}/entry_points.txt").decode()
    assert f"{info}/licenses/LICENSE" in wheel.namelist()


def test_the_lock_is_pins_alone() -> None:
    assert [line for line in LOCK if not re.fullmatch(r"[A-Za-z0-9_.-]+==[A-Za-z0-9_.]+", line)] == []
    assert "torch==2.13.0" in LOCK


def test_the_lock_satisfies_every_declared_range() -> None:
    pins = {canonicalize_name(name): version for name, version in (line.split("==") for line in LOCK)}
    extras = [r for group in PROJECT["optional-dependencies"].values() for r in group]
    declared = [Requirement(r) for r in [*PROJECT["dependencies"], *extras, *PYPROJECT["build-system"]["requires"]]]
    missing = [r.name for r in declared if not r.specifier.contains(pins.get(canonicalize_name(r.name), "0"))]
    assert missing == []


def test_every_public_name_resolves() -> None:
    assert [name for name in nybble.__all__ if not hasattr(nybble, name)] == []
    with pytest.raises(AttributeError, match="no attribute 'quantise'"):
        _ = nybble.quantise


@pytest.mark.parametrize("first", ["pass", "import nybble.ops", "import nybble.quantize.tensor", "import nybble.cli"])
def test_the_function_quantize_is_not_hidden_by_its_package(first: str) -> None:
    code = f"{first}\nimport torch, nybble\nprint(nybble.quantize(torch.ones(4, 32), 'nvfp4').format.name)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout.strip() == "nvfp4", run.stderr
