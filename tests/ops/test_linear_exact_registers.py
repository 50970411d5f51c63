"""What bounds linear_exact's tiles, read off the machine code: how often multiply-adds wait for the register file.

On Hopper the registers of a thread lie in two banks, even and odd, and each gives one operand a cycle; an operand
marked `.reuse` is kept from the instruction before. A multiply-add reads three: two of them have to come from different
banks and the third from its neighbour. ptxas decides that, and a line of the source that moves can make it decide
badly: 1.6 cycles a multiply-add instead of 1.2 cost a tenth of the speed on an H200 (LOG.md).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from nybble.ops import _nvrtc
from nybble.ops.linear_exact import cuda

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?(?P<name>[A-Z][A-Z0-9_.]*)(?P<operands>[^;]*);")
_REGISTER = re.compile(r"-?\|?R(\d+)((?:\.\w+)*)")


def disassembler() -> str | None:
    """nvdisasm, which Triton's wheel brings."""
    triton = pytest.importorskip("triton")
    bundled = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return str(bundled) if bundled.is_file() else shutil.which("nvdisasm")


def cycles(operands: list[str], kept: dict[int, int]) -> tuple[int, dict[int, int]]:
    """Cycles that a multiply-add's reads take after operands `kept` (slot -> register), and what it keeps itself."""
    reads: dict[int, set[int]] = {0: set(), 1: set()}
    keeps = {}
    for slot, operand in enumerate(operands):
        found = _REGISTER.match(operand.strip())
        if found is None:
            continue
        number = int(found[1])
        if kept.get(slot) != number:
            reads[number % 2].add(number)
        if "reuse" in found[2]:
            keeps[slot] = number
    return max(1, *map(len, reads.values())), keeps


def reads_of(text: str) -> tuple[int, int]:
    """(multiply-adds, cycles their reads take) of a kernel's machine code."""
    count, total, kept = 0, 0, {}
    for found in _INSTRUCTION.finditer(text):
        if not found["name"].startswith("FFMA"):
            kept = {}
            continue
        taken, kept = cycles(found["operands"].split(",")[1:], kept)
        count, total = count + 1, total + taken
    return count, total


def test_the_count_knows_banks_and_reuse() -> None:
    lines = ("FFMA R0, R1, R3, R5 ;", "FFMA R0, R2.reuse, R3, R4 ;", "FFMA R8, R2, R5, R8 ;", "FFMA R8, R2, R5, R8 ;")
    assert reads_of("".join(f"/*{16 * n:04x}*/ {line}\n" for n, line in enumerate(lines))) == (4, 3 + 2 + 1 + 2)


def test_tiles_for_many_tokens_seldom_wait_for_registers(tmp_path: Path) -> None:
    tool = disassembler()
    if tool is None or _nvrtc.available() is not None:
        pytest.skip("nvdisasm or NVRTC is not installed")
    if _nvrtc.version() != (13, 0):
        pytest.skip(f"NVRTC {_nvrtc.version()}: the layout was read off that of 13.0")
    chosen = cuda.plan(2048, 4096)
    cubin = _nvrtc.build(chosen.source, {"X_KIND": 0, "W_KIND": 0, **chosen.defines}, "90")
    (tmp_path / "tile.cubin").write_bytes(cubin)
    shown = subprocess.run([tool, "-c", str(tmp_path / "tile.cubin")], capture_output=True, text=True, timeout=60)
    count, taken = reads_of(shown.stdout)
    assert count >= 1024, shown.stderr
    assert taken <= 1.2 * count, f"{taken / count:.2f} cycles of reads a multiply-add"
