"""A whole survey of a tiny model: rows, resuming after an interruption, and what goes wrong."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tiny
from nybble.errors import BadInput, Unsupported
from nybble.methods import quantize_
from nybble.models import text
from nybble.ops import QuantLinear
from nybble.planner import here, plan
from nybble.planner.machines import TABLE, Machine
from nybble.survey import Original, Request, Result, Row, measure, run, steady, store, survey
from nybble.survey.paths import service

SCHEMES = ("W8A16", "W4A16_G32", "NVFP4", "W2A16")
MEASURED = ("scheme", "method", "bits_per_weight", "bytes", "perplexity", "kl", "top1", "path", "why")


class Watch:
    """A display that remembers, and can stop the survey before a row."""

    def __init__(self, stop_at: str | None = None) -> None:
        self.stop_at = stop_at
        self.steps: list[str] = []
        self.rows: list[tuple[str, bool]] = []

    def begin(self, title: str, total: int) -> None:
        self.total = total

    def step(self, text: str) -> None:
        self.steps.append(text)
        if self.stop_at is not None and self.stop_at in text:
            raise KeyboardInterrupt

    def original(self, original: Original) -> None:
        self.reference = original

    def row(self, row: Row, kept: bool) -> None:
        self.rows.append((row.scheme, kept))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("survey")
    tiny.directory(path / "model")
    tiny.sentences(path / "text.txt")
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decode a little only."""
    race = steady.race
    monkeypatch.setattr(steady, "race", lambda models, prompt: race(models, prompt, tokens=2, rounds=1))
    monkeypatch.setattr(steady, "ELSEWHERE", math.inf)  # what is asked here must not depend on how fast it runs,
    monkeypatch.setattr(steady, "waited", dict)  # nor on what else does
    return


def request(place: Path, out: str, **changes: Any) -> Request:
    """A survey of the tiny model on the CPU."""
    asked = Request(
        str(place / "model"),
        SCHEMES,
        tokens=200,
        text=str(place / "text.txt"),
        device="cpu",
        dtype="bfloat16",
        out=place / out,
    )
    return replace(asked, **changes)


def figures(result: Result) -> list[tuple[object, ...]]:
    """What must not depend on when it was measured: everything but times."""
    return [tuple(getattr(row, key) for key in MEASURED) for row in result.rows]


@pytest.mark.usefixtures("quick")
def test_a_survey_of_a_real_model(place: Path) -> None:
    watch = Watch()
    found = survey(request(place, "whole"), watch)
    assert [row.scheme for row in found.rows] == list(SCHEMES)
    assert watch.rows == [(name, False) for name in SCHEMES]
    by_name = {row.scheme: row for row in found.rows}
    kl = [by_name[name].kl or 0 for name in ("W8A16", "W4A16_G32", "W2A16")]
    assert 0 < kl[0] < kl[1] < kl[2]
    assert by_name["W4A16_G32"].bits_per_weight == 4.5
    assert by_name["NVFP4"].path == "emulated"
    assert "nvfp4" in by_name["NVFP4"].why
    for row in found.rows:
        assert row.bytes is not None
        assert row.bytes < found.original.bytes
        assert row.tokens_per_second is not None
        assert row.speedup is not None
        assert row.decode_error is not None
        assert row.window_path in ("native", "emulated")
    written = json.loads((place / "whole" / store.RESULT).read_text())
    assert [row["scheme"] for row in written["rows"]] == list(SCHEMES)
    assert written["recommendation"]["reason"]
    assert (place / "whole" / store.PAGE).stat().st_size > 10_000


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "moment", ["loading", "original: speed", "W8A16: quantizing", "W4A16_G32: speed", "W2A16: quality"]
)
def test_an_interrupted_survey_goes_on(place: Path, moment: str) -> None:
    out = f"stopped at {moment}"
    with pytest.raises(KeyboardInterrupt):
        survey(request(place, out), Watch(stop_at=moment))
    assert not (place / out / store.RESULT).exists()
    finished = {p.name.split(".")[0] for p in (place / out / store.ROWS).glob("*.*.json")}
    watch = Watch()
    found = survey(request(place, out), watch)
    assert watch.rows == [(name, name in finished) for name in SCHEMES]
    assert figures(found) == figures(survey(request(place, "uninterrupted"), Watch()))


@pytest.mark.usefixtures("quick")
def test_a_finished_survey_is_read_not_measured(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = survey(request(place, "twice"), Watch())
    monkeypatch.setattr(run, "load", lambda *args: pytest.fail("the model was loaded"))
    watch = Watch()
    assert survey(request(place, "twice"), watch) == first
    assert watch.steps == []
    tight = survey(request(place, "twice", max_kl=1e-9), Watch())
    assert tight.recommendation is not None
    assert tight.recommendation.scheme == "original"


@pytest.fixture
def disturb(quick: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, float], None]:
    """Makes every race of this lane come out as on a disturbed machine; a factor of 1 ends it."""
    race, factors = steady.race, {}

    def raced(models: Any, prompt: Any) -> Any:
        found = race(models, prompt)
        return {k: replace(v, turns=(v.seconds / factors.get(k, 1.0),)) for k, v in found.items()}

    monkeypatch.setattr(steady, "race", raced)
    return factors.__setitem__


def test_a_disturbed_row_is_told_and_measured_again(place: Path, disturb: Callable[[str, float], None]) -> None:
    disturb("W8A16", 2.0)
    asked = request(place, "disturbed", schemes=("W8A16", "W4A16_G32"), max_kl=9.0)
    watch = Watch()
    found = survey(asked, watch)
    assert [row.busy for row in found.rows] == [True, False]
    assert [step.split(":")[0] for step in watch.steps if "speed again" in step] == ["W8A16"] * steady.REPEATS
    assert "each time W8A16 decoded" in found.recommendation.reason
    assert "not to be trusted (W8A16)" in (place / "disturbed" / store.PAGE).read_text(encoding="utf-8")
    written = json.loads((place / "disturbed" / store.RESULT).read_text())
    assert [row["busy"] for row in written["rows"]] == [True, False]
    disturb("W8A16", 1.0)
    later = Watch()
    assert not any(row.busy for row in survey(asked, later).rows)
    assert later.rows == [("W8A16", False), ("W4A16_G32", True)]


def test_rows_of_a_disturbed_original_are_measured_again_with_it(
    place: Path, disturb: Callable[[str, float], None]
) -> None:
    """Its dtype was chosen by speeds that say nothing."""
    disturb("bfloat16", 2.0)
    asked = request(place, "disturbed original", schemes=("W8A16",))
    found = survey(asked, Watch())
    assert (found.original.busy, found.rows[0].busy) == (True, True)
    disturb("bfloat16", 1.0)
    later = Watch()
    found = survey(asked, later)
    assert (found.original.busy, found.rows[0].busy) == (False, False)
    assert "original: speed" in later.steps


@pytest.mark.usefixtures("quick")
def test_a_row_that_later_ones_put_in_doubt_is_measured_again(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "reviewed", lambda rows: [replace(row, busy=row.scheme == "W8A16") for row in rows])
    asked = request(place, "doubted", schemes=("W8A16", "W4A16_G32"))
    assert [row.busy for row in survey(asked, Watch()).rows] == [True, False]
    later = Watch()
    survey(asked, later)
    assert later.rows == [("W8A16", False), ("W4A16_G32", True)]


@pytest.mark.usefixtures("quick")
def test_a_folder_of_another_survey_is_refused_and_loses_nothing(place: Path) -> None:
    first = survey(request(place, "taken", schemes=("W8A16",)), Watch())
    before = (place / "taken" / store.RESULT).read_bytes()
    with pytest.raises(BadInput, match="tokens: 200 there, 150 here"):
        survey(request(place, "taken", schemes=("W8A16",), tokens=150), Watch())
    assert (place / "taken" / store.RESULT).read_bytes() == before
    again = survey(request(place, "taken", schemes=("W8A16",), tokens=150, force=True), Watch())
    assert figures(again) != figures(first)


@pytest.mark.usefixtures("quick")
def test_rows_are_added_to_a_survey(place: Path) -> None:
    survey(request(place, "more", schemes=("W8A16",)), Watch())
    watch = Watch()
    survey(request(place, "more", schemes=("w8a16", "W4A16", "W8A16")), watch)
    assert watch.rows == [("W8A16", True), ("W4A16", False)]


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("method", ["gptq", "hadamard", "smoothquant+gptq"])
def test_methods_that_change_more_than_linears_decode_as_they_evaluate(place: Path, method: str) -> None:
    (row,) = survey(request(place, f"by {method}", schemes=("W4A16_G32",), methods=[method]), Watch()).rows
    assert row.method == method
    assert row.tokens_per_second is not None, row.why
    assert row.kl is not None


@pytest.mark.usefixtures("quick")
def test_several_methods_stand_beside_each_other(place: Path) -> None:
    asked = request(place, "methods", schemes=("W4A16_G32", "W8A8"), methods=("rtn", "gptq", "schur"), max_kl=9.0)
    result = survey(asked, Watch())
    found = {(row.scheme, row.method): row for row in result.rows}
    assert list(found) == [(s, m) for s in ("W4A16_G32", "W8A8") for m in ("rtn", "gptq", "schur")]
    assert found["W8A8", "schur"].path == "refused", "its scales reach over whole rows"
    kl = {m: found["W4A16_G32", m].kl for m in ("rtn", "gptq", "schur")}
    assert kl["schur"] < kl["rtn"]
    assert all(row.quantize_seconds < row.seconds for row in result.rows if row.path != "refused")
    page = (place / "methods" / store.PAGE).read_text(encoding="utf-8")
    assert "W4A16_G32 schur" in page
    assert page.count("quantized in") == 3, "of rows that learned and could be had"
    kept = Watch()
    survey(replace(asked, methods=("rtn",)), kept)
    assert kept.rows == [("W4A16_G32", True), ("W8A8", True)], "a method's rows do not depend on the others'"


@pytest.mark.usefixtures("quick")
def test_a_path_that_changes_with_m_is_told(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "service", lambda model, m, dtype: ("native" if m == 1 else "emulated", f"M{m}"))
    (row,) = survey(request(place, "by m", schemes=("W8A16",)), Watch()).rows
    assert (row.path, row.window_path, row.why) == ("native", "emulated", "M1; at M = 200 emulated")


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("known", [True, False])
def test_the_planners_expectation_stands_beside_the_measurement(
    place: Path, monkeypatch: pytest.MonkeyPatch, known: bool
) -> None:
    def machine(cpu: bool = False) -> Machine:
        assert cpu
        if known:
            return TABLE["epyc-2c"]
        raise Unsupported("not in the table")

    monkeypatch.setattr(here, "machine", machine)
    row, emulated = survey(request(place, f"planned {known}", schemes=("W8A16", "NVFP4")), Watch()).rows
    assert (row.path, emulated.path) == ("native", "emulated")
    head, *inside = reversed([m for m in tiny.llama().modules() if isinstance(m, torch.nn.Linear)])
    sizes = [(linear.out_features, linear.in_features) for linear in inside]
    kept = [(head.out_features, head.in_features)]
    expected = plan.speedups(sizes, TABLE["epyc-2c"], ["W8A16"], kept=kept)["W8A16"]
    assert row.expected == row.planned == (pytest.approx(expected) if known else None)
    assert row.reason == row.why
    assert emulated.planned is None, "no native kernel ran, and of those alone something is expected"
    assert ("a native kernel is planned at" in emulated.reason) == known


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(("dtype", "itemsize"), [("float32", 4), ("bfloat16", 2)])
def test_the_expectation_is_of_the_dtype_that_ran(
    place: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, itemsize: int
) -> None:
    asked: list[object] = []
    monkeypatch.setattr(here, "machine", lambda cpu=False: TABLE["epyc-2c"])
    monkeypatch.setattr(plan, "speedups", lambda *args: asked.append(args[-1]) or {})
    (row,) = survey(request(place, f"expected in {dtype}", schemes=("W8A16",), dtype=dtype), Watch()).rows
    assert (row.dtype, asked) == (dtype, [(itemsize, itemsize)])


@pytest.mark.usefixtures("quick")
def test_a_gpu_is_surveyed_in_sixteen_bits(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model is float32 on disk; a CPU stands in for the GPU, but for the choice."""
    judged = run.precision.judged
    monkeypatch.setattr(run.precision, "judged", lambda device, *rest: judged("cuda", *rest))
    found = survey(request(place, "as on a gpu", schemes=("W8A16",), dtype="auto"), Watch())
    assert found.original.quality_dtype == "bfloat16"
    assert "bfloat16" in (place / "as on a gpu" / store.PAGE).read_text(encoding="utf-8")
    wide = survey(request(place, "wide", schemes=("W8A16",), dtype="float32"), Watch())
    assert (wide.original.quality_dtype, wide.rows[0].dtype) == ("float32", "float32")


@pytest.mark.usefixtures("quick")
def test_a_refused_scheme_is_a_row(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantize = measure.quantize_

    def refuse(model: Any, scheme: Any, *args: Any, **kwargs: Any) -> Any:
        if scheme.name == "NVFP4":
            raise Unsupported("nvfp4 needs more than this", {"kernel": "K = 64"})
        return quantize(model, scheme, *args, **kwargs)

    monkeypatch.setattr(measure, "quantize_", refuse)
    found = survey(request(place, "refused", schemes=("NVFP4", "W8A16")), Watch())
    assert found.rows[0].path == "refused"
    assert "nvfp4 needs more" in found.rows[0].why
    assert found.rows[0].kl is None
    assert found.rows[1].kl is not None


@pytest.mark.usefixtures("quick")
def test_a_kernel_that_is_wrong_gets_no_speed(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = QuantLinear.forward
    monkeypatch.setattr(QuantLinear, "forward", lambda self, x: forward(self, x).neg())
    (row,) = survey(request(place, "wrong", schemes=("W8A16",)), Watch()).rows
    assert row.tokens_per_second is None
    assert row.kl is not None
    assert "no speed: W8A16: decoded logits are" in row.why


def test_a_nan_in_a_weight_names_the_tensor(place: Path, tmp_path: Path) -> None:
    model = tiny.llama()
    model.model.layers[1].mlp.up_proj.weight.data[3, 4] = float("nan")
    tiny.directory(tmp_path / "nan", model)
    with pytest.raises(BadInput, match=r"model\.layers\.1\.mlp\.up_proj\.weight holds 1 values that are NaN"):
        survey(request(place, "nan", model=str(tmp_path / "nan")), Watch())


def test_a_quantized_model_is_refused(place: Path) -> None:
    model = quantize_(tiny.llama(), "W8A16")
    ids = [torch.arange(20)]
    with pytest.raises(BadInput, match=r"quantized already \(W8A16\)"):
        measure.prepare(model, ids, [], [torch.float32])


def test_a_short_text_is_refused_before_the_model_is_read(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "load", lambda *args: pytest.fail("the model was loaded"))
    with pytest.raises(BadInput, match=r"has \d+ tokens and 900000 were asked for"):
        survey(request(place, "short", tokens=900_000), Watch())
    survey_again = request(place, "short", tokens=900_001)
    with pytest.raises(BadInput, match="900001"):
        survey(survey_again, Watch())


def test_nothing_given_is_changed(place: Path) -> None:
    model = tiny.llama()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    windows = text.split(torch.arange(100) % tiny.VOCABULARY, 90, 32)
    bench = measure.prepare(model, windows, [torch.arange(16)[None]], [torch.float32, torch.bfloat16])
    measure.measure(bench, "NVFP4", "rtn")
    after = model.state_dict()
    assert list(after) == list(before)
    assert all(torch.equal(after[name], value) for name, value in before.items())


def test_sizes_count_kept_weights_at_16_bits_and_shared_ones_once() -> None:
    model = tiny.llama(tie_word_embeddings=True)
    linears = sum(
        m.weight.numel() for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"
    )
    kept = sum(p.numel() for p in model.parameters()) - linears
    quantize_(model, "W4A16_G32")
    total, bits = measure.size(model)
    assert bits == 4.5
    assert total == kept * 2 + linears * 4.5 / 8


def test_buffers_keep_their_dtype_when_a_copy_changes_its() -> None:
    model = tiny.llama()
    copy = measure.share(model, torch.bfloat16)
    assert {p.dtype for p in copy.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in copy.buffers()} == {torch.float32}
    assert all(a is b for a, b in zip(measure.share(model).parameters(), model.parameters(), strict=True))


def test_the_path_is_that_of_the_worst_layer() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 24))
    quantize_(model, "W4A16_G32", ignore=())
    path, why = service(model, 1, torch.bfloat16)
    assert path == "emulated"
    assert "1 of 2 layers" in why
    assert "N = 24" in why
    assert service(model[:1], 1, torch.bfloat16) == ("native", "linear_w4a16_group_cpu")
