"""CUDA C++ compiled at run time: no toolkit and no nvcc, only the NVRTC library that torch's CUDA wheels bring along.

`build` turns one of our `.cu` files into a cubin for one architecture. It needs no GPU, so every kernel can be
compiled anywhere. Cubins are kept in the user's cache folder under a digest of everything that decides the result:
the sources, the definitions, the architecture and the compiler's version. A file appears there whole or not at all.

`Kernel.launch` starts one on torch's current stream. It neither allocates nor synchronises, so it may be captured in
a CUDA graph. Nothing here happens at import.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from nybble.errors import NybbleError

Defines = Mapping[str, int]
DEFAULT_DYNAMIC_SHARED = 48 * 1024
"""Bytes of dynamic shared memory that a kernel may use without asking for more."""


class CompileError(NybbleError, RuntimeError):
    """NVRTC refused a source; the message holds its log."""


def cache_folder() -> Path:
    """Where cubins are kept: $NYBBLE_CACHE, else $XDG_CACHE_HOME/nybble, else ~/.cache/nybble."""
    chosen = os.environ.get("NYBBLE_CACHE")
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return (Path(chosen) if chosen else base / "nybble") / "cubins"


def available() -> str | None:
    """Why nothing can be compiled here, or None when it can."""
    try:
        version()
    except (ImportError, RuntimeError) as error:
        return f"NVRTC cannot be used here ({error}); pip install 'nybble[cuda]' brings it"
    return None


def refusal(capability: tuple[int, int], oldest: tuple[int, int] = (8, 0)) -> str | None:
    """Why nothing can be run on a GPU of that compute capability, or None."""
    if capability < oldest:
        return f"needs compute capability {oldest[0]}.{oldest[1]}, this is {capability}"
    return available()


def architecture(capability: tuple[int, int]) -> str:
    """The architecture to build for: with all features of that very one from Hopper on."""
    major, minor = capability
    return f"{major}{minor}{'a' if major >= 9 else ''}"


@lru_cache(maxsize=1)
def version() -> tuple[int, int]:
    """NVRTC's version."""
    from cuda.bindings import nvrtc

    return tuple(_check(nvrtc.nvrtcVersion()))


def headers(source: Path) -> dict[str, str]:
    """The .cuh files that a .cu file can include: those beside it, and those here, which all ops share."""
    folders = (Path(__file__).parent, source.parent)
    return {path.name: path.read_text() for folder in folders for path in sorted(folder.glob("*.cuh"))}


def build(source: Path, defines: Defines, arch: str) -> bytes:
    """The cubin of `source` for `arch` ("90a"), from the cache if it is there.

    Args:
        source: a .cu file, which can include its `headers`.
        defines: macro definitions.
        arch: the compute capability's digits, with the suffix of architecture-specific features where wanted.

    Raises:
        CompileError: with the compiler's log.
    """
    included = headers(source)
    options = [f"--gpu-architecture=sm_{arch}", "--std=c++17", "--fmad=true"]
    options += [f"-D{name}={value}" for name, value in sorted(defines.items())]
    text = source.read_text()
    digest = hashlib.sha256(repr((text, included, options, version())).encode()).hexdigest()
    cached = cache_folder() / f"{source.stem}-sm_{arch}-{digest[:32]}.cubin"
    if cached.exists():
        return cached.read_bytes()
    cubin = _compile(text, source.name, included, options)
    _write(cached, cubin)
    return cubin


def _compile(text: str, name: str, headers: Mapping[str, str], options: list[str]) -> bytes:
    from cuda.bindings import nvrtc

    contents, names = [h.encode() for h in headers.values()], [n.encode() for n in headers]
    program = _check(nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), len(names), contents, names))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            log = bytearray(_check(nvrtc.nvrtcGetProgramLogSize(program)))
            _check(nvrtc.nvrtcGetProgramLog(program, log))
            raise CompileError(f"{name} with {' '.join(options)}:\n{log.decode(errors='replace').rstrip(chr(0))}")
        cubin = bytearray(_check(nvrtc.nvrtcGetCUBINSize(program)))
        _check(nvrtc.nvrtcGetCUBIN(program, cubin))
        return bytes(cubin)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _write(path: Path, content: bytes) -> None:
    """All of the file or none of it, whoever else writes it at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _check(result: tuple[Any, ...]) -> Any:
    status, *values = result
    if status.value != 0:
        raise RuntimeError(f"{type(status).__name__} {status.name}")
    return values[0] if len(values) == 1 else values


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel, loaded in the current context."""

    function: Any
    library: Any

    @staticmethod
    def load(cubin: bytes, name: str, shared_bytes: int = 0) -> Kernel:
        """The kernel `name` of a cubin, allowed `shared_bytes` of dynamic shared memory."""
        from cuda.bindings import driver

        library = _check(driver.cuLibraryLoadData(cubin, None, None, 0, None, None, 0))
        function = _check(driver.cuKernelGetFunction(_check(driver.cuLibraryGetKernel(library, name.encode()))))
        if shared_bytes > DEFAULT_DYNAMIC_SHARED:
            attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _check(driver.cuFuncSetAttribute(function, attribute, shared_bytes))
        return Kernel(function, library)

    def launch(
        self,
        grid: tuple[int, int],
        threads: int,
        shared_bytes: int,
        argument: ctypes.Structure,
        overlap: bool,
        stream: int,
    ) -> None:
        """Start on a stream.

        Args:
            grid: blocks along x and y.
            threads: a block's threads.
            shared_bytes: dynamic shared memory of a block.
            argument: the kernel's one argument.
            overlap: whether the prologue may overlap the previous kernel's end (programmatic dependent launch).
            stream: the CUDA stream's handle.
        """
        from cuda.bindings import driver

        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = *grid, 1
        config.blockDimX, config.blockDimY, config.blockDimZ = threads, 1, 1
        config.sharedMemBytes, config.hStream = shared_bytes, stream
        if overlap:
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(argument))
        _check(driver.cuLaunchKernelEx(config, self.function, ctypes.addressof(parameters), 0))


@lru_cache(maxsize=4096)
def tensor_map(
    pointer: int, shape: tuple[int, int], row: int, box: tuple[int, int], fp16: bool, itemsize: int = 2
) -> ctypes.Array[ctypes.c_uint64]:
    """A descriptor for the copy engine (sm_90 and later): boxes of a [rows, columns] matrix of bf16, fp16 or bytes.

    It depends on its arguments alone, so that the one of a weight is made once.

    Args:
        pointer: the matrix, at a multiple of 16 bytes.
        shape: its rows and columns.
        row: elements from one row to the next, a multiple of 16 bytes.
        box: rows and columns copied at once; a box's rows of 64 or 128 bytes are swizzled over that many bytes, and
            what lies outside is zero.
        fp16: fp16 rather than bf16.
        itemsize: 2, or 1 for bytes.
    """
    from cuda.bindings import driver

    kinds = driver.CUtensorMapDataType
    kind = kinds.CU_TENSOR_MAP_DATA_TYPE_FLOAT16 if fp16 else kinds.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16
    kind = kind if itemsize == 2 else kinds.CU_TENSOR_MAP_DATA_TYPE_UINT8
    swizzle = driver.CUtensorMapSwizzle
    made = _check(
        driver.cuTensorMapEncodeTiled(
            kind, 2, pointer, [driver.cuuint64_t(shape[1]), driver.cuuint64_t(shape[0])],
            [driver.cuuint64_t(itemsize * row)], [driver.cuuint32_t(box[1]), driver.cuuint32_t(box[0])],
            [driver.cuuint32_t(1), driver.cuuint32_t(1)],
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzle.CU_TENSOR_MAP_SWIZZLE_128B if itemsize * box[1] == 128 else swizzle.CU_TENSOR_MAP_SWIZZLE_64B,
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        )
    )  # fmt: skip
    return (ctypes.c_uint64 * 16)(*(int(word) for word in made.opaque))
