"""CUDA C++ at run time: every kernel compiles for every architecture without a GPU, and the cache keeps whole files."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from nybble.formats import table
from nybble.ops import _nvrtc
from nybble.ops.linear import config, cuda, macros

ARCHITECTURES = ("80", "89", "90a", "100a", "120a")
FORMATS = {"int4_g128": False, "int4_g32_asym": True, "int3_g64": False, "int8_channel": True, "nvfp4": False,
           "mxfp4": True, "fp8_block128": False, "nf4_g64": False}  # fmt: skip

pytestmark = pytest.mark.skipif(_nvrtc.available() is not None, reason=str(_nvrtc.available()))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of cubins."""
    monkeypatch.setenv("NYBBLE_CACHE", str(tmp_path))
    return tmp_path / "cubins"


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_stream_compiles_everywhere(arch: str, cache: Path) -> None:
    plan = config.Stream(1, 1, 1, 16, 3)

    def compile_one(name: str) -> bytes:
        defines = {**macros.defines(table.block(name), FORMATS[name]), **plan.defines(1)}
        return _nvrtc.build(cuda._STREAM, defines, arch)

    with ThreadPoolExecutor(2) as pool:
        assert all(cubin.startswith(b"\x7fELF") for cubin in pool.map(compile_one, FORMATS))


@pytest.mark.parametrize(
    "plan",
    [config.Tile(2, 16, 1, 3, split=2, tiles=2), config.Tile(1, 64, 1, 3, 2, split=4), config.Tile(2, 128, 2, 3)],
    ids=str,
)
def test_tile_compiles_for_hopper(plan: config.Tile, cache: Path) -> None:
    for name in ("int4_g128", "int8_channel", "nvfp4", "fp8_block128", "nf4_g64"):
        fmt, fp16 = table.block(name), FORMATS[name]
        defines = {**macros.defines(fmt, fp16), **macros.tile_defines(fmt, fp16), **plan.defines(1)}
        assert _nvrtc.build(cuda._TILE, defines, "90a").startswith(b"\x7fELF")


@pytest.mark.parametrize("name", ["int4_g128", "nvfp4", "mxfp4", "int8_channel", "fp8_block128", "nf4_g64"])
def test_wgmma_runs_in_the_background(name: str) -> None:
    """ptxas says when it waits for each wgmma on its own, which costs a quarter of the speed and nothing else."""
    fmt = table.block(name)
    for plan in (config.Tile(4, 64, 1, 5), config.Tile(1, 64, 1, 5, 2, split=2), config.Tile(2, 128, 2, 3)):
        defines = {**macros.defines(fmt, False), **macros.tile_defines(fmt, False), **plan.defines(64)}
        assert "serialized" not in _log(cuda._TILE, defines)


@pytest.mark.parametrize(
    "name",
    ["int4_g128", "int4_g32_asym", "int3_g64", "nvfp4", "int8_channel", "fp8_channel", "fp8_block128", "nf4_g64"],
)
@pytest.mark.parametrize("tokens", [128, 256])
def test_walk_keeps_its_sums_in_registers(name: str, tokens: int) -> None:
    fmt, fp16 = table.block(name), tokens == 128 and name.startswith("int")
    plan = config.Walk(tokens, 5, 3)
    defines = {**macros.defines(fmt, fp16), **macros.tile_defines(fmt, fp16), **plan.defines(tokens)}
    log = _log(cuda._WALK, defines)
    assert "serialized" not in log
    assert " 0 bytes spill stores" in log


def _log(source: Path, defines: dict[str, int]) -> str:
    """What the compiler says of a source that it accepts."""
    from cuda.bindings import nvrtc

    headers = {name.encode(): text.encode() for name, text in _nvrtc.headers(source).items()}
    given = source.read_bytes(), source.name.encode(), len(headers), [*headers.values()], [*headers]
    program = _nvrtc._check(nvrtc.nvrtcCreateProgram(*given))
    options = ["--gpu-architecture=sm_90a", "--std=c++17", "--ptxas-options=-v"]
    options += [f"-D{key}={value}" for key, value in defines.items()]
    _nvrtc._check(nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options]))
    log = bytearray(_nvrtc._check(nvrtc.nvrtcGetProgramLogSize(program)))
    _nvrtc._check(nvrtc.nvrtcGetProgramLog(program, log))
    assert b"Compiling entry function" in log, "ptxas speaks of the kernel"
    return log.decode()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_widen_compiles_everywhere(arch: str, cache: Path) -> None:
    for name in FORMATS:
        assert _nvrtc.build(cuda._WIDEN, macros.defines(table.block(name), False), arch).startswith(b"\x7fELF")


def _source(folder: Path, body: str) -> Path:
    path = folder / "kernel.cu"
    path.write_text(body)
    return path


def test_a_cubin_is_kept_and_found_again(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = _source(tmp_path, 'extern "C" __global__ void k(int *p) { *p = VALUE; }')
    first = _nvrtc.build(source, {"VALUE": 1}, "90a")
    assert [path.read_bytes() for path in cache.iterdir()] == [first]
    monkeypatch.setattr(_nvrtc, "_compile", lambda *args: pytest.fail("compiled again"))
    assert _nvrtc.build(source, {"VALUE": 1}, "90a") == first


@pytest.mark.parametrize("change", ["definition", "architecture", "source", "header"])
def test_whatever_decides_the_result_decides_the_file(change: str, tmp_path: Path, cache: Path) -> None:
    source = _source(tmp_path, '#include "h.cuh"\nextern "C" __global__ void k(int *p) { *p = VALUE + EXTRA; }')
    (tmp_path / "h.cuh").write_text("#define EXTRA 0\n")
    _nvrtc.build(source, {"VALUE": 1}, "90a")
    if change == "source":
        source.write_text(source.read_text() + "\n// changed\n")
    if change == "header":
        (tmp_path / "h.cuh").write_text("#define EXTRA 1\n")
    _nvrtc.build(source, {"VALUE": 2 if change == "definition" else 1}, "89" if change == "architecture" else "90a")
    assert len(list(cache.iterdir())) == 2


def test_an_error_brings_the_compilers_log_and_leaves_no_file(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(_nvrtc.CompileError, match="undeclared_name"):
        _nvrtc.build(_source(tmp_path, 'extern "C" __global__ void k(int *p) { *p = undeclared_name; }'), {}, "90a")
    assert not cache.exists() or not list(cache.iterdir())


def test_a_write_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(_nvrtc.os, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        _nvrtc._write(tmp_path / "folder" / "x.cubin", b"abc")
    assert list((tmp_path / "folder").iterdir()) == []
