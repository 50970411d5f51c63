"""Methods that change a model before it is rounded: its outputs stay, and rounding hurts less."""

import copy
import json
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import nybble
from method_layers import layer
from nybble.errors import BadInput, NybbleError, Unsupported
from nybble.methods import Settings, awq, distill, hadamard, record, rtn, smoothquant
from nybble.methods.calibrate import collect
from nybble.methods.fold import Edge, edges, fold_edges
from nybble.methods.layer import Layer
from nybble.methods.stages import Whole, split
from nybble.ops import QuantLinear


def llama(tied: bool = True, outliers: bool = True) -> nn.Module:
    """A small Llama whose residual stream has three channels far larger than the rest."""
    config = LlamaConfig(
        hidden_size=96, intermediate_size=160, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        head_dim=16, vocab_size=120, max_position_embeddings=64, tie_word_embeddings=tied, initializer_range=0.1,
    )  # fmt: skip
    torch.manual_seed(0)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(torch.rand_like(parameter) + 0.5)
        if outliers:
            for layer in model.model.layers:
                layer.input_layernorm.weight[[3, 40, 77]] *= 30
                layer.post_attention_layernorm.weight[[3, 40, 77]] *= 30
                for linear in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj,
                               layer.mlp.gate_proj, layer.mlp.up_proj):  # fmt: skip
                    linear.weight[:, [3, 40, 77]] /= 30
    return model


def calibration() -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{"input_ids": torch.randint(0, 120, (2, 32), generator=generator)} for _ in range(4)]


IDS = torch.arange(100, 40, -2)[None]


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS, use_cache=False).logits


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def folded(model: nn.Module, method: object, config: object) -> int:
    """Fold every block of the model by a method; the number of inputs that changed."""
    linears = {n: m for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"}
    count = 0
    with torch.no_grad():
        for stage in split(model, linears):
            driver = Whole(model, calibration())
            seen = collect(stage.linears, driver.run(stage), stage.module)
            changed = method.fold(stage, seen, nybble.quantize.schemes.scheme("W4A16_G32"), config,
                                  lambda d=driver, s=stage: d.probe(s))  # fmt: skip
            again = collect(stage.linears, driver.run(stage), stage.module)
            for name, inputs in changed.items():
                difference = inputs.second_moment - again[name].second_moment
                assert float(difference.norm() / again[name].second_moment.norm()) < 2.0**-16, name
            count += len(changed)
    return count


@pytest.mark.parametrize(
    ("method", "config", "least"),
    [
        (smoothquant, smoothquant.Config(), 2 * 5),
        (smoothquant, smoothquant.Config(products=True), 2 * 7),
        (awq, awq.Config(points=5), 2),
    ],
)
def test_folding_leaves_the_model_and_says_what_the_inputs_became(method: object, config: object, least: int) -> None:
    model, original = llama(), llama()
    before = {n: p.clone() for n, p in model.named_parameters()}
    twin = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    assert folded(twin, method, config) >= least
    assert distance(logits(twin), logits(original)) < 2.0**-18
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters()), "shared parameters were written to"


def test_a_fold_that_would_change_the_block_is_undone() -> None:
    class AddsOne(nn.LayerNorm):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.layer_norm(x, self.normalized_shape) * (1 + self.weight)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.linear = AddsOne(16), nn.Linear(16, 16)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(self.norm(x))

    torch.manual_seed(0)
    model, x = Block(), torch.randn(8, 16)
    with torch.no_grad():
        stage = split(model, {"linear": model.linear})[0]
        driver = Whole(model, [x])
        seen = collect(stage.linears, driver.run(stage), model)
        expected = model(x)
        found = list(edges(stage, seen, products=True))
        assert [edge.producer for edge in found] == [model.norm]
        with pytest.warns(UserWarning, match="AddsOne before linear"):
            assert fold_edges(stage, seen, [(found[0], torch.full((16,), 2.0))], lambda: driver.probe(stage)) == {}
        assert torch.equal(model(x), expected)


def test_heads_that_share_keys_share_their_scale() -> None:
    edge = Edge(("o",), (nn.Linear(12, 4),), nn.Linear(4, 6), heads=(6, 2, 2))
    tied = edge.tied(torch.arange(12.0))
    assert tied.tolist() == [2, 3, 2, 3, 6, 7, 6, 7, 10, 11, 10, 11]
    assert edge.at_producer(tied).tolist() == [2, 3, 6, 7, 10, 11]


@pytest.mark.parametrize(("name", "k"), [("W4A16_G32", 96), ("W4A16_G32", 80), ("W3A16", 64), ("NVFP4A16", 48)])
def test_clipping_serves_each_group(name: str, k: int) -> None:
    """No group gets worse, a few with outliers get better, and only what is beyond the bound moves."""
    one = layer(name, 24, k, seed=0)
    tail = one.weight * (1 + (torch.arange(24 * k).view(24, k) % 37 == 0) * 1.0)
    cut = awq.clipped(tail, one.inputs, one.scheme)
    moved = cut != tail
    assert moved.any()
    assert (cut.abs() <= tail.abs()).all()
    assert (cut.sign() == tail.sign()).all()
    fmt, h = one.scheme.weight, one.inputs.second_moment
    for start in range(0, k, fmt.block[1] or k):
        group = slice(start, start + (fmt.block[1] or k))
        errors = []
        for weight in (tail, cut):
            rounded = rtn.apply(Layer("l", weight, one.scheme), rtn.Config()).dequantize()
            d = (tail - rounded)[:, group].double()
            errors.append(((d @ h[group, group]) * d).sum(1))
        if fmt.tensor_scale is None:  # where there is one, clipping the largest group moves all scales a little
            assert (errors[1] <= errors[0] * (1 + 1e-5)).all()
    assert distance(cut, tail) < 0.3


def test_they_help_where_they_should() -> None:
    original = logits(llama())

    def error(scheme: str, method: str) -> float:
        return distance(logits(nybble.quantize_(llama(), scheme, method, calibration=calibration())), original)

    assert error("W8A8", "smoothquant") < 0.7 * error("W8A8", "rtn")
    assert error("W4A16_G32", "awq") < error("W4A16_G32", "rtn")
    clipping = awq.Config(clip=True)
    clipped = nybble.quantize_(llama(), "W4A16_G32", "awq", calibration=calibration(), config=clipping)
    assert distance(logits(clipped), original) < error("W4A16_G32", "rtn")
    assert error("W4A4", "hadamard") < error("W4A4", "rtn")
    assert error("W4A4", "hadamard+gptq") < error("W4A4", "hadamard")
    assert error("W8A8", "smoothquant+gptq") < error("W8A8", "rtn")


@pytest.mark.parametrize("order", [1, 2, 4, 8, 12, 20, 28, 36, 44, 60])
def test_matrices_are_hadamard(order: int) -> None:
    h = hadamard.matrix(order)
    assert (h.abs() == 1).all()
    assert torch.equal(h @ h.t(), order * torch.eye(order).double())


def test_sizes_and_their_factors() -> None:
    assert hadamard.factors(576) == (36, 16)
    assert hadamard.factors(1536) == (12, 128)
    assert hadamard.factors(4096) == (1, 4096)
    assert hadamard.factors(14336) == (28, 512)
    assert hadamard.factors(7) == (1, 1)
    assert hadamard.factors(96 * 5) == (60, 8)
    with pytest.raises(Unsupported, match="order 6"):
        hadamard.matrix(6)


@pytest.mark.parametrize("size", [64, 96, 160, 6])
def test_a_rotation_keeps_lengths_and_is_shared_while_its_input_lives(size: int) -> None:
    rotation = hadamard.Rotation(size, seed=3)
    x = torch.randn(5, size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y = rotation(x)
    assert float((y.norm(dim=-1) / x.norm(dim=-1) - 1).abs().max()) < 1e-12
    assert rotation(x) is y
    x += 1
    assert rotation(x) is not y, "an input that was written to is another input"
    assert not torch.equal(hadamard.Rotation(size, seed=4)(x), rotation(x))
    twin = copy.deepcopy(rotation)
    assert torch.equal(twin(x), rotation(x))


def test_a_rotation_in_inference_mode_serves_training_afterwards() -> None:
    hadamard.unit.cache_clear()
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(0))
    rotation = hadamard.Rotation(96, seed=3)
    with torch.inference_mode():
        inside = x.clone()
        y = rotation(inside)
        inside += 1
        assert not torch.equal(rotation(inside), y)
    z = rotation(x.requires_grad_())
    z.sum().backward()
    assert torch.equal(z, y)


@pytest.mark.parametrize(
    "config", [hadamard.Config(), hadamard.Config(fold=True), hadamard.Config(fold=True, online=False)]
)
@pytest.mark.parametrize("tied", [True, False])
def test_rotating_leaves_the_model(config: hadamard.Config, tied: bool) -> None:
    model, original = llama(tied), llama(tied)
    linears = {n: m for n, m in model.named_modules() if type(m) is nn.Linear and n != "lm_head"}
    with torch.no_grad():
        hadamard.prepare(model, linears, nybble.quantize.schemes.scheme("W4A4"), config)
    assert distance(logits(model), logits(original)) < 2.0**-17
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, original.model.layers[0].mlp.up_proj.weight)


def test_folding_leaves_only_two_rotations_a_block() -> None:
    model = nybble.quantize_(llama(), "W4A4", "hadamard", config=hadamard.Config(fold=True))
    online = [n for n, m in model.named_modules() if isinstance(m, QuantLinear) and hasattr(m, "rotation")]
    assert sorted(n.rpartition(".")[2] for n in online) == ["down_proj"] * 2 + ["o_proj"] * 2
    assert distance(logits(model), logits(llama())) < 0.9
    with pytest.raises(Unsupported, match="Sequential"):
        nybble.quantize_(nn.Sequential(nn.Linear(8, 8)), "W4A4", "hadamard", config=hadamard.Config(fold=True))


def test_seeds_reach_the_part_that_draws() -> None:
    models = [
        nybble.quantize_(llama(), "W4A4", "hadamard+gptq", calibration=calibration(), config=Settings(seed=seed))
        for seed in (0, 0, 1)
    ]
    codes = [m.model.layers[0].mlp.up_proj.codes for m in models]
    assert torch.equal(codes[0], codes[1])
    assert not torch.equal(codes[0], codes[2])
    assert record(models[0]).method == "hadamard+gptq"


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(BadInput, match="alpha"):
        nybble.quantize_(llama(), "W8A8", "smoothquant", calibration=calibration(), config=smoothquant.Config(1.5))
    with pytest.raises(BadInput, match="points"):
        nybble.quantize_(llama(), "W4A16", "awq", calibration=calibration(), config=awq.Config(points=1))


@pytest.mark.parametrize("method", ["smoothquant+gptq", "awq", "awq+schur", "hadamard+gptq", "distill"])
def test_what_a_method_made_is_saved_and_loaded(method: str, tmp_path: Path) -> None:
    """What is folded or trained lives in ordinary weights, so that a checkpoint needs no word for it."""
    parts = {"hadamard": hadamard.Config(fold=True, online=False), "distill": distill.Config(steps=3, lr=1e-3)}
    settings = Settings(parts=parts)
    model = nybble.quantize_(llama(), "W4A16_G32", method, calibration=calibration(), config=settings)
    nybble.save(model, tmp_path / "out")
    again = nybble.load(tmp_path / "out")
    assert torch.equal(logits(again), logits(model))
    pytest.importorskip(
        "compressed_tensors", reason="transformers reads these checkpoints with compressed-tensors only"
    )
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    assert distance(logits(plain), logits(model)) < 2.0**-16


def test_a_plain_rotation_is_written_and_read(tmp_path: Path) -> None:
    """compressed-tensors applies what the file says to the model that transformers loads, and has our logits."""
    config = hadamard.Config(plain=True)
    model = llama()
    reference = copy.deepcopy(model)
    nybble.quantize_(model, "W8A16", "hadamard", config=config)
    with pytest.warns(UserWarning, match="transformers alone does not"):
        nybble.save(model, tmp_path / "out")
    again = nybble.load(tmp_path / "out")
    assert torch.equal(logits(again), logits(model))
    rotations = {id(m) for m in again.modules() if isinstance(m, hadamard.Rotation)}
    assert len(rotations) == 4 * len(again.model.layers), "fused projections share theirs"
    transform = pytest.importorskip("compressed_tensors.transform", reason="it defines what a transform_config means")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32).eval()
    said = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["transform_config"]
    assert distance(logits(plain), logits(model)) > 2.0**-4, "it matters"
    transform.apply_transform_config(plain, transform.TransformConfig(**said))
    assert distance(logits(plain), logits(model)) < 2.0**-16
    assert distance(logits(model), logits(reference)) < 0.5


def test_what_turns_inputs_as_they_come_is_not_saved_in_silence(tmp_path: Path) -> None:
    model = nybble.quantize_(llama(), "W4A16_G32", "hadamard")
    with pytest.raises(NybbleError):
        nybble.save(model, tmp_path / "out")
