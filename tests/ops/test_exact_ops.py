"""Ops with the promise cross-machine, linears aside: twins against what they stand for, kernels against their twins.

The kernels run on the CPU through tests/cuda_on_cpu.py, so equal bits are tested without a GPU; tests/gpu has the same
on a GPU.
"""

from __future__ import annotations

import importlib
import math
import re
from typing import Any

import pytest
import torch

import cuda_on_cpu
from nybble.errors import BadInput
from nybble.models.promised import PromisedRunner
from nybble.ops import _nvrtc, attention_exact, rmsnorm_exact, rope_exact, silu_exact, token_exact
from nybble.ops._declare import Implementation, Op
from nybble.ops._exact import arithmetic, launch
from nybble.ops.decode_attention import decode_attention_reference
from nybble.ops.rmsnorm import add_rmsnorm_reference
from nybble.ops.rope_exact.tables import rope_tables
from nybble.ops.silu_mul import silu_mul_reference
from ptx import FORBIDDEN, ptx
from same import copied, results, same_bits, specials
from tiny_models import IDS, tiny

KERNELS = [
    rmsnorm_exact.ADD_RMSNORM_EXACT, silu_exact.SILU_MUL_EXACT, rope_exact.ROPE_CACHE_EXACT,
    attention_exact.ATTENTION_EXACT,
]  # fmt: skip


def kernel_of(op: Op) -> Any:
    return importlib.import_module(op.homes["cuda"])


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launch kernels on the CPU."""
    if cuda_on_cpu.COMPILER is None:
        pytest.skip("g++ is not installed")

    def start(x: Any, file: str, kernel: str, given: Any, grid: Any, threads: int, argument: Any) -> None:
        cuda_on_cpu.run(launch.source(file), kernel, given, grid, threads, argument)

    for op in KERNELS:
        monkeypatch.setattr(kernel_of(op), "launch", start)


def equal_on(op: Op, implementation: Implementation, label: str, args: tuple[Any, ...]) -> None:
    """Results and whatever was written in place, bit by bit."""
    ours, theirs = copied(args), copied(args)
    for y, expected in zip(results(implementation.run(*ours)), results(op.reference(*theirs)), strict=True):
        same_bits(y, expected, f"{implementation.name} on {label}")
    for mine, other in zip(ours, theirs, strict=True):
        if isinstance(mine, torch.Tensor):
            same_bits(mine, other, f"an argument of {implementation.name} on {label}")


@pytest.mark.parametrize("op", KERNELS, ids=lambda op: op.name)
def test_kernels_have_the_bits_of_their_twins(op: Op, on_cpu: None) -> None:
    (implementation,) = kernel_of(op).IMPLEMENTATIONS
    served = [(label, args) for label, args in op.cases() if args[0].numel()]
    assert len(served) >= 5
    for label, args in served:
        equal_on(op, implementation, label, args)


@pytest.mark.parametrize("dtype", arithmetic.DTYPES)
@pytest.mark.parametrize("op", KERNELS, ids=lambda op: op.name)
def test_kernels_have_the_bits_of_their_twins_on_special_values(op: Op, dtype: torch.dtype, on_cpu: None) -> None:
    (implementation,) = kernel_of(op).IMPLEMENTATIONS
    for label, args in specials(op.name, dtype):
        equal_on(op, implementation, label, args)


def test_a_model_run_by_the_kernels_has_the_bits_of_the_twins(on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt and steps through every launcher, as a GPU would run them."""
    model = tiny()
    runner = PromisedRunner(model, "cross-machine", 20, 2)
    expected = [runner.prefill(IDS[:, :5]).clone(), runner.step().clone(), runner.step().clone()]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *args: (9, 0))
    monkeypatch.setattr(_nvrtc, "available", lambda: None)
    for op in KERNELS:
        monkeypatch.setitem(op.homes, "cpu", op.homes["cuda"])
        assert op.implementations("cpu")[0].name.endswith("cuda_sm80")
    runner = PromisedRunner(model, "cross-machine", 20, 2)
    for step, logits in enumerate(expected):
        same_bits(runner.step() if step else runner.prefill(IDS[:, :5]), logits, f"step {step}")


@pytest.mark.parametrize("op", [op for op in KERNELS if op is not rope_exact.ROPE_CACHE_EXACT], ids=lambda op: op.name)
def test_a_changed_order_is_seen(op: Op, on_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: other lanes, or an exponential without its last coefficient, do not pass the test above."""
    module = kernel_of(op)
    start, changed = module.launch, {"LANES": 64, "VALUE_LANES": 8, "EXP_C7": 0}

    def other(x: Any, file: str, kernel: str, given: Any, grid: Any, threads: int, argument: Any) -> None:
        given = tuple((name, changed.get(name, value)) for name, value in given)
        start(x, file, kernel, given, grid, 64 if file == "rmsnorm" else threads, argument)

    monkeypatch.setattr(module, "launch", other)
    wide = torch.randn(64, 1000, generator=torch.Generator().manual_seed(0))
    cases = {label: args for label, args in op.cases() if args[0].numel() and args[0].dtype == torch.float32}
    label, args = ("64x1000", (wide, None, wide[0], 1e-5)) if op.name == "add_rmsnorm_exact" else cases.popitem()
    with pytest.raises(AssertionError, match="differ"):
        equal_on(op, *module.IMPLEMENTATIONS, label, args)


@pytest.mark.parametrize("arch", ["80", "89", "90a"])
@pytest.mark.skipif(_nvrtc.available() is not None, reason=str(_nvrtc.available()))
def test_kernels_compile_everywhere(arch: str) -> None:
    given = {"rmsnorm": {"LANES": rmsnorm_exact.LANES}, "silu": {"THREADS": 256}, "rope": {"THREADS": 256}}
    for file, more in given.items():
        for dtype in arithmetic.DTYPES:
            assert _nvrtc.build(launch.source(file), dict(launch.defines(dtype, **more)), arch).startswith(b"\x7fELF")
    attention = kernel_of(attention_exact.ATTENTION_EXACT)
    for d, group in ((64, 3), (64, 4), (128, 4)):
        built = _nvrtc.build(launch.source("attention"), dict(attention.definitions(torch.bfloat16, d, group)), arch)
        assert built.startswith(b"\x7fELF")


@pytest.mark.parametrize("file", ["rmsnorm", "silu", "rope", "attention"])
@pytest.mark.skipif(_nvrtc.available() is not None, reason=str(_nvrtc.available()))
def test_every_operation_is_rounded_once_and_in_the_same_place_on_every_architecture(file: str) -> None:
    """PTX that names each rounding and contracts nothing; no later stage may contract what names its rounding."""
    given = dict(kernel_of(attention_exact.ATTENTION_EXACT).definitions(torch.bfloat16, 64, 3))
    if file != "attention":
        given = dict(launch.defines(torch.bfloat16, LANES=rmsnorm_exact.LANES, THREADS=256))
    texts = [ptx(launch.source(file), given, arch) for arch in ("80", "89", "90")]
    assert texts[0] == texts[1] == texts[2], "one text, so one order"
    assert not re.search(FORBIDDEN + r"|fma", texts[0]), re.search(FORBIDDEN + r"|fma", texts[0])
    assert re.search(r"mul\.rn\.f32", texts[0])


def test_the_exponential_is_within_two_units_in_the_last_place() -> None:
    x = torch.cat([torch.linspace(-106, 90, 200001), torch.randn(10000) * 1e-3])
    y, expected = arithmetic.exp(x), torch.exp(x.double())
    finite = expected < torch.finfo(torch.float32).max
    tiny = torch.finfo(torch.float32).tiny
    unit = expected.clamp_min(tiny).log2().floor().exp2() * torch.finfo(torch.float32).eps
    assert float(((y.double() - expected).abs() / unit)[finite].max()) < 2
    special = torch.tensor([math.inf, -math.inf, math.nan, 0.0, -0.0, 1e38, -1e38])
    same_bits(arithmetic.exp(special), torch.tensor([math.inf, 0, math.nan, 1, 1, math.inf, 0]), "exp")


def test_square_roots_are_rounded_once() -> None:
    codes = torch.arange(0x3F800000, 0x40800000, 7, dtype=torch.int32)  # from 1 to 4: the rest repeats
    x = codes.view(torch.float32)
    y = arithmetic.sqrt(x).double()
    below, above = ((torch.nextafter(y.float(), y.float() * end).double() + y) / 2 for end in (0, 2))
    assert bool(((below * below < x.double()) & (x.double() < above * above)).all()), "middles squared are exact"


def test_lane_sums_add_in_the_order_they_say() -> None:
    terms = torch.randn(3, 37, generator=torch.Generator().manual_seed(0)) * 1e3
    for lanes in (1, 4, 8):
        expected = []
        for row in terms:
            chains = [torch.zeros(()) for _ in range(lanes)]
            for n, term in enumerate(row):
                chains[n % lanes] = chains[n % lanes] + term
            while len(chains) > 1:
                half = len(chains) // 2
                chains = [a + b for a, b in zip(chains[:half], chains[half:], strict=True)]
            expected.append(chains[0])
        same_bits(arithmetic.lane_sum(terms, lanes, -1), torch.stack(expected), f"{lanes} lanes")
        same_bits(arithmetic.lane_sum(terms.T, lanes, -2), torch.stack(expected), f"{lanes} lanes, the other way")
    assert arithmetic.lane_sum(torch.zeros(2, 0), 4, -1).tolist() == [0, 0]


def test_twins_agree_with_the_ops_they_stand_for() -> None:
    for label, args in rmsnorm_exact.ADD_RMSNORM_EXACT.cases():
        y, _ = rmsnorm_exact.add_rmsnorm_exact(*args)
        rmsnorm_exact.rmsnorm.ADD_RMSNORM.agreement.check(y, add_rmsnorm_reference(*args)[0], label)
    for label, args in silu_exact.SILU_MUL_EXACT.cases():
        y = silu_exact.silu_mul_exact(*args)
        silu_exact.silu_mul.SILU_MUL.agreement.check(y, silu_mul_reference(*args), label)


def test_attention_agrees_with_its_definition_in_float64_and_rows_stand_alone() -> None:
    limits = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11, torch.float32: 2.0**-20}
    for label, (q, k, v, rows, at) in attention_exact.ATTENTION_EXACT.cases():
        o = attention_exact.attention_exact(q, k, v, rows, at)
        for n, row in enumerate(rows.tolist()):
            one = slice(n, n + 1)
            expected = decode_attention_reference(q[one], k[row : row + 1], v[row : row + 1], at[one])
            error = float((o[one].double() - expected.double()).norm() / expected.double().norm())
            assert error <= limits[q.dtype], label
            alone = attention_exact.attention_exact(q[one], k, v, rows[one], at[one])
            same_bits(alone, o[one], label)


def test_attention_does_not_depend_on_the_caches_capacity() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(*shape, generator=generator).bfloat16() for shape in ((1, 4, 32), (1, 2, 200, 32)))
    rows, at = torch.zeros(1, dtype=torch.int32), torch.tensor([70], dtype=torch.int32)
    whole = attention_exact.attention_exact(q, k, k, rows, at)
    same_bits(attention_exact.attention_exact(q, k[:, :, :71], k[:, :, :71], rows, at), whole, "capacity")


def test_rotary_tables_are_the_true_cosines() -> None:
    for d, theta in ((64, 10000.0), (128, 500000.0), (2, 100.0)):
        cos, sin = rope_tables(d, 300, {"rope_theta": theta})
        angle = torch.arange(300, dtype=torch.float64)[:, None] * theta ** (
            -torch.arange(0, d, 2, dtype=torch.float64) / d
        )
        for table, true in ((cos, angle.cos()), (sin, angle.sin())):
            assert float((table.double() - true).abs().max()) <= torch.finfo(torch.float32).eps / 2


def test_rotary_tables_scale_as_transformers_scales_them() -> None:
    utils = pytest.importorskip("transformers.modeling_rope_utils", reason="the definition of scaled positions")
    from transformers import LlamaConfig

    kinds = {"linear": {"factor": 4.0}, "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
             "original_max_position_embeddings": 64}}  # fmt: skip
    for kind, more in kinds.items():
        rope = {"rope_type": kind, "rope_theta": 10000.0, **more}
        config = LlamaConfig(hidden_size=256, num_attention_heads=4, rope_parameters=rope)
        frequencies, _ = utils.ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        cos, _ = rope_tables(64, 2, rope)
        assert torch.allclose(cos[1], frequencies.cos(), rtol=2.0**-22, atol=0), kind


def test_equal_logits_go_to_the_lowest_index_and_nan_wins() -> None:
    (_, (special,)) = list(token_exact.argmax_cases())[-1]
    assert token_exact.argmax_exact(special).tolist() == [2, 0, 0]
    assert token_exact.argmax_exact(torch.tensor([[1.0, 3.0, 3.0]]).bfloat16()).tolist() == [1]


def test_draws_follow_the_probabilities_and_the_seed() -> None:
    z = torch.tensor([[0.0, 1.0, 2.0, -math.inf]]).expand(20000, 4)
    heat, at = torch.full((20000,), 0.7), torch.arange(20000)
    drawn = token_exact.sample_exact(z, heat, torch.full_like(at, 7), at)
    share = torch.bincount(drawn, minlength=4) / 20000
    assert float((share - (z[0] / 0.7).softmax(0)).abs().max()) < 0.01
    assert share[3] == 0
    again = token_exact.sample_exact(z[:9], heat[:9], torch.full_like(at[:9], 7), at[:9])
    assert torch.equal(again, drawn[:9]), "a draw depends on its seed and position alone"
    other = token_exact.sample_exact(z, heat, torch.full_like(at, 8), at)
    assert 0.2 < float((other == drawn).float().mean()) < 0.8


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x: rmsnorm_exact.add_rmsnorm_exact(x.double(), None, x[0].double(), 1e-5), "float64"),
        (lambda x: rmsnorm_exact.add_rmsnorm_exact(x, None, x[0, :3], 1e-5), r"\(2, 6\), \(3,\)"),
        (lambda x: silu_exact.silu_mul_exact(x[:, :5]), "an even width"),
        (lambda x: silu_exact.silu_mul_exact(x.double()), "float64"),
        (lambda x: token_exact.argmax_exact(x[0]), r"\[B, V\]"),
        (lambda x: token_exact.sample_exact(x, x[:, 0].double(), x[:, 0].long(), x[:, 0].long()), "float64"),
        (lambda x: attention_exact.attention_exact(x, x[None, None], x[None, None], x, x), "shapes do not fit"),
    ],
)
def test_bad_input_is_named(call: Any, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        call(torch.ones(2, 6))
