"""Every Triton kernel compiles for every target, without a GPU: what the interpreter accepts a compiler may not."""

import json
import re
import subprocess
import sys

import pytest

# Signatures and compile-time constants of one instance a kernel; a Triton kernel without an entry fails the test.
KERNELS = {
    "nybble.ops.rmsnorm.triton:_add_rmsnorm_kernel": (
        {"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "y": "*bf16", "h": "*bf16",
         "columns": "i32", "eps": "fp32"},
        {"HAS_RESIDUAL": True, "BLOCK": 1024, "LANES": 128},
    ),
    "nybble.ops.silu_mul.triton:_silu_mul_kernel": ({"x": "*fp16", "y": "*fp16", "columns": "i32"}, {"BLOCK": 1024}),
    "nybble.ops.embed_token.triton:_embed_token_kernel": (
        {"token": "*i64", "position": "*i32", "tokens": "*i64", "width": "i32", "capacity": "i32",
         "embedding": "*bf16", "x": "*bf16"},
        {"BLOCK": 1024},
    ),
    "nybble.ops.greedy_token.triton:_greedy_token_kernel": (
        {"logits": "*bf16", "token": "*i64", "position": "*i32", "turns": "*i32", "winners": "*i64", "columns": "i32"},
        {"PIECES": 63, "BP": 64, "BLOCK": 2048},
    ),
    "nybble.ops.rope_cache.triton:_rope_cache_kernel": (
        {**dict.fromkeys(("qkv", "cos", "sin", "q", "k_cache", "v_cache"), "*bf16"),
         **dict.fromkeys(("s", "tokens"), "i32"), "position": "*i32"},
        {"HQ": 8, "HKV": 2, "HALF": 64, "BLOCK": 64, "ROWS": 16},
    ),
    "nybble.ops.decode_attention.triton:_part_kernel": (
        {"q": "*bf16", "k_cache": "*bf16", "v_cache": "*bf16", "position": "*i32", "part_o": "*fp32",
         "part_ml": "*fp32", "s": "i32", "scale": "fp32"},
        {"GROUP": 4, "PARTS": 16, "D": 128, "BD": 128, "BG": 16, "KEYS": 64},
    ),
    "nybble.ops.decode_attention.triton:_join_kernel": (
        {"part_o": "*fp32", "part_ml": "*fp32", "o": "*bf16"},
        {"GROUP": 4, "PARTS": 16, "D": 128, "BD": 128, "BP": 16},
    ),
    "nybble.ops.round_columns.triton:_round_columns_kernel": (
        {**dict.fromkeys(("columns", "upper", "errors"), "*fp64"), "scale": "*fp32", "zero": "*fp32",
         **dict.fromkeys(("n", "total", "stride_r", "stride_c", "stride_n"), "i32"),
         **dict.fromkeys(("upper_stride_r", "upper_stride_c"), "i32")},
        {"R": 16, "BR": 16, "BLOCK": 32, "HAS_ZERO": False, "IS_INT": False, "LOW": -6.0, "HIGH": 6.0, "ONE": 2.0,
         "SMALLEST": 1.0, "MAGIC": 12582912.0},
    ),
    "nybble.ops.linear.triton:_narrow_kernel": (
        {"x": "*i8", "w": "*i8", "x_scale": "*fp32", "w_scale": "*bf16", "bias": "*bf16", "y": "*bf16",
         **dict.fromkeys(("m", "n", "k", "w_row", "groups", "w_shift", "x_step", "pieces"), "i32")},
        {"TOKENS": 64, "ROWS": 128, "COLUMNS": 64, "GROUP": 64, "NIBBLES": True, "FLOAT8": False, "W_GROUPED": True,
         "X_GROUPED": True, "HAS_BIAS": True, "BAND": 8},
    ),
    "nybble.ops.linear.triton:_widen_kernel": ({"packed": "*i8", "codes": "*i8", "count": "i32"}, {"BLOCK": 2048}),
    "nybble.ops.linear_invariant.triton:_linear_invariant_kernel": (
        {"x": "tensordesc<bf16[64, 64]>", "w": "tensordesc<bf16[64, 64]>", "bias": "*bf16", "y": "*bf16",
         **dict.fromkeys(("m", "n", "k", "x_row"), "i32")},
        {"HAS_BIAS": True, "FEW": False, "BM": 64, "BN": 64, "BK": 64, "GROUP": 8},
    ),
}  # fmt: skip
PRODUCER = "nybble.ops.quantize_rows.triton:_quantize_rows_kernel"
TARGETS = (80, 90, 100, 120)


def producer(name: str, prologue: int, hadamard: int, cut: tuple[int, int, int]) -> tuple[dict, dict]:
    """Signature and constants of an instance of the producers' kernel."""
    from nybble.formats import table
    from nybble.ops.quantize_rows.triton_codes import facts
    from nybble.quantize.scales import MAX_ENCODE

    fmt = table.block(name)
    pointers = dict.fromkeys(("x", "residual", "gain", "h"), "*bf16")
    pointers |= {"codes": "*u8", "tensor": "*fp32", "tensor_amax": "*fp32"}
    pointers["scale"] = {"fp32": "*fp32", "bf16": "*i16"}.get(fmt.scale.name, "*u8")
    sizes = ("x_stride", "residual_stride", "columns", "code_bytes", "scale_columns", "chunks")
    pieces = dict(zip(("P0", "P1", "P2"), cut, strict=True))
    constants = {"PROLOGUE": prologue, "RESIDUAL": prologue == 1, "HADAMARD": hadamard, "MACHINE": 1,
                 "MOST": MAX_ENCODE, **pieces, **facts(fmt)}  # fmt: skip
    return {**pointers, **dict.fromkeys(sizes, "i32"), "eps": "fp32"}, constants


SCALED = "nybble.ops.linear.triton_scaled"
BYTES = dict.fromkeys(("x", "w", "x_scale", "w_scale"), "*u8")
# With E4M3 scales only what has the instruction compiles it: tests/ops/test_linear_scaled.py.
KERNELS[f"{SCALED}:_block_scaled_kernel"] = (
    {**BYTES, "x_tensor": "*fp32", "w_tensor": "*fp32", "bias": "*bf16", "y": "*bf16",
     **dict.fromkeys(("m", "n", "code_bytes", "scale_columns"), "i32")},
    {"TOKENS": 64, "ROWS": 64, "COLUMNS": 128, "BLOCK": 32, "E4M3_SCALES": False, "HAS_TENSOR": False,
     "HAS_BIAS": True},
)  # fmt: skip
KERNELS[f"{SCALED}:_decode_kernel"] = (
    {"codes": "*u8", "scale": "*u8", "y": "*bf16",
     **dict.fromkeys(("columns", "code_bytes", "scale_columns", "chunks"), "i32")},
    {"BITS": 4, "E_SIGN": 3, "E_MANTISSA": 1, "E_BIAS": 1, "E_MOST": 7, "E_INF": -1,
     "S_SIGN": 7, "S_MANTISSA": 3, "S_BIAS": 7, "S_MOST": 0x7E, "S_INF": -1, "BLOCK": 16, "P": 1024},
)  # fmt: skip
KERNELS[PRODUCER] = producer("int8_token", 1, 32, (1024, 512, 128))
PRODUCERS = [
    producer("fp8_token", 0, 0, (1024, 0, 0)),
    producer("fp8_g128", 2, 128, (512, 0, 0)),
    producer("int4_g128", 0, 0, (512, 0, 0)),
    producer("nvfp4", 1, 16, (1024, 128, 0)),
    producer("mxfp4", 2, 0, (512, 0, 0)),
    producer("mxint8", 0, 0, (512, 0, 0)),
]  # one instance a way to scale and to code

ATTENTION = "nybble.ops.decode_attention.triton:_part_kernel"
SHARED_BYTES = {80: 166912, 90: 232448, 100: 232448, 120: 101376}
"""What a program may use; 8.6 and 8.9 have what 12.0 has."""


def attention(dtype: str, itemsize: int, d: int) -> tuple[dict, dict]:
    """Signature and constants of the attention's kernel as it is launched."""
    from nybble.ops.decode_attention.triton import step_keys

    signature, constants = KERNELS[ATTENTION]
    caches = dict.fromkeys(("q", "k_cache", "v_cache"), dtype)
    return {**signature, **caches}, {**constants, "D": d, "BD": d, "KEYS": step_keys(d, itemsize)}


# A process of its own, since here the kernels are interpreted functions.
PROGRAM = """
import json, sys
from importlib import import_module
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
for name, (signature, constants) in json.loads(sys.argv[1]):
    module, kernel = name.split(":")
    fn = getattr(import_module(module), kernel)
    signature = {arg: signature.get(arg, "constexpr") for arg in fn.arg_names}
    for target in json.loads(sys.argv[2]):
        if "EARLY" in fn.arg_names:
            constants["EARLY"] = target >= 90
        if "MACHINE" in fn.arg_names:
            constants["MACHINE"] = 2 if target >= 89 else 1
        source = ASTSource(fn, signature, {(fn.arg_names.index(c),): v for c, v in constants.items()})
        compiled = triton.compile(source, target=GPUTarget("cuda", target, 32))
        print(json.dumps([name, compiled.metadata.shared, len(compiled.asm["cubin"]), compiled.asm["ptx"]]))
"""


def taken_apart(ptx: str) -> list[str]:
    """Pairs of E4M3 that are converted together and then spread over two 16-bit halves by a shift: ptxas 12.8 reads
    the register of such a pair before it is written."""
    pairs = set(re.findall(r"cvt\.rn\.satfinite\.e4m3x2\.f32\s+(%rs\d+)", ptx))
    shifted = dict(re.findall(r"shr\.u16\s+(%rs\d+), (%rs\d+), 8;", ptx))
    return [low for low, high in re.findall(r"\{(%rs\d+), (%rs\d+)\}", ptx) if shifted.get(high) == low in pairs]


def test_every_kernel_is_listed() -> None:
    import house

    found = set()
    for path in (house.SRC / "ops").rglob("*.py"):
        module = ".".join(path.relative_to(house.SRC.parent).with_suffix("").parts)
        # other functions are parts of kernels
        kernels = re.findall(r"@triton\.jit(?:\(.*\))?(?: +#.*)?\s+def (\w+_kernel)", path.read_text())
        found |= {f"{module}:{name}" for name in kernels}
    assert found == set(KERNELS)


@pytest.mark.parametrize("target", TARGETS)
def test_compiles(target: int, monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))  # a cached cubin would hide a break
    instances = [*KERNELS.items(), *((PRODUCER, instance) for instance in PRODUCERS)]
    instances += [(ATTENTION, attention(*kind, d)) for kind in (("*fp32", 4), ("*fp16", 2)) for d in (64, 128, 256)]
    command = [sys.executable, "-c", PROGRAM, json.dumps(instances), json.dumps([target])]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr[-3000:]
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    assert len(lines) == len(instances)
    for name, shared, size, ptx in lines:
        assert size > 0
        assert shared <= SHARED_BYTES[target], name
        assert not taken_apart(ptx), f"{name} for sm_{target}"


def test_a_pair_that_is_taken_apart_is_found() -> None:
    """As Triton 3.6 wrote it for NVFP4's scales."""
    pair = "cvt.rn.satfinite.e4m3x2.f32  %rs7, %r2, %r1;\nshr.u16 \t%rs8, %rs7, 8;\n"
    assert taken_apart(pair + "mov.b32 \t%r3, {%rs7, %rs8};") == ["%rs7"]
    assert not taken_apart(pair + "mov.b32 \t%r3, {%rs7, %rs9};")
