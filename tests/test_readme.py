"""The README's examples run: Python blocks in order, in one namespace, and every command that is cheap."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import house

README = (house.ROOT / "README.md").read_text(encoding="utf-8")

# Commands that are shown and not run here: a pattern, and the reason.
NOT_RUN = {
    r"make (survey|test|lint|docs)$": "sets up its own environment; .ci/run calls make test",
    r"nybble survey\b": "takes minutes; tests/survey runs it on a tiny model",
    r"nybble \w+ .*\b(MODEL|DIR|FILE)\b": "stands for any model",
    r"nybble judge PROBLEM": "stands for any kernel; tests/judge judges many",
    r"nybble bench": "needs a GPU",
    r"(pip|git|apt-get) ": "changes the machine",
}


def blocks(language: str) -> list[str]:
    """The fenced blocks of one language."""
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.DOTALL | re.MULTILINE)


def commands() -> list[str]:
    """Every shell line without its comment."""
    lines = (line for block in blocks("sh") for line in block.splitlines())
    return [command for line in lines if (command := re.sub(r"\s+#.*", "", line).strip())]


def test_python_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {"__name__": "readme"}
    found = blocks("python")
    assert found
    for block in found:
        exec(compile(block, "README.md", "exec"), scope)
    assert "relative error 0.0" in capsys.readouterr().out


@pytest.mark.parametrize("command", commands())
def test_command(command: str, tmp_path: Path) -> None:
    for pattern, reason in NOT_RUN.items():
        if re.match(pattern, command):
            pytest.skip(reason)
    program, *arguments = shlex.split(command)
    assert program == "nybble", f"{program} is neither run nor listed in NOT_RUN"
    script = [sys.executable, "-c", "import sys; from nybble.cli import main; sys.exit(main())"]
    run = subprocess.run([*script, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr
    assert run.stdout.strip()


@pytest.mark.parametrize("target", re.findall(r"\]\((?!http)([^)#]+)", README))
def test_links_lead_somewhere(target: str) -> None:
    assert (house.ROOT / target).exists()


def test_folders_of_the_table_exist() -> None:
    folders = re.findall(r"^\| `([^`]+)` \|", README, flags=re.MULTILINE)
    assert folders
    assert [f for f in folders if not (house.ROOT / f).is_dir()] == []


def test_the_two_commands_come_first() -> None:
    assert commands()[:2] == ["make survey", "make test"]
