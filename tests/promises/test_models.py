"""Whole models under a promise: the runner, generate and evaluate inside the context, measuring, fingerprints."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import nybble
from nybble.errors import BadInput, Unsupported
from nybble.models import decode, fingerprint, llama, promised, verify
from nybble.models.evaluate import logits
from nybble.models.promised import PromisedRunner
from nybble.ops import silu_exact
from nybble.ops._promise import in_force, promise
from nybble.ops.silu_exact import SILU_MUL_EXACT
from same import same_bits
from tiny_models import IDS, Words, tiny

PROMISES = ("run-to-run", "batch-invariant", "cross-machine")
pytest.importorskip("transformers", reason="the definition of the model")


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny()


@pytest.mark.parametrize("wanted", PROMISES)
def test_agrees_with_the_runner_without_a_promise(wanted: Any, model: Any) -> None:
    expected = llama.Runner(copy.deepcopy(model), 32, 2).prefill(IDS).float()
    got = PromisedRunner(model, wanted, 32, 2).prefill(IDS).float()
    assert float((got - expected).norm() / expected.norm()) < 2.0**-6


@pytest.mark.parametrize("kind", ["Mistral", "Qwen2"])
def test_other_members_of_the_family(kind: str) -> None:
    other = tiny(kind, **({"sliding_window": None} if kind == "Mistral" else {}))
    expected = llama.Runner(copy.deepcopy(other), 32, 2).prefill(IDS).float()
    got = PromisedRunner(other, "cross-machine", 32, 2).prefill(IDS).float()
    assert float((got - expected).norm() / expected.norm()) < 2.0**-6


@pytest.mark.parametrize("scheme", ["bf16", "W8A16", "W4A16", "NVFP4A16"])
@pytest.mark.parametrize("wanted", ["batch-invariant", "cross-machine"])
def test_a_sequence_has_the_same_bits_alone_beside_others_and_step_by_step(wanted: Any, scheme: str) -> None:
    model = tiny() if scheme == "bf16" else nybble.quantize_(tiny(), scheme)
    verdict = nybble.verify_promise(model, wanted, batches=(2, 7), steps=3)
    assert verdict.holds, str(verdict)
    assert len(verdict.checks) == 2 + 2 + 3 + 1
    assert bool(verdict.unchecked) == (wanted == "cross-machine")


def test_widened_weights_change_no_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nybble.quantize_(tiny(), "W4A16")
    widened = PromisedRunner(model, "cross-machine", 32, 2).prefill(IDS)
    monkeypatch.setattr(promised.projections, "_WIDENED", 0)
    same_bits(PromisedRunner(model, "cross-machine", 32, 2).prefill(IDS), widened, "logits")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes(dtype: torch.dtype) -> None:
    verdict = nybble.verify_promise(tiny(dtype=dtype), "cross-machine", batches=(3,), steps=2)
    assert verdict.holds, str(verdict)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_stock_torch_is_found_different_and_the_promise_mends_it(dtype: torch.dtype) -> None:
    """The comparison is not blind. A last bit of bf16 seldom shows, and not with one token: the prompt has twelve."""
    model = tiny(dtype=dtype, hidden_size=576, intermediate_size=1536, num_hidden_layers=4,
                 num_attention_heads=9, num_key_value_heads=3)  # fmt: skip
    stock = nybble.verify_promise(model, "none", IDS[0], batches=(2, 7, 33))
    if stock.holds:
        pytest.skip("this CPU's library multiplies one row as it multiplies many")
    assert "differs first" in str(stock)
    assert nybble.verify_promise(model, "batch-invariant", IDS[0], batches=(2, 7), steps=2).holds


def test_the_control_sees_every_module_token_by_token(model: Any) -> None:
    """What is compared of stock torch: each module's result for each token, not the last logits alone."""
    whole, stepped = verify._stock(model)(IDS[:1]), verify._stock_steps(model, IDS[0])
    assert {name: t.shape for name, t in whole.items()} == {name: t.shape for name, t in stepped.items()}
    assert len(whole) == 1 + 2 * 12 + 2
    broken = {**stepped, "lm_head (Linear)": stepped["lm_head (Linear)"].clone()}
    broken["lm_head (Linear)"].view(torch.int16)[0, 5, 3] += 1
    assert verify.first_difference(stepped, broken).startswith("lm_head (Linear) differs first: token 5, value 3:")


def test_a_broken_op_is_caught_and_named(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    right = SILU_MUL_EXACT.fallback.run

    def wrong(x: torch.Tensor) -> torch.Tensor:
        y = right(x)
        if len(x) > 40:  # one unit in the last place of one value, in large batches alone
            y.view(torch.int16)[-1, 7] += 1
        return y

    op = copy.copy(SILU_MUL_EXACT)
    object.__setattr__(op, "fallback", copy.copy(op.fallback))
    object.__setattr__(op.fallback, "run", wrong)
    monkeypatch.setattr(silu_exact, "SILU_MUL_EXACT", op)
    verdict = nybble.verify_promise(model, "batch-invariant", batches=(2, 7), steps=0)
    assert not verdict.holds
    wanted = {check.what: check.difference for check in verdict.checks if not check.holds}
    assert list(wanted) == ["row 6 of 7"]
    assert wanted["row 6 of 7"].startswith("layers.0.mlp.act_fn (silu_mul_exact) differs first: token 11, value 7:")


@pytest.mark.parametrize("scheme", ["W8A8", "NVFP4"])
def test_rounded_activations_are_refused_by_name(scheme: str) -> None:
    model = nybble.quantize_(tiny(), scheme, calibration=[IDS])
    with pytest.raises(Unsupported, match=r"layers\.0\.self_attn\.q_proj rounds its inputs to .*; nearest: "):
        PromisedRunner(model, "cross-machine", 32)


def test_hooks_and_other_families_are_refused() -> None:
    model = tiny()
    model.model.layers[1].mlp.down_proj.register_forward_pre_hook(lambda module, args: None)
    with pytest.raises(Unsupported, match=r"attached to model\.layers\.1\.mlp\.down_proj"):
        PromisedRunner(model, "cross-machine", 32)
    with pytest.raises(Unsupported, match="'gemma' is not one of"):
        PromisedRunner(tiny("Gemma"), "cross-machine", 32)


def test_the_model_itself_is_refused_inside_a_promise_and_the_runner_is_not(model: Any) -> None:
    with promise("cross-machine"), torch.no_grad():
        with pytest.raises(Unsupported, match=r"^Linear makes no promise"):
            model(IDS)
        whole = logits(model, IDS[0])
        lane = decode.runner(model, 16)
        assert isinstance(lane, promised.Lane)
        same_bits(lane.start(IDS[0]), whole[-1], "logits")
    assert isinstance(decode.runner(model, 16), decode.Runner)


def test_tf32_and_its_like_are_without_effect(model: Any) -> None:
    before = torch.get_float32_matmul_precision()
    expected = PromisedRunner(model, "cross-machine", 32, 2).prefill(IDS)
    try:
        torch.set_float32_matmul_precision("medium")
        same_bits(PromisedRunner(model, "cross-machine", 32, 2).prefill(IDS), expected, "logits")
    finally:
        torch.set_float32_matmul_precision(before)


def test_draws_depend_on_seed_and_position_not_on_the_batch(model: Any) -> None:
    def drawn(batch: int, seeds: list[int]) -> torch.Tensor:
        runner = PromisedRunner(model, "cross-machine", 32, batch, temperature=1.5, seeds=seeds)
        runner.prefill(IDS[:1].expand(batch, -1))
        return runner.decode(8).clone()

    alone = drawn(1, [11])
    beside = drawn(3, [5, 11, 6])
    assert torch.equal(beside[1:2], alone)
    assert not torch.equal(beside[0], beside[1])
    with pytest.raises(BadInput, match="as many seeds, got 1"):
        drawn(2, [1])
    with pytest.raises(BadInput, match="above 0, got 0"):
        PromisedRunner(model, "cross-machine", 32, temperature=0)


def test_generate_inside_a_promise(model: Any) -> None:
    runner = PromisedRunner(model, "cross-machine", 32)
    runner.prefill(torch.tensor([Words()("Hello")["input_ids"]]))
    expected = Words().decode(runner.decode(6)[0].tolist(), True)
    with promise("cross-machine"):
        assert "".join(decode.generate(model, Words(), "Hello", 6)) == expected
        pick = promised.drawn(1.5, 3)
        one, two = ("".join(decode.generate(model, Words(), "Hello", 6, pick)) for _ in range(2))
    assert one == two != expected


@pytest.fixture(scope="module")
def made(model: Any) -> dict[str, Any]:
    return fingerprint.make(model, IDS[0], 6)


def test_a_fingerprint_repeats_itself_whatever_layout_or_runner(made: dict[str, Any], tmp_path: Path) -> None:
    again = tiny()
    before = fingerprint.model_hash(again)
    llama.Runner(again, 16)
    assert fingerprint.model_hash(again) == before == made["model"]
    fingerprint.write(tmp_path / "f.json", made)
    assert list(tmp_path.iterdir()) == [tmp_path / "f.json"]
    known = fingerprint.read(tmp_path / "f.json")
    assert known == made
    assert fingerprint.check(again, known) == ""
    assert nybble.verify_promise(again, "cross-machine", batches=(), steps=0, recorded=tmp_path / "f.json").holds


def test_another_instruction_set_and_more_threads_give_the_same_bits(tmp_path: Path) -> None:
    """The nearest thing to another machine that a CPU has to offer: torch's kernels without vector instructions."""
    nybble.save(nybble.quantize_(tiny(), "W4A16"), tmp_path / "model")
    fingerprint.write(tmp_path / "f.json", fingerprint.make(nybble.load(tmp_path / "model"), IDS[0], 8))
    environment = {**os.environ, "ATEN_CPU_CAPABILITY": "default", "OMP_NUM_THREADS": "3"}
    command = [sys.executable, "-m", "nybble", "fingerprint", str(tmp_path / "model"), "--device", "cpu"]
    run = subprocess.run(
        [*command, "--check", str(tmp_path / "f.json")], capture_output=True, text=True, timeout=120, env=environment
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "the same bits" in run.stdout


@pytest.mark.parametrize("scheme", ["bf16", "W8A16", "W4A16_G64"])
def test_the_committed_fingerprints_of_two_machines_are_the_same(scheme: str) -> None:
    """SmolLM2-135M, 256 greedy tokens, made on a CPU and on an H200 (benchmarks/promises_model.py)."""
    results = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
    here, there = (
        fingerprint.read(results / where / "fingerprints" / f"smollm2-135m-{scheme}.json") for where in ("cpu", "h200")
    )
    assert fingerprint.difference(here, there) == ""
    assert here.pop("machine") != there.pop("machine")
    assert here == there
    assert len(here["tokens"]) == 256


def test_a_fingerprint_of_a_quantized_model_knows_its_bits() -> None:
    one, other = nybble.quantize_(tiny(), "W8A16"), nybble.quantize_(tiny(), "W4A16")
    known = fingerprint.make(one, IDS[0], 2)
    assert fingerprint.check(one, known) == ""
    with pytest.raises(BadInput, match="of another model: "):
        fingerprint.check(other, known)


def test_the_first_differing_op_is_named(made: dict[str, Any]) -> None:
    ops = [list(op) for op in made["ops"]]
    ops[5][1] = ops[9][1] = "0" * 16
    assert fingerprint.difference({**made, "ops": ops}, made).startswith(f"{ops[5][0]} differs first: 0000")
    tokens = [*made["tokens"][:4], -1, *made["tokens"][5:]]
    assert fingerprint.difference({**made, "tokens": tokens}, made).startswith(
        "decoded token 4 differs first: -1 there"
    )
    assert fingerprint.difference({**made, "tables": ""}, made) == "the rotary tables differ"


def test_the_context_is_left_as_it_was_when_the_runner_fails(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = PromisedRunner(model, "cross-machine", 16)
    monkeypatch.setattr(promised, "silu_mul_exact", lambda x: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        runner.prefill(IDS[:1])
    assert in_force() == "none"


@pytest.mark.parametrize("tokens", [torch.zeros(2, 3), torch.zeros(1, 17)])
def test_prompts_that_do_not_fit_are_refused(tokens: torch.Tensor, model: Any) -> None:
    with pytest.raises(BadInput, match=r"takes \[1, 1 to 16\] tokens"):
        PromisedRunner(model, "cross-machine", 16).prefill(tokens.long())


@pytest.mark.parametrize("tokens", [torch.full((1, 4), 96), torch.full((1, 4), -1), torch.zeros(1, 4)])
def test_tokens_that_the_model_does_not_know_are_refused(tokens: torch.Tensor, model: Any) -> None:
    with pytest.raises(BadInput, match="knows 96 tokens, int64; got torch"):
        PromisedRunner(model, "cross-machine", 16).prefill(tokens)


def test_float64_models_are_refused_by_name() -> None:
    runner = PromisedRunner(tiny(dtype=torch.float64), "cross-machine", 16)
    with pytest.raises(BadInput, match=r"^add_rmsnorm_exact takes .* got float64"):
        runner.prefill(IDS[:1])


def test_autocast_round_a_runner_is_refused(model: Any) -> None:
    runner = PromisedRunner(model, "cross-machine", 16)
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(BadInput, match="autocast is switched on for cpu"):
        runner.prefill(IDS[:1])


def test_a_weaker_promise_inside_a_stronger_one_is_refused_by_name(model: Any) -> None:
    weak, strong = (PromisedRunner(model, wanted, 16) for wanted in ("batch-invariant", "cross-machine"))
    with promise("batch-invariant"):
        strong.prefill(IDS[:1])
    with promise("cross-machine"), pytest.raises(Unsupported, match=r"^linear_invariant promises no more than batch"):
        weak.prefill(IDS[:1])
