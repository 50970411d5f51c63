"""What every result file says of where it comes from, and writing it so that it is there as a whole or not at all."""

from __future__ import annotations

import datetime
import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

import nybble
from nybble import machine
from nybble.files import write_whole

ROOT = Path(__file__).resolve().parent.parent


def origin(device: str = "cpu", commit: str | None = None) -> dict[str, Any]:
    """Device, versions, date and commit.

    Args:
        device: what was measured.
        commit: of this tree, where git is not at hand.
    """
    return {
        "device": machine.describe(device).sentence(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "nybble": nybble.__version__,
        "date": datetime.date.today().isoformat(),
        "commit": commit or head(),
    }


def head() -> str:
    """The working tree's commit, with a "+" where files differ from it; "unknown" without git."""
    asked = ("git", "describe", "--always", "--exclude=*", "--dirty=+")
    try:
        return subprocess.run(asked, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def write(path: Path, result: Mapping[str, Any]) -> None:
    """Write a result; a run that is stopped leaves the last whole one."""
    write_whole(path, json.dumps(result, indent=1) + "\n", parents=True)
