"""A verdict replays from its seed, reads well, and holds no speed that was not earned."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest

from collection import PROBLEMS, exhibits
from nybble.errors import BadInput
from nybble.judge import Finding, Verdict, Zygote, judge
from nybble.judge.page import page
from nybble.judge.verdict import decide

CHEATS = {e.label: e for e in exhibits("cheats")}


def _said(verdict: Verdict) -> list[tuple[str, str, str, dict[str, str]]]:
    return [(f.check, f.status, f.what, dict(f.evidence)) for f in verdict.findings if f.check != "timed"]


@pytest.mark.parametrize(
    "label", ["k11_precision.TensorFloat", "k06_cache.Sampled", "k12_shape.Padded", "k10_dead_branch.Copy"]
)
def test_a_verdict_replays_from_its_seed(label: str, verdict_on: Callable[..., Verdict]) -> None:
    first = verdict_on(CHEATS[label], seed=None)
    again = verdict_on(CHEATS[label], seed=first.seed)
    other = verdict_on(CHEATS[label], seed=first.seed + 1)
    assert _said(again) == _said(first)
    assert other.status == first.status
    assert _said(other) != _said(first)


def test_seeds_are_drawn_anew(verdict_on: Callable[..., Verdict]) -> None:
    cheat = CHEATS["k09_constant.Zero"]
    assert len({verdict_on(cheat, seed=None, checks=["as_given"]).seed for _ in range(3)}) == 3


def test_the_evidence_can_be_followed(verdict_on: Callable[..., Verdict]) -> None:
    verdict = verdict_on(CHEATS["k11_precision.OneLost"], checks=["exact"])
    (finding,) = verdict.against
    seen, expected = float(finding.evidence["seen"]), float(finding.evidence["expected"])
    assert seen != expected
    assert seen.is_integer()
    assert expected.is_integer()
    assert f"--seed {verdict.seed}" in verdict.text()


def test_a_file_without_a_name_lies_in_its_folder(verdict_of: Callable[..., Verdict]) -> None:
    """Compilers keep their output in such files; Linux opens them by the name of the folder."""
    head = "import tempfile\nimport torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, a, b):\n"
    own = verdict_of(
        f"{head}        with tempfile.TemporaryFile():\n            return a @ b\n", checks=["as_given", "files"]
    )
    assert own.correct, own.text()
    other = verdict_of(f"{head}        with tempfile.TemporaryFile(dir='/var/tmp'):\n            return a @ b\n")
    assert not other.correct


def test_text_json_and_page_agree(verdict_of: Callable[..., Verdict]) -> None:
    head = "import torch\nclass ModelNew(torch.nn.Module):\n    def forward(self, a, b):\n"
    source = head + "        raise ValueError('<script>')\n"
    verdict = verdict_of(source)
    assert json.loads(json.dumps(verdict.as_dict()))["status"] == verdict.status == "wrong"
    assert "WRONG" in verdict.text()
    html = page(verdict)
    assert "<script" not in html
    assert "&lt;script&gt;" in html
    assert str(verdict.seed) in html


def test_speed_comes_last_and_only_for_the_correct(verdict_on: Callable[..., Verdict], zygote: Zygote) -> None:
    kernel = next(e for e in exhibits("honest") if e.label == "matmul.Einsum")
    verdict = verdict_on(kernel, rounds=4)
    assert [s.rounds for s in verdict.speeds] == [4, 4]
    assert all(s.low <= s.median <= s.high for s in verdict.speeds)
    assert verdict.ratios["eager"] == pytest.approx(verdict.speeds[1].median / verdict.speeds[0].median)
    assert "speed-up" in verdict.text()
    assert "speed-up" in page(verdict) or "over the best baseline" in page(verdict)
    assert not judge(str(kernel.problem), kernel.spec, checks=["as_given"], zygote=zygote).speeds


@pytest.mark.parametrize(
    ("statuses", "word"),
    [
        ([], "correct"),
        (["ok", "note"], "correct"),
        (["ok", "invalid measurement"], "invalid measurement"),
        (["invalid measurement", "wrong"], "wrong"),
        (["wrong", "crashed"], "crashed"),
        (["wrong", "timed out"], "timed out"),
        (["crashed", "cheating", "wrong"], "cheating"),
    ],
)
def test_the_gravest_finding_decides(statuses: list[str], word: str) -> None:
    assert decide([replace(Finding("x", "ok", "y"), status=s) for s in statuses]) == word  # type: ignore[arg-type]


def test_functions_are_judged_too(zygote: Zygote, tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "p.py").write_text(
        "import torch\ndef double(x): return 2 * x\ndef get_inputs(): return [torch.randn(8, 9)]\n"
    )
    (tmp_path / "c.py").write_text("def double(x): return x + x\ndef triple(x): return x + x + x\n")
    right = judge(f"{tmp_path}/p.py:double", f"{tmp_path}/c.py", zygote=zygote, rounds=1, seed=1)
    wrong = judge(f"{tmp_path}/p.py:double", f"{tmp_path}/c.py:triple", zygote=zygote, rounds=1, seed=1)
    assert (right.status, wrong.status) == ("correct", "wrong"), right.text()


def test_a_problem_without_negative_numbers_and_one_with_structure(zygote: Zygote) -> None:
    for name in ("x_log_x", "triangular", "embedding", "argmax", "add_one_", "batchnorm_conv"):
        spec = str(PROBLEMS / f"{name}.py")
        verdict = judge(spec, f"{spec}:Model", zygote=zygote, rounds=1, seed=2)
        assert verdict.correct, verdict.text()


@pytest.mark.parametrize("op", ["linear:linear", "rmsnorm:add_rmsnorm"])
def test_our_own_ops_are_judged_by_what_they_declare(op: str, zygote: Zygote, tmp_path) -> None:  # type: ignore[no-untyped-def]
    name, function = op.split(":")
    right = judge(f"op:{name}", f"nybble.ops.{op}", zygote=zygote, rounds=1, seed=4)
    assert right.correct, right.text()
    file = tmp_path / "near.py"
    file.write_text(
        f"from nybble.ops.{name} import {function} as right\n"
        "def near(*args):\n"
        "    y = right(*args)\n"
        "    return tuple(1.02 * v for v in y) if isinstance(y, tuple) else 1.02 * y\n"
    )
    assert judge(f"op:{name}", f"{file}:near", zygote=zygote, stop=True, seed=4).status == "wrong"


def test_an_op_that_does_not_exist(zygote: Zygote) -> None:
    with pytest.raises(BadInput, match="no such op"):
        judge("op:matmull", "nybble.ops.linear:linear", zygote=zygote)
