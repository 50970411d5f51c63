"""What holds a candidate's process in: limits, a file system it cannot write to, a record of what it opens.

All of it is set inside the child after the fork and before the candidate's first line. It stops accidents and the usual
tricks, in Python and in native code: memory, processor time, written bytes (rlimits), writes outside the private folder
and signals to other processes (Landlock, where the kernel has it). Reads are recorded, not stopped: Python's audit hook
sees `open`, a read by native code it does not see. It is not a sandbox for hostile code: the candidate runs as the same
user, with the network.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # syscalls of Landlock, the same on every architecture
_NO_NEW_PRIVILEGES = 38
# write, remove directory and file, make character device, directory, file, socket, fifo, block device, symlink,
# link or rename across folders, truncate
_WRITES = sum(1 << bit for bit in (1, *range(4, 13), 13, 14))
_TRUNCATE_SINCE, _REFER_SINCE, _SCOPES_SINCE = 3, 2, 6
_OWN_SIGNALS = 1 << 1


def limit(memory: int | None, seconds: int, written: int) -> None:
    """Set the kernel's limits for this process and its children: address space, processor time, bytes in a file."""
    hard = {resource.RLIMIT_CPU: seconds, resource.RLIMIT_FSIZE: written, resource.RLIMIT_CORE: 0}
    if memory is not None:
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        hard[resource.RLIMIT_AS] = pages * resource.getpagesize() + memory
    for what, value in hard.items():
        resource.setrlimit(what, (value, value))


def forbid_writes(allowed: Iterable[str]) -> bool:
    """Let this process and its children write below these folders only, and signal each other only.

    False where the kernel has no Landlock; signals need Linux 6.12.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    version = libc.syscall(_CREATE_RULESET, None, 0, 1)
    if version < 1:
        return False
    access = _WRITES
    access &= ~(1 << 13) if version < _REFER_SINCE else -1
    access &= ~(1 << 14) if version < _TRUNCATE_SINCE else -1
    wanted = (access, 0, _OWN_SIGNALS) if version >= _SCOPES_SINCE else (access,)
    rules = libc.syscall(_CREATE_RULESET, struct.pack(f"={len(wanted)}Q", *wanted), 8 * len(wanted), 0)
    if rules < 0:
        return False
    for folder in allowed:
        _allow(libc, rules, folder, access)
    held = libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0 and libc.syscall(_RESTRICT_SELF, rules, 0) == 0
    os.close(rules)
    return held


def _allow(libc: Any, rules: int, folder: str, access: int) -> None:
    if not os.path.exists(folder):
        return
    at = os.open(folder, os.O_PATH)
    files_only = (1 << 1) | (1 << 14)
    rule = struct.pack("=Qi", access if os.path.isdir(folder) else access & files_only, at)
    libc.syscall(_ADD_RULE, rules, 1, rule, 0)
    os.close(at)


def record_opens(events: int, known: Iterable[str]) -> None:
    """From now on write a line to `events` for each file opened outside the `known` folders: mode, then path."""
    inside = (*(os.path.realpath(folder) + os.sep for folder in known), "/dev/")
    write, real, quick = os.write, os.path.realpath, ("/dev/", "/usr/", "/lib", "/sys/", "/etc/", "/proc/self/")

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event != "open" or not isinstance(arguments[0], str | bytes):
            return
        name = os.fsdecode(arguments[0])
        flags = arguments[2] if isinstance(arguments[2], int) else 0
        writes = bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        if not writes and name.startswith(quick) and ".." not in name:
            return
        path = real(name)
        if not f"{path}{os.sep}".startswith(inside):  # a file without a name is opened by its folder's (O_TMPFILE)
            write(events, f"{'write' if writes else 'read'} {path}\n".encode())

    sys.addaudithook(hook)
