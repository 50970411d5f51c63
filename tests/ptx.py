"""The PTX that NVRTC makes of a kernel, and what must not stand in it where bits are promised across machines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from nybble.ops import _nvrtc

FORBIDDEN = r"\.ftz|mma|\batom|\bred\.|\.approx|\.sat|fma\.r[zmp]|\b(mul|add|sub|mad)\.f32"


def ptx(path: Path, defines: Mapping[str, int], arch: str) -> str:
    """What NVRTC makes of a source, from the first function on."""
    from cuda.bindings import nvrtc

    headers = _nvrtc.headers(path)
    contents, names = [h.encode() for h in headers.values()], [h.encode() for h in headers]
    program = _nvrtc._check(
        nvrtc.nvrtcCreateProgram(path.read_text().encode(), path.name.encode(), len(names), contents, names)
    )
    options = [f"--gpu-architecture=compute_{arch}", "--std=c++17", *(f"-D{k}={v}" for k, v in defines.items())]
    _nvrtc._check(nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options]))
    text = bytearray(_nvrtc._check(nvrtc.nvrtcGetPTXSize(program)))
    _nvrtc._check(nvrtc.nvrtcGetPTX(program, text))
    nvrtc.nvrtcDestroyProgram(program)
    decoded = text.decode().rstrip("\0")
    return decoded[decoded.index(".visible .entry") :]
