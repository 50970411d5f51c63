"""compute-sanitizer must find no access outside what a kernel was given. On request, since it takes half a minute.

NVIDIA's memcheck watches every access of every kernel, those of native code included, so it sees a read past an end
that neither fences nor poison show (14). The candidate answers one question in a process of its own under the tool;
torch's memory pool is off there and inputs have no fences, so that an allocation ends where its tensor does.
"""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from nybble.judge import cases, wire
from nybble.judge.isolate import environment, printable
from nybble.judge.problem import seed_of
from nybble.judge.trial import Trial
from nybble.judge.verdict import Finding

KINDS = (14,)
OPTIONAL = True
TOOL = "compute-sanitizer"
_FOUND, _SECONDS = 77, 240.0
_SHOWN = 14  # lines of the tool's report


def run(trial: Trial) -> Iterator[Finding]:
    """Ask one question under the tool."""
    tool = shutil.which(TOOL)
    if tool is None:
        yield Finding("sanitizer", "note", f"there is no {TOOL} on the PATH: not run")
        return
    with tempfile.TemporaryDirectory(prefix="nybble-judge-") as folder, open(Path(folder) / "report", "w+") as report:
        door = f"{folder}/channel"  # a place, since the tool may close descriptors that are not its own
        command = [tool, "--tool", "memcheck", "--error-exitcode", str(_FOUND), sys.executable, "-m",
                   "nybble.judge.worker", door, trial.device]  # fmt: skip
        settings = environment(trial.device, 1) | {
            "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
            "HOME": folder,
            "TMPDIR": folder,
        }
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(door)
            listener.listen(1)
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=report, stderr=subprocess.STDOUT, cwd=folder, env=settings,
                start_new_session=True,
            )  # fmt: skip
            channel = _arrival(listener, process)
            trouble = _talk(trial, channel) if channel else "it did not start"
            code = _end(process)
        report.seek(0)
        said = report.read()
    lines = [line.strip("= \n") for line in said.splitlines() if line.startswith("=====")]
    if code == _FOUND:
        text = printable("\n".join(lines[1 : 1 + _SHOWN]))
        yield Finding("sanitizer", "wrong", "compute-sanitizer found an access out of bounds", {"report": text})
    elif trouble or code:
        what = f"not run to its end: {trouble or f'exit code {code}'}"
        yield Finding("sanitizer", "note", what, {"it printed": printable(said[-1500:])} if said else {})


def _arrival(listener: socket.socket, process: subprocess.Popen[bytes]) -> socket.socket | None:
    """The channel, once the process under the tool knocks; None when it ended, or takes too long."""
    listener.settimeout(0.2)
    end = time.monotonic() + _SECONDS
    while process.poll() is None and time.monotonic() < end:
        with suppress(TimeoutError):
            return listener.accept()[0]
    return None


def _talk(trial: Trial, channel: socket.socket) -> str:
    """Load, build, weights, one question; what went wrong, or nothing."""
    channel.settimeout(_SECONDS)
    try:
        for header, value in _messages(trial):
            blobs: list[Any] = []
            key, content = value or ("", None)
            wire.send(channel, header | ({key: wire.pack(content, blobs)} if key else {}), blobs)
            answer, _ = wire.receive(channel)
            if "error" in answer:
                return printable(f"the candidate raises {answer['error']}: {answer.get('message', '')}")
    except (wire.BrokenWire, OSError) as error:
        return printable(str(error) or type(error).__name__)
    finally:
        channel.close()
    return ""


def _messages(trial: Trial) -> Iterator[tuple[dict[str, Any], tuple[str, Any] | None]]:
    problem = trial.problem
    yield {"do": "load", "path": trial.path, "name": trial.name}, None
    init = {"do": "build", "seed": seed_of(trial.seed, "init"), "function": problem.function}
    yield init, ("init", problem.init)
    if problem.state:
        yield (
            {"do": "state"},
            ("tree", {trial.counterparts[k]: v for k, v in problem.state.items() if k in trial.counterparts}),
        )
    yield {"do": "put", "slot": "s", "in_place": False}, ("tree", cases.given(problem, trial.seed, "sanitizer").inputs)
    yield {"do": "call", "slots": ["s"]}, None


def _end(process: subprocess.Popen[bytes]) -> int:
    try:
        return process.wait(60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        return process.wait()
