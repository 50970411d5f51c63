"""`nybble judge` from the command line: the exit code, the files, the messages."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from collection import PROBLEMS
from nybble.cli import main
from nybble.cli.judge import NOT_CORRECT

RIGHT = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, a, b): return torch.mm(a, b)\n"


def test_a_correct_candidate_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(RIGHT)
    files = ["--json", f"{tmp_path}/v.json", "--html", f"{tmp_path}/v.html"]
    command = [
        "judge",
        f"{PROBLEMS}/matmul.py",
        f"{tmp_path}/mine.py",
        "--device",
        "cpu",
        "--rounds",
        "2",
        "--seed",
        "3",
    ]
    assert main([*command, *files]) == 0
    assert capsys.readouterr().out.startswith("CORRECT")
    verdict = json.loads((tmp_path / "v.json").read_text())
    assert (verdict["status"], verdict["seed"], verdict["correct"]) == ("correct", 3, True)
    assert "<html" in (tmp_path / "v.html").read_text()


def test_others_do_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.py").write_text(RIGHT.replace("torch.mm(a, b)", "2 * torch.mm(a, b)"))
    options = ["--device", "cpu", "--checks", "as_given"]
    assert main(["judge", f"{PROBLEMS}/matmul.py", f"{tmp_path}/mine.py", *options]) == NOT_CORRECT
    assert capsys.readouterr().out.startswith("WRONG")
    assert main(["judge", f"{PROBLEMS}/matmul.py", f"{tmp_path}/none.py", *options]) == 2
    assert "no such file" in capsys.readouterr().err
    assert main(["judge", f"{PROBLEMS}/matmul.py", f"{tmp_path}/mine.py", "--json", f"{tmp_path}/no/v.json"]) == 2
    assert "there is no folder" in capsys.readouterr().err
    assert main(["judge", f"{PROBLEMS}/matmul.py", f"{tmp_path}/mine.py", "--html", str(tmp_path)]) == 2
    assert "is a folder, name a file" in capsys.readouterr().err
