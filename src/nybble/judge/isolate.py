"""The judge's side of a candidate's process: start it, ask it, watch it, end it with all its children.

The candidate never runs in the judge's process. It is a fork of a `zygote` (a process that has imported torch and
nothing of the problem); it is given inputs through a socket and gives outputs back, while references, seeds, the
clock and the verdict stay here. While an answer is awaited the judge drains what the candidate prints, notes which
files it opens, counts its processes, and ends it at a limit.

What this does not stop: the candidate runs as the same user and may use the network, and native code may read files
that Python's audit hook does not see. Against code written to harm, use a virtual machine.
"""

from __future__ import annotations

import array
import atexit
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from nybble.errors import NybbleError
from nybble.judge import wire

_TICK = 0.1  # seconds between two looks at a candidate that has not answered
_DYING = 10.0  # seconds that processes may take to end when they are killed
_PRINTED_KEPT, _PRINTED_SHOWN = 6000, 1500
_RECORD_KEPT = 1 << 20
_PASSED_ON = (
    "PATH",
    "LANG",
    "LC_ALL",
    "TRITON_PTXAS_PATH",
    "LD_LIBRARY_PATH",
    "CUDA_HOME",
    "CUDA_PATH",
    "CUDA_VISIBLE_DEVICES",
    "CC",
    "CXX",
)


@dataclass(frozen=True)
class Limits:
    """What a candidate may use.

    Attributes:
        seconds: for one answer.
        start_seconds: for its import, its construction and its first call, where compilers run.
        memory: bytes beyond what torch has at the start: of address space, which the kernel refuses; with a GPU, whose
            driver reserves terabytes of addresses, of main memory in use, watched from here.
        device_memory: bytes of a GPU's memory, which torch's pool refuses.
        written: bytes in any one file it writes.
        printed: bytes it may print.
        processes: how many children it may have at once.
    """

    seconds: float = 60.0
    start_seconds: float = 120.0
    memory: int = 8 << 30
    device_memory: int = 32 << 30
    written: int = 1 << 30
    printed: int = 16 << 20
    processes: int = 64


class Ended(Exception):
    """The candidate is gone: how, and a sentence that says why."""

    def __init__(self, how: Literal["crashed", "timed out"], why: str) -> None:
        self.how, self.why = how, why
        super().__init__(f"{how}: {why}")


class CandidateError(Exception):
    """The candidate raised while it answered; its own words, which are text from an untrusted source."""

    def __init__(self, kind: str, message: str, trace: str) -> None:
        self.kind, self.message, self.trace = kind, message, trace
        super().__init__(f"{kind}: {message}")


class Zygote:
    """Starts candidates' processes. One serves many verdicts, one after another."""

    def __init__(self, device: str = "cpu", threads: int = 1) -> None:
        self.device, self.threads = device, threads
        self.candidates: set[int] = set()
        self._start()
        atexit.register(self.close)

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.control = ours
        command = [sys.executable, "-m", "nybble.judge.zygote", str(theirs.fileno())]
        self.process = subprocess.Popen(
            command, pass_fds=[theirs.fileno()], env=environment(self.device, self.threads), stdin=subprocess.DEVNULL,
            cwd=tempfile.gettempdir(),
        )  # fmt: skip
        theirs.close()
        if not self._reply(60.0).get("ready"):
            raise NybbleError("the process that starts candidates did not start")

    def _reply(self, seconds: float) -> dict[str, Any]:
        self.control.settimeout(seconds)
        try:
            data = self.control.recv(1 << 16)
        except OSError as error:
            raise NybbleError(f"the process that starts candidates does not answer: {error}") from error
        return dict(json.loads(data)) if data else {}

    def fork(self, request: dict[str, Any], descriptors: Sequence[int]) -> int:
        """Start a candidate's process; its pid."""
        if self.process.poll() is not None:  # the last candidate ended it
            self.control.close()
            self._start()
        rights = array.array("i", descriptors)
        self.control.sendmsg(
            [json.dumps({"do": "fork", **request}).encode()], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)]
        )
        pid = int(self._reply(30.0)["pid"])
        self.candidates.add(pid)
        return pid

    def orphans(self) -> list[int]:
        """Processes that a candidate's child left behind when it ended, and those below them."""
        adopted = [pid for pid in _below(self.process.pid) if pid not in self.candidates]
        return [p for pid in adopted for p in (pid, *descendants(pid))]

    def status(self, pid: int) -> int | None:
        """How an ended candidate ended: its exit code, a signal as a negative number; None where nobody knows."""
        try:
            self.control.send(json.dumps({"do": "status", "pid": pid}).encode())
            return self._reply(10.0).get("ended")
        except (OSError, NybbleError):  # the candidate ended this process, too
            return None

    def close(self) -> None:
        """End it and everything below it."""
        if self.process.poll() is None:
            for pid in [*descendants(self.process.pid), self.process.pid]:
                _kill(pid)
            self.process.wait()
        self.control.close()
        atexit.unregister(self.close)


def environment(device: str, threads: int) -> dict[str, str]:
    """A small one for a candidate: of the judge's own only what finding libraries and compilers takes."""
    kept = {name: os.environ[name] for name in _PASSED_ON if name in os.environ}
    package = str(Path(__file__).resolve().parents[2])
    kept |= {"PYTHONPATH": os.pathsep.join([package, *filter(None, sys.path)]), "OMP_WAIT_POLICY": "passive",
             "OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads), "PYTHONSAFEPATH": "1",
             "TORCHINDUCTOR_COMPILE_THREADS": str(threads)}  # fmt: skip
    if device == "cpu":  # tcache would hand out small blocks unpoisoned
        kept |= {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0"}
    return kept


@dataclass
class Candidate:
    """A running candidate. Use as a context manager: leaving ends the process and its children.

    Attributes:
        events: files it opened outside the known folders, "read PATH" or "write PATH", in order.
        printed: the last of what it printed.
    """

    zygote: Zygote
    own: str
    limits: Limits = field(default_factory=Limits)
    events: list[str] = field(default_factory=list)
    printed: str = ""
    pid: int = 0

    def __enter__(self) -> Candidate:
        self._folder = tempfile.TemporaryDirectory(prefix="nybble-judge-", ignore_cleanup_errors=True)
        self.channel, theirs = socket.socketpair()
        out_read, out_write = os.pipe()
        event_read, event_write = os.pipe()
        request = {"folder": os.path.realpath(self._folder.name), "own": self.own, "device": self.zygote.device,
                   "memory": self.limits.memory if self.zygote.device == "cpu" else None,
                   "device_memory": self.limits.device_memory,
                   "seconds": int(10 * self.limits.start_seconds), "written": self.limits.written,
                   "known": _known_folders()}  # fmt: skip
        self.pid = self.zygote.fork(request, [theirs.fileno(), out_write, event_write])
        theirs.close()
        os.close(out_write)
        os.close(event_write)
        self._pipes: dict[int, bytearray] = {out_read: bytearray(), event_read: bytearray()}
        self._out, self._event, self._printed_bytes = out_read, event_read, 0
        for descriptor in self._pipes:
            os.set_blocking(descriptor, False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()
        self._drain()
        self.channel.close()
        for descriptor in self._pipes:
            os.close(descriptor)
        self._folder.cleanup()

    def kill(self) -> None:
        """End the process and every child, also those that left its session; on a busy machine they take their time."""
        end = time.monotonic() + _DYING
        while time.monotonic() < end:
            for pid in [self.pid, *self.children()]:
                _kill(pid)
            self.zygote.status(self.pid)
            if not self.children():
                break
            time.sleep(0.005)
        self.zygote.candidates.discard(self.pid)

    def ask(
        self, do: str, blobs: Sequence[bytes | memoryview] = (), seconds: float | None = None, **arguments: Any
    ) -> tuple[dict[str, Any], list[bytearray]]:
        """Send a message, await the answer.

        Raises:
            CandidateError: the candidate raised.
            Ended: it died, hung or went beyond a limit.
        """
        limit = self.limits.seconds if seconds is None else seconds
        self.channel.settimeout(limit)
        try:
            wire.send(self.channel, {"do": do, **arguments}, blobs)
            self._await(time.monotonic() + limit, do)
            self.channel.settimeout(limit)
            answer, back = wire.receive(self.channel)
        except TimeoutError as error:
            raise Ended("timed out", f"no answer to {do!r} within {limit:g} s") from error
        except (wire.BrokenWire, OSError) as error:
            raise self._why_gone(error, do) from error
        self._drain()
        if "error" in answer:
            raise CandidateError(*(printable(answer.get(part)) for part in ("error", "message", "trace")))
        return answer, back

    def _await(self, deadline: float, do: str) -> None:
        channel = self.channel.fileno()
        while True:
            ready, _, _ = select.select([channel, *self._pipes], [], [], _TICK)
            if channel in ready:
                return
            self._drain()
            if self._printed_bytes > self.limits.printed:
                raise Ended("crashed", f"printed more than {self.limits.printed >> 20} MiB")
            if time.monotonic() > deadline:
                raise TimeoutError
            if not ready and len(self.children()) > self.limits.processes:
                raise Ended("crashed", f"started more than {self.limits.processes} processes")
            if not ready and self.zygote.device != "cpu" and self._resident() > self.limits.memory:
                raise Ended("crashed", f"uses more than {self.limits.memory >> 20} MiB of main memory")
            if ready:
                time.sleep(0.001)  # a pipe that is at its end is always ready

    def _drain(self) -> None:
        for descriptor, kept in self._pipes.items():
            while True:
                try:
                    data = os.read(descriptor, 1 << 16)
                except BlockingIOError:
                    break
                if not data:
                    break
                if len(kept) < _RECORD_KEPT:
                    kept += data
                if descriptor == self._out:
                    self._printed_bytes += len(data)
                    del kept[:-_PRINTED_KEPT]
                    if self._printed_bytes > self.limits.printed:
                        break
        self.printed = printable(self._pipes[self._out].decode(errors="replace"))
        self.events = [printable(line) for line in self._pipes[self._event].decode(errors="replace").splitlines()]

    def _why_gone(self, error: Exception, do: str) -> Ended:
        self._drain()
        _kill(self.pid)
        code = self.zygote.status(self.pid)
        if code is None or code in (0, 70):
            return Ended("crashed", f"left its process during {do!r} ({error})")
        if code < 0:
            name = signal.Signals(-code).name
            return Ended(
                "crashed", f"killed by {name} during {do!r}" if name != "SIGKILL" else f"gone during {do!r}: {error}"
            )
        return Ended("crashed", f"ended its process with exit code {code} during {do!r}")

    def _resident(self) -> int:
        """Bytes of main memory in use, without what it shares with files, GPU and relatives."""
        pages = (_read(f"/proc/{pid}/statm").split()[1:3] for pid in [self.pid, *self.children()])
        return sum((int(p[0]) - int(p[1])) * os.sysconf("SC_PAGE_SIZE") for p in pages if len(p) == 2)

    def children(self) -> list[int]:
        """Processes that the candidate started and that still run, also those that left it."""
        return [*descendants(self.pid), *self.zygote.orphans()]

    def processor_seconds(self) -> float:
        """Processor time of the candidate's threads and its children so far, from the kernel's scheduler."""
        total = 0
        for pid in [self.pid, *self.children()]:
            for thread in _listed(f"/proc/{pid}/task"):
                text = _read(f"/proc/{pid}/task/{thread}/schedstat")
                total += int(text.split()[0]) if text else 0
        return total * 1e-9

    def last_words(self) -> dict[str, str]:
        """As evidence: the end of what it printed, its stack among it where it was killed; {} where it said nothing."""
        lines = [line for line in self.printed.splitlines() if not line.startswith("Extension modules:")]
        text = "\n".join(lines).strip()[-_PRINTED_SHOWN:]
        return {"it printed": text} if text else {}

    def threads(self) -> set[str]:
        """Ids of the candidate's threads."""
        return set(_listed(f"/proc/{self.pid}/task"))


def descendants(root: int) -> list[int]:
    """Every living process below `root`; zombies do not count."""
    found, todo = [], _below(root)
    while todo:
        pid = todo.pop()
        found.append(pid)
        todo += _below(pid)
    return found


def _below(pid: int) -> list[int]:
    """The living children of a process, of all its threads."""
    listed = (_read(f"/proc/{pid}/task/{thread}/children").split() for thread in _listed(f"/proc/{pid}/task"))
    return [int(child) for children in listed for child in children if _lives(int(child))]


def _lives(pid: int) -> bool:
    text = _read(f"/proc/{pid}/stat")
    return bool(text) and text.rpartition(")")[2].split()[0] != "Z"


def _known_folders() -> list[str]:
    """Where Python, its packages and compilers' headers live: reading there tells a candidate nothing."""
    roots = {
        sys.prefix,
        sys.base_prefix,
        *(p for p in sys.path if "site-packages" in p),
        str(Path(__file__).parents[1]),
    }
    return sorted(os.path.realpath(root) for root in roots)


def _listed(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        with open(path) as file:
            return file.read()
    except OSError:
        return ""


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def printable(value: Any) -> str:
    """Text from a candidate with control characters taken out, so that it cannot write on a terminal."""
    return "".join(c if c.isprintable() or c == "\n" else "�" for c in str(value))
