"""Quality and decoding on a tiny random Llama: equal to a plain computation, and every check can fail."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn

from nybble.errors import BadInput, Mismatch
from nybble.methods import quantize_
from nybble.models import decode, text
from nybble.models.evaluate import by_definition, divergence, evaluate, logits, reference
from nybble.ops import QuantLinear

VOCABULARY = 96


def tiny(seed: int = 0, **settings: int) -> nn.Module:
    """A random Llama with two layers, sharp enough that its predictions differ from token to token."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    facts = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, **settings}
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, max_position_embeddings=256,
        initializer_range=0.2, tie_word_embeddings=False, **facts,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


@pytest.fixture(scope="module")
def model() -> nn.Module:
    return tiny()


@pytest.fixture(scope="module")
def windows() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return text.split(torch.randint(VOCABULARY, (400,), generator=generator), 300, 64)


class Bytes:
    """A tokenizer whose tokens are characters."""

    eos_token_id = None

    def __call__(self, content: str, **settings: object) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) % VOCABULARY for c in content]}

    def decode(self, ids: list[int], **settings: object) -> str:
        return "".join(chr(48 + i) for i in ids)


def test_quality_equals_a_plain_computation(model: nn.Module, windows: list[torch.Tensor]) -> None:
    changed = quantize_(copy.deepcopy(model), "W4A16_G32")
    kept = reference(model, windows)
    found = evaluate(changed, windows, kept)
    losses, divergences, agreements = [], [], []
    with torch.no_grad():
        for ids in windows:
            p = model(ids[None]).logits[0, :-1].double().log_softmax(-1)
            q = changed(ids[None]).logits[0, :-1].double().log_softmax(-1)
            losses.append(-q.gather(1, ids[1:, None])[:, 0])
            divergences.append((p.exp() * (p - q)).sum(-1))
            agreements.append((p.argmax(-1) == q.argmax(-1)).double())
    assert found.tokens == sum(len(w) - 1 for w in windows) == 295
    assert found.perplexity == pytest.approx(float(torch.cat(losses).mean().exp()), rel=1e-5)
    kl = float(torch.cat(divergences).mean())
    assert kl > 1e-3
    assert found.kl == pytest.approx(kl, rel=1e-3)
    assert found.top1 == float(torch.cat(agreements).mean())


def test_an_exact_copy_has_no_divergence(model: nn.Module, windows: list[torch.Tensor]) -> None:
    found = evaluate(copy.deepcopy(model), windows, reference(model, windows))
    assert found.kl is not None
    assert found.kl < 1e-6
    assert found.top1 == 1.0


def test_without_an_original_only_perplexity(model: nn.Module, windows: list[torch.Tensor]) -> None:
    found = evaluate(model, windows)
    assert (found.kl, found.top1) == (None, None)
    assert found.perplexity == reference(model, windows).quality.perplexity


def test_divergence_of_a_token_that_is_forbidden_is_finite() -> None:
    z = torch.tensor([[0.0, 1.0, -math.inf]])
    kept = (z - 1).clamp(min=torch.finfo(torch.float16).min).half()
    assert float(divergence(kept, z)) == pytest.approx(0, abs=1e-6)
    assert float(divergence(kept, torch.tensor([[-math.inf, 1.0, 0.0]]))) > 100


def test_nan_is_refused(windows: list[torch.Tensor]) -> None:
    broken = tiny()
    broken.lm_head.weight.data[3, 5] = math.nan
    with pytest.raises(BadInput, match=r"NaN \(window 1\)"):
        reference(broken, windows)


def test_progress_is_told(model: nn.Module, windows: list[torch.Tensor]) -> None:
    seen: list[tuple[int, int]] = []
    evaluate(model, windows, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, len(windows)) for i in range(len(windows))]


def test_by_definition_ends_with_an_exception(model: nn.Module) -> None:
    changed = quantize_(copy.deepcopy(model), "W8A16")
    layers = [m for m in changed.modules() if isinstance(m, QuantLinear)]
    inside: list[bool] = []

    def fail() -> None:
        with by_definition(changed):
            inside.extend("forward" in layer.__dict__ for layer in layers)
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail()
    assert inside == [True] * 14
    assert not any("forward" in layer.__dict__ for layer in layers)


def test_by_definition_ignores_the_kernels(
    model: nn.Module, windows: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = quantize_(copy.deepcopy(model), "W8A16")
    with torch.no_grad():
        right = logits(changed, windows[0])
        monkeypatch.setattr(QuantLinear, "forward", lambda self, x: x.new_zeros((*x.shape[:-1], self.out_features)))
        assert not torch.equal(logits(changed, windows[0]), right)
        with by_definition(changed):
            assert decode.distance(logits(changed, windows[0]), right) < 1e-5


@pytest.mark.parametrize(("tokens", "window", "lengths"), [
    (64, 64, [64]), (130, 64, [2, 64, 64]), (129, 64, [64, 64]), (10, 64, [10]), (2, 2, [2]),
])  # fmt: skip
def test_windows_are_the_end_of_the_text(tokens: int, window: int, lengths: list[int]) -> None:
    ids = torch.arange(200)
    found = text.split(ids, tokens, window)
    assert [len(part) for part in found] == lengths
    assert torch.equal(torch.cat(found), ids[200 - sum(lengths) :])


def test_a_short_text_names_both_numbers() -> None:
    with pytest.raises(BadInput, match="has 100 tokens and 4096 were asked for"):
        text.split(torch.arange(100), 4096, 1024)
    with pytest.raises(BadInput, match="at least 2"):
        text.split(torch.arange(100), 1, 1024)


@pytest.mark.parametrize(("length", "expected"), [(400, 3), (110, 1), (100, 0)])
def test_calibration_ends_where_evaluation_begins(length: int, expected: int) -> None:
    found = text.calibration(torch.arange(length), 100, windows=3, window=16)
    assert len(found) == expected
    if found:
        assert int(found[-1][0, -1]) == length - 101


def test_the_default_text_is_what_python_ships() -> None:
    from pydoc_data.topics import topics

    found = text.default_text()
    assert found.content.startswith(topics[min(topics)])
    assert found.content.endswith(topics[max(topics)])
    assert len(found.sha256) == 64


def test_an_unreadable_text_is_refused(tmp_path: object) -> None:
    from pathlib import Path

    bad = Path(str(tmp_path)) / "latin1.txt"
    bad.write_bytes(b"caf\xe9")
    for path in (bad, bad.with_name("none.txt")):
        with pytest.raises(BadInput, match="cannot be read as UTF-8"):
            text.read_text(path)


@pytest.mark.parametrize("scheme", [None, "W8A16", "W4A16_G32", "NVFP4A16", "W8A8"])
def test_the_runner_equals_the_whole_forward(model: nn.Module, windows: list[torch.Tensor], scheme: str | None) -> None:
    changed = model if scheme is None else quantize_(copy.deepcopy(model), scheme)
    speeds = decode.race({"original": model, "other": changed}, windows[0][:7], tokens=6, rounds=2, limit=600)
    assert set(speeds) == {"original", "other"}
    for speed in speeds.values():
        assert speed.tokens == 12
        assert speed.tokens_per_second > 0
    assert speeds["original"].error < 1e-5


def test_greedy_tokens_equal_those_of_transformers(model: nn.Module, windows: list[torch.Tensor]) -> None:
    prompt = windows[0][:9]
    runner = decode.Runner(model)
    made = []
    with torch.inference_mode():
        token = int(runner.start(prompt).argmax())
        for _ in range(8):
            made.append(token)
            token = int(runner.step(token).argmax())
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(prompt[None], attention_mask=torch.ones(1, 9), max_new_tokens=8, **settings)
    assert made == expected[0, 9:].tolist()


def test_no_speed_for_a_wrong_kernel(
    model: nn.Module, windows: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = quantize_(copy.deepcopy(model), "W8A16")
    forward = QuantLinear.forward
    monkeypatch.setattr(QuantLinear, "forward", lambda self, x: forward(self, x) * 1.05)
    with pytest.raises(Mismatch, match=r"decoded logits are .* away"):
        decode.race({"W8A16": changed}, windows[0][:7], tokens=2, rounds=1)


def test_a_restless_model_is_measured_by_its_own_unrest(
    model: nn.Module, windows: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    changed = quantize_(copy.deepcopy(model), "W8A16")
    monkeypatch.setattr(decode, "AGREEMENT", dict.fromkeys(decode.AGREEMENT, 0.0))
    (speed,) = decode.race({"W8A16": changed}, windows[0][:7], tokens=4, rounds=1).values()
    assert 0 < speed.error < 1e-4
    forward = QuantLinear.forward
    monkeypatch.setattr(QuantLinear, "forward", lambda self, x: forward(self, x) * 1.05)
    with pytest.raises(Mismatch):
        decode.race({"W8A16": changed}, windows[0][:7], tokens=4, rounds=1)


def test_no_speed_for_a_cache_that_forgets(
    model: nn.Module, windows: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def forget(self: decode.Runner, token: int) -> torch.Tensor:
        return self.start(torch.tensor([token]))

    monkeypatch.setattr(decode.Runner, "step", forget)
    with pytest.raises(Mismatch):
        decode.race({"original": model}, windows[0][:7], tokens=2, rounds=1)


def test_a_slow_model_stops_at_its_limit(
    model: nn.Module, windows: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(10_000))
    monkeypatch.setattr(decode.time, "perf_counter", lambda: float(next(clock)))
    speeds = decode.race({"slow": model}, windows[0][:3], tokens=50, rounds=3, limit=5.0)
    assert speeds["slow"].tokens == 2
    assert speeds["slow"].turns == (1.0, 1.0), "a second turn, so that it could disagree; no third"


def test_every_turn_tells_its_time(
    model: nn.Module, windows: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock that only steps move: 1, 4 and 2 ticks a token in the three turns."""
    now, turn, ticks = [0.0], [-1], (1.0, 4.0, 2.0)
    start, step = decode.Runner.start, decode.Runner.step

    def counted(self: decode.Runner, prompt: torch.Tensor) -> torch.Tensor:
        turn[0] += 1
        return start(self, prompt)

    def timed(self: decode.Runner, token: int) -> torch.Tensor:
        now[0] += ticks[turn[0]]
        return step(self, token)

    monkeypatch.setattr(decode.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(decode.Runner, "start", counted)
    monkeypatch.setattr(decode.Runner, "step", timed)
    monkeypatch.setattr(decode, "_unrest", lambda *args: pytest.fail("the definition is another run"))
    speed = decode.race({"model": model}, windows[0][:3], tokens=6, rounds=3, limit=15.0)["model"]
    assert speed.turns == ticks
    assert speed.tokens == 5 + 1 + 2, "until more than five of 15 seconds are over, the first token untimed"
    assert speed.seconds == 1.0


def test_an_empty_prompt_is_refused(model: nn.Module) -> None:
    with pytest.raises(BadInput, match="at least one token"):
        decode.race({"original": model}, torch.tensor([], dtype=torch.int64))


def test_generate_streams_what_the_runner_makes(model: nn.Module) -> None:
    pieces = list(decode.generate(model, Bytes(), "hello", 5))
    assert len(pieces) == 5
    assert "".join(pieces) == "".join(decode.generate(model, Bytes(), "hello", 5))


def test_generate_stops_at_the_end_of_the_positions(model: nn.Module) -> None:
    assert len(list(decode.generate(model, Bytes(), "x" * 253, 50))) == 3
    with pytest.raises(BadInput, match="256 tokens"):
        next(decode.generate(model, Bytes(), "x" * 256, 50))
    with pytest.raises(BadInput, match="0 tokens"):
        next(decode.generate(model, Bytes(), "", 50))


def test_generate_stops_at_the_end_of_the_sequence(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    first = next(decode.generate(model, Bytes(), "hello", 5))
    monkeypatch.setattr(model.generation_config, "eos_token_id", [ord(first) - 48])
    assert list(decode.generate(model, Bytes(), "hello", 5)) == []


def test_generate_holds_back_half_a_character(model: nn.Module) -> None:
    class Halves(Bytes):
        def decode(self, ids: list[int], **settings: object) -> str:
            return "é" * (len(ids) // 2) + "\N{REPLACEMENT CHARACTER}" * (len(ids) % 2)

    assert list(decode.generate(model, Halves(), "hello", 5)) == ["é", "é"]
