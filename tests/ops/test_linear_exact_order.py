"""The kernels of linear_exact make the same multiply-adds in the same order on every architecture.

NVRTC turns them into PTX for sm_80, sm_89 and sm_90; PTX says what depends on what, and no later stage may change the
order of dependent IEEE operations or merge roundings that are named. The machine code is looked at as well, where
Triton's disassembler is there. No GPU is needed.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from nybble.ops import _nvrtc
from ptx import FORBIDDEN, ptx

pytestmark = pytest.mark.skipif(_nvrtc.available() is not None, reason=str(_nvrtc.available()))
ARCHITECTURES = ("80", "89", "90")
HALVES = {"bf16": {"X_KIND": 0, "W_KIND": 0}, "fp16": {"X_KIND": 1, "W_KIND": 1},
          "int4": {"X_KIND": 0, "W_KIND": 3, "BITS": 4, "GROUP": 128}, "fp32": {"X_KIND": 2, "W_KIND": 2}}  # fmt: skip
KERNELS = {"stream-1": ("stream.cu", {"TOKENS": 1, "ROWS": 2, "UNROLL": 2}),
           "stream-8": ("stream.cu", {"TOKENS": 8, "ROWS": 2, "UNROLL": 1}),
           "tile": ("tile.cu", {"TOKENS": 2, "ROWS": 8, "BLOCKS": 1})}  # fmt: skip


def source(name: str) -> Path:
    from nybble.ops.linear_exact import cuda

    return Path(cuda.__file__).with_name(name)


def chains(text: str) -> list[int]:
    """Lengths of the runs of fused multiply-adds in which each adds to the one before, longest first."""
    length: dict[str, int] = {}
    heads: dict[str, int] = {}
    for to, addend in re.findall(r"fma\.rn\.f32 \s*(%f\d+|%r\d+), [^,]+, [^,]+, (%f\d+|%r\d+);", text):
        length[to] = length.get(addend, 0) + 1
        heads.pop(addend, None)
        heads[to] = length[to]
    return sorted(heads.values(), reverse=True)


@pytest.mark.parametrize("numbers", HALVES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_the_multiply_adds_and_their_order_are_the_same_for_every_architecture(kernel: str, numbers: str) -> None:
    name, shape = KERNELS[kernel]
    texts = [ptx(source(name), {**HALVES[numbers], **shape}, arch) for arch in ARCHITECTURES]
    assert texts[0] == texts[1] == texts[2], "one text, so one order"
    assert not re.search(FORBIDDEN, texts[0]), re.search(FORBIDDEN, texts[0])
    found = chains(texts[0])
    if kernel == "tile":
        assert found == [16] * 16, "two runs of eight columns for each of the 2 x 8 sums of a thread"
    else:
        lengths = [8 * shape["UNROLL"] + 8] * (shape["ROWS"] * shape["TOKENS"])
        assert found == lengths, "a lane's runs one after the other, then what is left of them, for each of its sums"


def test_the_check_can_fail() -> None:
    assert re.search(FORBIDDEN, "fma.rn.ftz.f32 %f1, %f2, %f3, %f4;")
    assert re.search(FORBIDDEN, "add.f32 %f1, %f2, %f3;")
    assert not re.search(FORBIDDEN, "add.rn.f32 %f1, %f2, %f3;")
    assert chains(
        "fma.rn.f32 \t%f1, %f8, %f9, %f0;\nfma.rn.f32 \t%f2, %f8, %f9, %f1;\nfma.rn.f32 \t%f3, %f8, %f9, %f0;"
    ) == [2, 1]


@pytest.mark.parametrize("kernel", KERNELS)
def test_the_machine_code_has_them_all(kernel: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton")
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton brings no disassembler")
    monkeypatch.setenv("NYBBLE_CACHE", str(tmp_path))
    name, shape = KERNELS[kernel]
    counts = []
    for arch in ARCHITECTURES:
        cubin = tmp_path / f"{arch}.cubin"
        cubin.write_bytes(_nvrtc.build(source(name), {**HALVES["bf16"], **shape}, arch))
        text = subprocess.run([tool, "-sass", cubin], capture_output=True, text=True, check=True).stdout
        found = Counter(re.findall(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z][A-Z0-9_.]*)", text, re.MULTILINE))
        assert not [op for op in found if "FTZ" in op or op.startswith(("HMMA", "HGMMA", "RED", "ATOM", "MUFU"))]
        counts.append(sum(count for op, count in found.items() if op.startswith("FFMA")))
    assert counts[0] == counts[1] == counts[2] > 0
