"""Distillation: the estimator's gradient, what is exported, and that training on the original brings it nearer."""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import nybble
import tiny
from nybble.errors import BadInput
from nybble.methods import distill, memory, rtn
from nybble.methods.layer import Layer
from nybble.methods.pipeline import weight_amax
from nybble.ops import QuantLinear
from nybble.ops.linear.reference import round_activation
from nybble.quantize.schemes import scheme


class Model(nn.Module):
    """Two fused projections, one that is not, and a head that is not quantized."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 64)
        self.gate_proj, self.up_proj = nn.Linear(64, 96), nn.Linear(64, 96)
        self.down_proj = nn.Linear(96, 64)
        self.lm_head = nn.Linear(64, 50, bias=False)
        self.to(dtype)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for _ in range(2):
            x = x + self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))
        return self.lm_head(x)


def batches(count: int = 8, seed: int = 1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 50, (4, 16), generator=generator) for _ in range(count)]


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {n: m for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"}


def kl(model: nn.Module, original: nn.Module) -> float:
    with torch.no_grad():
        return float(torch.stack([distill.divergence(original(b), model(b)) for b in batches(4, seed=9)]).mean())


@pytest.mark.parametrize("name", ["NVFP4A16", "NVFP4", "MXFP4", "W4A16_G32"])
def test_the_gradient_is_that_of_the_dequantized_linear(name: str) -> None:
    torch.manual_seed(0)
    row, linear = scheme(name), nn.Linear(64, 32)
    x = torch.randn(5, 64, requires_grad=True)
    trained = distill.Trained(linear, 0, 0)
    with distill.simulating({"l": linear}, {"l": trained}, row):
        y = linear(x)
    upstream = torch.randn_like(y)
    grads = torch.autograd.grad(y, [trained.parameters[0], x], upstream)
    amax = linear.weight.detach().abs().amax()
    w = rtn.apply(Layer("l", linear.weight.detach(), row, amax), rtn.Config()).dequantize().requires_grad_()
    a = round_activation(x.detach(), row.activation).requires_grad_()
    same = nn.functional.linear(a, w, linear.bias)
    assert torch.equal(y, same)
    expected = torch.autograd.grad(same, [w, a], upstream)
    assert all(torch.equal(g, e) for g, e in zip(grads, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rank", [0, 4])
def test_the_codes_exported_are_those_simulated(dtype: torch.dtype, rank: int) -> None:
    model, row = Model(dtype), scheme("NVFP4A16")
    config = distill.Config(steps=5, lr=1e-3, rank=rank, warmup=1)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        distill.fit(twin, linears(twin), row, batches(), config)
        trained = {name: distill.Trained(linear, 0, 0) for name, linear in linears(twin).items()}
        with distill.simulating(linears(twin), trained, row):
            simulated = twin(batches()[0])
    nybble.quantize_(model, row, "distill", calibration=batches(), config=config)
    amax = weight_amax(linears(twin))
    for name, linear in linears(twin).items():
        expected = rtn.apply(Layer(name, linear.weight, row, amax[name]), rtn.Config())
        found = model.get_submodule(name).weight
        assert all(torch.equal(found.parts[key], value) for key, value in expected.parts.items())
        assert not torch.equal(linear.weight, Model(dtype).get_submodule(name).weight)
    with torch.no_grad():
        for name, layer in list(model.named_modules()):
            if isinstance(layer, QuantLinear):
                plain = nn.Linear(layer.in_features, layer.out_features).to(dtype)
                plain.weight, plain.bias = nn.Parameter(layer.weight.dequantize(dtype)), layer.bias
                model.set_submodule(name, plain)
        assert torch.equal(model(batches()[0]), simulated)


@pytest.mark.parametrize(("name", "rank"), [("MXFP4A16", 0), ("W3A16", 0), ("W3A16", 16), ("NVFP4", 0)])
def test_training_brings_the_model_nearer_to_the_original(name: str, rank: int) -> None:
    original = Model()
    before = {n: p.clone() for n, p in original.named_parameters()}
    nearest = kl(nybble.quantize_(Model(), name), original)
    twin = copy.deepcopy(original, {id(p): p for p in original.parameters()})
    config = distill.Config(steps=120, lr=2e-3 if rank else 3e-4, rank=rank, warmup=5)
    nybble.quantize_(twin, name, "distill", calibration=batches(16), config=config)
    assert kl(twin, original) < 0.75 * nearest
    assert all(torch.equal(p, before[n]) for n, p in original.named_parameters()), "shared parameters were written to"
    assert all(p.grad is None for p in original.parameters())


def test_weights_only_leaves_inputs_alone_while_training() -> None:
    seen = []
    for only in (True, False):
        model = Model()
        config = distill.Config(steps=2, lr=1e-4, weights_only=only, warmup=0)
        seen.append(distill.fit(model, linears(model), scheme("W4A4"), batches(), config)[0])
    assert seen[0] < seen[1], "rounding inputs as well costs more"


@pytest.mark.parametrize("name", ["NVFP4", "MXFP4", "W4A16_G32"])
def test_what_was_learned_is_saved_and_loaded_bit_for_bit(name: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    data = [{"input_ids": torch.randint(0, tiny.VOCABULARY, (2, 16), generator=generator)} for _ in range(4)]
    model = tiny.llama()
    nybble.quantize_(model, name, "distill", calibration=data, config=distill.Config(steps=4, lr=1e-3, warmup=1))
    nybble.save(model, tmp_path / "out")
    again = nybble.load(tmp_path / "out")
    layers = {n: m for n, m in model.named_modules() if isinstance(m, QuantLinear)}
    assert len(layers) == 14
    for layer_name, layer in layers.items():
        loaded = again.get_submodule(layer_name).weight.parts
        assert all(torch.equal(loaded[part], value) for part, value in layer.weight.parts.items()), layer_name
    with torch.no_grad():
        assert torch.equal(again(**data[0]).logits, model(**data[0]).logits)


def test_steps_are_told() -> None:
    told: list[tuple[int, int, str]] = []
    config = distill.Config(steps=3, lr=1e-4)
    nybble.quantize_(Model(), "NVFP4A16", "distill", calibration=batches(), config=config,
                     progress=lambda *words: told.append(words))  # fmt: skip
    assert [words[:2] for words in told] == [(1, 3), (2, 3), (3, 3), *[(i, 3) for i in (1, 2, 3)]]
    assert all(re.fullmatch(r"distill: \d\.\d{4} nats", words[2]) for words in told[:3])


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("at", [7, 25])
def test_a_run_that_was_stopped_goes_on(at: int, rank: int, tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    told: list[int] = []

    def stop(done: int, total: int, name: str) -> None:
        told.append(done)
        if len(told) == at:
            raise Stopped

    asked: dict[str, Any] = {"calibration": batches(), "config": distill.Config(steps=23, lr=1e-3, rank=rank)}
    expected = nybble.quantize_(Model(), "NVFP4", "distill", **asked)
    with pytest.raises(Stopped):
        nybble.quantize_(Model(), "NVFP4", "distill", **asked, work_dir=tmp_path, progress=stop)
    kept = 6 if at == 7 else 23  # every tenth of the steps, here two, and the last; 25 is the second layer
    told.clear()
    model = nybble.quantize_(Model(), "NVFP4", "distill", **asked, work_dir=tmp_path, progress=stop_never(told))
    assert told[0] == (kept + 1 if kept < 23 else 1)
    assert len(list(tmp_path.glob("step-*.pt"))) == 1
    for a, b in zip(model.modules(), expected.modules(), strict=True):
        if isinstance(a, QuantLinear):
            assert all(torch.equal(a.weight.parts[name], part) for name, part in b.weight.parts.items())


def stop_never(told: list[int]) -> Callable[[int, int, str], None]:
    return lambda done, total, name: told.append(done)


def test_a_training_that_does_not_fit_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = 2 * 64 * 96 + 96 * 64
    whole, small = 20 * weights, 4 * weights + 16 * 16 * 3 * (64 + 96)
    assert [distill.training_bytes(linears(Model()), rank) for rank in (0, 16)] == [whole, small]
    model = Model()
    monkeypatch.setattr(memory, "free", lambda device: whole - 1)
    with pytest.raises(BadInput, match=r"0.000369 GB are needed .* cpu has 0.000369 GB: rank=16 .* in 0.000197 GB"):
        nybble.quantize_(model, "NVFP4A16", "distill", calibration=batches())
    monkeypatch.setattr(memory, "free", lambda device: small - 1)
    with pytest.raises(BadInput, match="no rank fits"):
        nybble.quantize_(model, "NVFP4A16", "distill", calibration=batches(), config=distill.Config(rank=16))
    assert linears(model), "nothing was changed"


def test_refusals() -> None:
    with pytest.raises(BadInput, match="steps 0"):
        nybble.quantize_(Model(), "NVFP4A16", "distill", calibration=batches(), config=distill.Config(steps=0))
    with pytest.raises(BadInput, match="give calibration"):
        nybble.quantize_(Model(), "NVFP4A16", "distill")
    with pytest.raises(BadInput, match="tuple"):
        distill.fit(Pair(), {"linear": nn.Linear(4, 4)}, scheme("NVFP4A16"), [torch.ones(1, 4)], distill.Config())
    broken = Model()
    broken.lm_head.weight.data[0, 0] = torch.inf
    with pytest.raises(BadInput, match="the loss is nan at step 1"):
        nybble.quantize_(broken, "NVFP4A16", "distill", calibration=batches())


class Pair(nn.Module):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x, x
