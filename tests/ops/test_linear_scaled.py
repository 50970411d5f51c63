"""NVFP4 and MXFP4 with quantized activations: exact operands of bf16 products, and the block-scaled instruction.

The instruction is looked for in code compiled for machines that are not here; the kernel around it is run where
Triton emulates it, with MXFP4's scales.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import torch

import nybble
from nybble.formats import table
from nybble.ops.linear import LINEAR, triton_scaled
from nybble.ops.linear.triton_scaled import NEVER_RUN, decode, emulated_refusal, significant
from nybble.quantize import QuantTensor
from nybble.quantize.layouts import DENSE

FORMATS = ("nvfp4", "mxfp4", "mxfp8_e4m3", "mxfp8_e5m2", "ue5m3fp4")
INSTRUCTIONS = {100: r"tcgen05\.mma\.\S*kind::mxf4\S*block_scale", 120: r"mma\.sync\.\S*kind::mxf4\S*block_scale"}

PROGRAM = """
import json, sys
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from nybble.ops.linear.triton_scaled import _block_scaled_kernel as kernel
kinds = {**dict.fromkeys(("x", "w", "x_scale", "w_scale"), "*u8"), "x_tensor": "*fp32", "w_tensor": "*fp32",
         "bias": "*bf16", "y": "*bf16", **dict.fromkeys(("m", "n", "code_bytes", "scale_columns"), "i32")}
kinds = {name: kinds.get(name, "constexpr") for name in kernel.arg_names}
found = {}
for target, name, constants in json.loads(sys.argv[1]):
    source = ASTSource(kernel, kinds, {(kernel.arg_names.index(key),): value for key, value in constants.items()})
    options = {"num_warps": 4, "num_stages": 3}
    found[f"{target} {name}"] = compile(source, target=GPUTarget("cuda", target, 32), options=options).asm["ptx"]
print(json.dumps(found))
"""


def constants(name: str) -> dict[str, object]:
    tokens, rows, columns = triton_scaled._TILE
    fmt = table.block(name)
    return {"TOKENS": tokens, "ROWS": rows, "COLUMNS": columns, "BLOCK": fmt.block[1], "E4M3_SCALES": name == "nvfp4",
            "HAS_TENSOR": fmt.tensor_scale is not None, "HAS_BIAS": True}  # fmt: skip


def test_blackwell_multiplies_blocks_as_they_are(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    asked = [(target, name, constants(name)) for target in INSTRUCTIONS for name in ("nvfp4", "mxfp4")]
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(asked)], capture_output=True, text=True, timeout=300
    )
    assert run.returncode == 0, run.stderr[-3000:]
    found = json.loads(run.stdout)
    for target, name, _ in asked:
        ptx = found[f"{target} {name}"]
        assert f".target sm_{target}a" in ptx
        assert re.search(INSTRUCTIONS[target], ptx), f"{name}, sm_{target}: no block-scaled product in the code"
        assert "mxf4nvf4" in ptx or name == "mxfp4"


def test_what_was_never_run_says_so() -> None:
    notes = {one.name: (one.native, one.note) for one in LINEAR.implementations("cuda") if "fp4" in one.name}
    assert notes == {
        "linear_fp4_block_triton_sm100": (True, NEVER_RUN), "linear_fp4_block_bf16_triton": (False, ""),
    }  # fmt: skip


def operand(name: str, device: str = "cpu") -> QuantTensor:
    x = torch.randn(6, 200, generator=torch.Generator().manual_seed(0)) * torch.logspace(-5, 5, 6)[:, None]
    x[1] = 0
    return nybble.quantize(x, name).to(device)


def check_decoded(name: str, device: str) -> None:
    q = operand(name, device)
    expected = q.dequantize(torch.float32)
    if q.tensor_scale is not None:
        got = decode(q).to(torch.float32) * q.tensor_scale
        assert float((got - expected).abs().max() / expected.abs().max()) < 2.0**-23  # two products in another order
        q = QuantTensor(q.format, q.shape, q.codes, q.scale)
        expected = q.dequantize(torch.float32)
    assert torch.equal(decode(q).to(torch.float32), expected), "exact in bfloat16"


def check_every_code(name: str, device: str) -> None:
    """Every scale over every element, infinities and NaN included, where the product is a bfloat16 at all."""
    fmt = table.block(name)
    columns, elements = fmt.block[1] or 1, fmt.element.codes
    codes = (torch.arange(-(-elements // columns) * columns) % elements).repeat(256, 1).to(torch.uint8)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, codes.shape[1] // columns)
    q = QuantTensor(fmt, tuple(codes.shape), DENSE.pack(codes, fmt.element.bits), scale).to(device)
    expected = q.dequantize(torch.float32)
    exact = (expected.to(torch.bfloat16) == expected) | expected.isnan()
    if device == "cpu":  # Triton's interpreter makes zeros of small bfloat16
        exact &= (expected.abs() >= torch.finfo(torch.bfloat16).smallest_normal) | (expected == 0) | expected.isnan()
    assert exact.float().mean() > 0.9, "the others have no float32, or no bfloat16, of their size"
    got = decode(q).to(torch.float32)
    assert torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got[exact].nan_to_num(nan=0.5), expected[exact].nan_to_num(nan=0.5))


@pytest.mark.parametrize("name", FORMATS)
def test_operands_are_exact_in_bf16(name: str) -> None:
    assert 0 < significant(table.block(name)) <= 8
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU, and do not take tensors of the CPU")
    check_decoded(name, "cpu")
    check_every_code(name, "cpu")


def test_emulated_products_agree_on_every_case_they_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, which has no bf16 product with float32 results: that one is made of float32's."""
    if torch.cuda.is_available():
        pytest.skip("tests/gpu/test_linear_cuda.py asks the same of the real product")
    monkeypatch.setattr(torch, "mm", lambda a, b, out_dtype: a.to(out_dtype) @ b.to(out_dtype))
    emulated = triton_scaled.IMPLEMENTATIONS[1]
    served = 0
    for label, args in LINEAR.cases("cpu", (torch.bfloat16, torch.float16)):
        if emulated.supports(*args) is None:
            LINEAR.check(emulated.run(*args), args, label)
            served += 1
    assert served >= 24, "nvfp4, mxfp4 and mxfp8, eight shapes each"


@pytest.mark.gpu(capability=(8, 0))
@pytest.mark.parametrize("name", FORMATS)
def test_operands_are_exact_in_bf16_on_a_gpu(name: str) -> None:
    check_decoded(name, "cuda")
    check_every_code(name, "cuda")
    q = operand(name, "cuda")
    q.scale[2] = 0x7F if table.block(name).scale.name == "e4m3" else 0xFF
    assert decode(q)[2].isnan().all()
    assert decode(q)[3].isfinite().all()


@pytest.mark.gpu(capability=(8, 0))
def test_the_kernel_around_the_instruction_where_it_is_emulated() -> None:
    generator = torch.Generator().manual_seed(0)
    for m, n, k in ((3, 17, 64), (130, 129, 288), (1, 256, 1000), (257, 64, 512)):
        x = torch.randn(m, k, generator=generator).cuda().to(torch.bfloat16)
        w = nybble.quantize(torch.randn(n, k, generator=generator), "mxfp4").to("cuda")
        bias = torch.randn(n, generator=generator).cuda().to(torch.bfloat16)
        y = triton_scaled.block_scaled(nybble.quantize(x, "mxfp4"), w, bias, x.dtype)
        LINEAR.check(y, (x, w, bias, table.block("mxfp4"), None), f"block scaled [{m}, {n}, {k}]")


def test_refusals_say_what_was_seen() -> None:
    x, w = torch.zeros(2, 64, dtype=torch.bfloat16), nybble.quantize(torch.zeros(8, 64), "nvfp4")
    nvfp4, mxfp4 = table.block("nvfp4"), table.block("mxfp4")
    assert emulated_refusal(x, w, nvfp4) is None
    assert "float32" in str(emulated_refusal(x.float(), w, nvfp4))
    assert "ufp4" in str(emulated_refusal(x, w, table.block("ufp4")))
    assert "none were asked for" in str(emulated_refusal(x, w, None))
    assert "one kind of blocks" in str(triton_scaled.native_refusal(x, w, mxfp4))
