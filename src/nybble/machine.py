"""What this machine is, asked when somebody wants to know: importing this module probes nothing."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch

from nybble.errors import BadInput

# What decides which of torch's CPU kernels run; names as Linux reports them.
_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "i8mm")


@dataclass(frozen=True)
class Machine:
    """A device and what it can do.

    Attributes:
        device: torch's device type, "cpu" or "cuda".
        name: the processor's or GPU's own name.
        units: CPU threads that torch uses, or the GPU's multiprocessors.
        memory: bytes.
        capability: (major, minor) of a CUDA device.
        features: a CPU's instruction sets that matter here.
        torch: torch's version.
        system: operating system and architecture.
    """

    device: str
    name: str
    units: int
    memory: int
    capability: tuple[int, int] | None
    features: tuple[str, ...]
    torch: str
    system: str

    def sentence(self) -> str:
        """One line for people."""
        unit = "multiprocessor" if self.device == "cuda" else "thread"
        parts = [self.name, f"{self.units} {unit}{'s' * (self.units != 1)}", f"{self.memory / 2**30:.0f} GiB"]
        if self.capability:
            parts.append("compute capability {}.{}".format(*self.capability))
        parts += [", ".join(self.features)] if self.features else []
        return f"{'; '.join(parts)}; torch {self.torch}; {self.system}"

    def as_dict(self) -> dict[str, object]:
        """The attributes, for a report."""
        return asdict(self)


def find_device(name: str | None) -> torch.device:
    """The device called `name` ("cpu", "cuda", "cuda:1"); None takes a GPU where there is one.

    Raises:
        BadInput: torch knows no such device or cannot use it here.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise BadInput(f"unknown device {name!r}; known here: {', '.join(_devices())}") from error
    if device.type not in {d.split(":")[0] for d in _devices()}:
        raise BadInput(f"no {device.type} device can be used here; usable: {', '.join(_devices())}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BadInput(f"{name}: there are {torch.cuda.device_count()} CUDA devices, numbered from 0")
    return device


def _devices() -> list[str]:
    return ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@lru_cache(maxsize=8)
def describe(device: str = "cpu") -> Machine:
    """What the device is."""
    where = torch.device(device)
    system = f"{platform.system()} {platform.machine()}"
    if where.type == "cuda":
        p = torch.cuda.get_device_properties(where)
        capability = (p.major, p.minor)
        return Machine(
            "cuda", p.name, p.multi_processor_count, p.total_memory, capability, (), torch.__version__, system
        )
    facts = _cpuinfo()
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    name = facts.get("model name") or platform.processor() or platform.machine()
    features = tuple(flag for flag in _FLAGS if flag in flags)
    return Machine("cpu", name, torch.get_num_threads(), _memory(), None, features, torch.__version__, system)


def waited() -> dict[str, float]:
    """Seconds that each thread of this process was ready to run and had no processor, by its number.

    Empty where the system does not tell; Linux does, in containers too.
    """
    found = {}
    for path in Path("/proc/self/task").glob("*/schedstat"):
        with suppress(OSError):  # a thread that has ended meanwhile
            found[path.parent.name] = int(path.read_text().split()[1]) / 1e9
    return found


DISTURBED = 0.2
"""The part of a measurement that a thread may be kept waiting for a processor. A program that wants a fifth of one
makes it 0.14 at most and moves no median."""


def longest_wait(before: dict[str, float], after: dict[str, float]) -> float:
    """Seconds that the thread which was kept longest waited between two answers of `waited`; 0 where there are none."""
    return max((total - before.get(thread, 0.0) for thread, total in after.items()), default=0.0)


def _cpuinfo() -> dict[str, str]:
    """The first processor's lines of /proc/cpuinfo; empty where there is none."""
    path = Path("/proc/cpuinfo")
    if not path.is_file():
        return {}
    first = path.read_text(errors="replace").split("\n\n")[0]
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def _memory() -> int:
    """Bytes of main memory, 0 where the system does not say."""
    names = getattr(os, "sysconf_names", {})
    if "SC_PHYS_PAGES" not in names or "SC_PAGE_SIZE" not in names:
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
