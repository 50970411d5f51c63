"""The museum of cheats and the honest kernels: what there is, read from the files without importing them.

A file has `PROBLEM` (a file's stem in tests/problems) and, as classes, variants of a kernel; a class may name another
PROBLEM. `OWN_KERNELS` asks for own kernels, `NEEDS` names a program, `DEVICE` is "cuda" for what only a GPU shows.
The number of a cheat's kind is in its file's name.
"""

from __future__ import annotations

import ast
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent
PROBLEMS = TESTS / "problems"


@dataclass(frozen=True)
class Exhibit:
    """A kernel to be judged."""

    file: Path
    name: str
    problem: Path
    kind: int
    own_kernels: bool
    device: str

    @property
    def spec(self) -> str:
        return f"{self.file}:{self.name}"

    @property
    def label(self) -> str:
        return f"{self.file.stem}.{self.name}"


def exhibits(folder: str, device: str = "cpu") -> list[Exhibit]:
    """Every kernel below a folder of tests that can run here, in order."""
    found = [e for file in sorted((TESTS / folder).glob("*.py")) for e in _in_file(file)]
    return [e for e in found if e.device == device]


def _in_file(file: Path) -> list[Exhibit]:
    tree = ast.parse(file.read_text())
    facts = _constants(tree.body)
    if "PROBLEM" not in facts or ("NEEDS" in facts and shutil.which(facts["NEEDS"]) is None):
        return []
    kind = re.match(r"k(\d+)_", file.stem)
    made = []
    for node in tree.body:
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_") and "forward" in _methods(tree, node):
            problem = PROBLEMS / f"{_constants(node.body).get('PROBLEM', facts['PROBLEM'])}.py"
            number = int(kind[1]) if kind else 0
            made.append(
                Exhibit(file, node.name, problem, number, facts.get("OWN_KERNELS", False), facts.get("DEVICE", "cpu"))
            )
    return made


def _constants(body: list[ast.stmt]) -> dict[str, Any]:
    named = (n for n in body if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name))
    return {n.targets[0].id: n.value.value for n in named if isinstance(n.value, ast.Constant)}  # type: ignore[attr-defined]


def _methods(tree: ast.Module, node: ast.ClassDef) -> set[str]:
    """Names of its methods, with those of its bases in the same file."""
    own = {m.name for m in node.body if isinstance(m, ast.FunctionDef)}
    bases = {b.id for b in node.bases if isinstance(b, ast.Name)}
    above = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name in bases)
    return own.union(*(_methods(tree, n) for n in above))
