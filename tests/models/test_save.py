"""Whole models out and in again: equal to the bit, in a fresh process and without a network."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import nn

from nybble.errors import BadInput, Unsupported
from nybble.methods import quantize_, record
from nybble.models import check_saveable, load, load_tokenizer, save
from nybble.quantize.schemes import SCHEMES
from tiny_models import linears, logits, quantized, tensors_in, tiny

SAVEABLE = [
    "W8A16", "W8A8", "W4A16", "W4A16_ASYM", "W4A8", "FP8_DYNAMIC", "FP8_BLOCK", "NVFP4A16", "NVFP4", "MXFP4A16",
    "MXFP4", "MXFP8A16", "MXFP8", "FP8A16", "W4A16_G64", "W4A16_G32_ASYM", "W3A16", "W2A16", "MXFP6A16",
]  # fmt: skip


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
