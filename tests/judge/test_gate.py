"""What is not right is not timed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from nybble import bench
from nybble.errors import BadInput, Mismatch
from nybble.judge import cases
from nybble.judge.gate import admit
from nybble.judge.op_problem import OpProblem

SMALL = {"rmsnorm": "add_rmsnorm", "silu_mul": "silu_mul", "rope_cache": "rope_cache_",
         "decode_attention": "decode_attention", "rmsnorm_linear": "rmsnorm_linear",
         "rope_attention": "rope_attention_"}  # fmt: skip


@pytest.mark.parametrize("op", SMALL)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_our_ops_are_admitted(op: str, device: str) -> None:
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    verdict = admit(op, f"nybble.ops.{op}:{SMALL[op]}", device)
    assert verdict.correct
    assert {f.check for f in verdict.findings} >= {"as_given", "kept", "poison", "fresh"}
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_bench_asks_about_the_formats_that_it_times(device: str) -> None:
    assert bench.judged(["nvfp4", "int4_g128"], device).endswith("nvfp4, int4_g128")


def test_a_declared_agreement_gives_way_to_the_condition_of_a_question_only() -> None:
    problem = OpProblem("op:rope_attention", "cpu")
    problem.build(0)  # a float32 case
    declared = problem.op.agreement.limits[torch.float32]
    ordinary = problem.expect(cases.given(problem, 0))
    assert ordinary is not None
    assert ordinary.budgets[0].total <= 4 * declared
    apart = next(c for c, _ in cases.redrawn(problem, 0, cases.DRAWS) if c.label == "rows of different size")
    expected = problem.expect(apart)
    assert expected is not None
    assert expected.budgets[0].total > 50 * declared  # plain float32 attention is 45 times the declared limit away
    exact = OpProblem("op:linear_exact", "cpu")
    exact.build(0)
    answer = exact.expect(cases.given(exact, 0))
    assert answer is not None
    assert answer.budgets[0].total == 0


@pytest.mark.parametrize("flaw", ["1.02 * y", "y.float().to(torch.float8_e4m3fn).to(y.dtype)", "KEPT.setdefault(0, y)"])
def test_what_is_wrong_is_not(flaw: str, tmp_path: Path) -> None:
    source = "import torch\nfrom nybble.ops.linear import linear\nKEPT = {}\ndef near(*args):\n    y = linear(*args)\n"
    (tmp_path / "near.py").write_text(source + f"    return {flaw}\n")
    with pytest.raises(Mismatch, match=r"not timed, since the judge says: (WRONG|CHEATING)"):
        admit("linear", f"{tmp_path}/near.py:near", "cpu", ["nvfp4-a16"])


@pytest.mark.parametrize(
    ("caches", "reason"),
    [
        ("k, v", ""),
        ("k.clone(), v", "input 3 was left as it was"),
        ("v, k", "but not to what the reference makes of it"),
    ],
)
def test_what_is_written_in_place_is_asked_for(caches: str, reason: str, tmp_path: Path) -> None:
    source = "from nybble.ops.rope_cache import rope_cache_\ndef own(qkv, cos, sin, k, v, position):\n"
    (tmp_path / "own.py").write_text(f"{source}    return rope_cache_(qkv, cos, sin, {caches}, position)\n")
    if not reason:
        assert admit("rope_cache", f"{tmp_path}/own.py:own", "cpu").correct
        return
    with pytest.raises(Mismatch, match=reason):
        admit("rope_cache", f"{tmp_path}/own.py:own", "cpu")


def test_cases_that_do_not_exist() -> None:
    with pytest.raises(BadInput, match="declares no case that begins with 'int5'"):
        admit("linear", "nybble.ops.linear:linear", "cpu", ["int5"])


def test_bench_times_nothing_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*args: object) -> str:
        raise Mismatch("not timed")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "copy_bandwidth", lambda: 1.0)
    monkeypatch.setattr(bench, "machine", lambda: {"device": "a device", "date": "today"})
    monkeypatch.setattr(bench, "judged", wrong)
    monkeypatch.setattr(bench, "measure", lambda *args: pytest.fail("it timed"))
    with pytest.raises(Mismatch, match="not timed"):
        bench.main(["linear", "--shapes", "64x64", "--m", "1"])
