"""The house rules as functions: each takes a file's path and text and returns its findings, one line each.

tests/test_house.py runs them over the tree and shows, for every rule, a snippet that breaks it. `sizes()` is printed
at the end of a test run, tokens per line included, so that nobody makes a file short by making it dense.
"""

from __future__ import annotations

import ast
import io
import re
import statistics
import subprocess
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

from nybble.formats import FloatFormat, IntFormat, rows

ROOT = Path(__file__).resolve().parent.parent
SRC = ROOT / "src" / "nybble"

FILE_LINES, FUNCTION_LINES, KERNEL_LINES = 400, 40, 150

# Which parts of nybble a part may import. A part is the first name below `nybble`; `ops:declarations` stands for the
# ops package and its underscored modules, without any op's implementations. `errors` is open to everyone.
ARROWS: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "machine": set(),
    "formats": set(),
    "costs": {"formats"},
    "quantize": {"formats"},
    "ops": {"formats", "quantize", "machine", "costs"},
    "methods": {"formats", "quantize", "ops"},
    "checkpoints": {"formats", "quantize", "methods"},
    "models": {"files", "formats", "quantize", "ops", "methods", "checkpoints", "machine"},
    "judge": {"ops:declarations"},
    "planner": {"files", "formats", "quantize", "ops:declarations", "machine", "costs"},
    "bench": {"files", "formats", "quantize", "ops", "machine", "judge"},
    "survey": {
        "files",
        "formats",
        "quantize",
        "ops",
        "methods",
        "checkpoints",
        "models",
        "judge",
        "planner",
        "machine",
    },
}
ARROWS["cli"] = {*ARROWS, "__init__"}
ARROWS["__init__"] = set(ARROWS)
ARROWS["__main__"] = {"cli"}

# Which outside packages a part may import; the standard library is open to everyone.
OUTSIDE: dict[str, set[str]] = {
    "errors": set(),
    "files": set(),
    "formats": {"numpy"},
    "costs": set(),
    "machine": {"torch"},
    "quantize": {"numpy", "torch"},
    "ops": {"numpy", "torch", "triton", "cuda"},
    "methods": {"numpy", "torch"},
    "checkpoints": {"numpy", "torch", "safetensors", "gguf", "transformers"},
    "models": {"numpy", "torch", "safetensors", "transformers", "gguf"},
    "judge": {"numpy", "torch"},
    "planner": {"numpy", "torch", "matplotlib"},
    "bench": {"numpy", "torch", "matplotlib"},
    "survey": {"numpy", "torch", "rich", "matplotlib"},
    "cli": {"numpy", "torch", "rich"},
    "__init__": {"torch"},
    "__main__": set(),
}

# Numbers that equal a format's limit and mean something else: (file below src/nybble, number) -> what it means.
CONSTANTS_ALLOWED: dict[tuple[str, float], str] = {}

# Longer than the limits, with the reason: "file" or "file:function" below src/nybble -> why.
SIZES_ALLOWED: dict[str, str] = {}


def python_files() -> list[Path]:
    """Every Python file of the package."""
    return sorted(SRC.rglob("*.py"))


def cuda_files() -> list[Path]:
    """Every CUDA source of the package."""
    return sorted([*SRC.rglob("*.cu"), *SRC.rglob("*.cuh")])


def tracked_files() -> list[Path]:
    """Every file under version control; without git, every file that is not hidden, built or installed."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        found = (p for p in ROOT.rglob("*") if p.is_file())
        hidden = ("__pycache__", "build", "dist", "nybble.egg-info")
        return sorted(p for p in found if not any(s in hidden or s.startswith(".") for s in p.relative_to(ROOT).parts))
    return sorted(p for name in listed.decode().split("\0") if name and (p := ROOT / name).is_file())


def below(path: Path) -> str:
    """The path below src/nybble, or below the root for other files."""
    return path.relative_to(SRC if path.is_relative_to(SRC) else ROOT).as_posix()


def part_of(name: str) -> str:
    """The part a file below src/nybble belongs to: its first folder, or its own stem."""
    return name.split("/")[0].removesuffix(".py")


def _imported(tree: ast.AST, name: str) -> Iterator[tuple[int, str]]:
    """(line, absolute module name) of every import, those inside functions and relative ones included."""
    package = ("nybble", *name.split("/")[:-1])
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = list(package[: len(package) - node.level + 1]) if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{module}.{alias.name}") for alias in node.names)


def arrows(name: str, text: str) -> list[str]:
    """Imports that the tables ARROWS and OUTSIDE do not allow."""
    part, found = part_of(name), []
    if part not in ARROWS:
        return [f"{name}: {part!r} has no row in ARROWS"]
    for line, module in _imported(ast.parse(text), name):
        top, *rest = module.split(".")
        if top != "nybble":
            if top not in sys.stdlib_module_names | OUTSIDE.get(part, set()):
                found.append(f"{name}:{line}: {part} may not import {top}")
            continue
        target = rest[0] if rest and rest[0] in ARROWS else "__init__"
        declared = target == "ops" and (len(rest) < 2 or not (SRC / "ops" / rest[1]).exists() or rest[1][:1] == "_")
        allowed = {part, "errors", *ARROWS[part]} | (
            {"ops"} if declared and "ops:declarations" in ARROWS[part] else set()
        )
        if target not in allowed:
            found.append(f"{name}:{line}: {part} may not import nybble.{target}")
    return found


def limits() -> tuple[set[float], set[float]]:
    """Limits that name a format wherever they stand, and small ones that do so only when written as a float.

    448 or 127 is no accident; 6 and 7 are also counts, 6.0 is not. Powers of two are too common to tell.
    """
    largest = {float(row.max) for row in rows() if isinstance(row, FloatFormat | IntFormat) and row.bits <= 16}
    biases = {float(row.bias) for row in rows() if isinstance(row, FloatFormat) and row.bits == 8}
    told = {v for v in largest | biases if v > 2 and not (v.is_integer() and int(v) & (int(v) - 1) == 0)}
    return {v for v in told if v > 100}, {v for v in told if 5 < v <= 100 or not v.is_integer()}


def constants(name: str, text: str) -> list[str]:
    """Format constants outside the table of formats. Hexadecimal numbers are bit masks and pass."""
    distinct, small = limits()
    found = []
    for line, literal in _cuda_numbers(text) if name.endswith((".cu", ".cuh")) else _python_numbers(text):
        value = float(literal.rstrip("fFuUlL"))
        told = value in distinct or (value in small and not literal.isdigit())
        if told and name != "formats/table.py" and (name, value) not in CONSTANTS_ALLOWED:
            found.append(f"{name}:{line}: {literal} is a format's limit: derive it from the row")
    return found


def _python_numbers(text: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and type(node.value) in (int, float):
            literal = ast.get_source_segment(text, node) or ""
            if not literal.lower().startswith(("0x", "0b", "0o")):
                yield node.lineno, literal.replace("_", "")


def _cuda_numbers(text: str) -> Iterator[tuple[int, str]]:
    """Decimal numbers outside comments; 127 as an integer is a mask over a block's threads and passes."""
    number = re.compile(r"(?<![\w.])(\d+\.?\d*(?:[eE][+-]?\d+)?[fF]?|\d+[uUlL]*)(?![\w.])")
    for line, row in enumerate(_without_comments(text).splitlines(), 1):
        yield from ((line, m[0]) for m in number.finditer(row) if m[0].rstrip("uUlL") != "127")


def _without_comments(text: str) -> str:
    blank = lambda m: re.sub(r"[^\n]", " ", m[0])  # noqa: E731 - keeps the line numbers
    return re.sub(r"//[^\n]*|/\*.*?\*/", blank, text, flags=re.DOTALL)


def asserts(name: str, text: str) -> list[str]:
    """`assert` statements: a user's error is raised with its values, and a check must survive `python -O`."""
    return [f"{name}:{n.lineno}: assert in src: raise" for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Assert)]


def swallowed(name: str, text: str) -> list[str]:
    """Handlers that catch everything and do nothing with it."""
    handlers = (n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.ExceptHandler))
    broad = (h for h in handlers if h.type is None or ast.unparse(h.type) in ("Exception", "BaseException"))
    idle = (h for h in broad if all(map(_does_nothing, h.body)))
    return [f"{name}:{h.lineno}: catches everything and does nothing" for h in idle]


def _does_nothing(node: ast.stmt) -> bool:
    if isinstance(node, ast.Expr | ast.Return):
        return node.value is None or isinstance(node.value, ast.Constant)
    return isinstance(node, ast.Pass | ast.Continue)


def docstrings(name: str, text: str, documented: frozenset[str] = frozenset()) -> list[str]:
    """Public names without a docstring. A method is documented where its name first appears (`documented`)."""
    tree = ast.parse(text)
    found = [] if ast.get_docstring(tree) else [f"{name}:1: the module has no docstring"]
    for node in public(tree):
        if not ast.get_docstring(node) and node.name not in documented:
            found.append(f"{name}:{node.lineno}: {node.name} has no docstring")
    return found


def public(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.ClassDef]:
    """Public functions and classes of a module and the public methods of its public classes."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from (m for m in node.body if isinstance(m, ast.FunctionDef) and not m.name.startswith("_"))


def documented_methods() -> frozenset[str]:
    """Names of methods that some class of the package documents; an override need not repeat it."""
    classes = (n for p in python_files() for n in ast.walk(ast.parse(p.read_text())) if isinstance(n, ast.ClassDef))
    methods = (m for c in classes for m in c.body if isinstance(m, ast.FunctionDef))
    torch_own = {"forward", "extra_repr"}
    return frozenset(m.name for m in methods if ast.get_docstring(m)) | torch_own


def functions(text: str) -> Iterator[tuple[str, int, bool]]:
    """(name, lines without docstring, whether it is a kernel) of every function, nested ones included."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0]
            has_doc = ast.get_docstring(node) is not None
            doc = (first.end_lineno or first.lineno) - first.lineno + 1 if has_doc else 0
            kernel = any("jit" in ast.unparse(d) for d in node.decorator_list)
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1 - doc, kernel


def cuda_functions(text: str) -> Iterator[tuple[str, int, bool]]:
    """The same for CUDA, from the opening brace to its partner; namespaces, structs and `extern "C"` do not nest."""
    text = re.sub(r"((?:namespace|struct|extern)\b[^;{}()]*)\{", r"\1 ", _without_comments(text))
    depth = start = 0
    for brace in re.finditer(r"[{}]", text):
        if brace[0] == "{":
            start = start if depth else brace.start()
            depth += 1
        elif depth:
            depth -= 1
            head = re.split(r"[;}]", text[:start])[-1]
            names = [n for n in re.findall(r"(\w+)\s*\(", head) if n != "__launch_bounds__"]
            if depth == 0 and names:
                yield names[0], text[start : brace.end()].count("\n") + 1, True


def too_long(name: str, text: str) -> list[str]:
    """Files and functions beyond the limits, unless SIZES_ALLOWED gives a reason."""
    found = []
    lines = text.count("\n")
    if lines > FILE_LINES and name not in SIZES_ALLOWED:
        found.append(f"{name}: {lines} lines, at most {FILE_LINES}")
    parts = cuda_functions(text) if name.endswith((".cu", ".cuh")) else functions(text)
    for function, length, kernel in parts:
        limit = KERNEL_LINES if kernel else FUNCTION_LINES
        if length > limit and f"{name}:{function}" not in SIZES_ALLOWED:
            found.append(f"{name}: {function} has {length} lines, at most {limit}")
    return found


# Written so that no pattern matches its own text.
_PLACES = re.compile(
    r"(?<![\w.])/(?:[r]oot|[h]ome|[w]ork|[t]mp|[o]pt/pypi)\b|[p]ypi\.org|[p]ythonhosted|[d]ownload\.pytorch|--(?:extra-)?[i]ndex-url"
)


def places(name: str, text: str) -> list[str]:
    """Paths of one machine and hosts of registries, which mean nothing to whoever clones the project."""
    rows_ = enumerate(text.splitlines(), 1)
    return [f"{name}:{line}: names {m[0]!r}" for line, row in rows_ for m in _PLACES.finditer(row)]


def tokens_per_line(text: str) -> float:
    """Code tokens for each line that has code; comments and docstrings do not count."""
    skip = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in skip]
    tokens = [t for t in tokens if not (t.type == tokenize.STRING and t.line.lstrip().startswith(t.string[:3]))]
    return len(tokens) / max(1, len({t.start[0] for t in tokens}))


def sizes() -> str:
    """The size of the package in three lines: files, functions, density."""
    texts = [p.read_text() for p in python_files()]
    files = sorted(t.count("\n") for t in texts)
    lengths = sorted(length for t in texts for _, length, kernel in functions(t) if not kernel)
    density = sorted(tokens_per_line(t) for t in texts if t.strip())
    cuda = sorted(p.read_text().count("\n") for p in cuda_files())
    return (
        f"files     {len(files)}, lines: {_spread(files)}, {sum(files)} in all; CUDA: {len(cuda)}, {sum(cuda)} lines\n"
        f"functions {len(lengths)}, lines: {_spread(lengths)}\n"
        f"density   tokens a line: {_spread(density)}"
    )


def _spread(values: list[int] | list[float]) -> str:
    p90 = values[min(len(values) - 1, len(values) * 9 // 10)]
    return f"median {statistics.median(values):.4g}, 90 % below {p90:.4g}, largest {values[-1]:.4g}"
