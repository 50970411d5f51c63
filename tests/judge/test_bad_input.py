"""Whatever a candidate does, the answer is a verdict with a reason."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from collection import PROBLEMS
from nybble.errors import BadInput, UnknownName
from nybble.judge import Verdict, Zygote, judge
from nybble.judge.isolate import descendants

HEAD = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, a, b):\n"
BAD: dict[str, tuple[str, str, str]] = {
    "no such name": ("class Other: pass\n", "crashed", "no 'ModelNew'; it defines Other"),
    "empty file": ("", "crashed", "it defines nothing"),
    "does not parse": ("def f(:\n", "crashed", "SyntaxError"),
    "import fails": ("import no_such_package_at_all\n", "crashed", "ModuleNotFoundError"),
    "raises at import": ("raise ValueError('not today')\n", "crashed", "ValueError"),
    "exits at import": ("import sys\nsys.exit(0)\n", "crashed", "during 'load'"),
    "construction fails": ("import torch\nclass ModelNew(torch.nn.Module):\n    def __init__(self):\n        1 / 0\n",
                           "crashed", "ZeroDivisionError"),
    "other arguments": ("class ModelNew:\n    def __init__(self, x): pass\n", "crashed", "TypeError"),
    "not callable": ("ModelNew = lambda: 7\n", "wrong", "TypeError"),
    "raises": (HEAD + "        raise RuntimeError('no \\x1b[31m kernel')\n", "wrong", "RuntimeError"),
    "hangs at import": ("while True: pass\n", "timed out", "no answer to 'load'"),
    "hangs": (HEAD + "        while True: pass\n", "timed out", "no answer to 'call'"),
    "sleeps": (HEAD + "        import time; time.sleep(60)\n", "timed out", "no answer to 'call'"),
    "exits politely": (HEAD + "        raise SystemExit('enough')\n", "crashed", "SystemExit: enough"),
    "exits": (HEAD + "        import os; os._exit(3)\n", "crashed", "exit code 3"),
    "kills itself": (HEAD + "        import os; os.kill(os.getpid(), 11)\n", "crashed", "SIGSEGV"),
    "reads address 0": (HEAD + "        import ctypes; ctypes.string_at(0)\n", "crashed", "SIGSEGV"),
    "dies with a stack": (HEAD + "        import ctypes; ctypes.string_at(0)\n", "crashed", "line 4 in forward"),
    "dies with last words": (HEAD + "        print('too hot', flush=True)\n        import os; os.abort()\n", "crashed",
                             "too hot"),
    "floods": (HEAD + "        while True: print('x' * 4000)\n", "crashed", "printed more than"),
    "allocates": (HEAD + "        keep = []\n        while True: keep.append(bytearray(1 << 26))\n",
                  "wrong", "MemoryError"),
    "forks without end": (HEAD + "        import os, time\n        while True:\n            if os.fork() == 0:"
                          " time.sleep(99)\n            time.sleep(0.01)\n", "crashed", "started more than"),
    "closes everything": (HEAD + "        import os; os.closerange(3, 999)\n", "crashed", "during 'call'"),
    "writes outside": (HEAD + "        open({target!r}, 'w').write('x')\n        return a @ b\n",
                       "wrong", "PermissionError"),
    "returns None": (HEAD + "        return None\n", "wrong", "is a builtins.NoneType"),
    "returns a list": (HEAD + "        return (a @ b).tolist()\n", "wrong", "outputs for"),
    "returns numpy": (HEAD + "        return (a @ b).numpy()\n", "wrong", "numpy.ndarray"),
    "returns two": (HEAD + "        return a @ b, a\n", "wrong", "2 outputs"),
    "wrong shape": (HEAD + "        return (a @ b).t()\n", "wrong", "shape [80, 96], expected [96, 80]"),
    "wrong dtype": (HEAD + "        return (a @ b).double()\n", "wrong", "dtype torch.float64, expected torch.float32"),
    "another device": (HEAD + "        return (a @ b).to('meta')\n", "wrong", "device meta, expected cpu"),
    "sparse": (HEAD + "        return (a @ b).to_sparse()\n", "wrong", ""),
    "NaN": (HEAD + "        return (a @ b) * float('nan')\n", "wrong", "seen nan"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_verdict_with_a_reason(name: str, verdict_of: Callable[..., Verdict], tmp_path: Path, zygote: Zygote) -> None:
    source, status, reason = BAD[name]
    target = Path.cwd() / "written-by-a-candidate"
    verdict = verdict_of(source.replace("{target!r}", repr(str(target))))
    assert verdict.status == status, verdict.text()
    assert reason in verdict.text().replace("seen: ", "seen ")
    assert not target.exists()
    assert not verdict.speeds
    assert "\x1b" not in verdict.text()
    assert descendants(zygote.process.pid) == []


def test_stacks_are_the_candidates(verdict_of: Callable[..., Verdict]) -> None:
    for body in ("        raise ValueError('no')\n", "        raise SystemExit('no')\n"):
        shown = verdict_of(HEAD + body).text()
        assert "line 4, in forward" in shown
        assert "/judge/worker.py" not in shown
        assert "/judge/zygote.py" not in shown


def test_children_end_with_the_verdict(verdict_of: Callable[..., Verdict], zygote: Zygote) -> None:
    escape = (
        "        import os, time\n        if os.fork() == 0:\n            os.setsid()\n            time.sleep(99)\n"
    )
    verdict_of(HEAD + escape + "        return a @ b\n")
    time.sleep(0.05)
    assert descendants(zygote.process.pid) == []


def test_what_started_it_is_out_of_reach(verdict_of: Callable[..., Verdict]) -> None:
    """Linux 6.12 refuses the signal; before, the verdict says what happened, and another can be had."""
    verdict = verdict_of(HEAD + "        import os; os.kill(os.getppid(), 9)\n        return a @ b\n")
    assert verdict.status in ("wrong", "crashed"), verdict.text()
    assert verdict_of(HEAD + "        return a @ b\n", checks=["as_given"]).correct


def test_a_starter_that_died_is_started_again() -> None:
    starter = Zygote()
    starter.process.kill()
    starter.process.wait()
    assert starter.status(1) is None
    problem = str(PROBLEMS / "matmul.py")
    assert judge(problem, f"{problem}:Model", zygote=starter, checks=["as_given"]).correct
    starter.close()


def test_the_environment_holds_no_secret(verdict_of: Callable[..., Verdict], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_OF_THE_JUDGE", "1")
    assert "SECRET_OF_THE_JUDGE" in os.environ
    show = "        import os\n        raise ValueError(str('SECRET_OF_THE_JUDGE' in os.environ))\n"
    assert "message: False" in verdict_of(HEAD + show).text()


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ("no_such_file.py", "no such file"),
        ("empty.py", "has no 'Model'"),
        ("broken.py", "does not import: ZeroDivisionError"),
        ("no_inputs.py", r"get_inputs\(\) raises RuntimeError: not today"),
        ("no_list.py", r"get_inputs\(\) gave a NoneType, expected a list"),
        ("no_init.py", r"get_init_inputs\(\) raises TypeError"),
        ("no_model.py", r"Model\(\*get_init_inputs\(\)\) raises TypeError"),
        ("text.py", "Model on its own inputs raises TypeError: "),
    ],
)
def test_a_bad_problem_is_an_error(problem: str, message: str, tmp_path: Path, zygote: Zygote) -> None:
    (tmp_path / "empty.py").write_text("")
    (tmp_path / "broken.py").write_text("1 / 0\n")
    whole = (PROBLEMS / "matmul.py").read_text()
    for name, more in (
        ("no_inputs", "def get_inputs(): raise RuntimeError('not today')\n"),
        ("no_list", "def get_inputs(): return None\n"),
        ("no_init", "def get_init_inputs(): return None\n"),
        ("no_model", "def get_init_inputs(): return [1, 2, 3]\n"),
        ("text", "def get_inputs(): return ['a', 'b']\n"),
    ):
        (tmp_path / f"{name}.py").write_text(whole + more)
    with pytest.raises(BadInput, match=message):
        judge(str(tmp_path / problem), f"{PROBLEMS / 'matmul.py'}:Model", zygote=zygote)


def test_unknown_names_are_told(zygote: Zygote, tmp_path: Path) -> None:
    problem = str(PROBLEMS / "matmul.py")
    with pytest.raises(BadInput, match="no such file"):
        judge(problem, str(tmp_path / "none.py"), zygote=zygote)
    with pytest.raises(UnknownName, match="nearest: eager"):
        judge(problem, problem, baselines=["eagre"], zygote=zygote)
    with pytest.raises(UnknownName, match="nearest: fresh"):
        judge(problem, problem, checks=["fesh"], zygote=zygote)
