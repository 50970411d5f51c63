"""`nybble judge`: is a kernel right, and is it fast?"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from nybble.cli.console import Plain
from nybble.errors import BadInput
from nybble.files import write_whole
from nybble.machine import find_device

NOT_CORRECT = 3


def judge(options: argparse.Namespace) -> int:
    """Print the verdict, write it where asked; 0 for a correct candidate only."""
    from nybble.judge import judge as run
    from nybble.judge.page import page

    for path in filter(None, (options.json, options.html)):
        _can_be_written(path)
    verdict = run(
        options.problem, options.candidate, device=str(find_device(options.device)), seed=options.seed,
        baselines=[name for name in options.baseline.split(",") if name],
        checks=options.checks.split(",") if options.checks else None,
        own_kernels=options.own_kernels, rounds=options.rounds,
    )  # fmt: skip
    Plain().print(verdict.text(), soft_wrap=True)
    if options.json:
        write_whole(options.json, json.dumps(verdict.as_dict(), indent=2) + "\n")
    if options.html:
        write_whole(options.html, page(verdict))
    return 0 if verdict.correct else NOT_CORRECT


def _can_be_written(path: Path) -> None:
    """Raise BadInput if it cannot: better now than when the verdict is there."""
    folder = path.resolve().parent
    if not folder.is_dir():
        raise BadInput(f"{path}: there is no folder {folder}")
    if path.is_dir() or not os.access(folder, os.W_OK | os.X_OK):
        raise BadInput(f"{path}: {'is a folder, name a file' if path.is_dir() else 'cannot be written'}")
