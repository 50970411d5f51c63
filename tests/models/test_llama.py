"""The Llama runner against transformers' own modules, on the CPU: prefill, decode, fusing and refusals."""

import pytest
import torch
from torch import nn

import nybble
from nybble.errors import BadInput, Unsupported
from nybble.models import fed
from nybble.models.llama import Runner, fuse, refusal
from nybble.ops import QuantLinear
from nybble.ops.linear import linear
from nybble.quantize import QuantTensor, schemes
from nybble.quantize.tensor import concatenate, split_rows

transformers = pytest.importorskip("transformers", reason="the definition of the model")


def tiny(kind: str = "llama", **changes) -> nn.Module:
    config = {"hidden_size": 128, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4,
              "num_key_value_heads": 2, "vocab_size": 97, "max_position_embeddings": 64, **changes}  # fmt: skip
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **config))
    return model.eval()


PROMPT = torch.tensor([[5, 17, 3, 80, 41], [9, 9, 1, 0, 96]])


@torch.no_grad()
def agree(model: nn.Module, steps: int = 6) -> None:
    """The runner's logits after each step are the full forward's, and its tokens transformers' greedy ones."""
    runner, prompt = Runner(model, capacity=16, batch=2), PROMPT.to(model.device)
    logits = [runner.prefill(prompt).clone()]
    for _ in range(steps):
        logits.append(runner.step().clone())
    tokens = runner.tokens[:, : runner.length]
    full = model(tokens).logits[:, PROMPT.shape[1] - 1 :]
    got = torch.stack(logits, 1)
    assert float((got - full).norm() / full.norm()) < 1e-5
    assert torch.equal(got[:, :-1].argmax(-1), tokens[:, PROMPT.shape[1] :])


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [4, 2])
def test_captured_steps_agree_with_transformers(heads: int) -> None:
    agree(tiny(num_attention_heads=heads).to("cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [None, "W4A16", "NVFP4A16"])
def test_captured_steps_are_those_of_single_launches(scheme: str | None) -> None:
    model = tiny().to("cuda", torch.bfloat16)
    model = model if scheme is None else nybble.quantize_(model, scheme)
    results = []
    for graph in (False, True):
        runner = Runner(model, capacity=16, batch=2, graph=graph)
        runner.prefill(PROMPT.cuda())
        results.append((runner.decode(8).clone(), runner.logits.clone()))
        assert not runner.turns.any()
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_agrees_with_transformers(kind: str) -> None:
    agree(tiny(kind))


def test_llama3_rotary_positions_and_tied_head() -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8}  # fmt: skip
    agree(tiny(rope_parameters=scaling, tie_word_embeddings=True))


@pytest.mark.parametrize("scheme", ["W8A16", "W4A16", "NVFP4A16", "MXFP4", "FP8_BLOCK"])
def test_agrees_with_transformers_when_quantized(scheme: str) -> None:
    agree(nybble.quantize_(tiny(), scheme))


@pytest.mark.parametrize("scheme", ["W8A8", "MXFP4", "FP8_DYNAMIC"])
def test_norms_and_gates_hand_over_codes(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What runs where a GPU multiplies codes; here the product is made of its definition."""
    given: list[str] = []

    def product(a: QuantTensor, w: QuantTensor, bias: torch.Tensor | None) -> torch.Tensor:
        given.append(a.format.name)
        return linear(a.dequantize(), w, bias)

    monkeypatch.setattr(fed, "takes_codes", lambda x, w, bias, activation: activation is not None)
    monkeypatch.setattr(fed, "product", product)
    agree(nybble.quantize_(tiny(), scheme), steps=2)
    projections, layers, forwards = 3, 2, 3
    assert given == [schemes.scheme(scheme).activation.name] * (projections * layers * forwards)


def test_a_layer_with_hooks_gets_its_input_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fed, "takes_codes", lambda *args: True)
    layer = QuantLinear(nybble.quantize(torch.ones(8, 64), "int8_channel"), None, nybble.formats.get("int8_token"))
    seen: list[torch.Tensor] = []
    layer.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    fed.gated(layer, torch.ones(2, 128))
    assert [x.shape for x in seen] == [(2, 64)]


def test_a_second_prompt_starts_afresh() -> None:
    runner = Runner(tiny(), capacity=16, batch=2)
    runner.prefill(PROMPT)
    first = runner.decode(5).clone()
    runner.prefill(PROMPT.flip(0))
    assert torch.equal(runner.decode(5), first.flip(0))


def test_fused_weights_are_held_once() -> None:
    model = tiny()
    Runner(model, capacity=8)
    attention = model.model.layers[0].self_attn
    storage = {p.weight.untyped_storage().data_ptr() for p in (attention.q_proj, attention.k_proj, attention.v_proj)}
    assert len(storage) == 1
    model = nybble.quantize_(tiny(), "NVFP4A16")
    Runner(model, capacity=8)
    mlp = model.model.layers[1].mlp
    assert mlp.gate_proj.codes.untyped_storage().data_ptr() == mlp.up_proj.codes.untyped_storage().data_ptr()


def test_what_cannot_be_fused_is_called_one_by_one() -> None:
    generator = torch.Generator().manual_seed(0)
    parts = [torch.randn(n, 64, generator=generator) * s for n, s in ((32, 1.0), (16, 3.0))]
    x = torch.randn(3, 64, generator=generator)
    for formats in (("nvfp4", "nvfp4"), ("nvfp4", "mxfp4"), ("fp8_tensor", "fp8_tensor")):
        layers = [QuantLinear(nybble.quantize(w, f)) for w, f in zip(parts, formats, strict=True)]
        assert concatenate([layer.weight for layer in layers]) is None
        assert torch.equal(fuse(layers)(x), torch.cat([layer(x) for layer in layers], -1))
    with pytest.raises(BadInput, match="bias"):
        fuse([nn.Linear(4, 4), nn.Linear(4, 4, bias=False)])


def test_rows_are_joined_and_split_bit_for_bit() -> None:
    generator = torch.Generator().manual_seed(0)
    for name in ("int4_g32_asym", "int8_channel", "mxfp4", "int3_g64"):
        parts = [nybble.quantize(torch.randn(n, 100, generator=generator), name) for n in (32, 16, 48)]
        whole = concatenate(parts)
        assert whole.shape == (96, 100)
        assert torch.equal(whole.dequantize(), torch.cat([p.dequantize() for p in parts]))
        for part, view in zip(parts, split_rows(whole, [32, 16, 48]), strict=True):
            assert torch.equal(view.dequantize(), part.dequantize())


def test_refusals_say_why() -> None:
    assert "gpt2" in refusal(transformers.AutoModelForCausalLM.from_config(
        transformers.AutoConfig.for_model("gpt2", n_embd=32, n_layer=1, n_head=2, vocab_size=10)))  # fmt: skip
    assert "None" in refusal(nn.Linear(2, 2))
    assert "slides" in refusal(tiny("mistral", sliding_window=16))
    assert "gelu" in refusal(tiny(hidden_act="gelu"))
    with pytest.raises(Unsupported, match="gelu"):
        Runner(tiny(hidden_act="gelu"), capacity=8)


def test_the_cache_has_an_end() -> None:
    runner = Runner(tiny(), capacity=7, batch=2)
    with pytest.raises(BadInput, match="prefill"):
        runner.step()
    runner.prefill(PROMPT)
    runner.decode(2)
    with pytest.raises(BadInput, match="full: 7"):
        runner.step()
    with pytest.raises(BadInput, match=r"1 to 7"):
        runner.prefill(torch.zeros((2, 8), dtype=torch.int64))
    with pytest.raises(BadInput, match=r"\[2"):
        runner.prefill(PROMPT[:1])
