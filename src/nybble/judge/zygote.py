"""A process that has imported torch and waits to be forked: a candidate then starts in milliseconds, not seconds.

It never runs a candidate's code itself and knows nothing of any problem. For each request it receives three descriptors
(message channel, output, record of opened files), forks, and the child becomes the candidate's process. Children of a
killed candidate are handed to this process by the kernel (it is a subreaper), so that none outlives the judge.
"""

from __future__ import annotations

import array
import ctypes
import faulthandler
import json
import os
import signal
import socket
import sys
import tempfile
from typing import Any

_SUBREAPER, _DIE_WITH_PARENT = 36, 1
_REQUEST = 1 << 16


def main() -> None:
    """Serve fork requests on the descriptor named by the first argument until it closes."""
    import torch

    from nybble.judge import worker  # noqa: F401 - what every child needs

    libc = ctypes.CDLL(None)
    libc.prctl(_SUBREAPER, 1, 0, 0, 0)
    control = socket.socket(fileno=int(sys.argv[1]))
    control.send(json.dumps({"ready": True, "torch": torch.__version__}).encode())
    while True:
        data, descriptors = _request(control)
        if not data:
            return
        request = json.loads(data)
        ended: dict[int, int] = {}
        _reap(ended)
        if request["do"] == "status":
            control.send(json.dumps({"ended": ended.get(request["pid"], _wait(request["pid"]))}).encode())
            continue
        pid = os.fork()
        if pid == 0:
            control.close()
            _become(request, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)
        control.send(json.dumps({"pid": pid}).encode())


def _request(control: socket.socket) -> tuple[bytes, list[int]]:
    descriptors = array.array("i")
    data, extra, _, _ = control.recvmsg(_REQUEST, socket.CMSG_LEN(3 * descriptors.itemsize))
    for level, kind, raw in extra:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(raw[: len(raw) - len(raw) % descriptors.itemsize])
    return data, list(descriptors)


def _reap(ended: dict[int, int]) -> None:
    try:
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                return
            ended[pid] = os.waitstatus_to_exitcode(status)
    except ChildProcessError:
        return


def _wait(pid: int) -> int | None:
    try:
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    except ChildProcessError:
        return None


def _become(request: dict[str, Any], descriptors: list[int]) -> None:
    """Turn this fresh child into a candidate's process; never returns."""
    from nybble.judge import guard, worker

    code = 70
    try:
        channel, output, events = descriptors
        os.setsid()
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL, 0, 0, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        folder = request["folder"]
        os.chdir(folder)
        os.environ.update(HOME=folder, TMPDIR=folder, TRITON_CACHE_DIR=f"{folder}/triton",
                          TORCHINDUCTOR_CACHE_DIR=f"{folder}/inductor",
                          TORCH_EXTENSIONS_DIR=f"{folder}/extensions")  # fmt: skip
        tempfile.tempdir = folder
        sys.path.insert(0, request["own"])
        sys.argv[:] = ["candidate"]
        sys.dont_write_bytecode = True
        faulthandler.enable()  # what kills the process leaves its stack in what was printed
        worker.wake(request["device"], request["device_memory"])  # fenced in, CUDA's driver does not start
        guard.limit(request["memory"], request["seconds"], request["written"])
        guard.forbid_writes([folder, "/dev", "/proc/self"])
        guard.record_opens(events, [*request["known"], folder])
        worker.serve(socket.socket(fileno=channel), request["device"])
        code = 0
    except BaseException as error:
        sys.stderr.write(worker.stack(error) + "\n")
        raise
    finally:
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
