"""GGUF: every type the package can decode is read, and the models that come out are transformers' to the bit."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import gguf_files
from nybble.checkpoints.gguf import ARCHITECTURES, GgufFile
from nybble.errors import BadInput, DamagedFile, Unsupported
from nybble.models import load
from nybble.quantize import quantize

Kind = gguf.GGMLQuantizationType
SMALL = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {"head_dim": 128}),
    "starcoder2": ("Starcoder2Config", {"bos_token_id": 1, "eos_token_id": 1}),
    "stablelm": ("StableLmConfig", {}),
    "gemma2": ("Gemma2Config", {"head_dim": 16}),
    "gemma3": ("Gemma3TextConfig", {"head_dim": 16}),
}


def model_of(architecture: str, **more: Any) -> Any:
    import transformers

    name, special = CONFIGS[architecture]
    config = getattr(transformers, name)(**{**SMALL, **special, **more})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    return model


def test_every_architecture_is_tested() -> None:
    assert CONFIGS.keys() == ARCHITECTURES.keys()


@pytest.mark.parametrize("architecture", CONFIGS)
def test_models_equal_transformers_own_reading(architecture: str, tmp_path: Path) -> None:
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    original = model_of(architecture)
    path = gguf_files.write(tmp_path / "m.gguf", original, architecture, {"mlp.down_proj.weight": Kind.Q8_0})
    model = load(path)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    own = model.state_dict()
    assert theirs.keys() >= {name for name, _ in original.named_parameters()}
    for name, tensor in theirs.items():
        assert torch.equal(own[name], tensor), name


@pytest.mark.parametrize("architecture", CONFIGS)
def test_a_model_in_float32_comes_back(architecture: str, tmp_path: Path) -> None:
    original = model_of(architecture)
    model = load(gguf_files.write(tmp_path / "m.gguf", original, architecture))
    ids = torch.arange(12).reshape(2, 6)
    with torch.no_grad():
        expected, got = original(ids).logits, model(ids).logits
    assert (got - expected).norm() / expected.norm() < 1e-6  # metadata holds the norm's epsilon in float32
    assert not model.training


def test_weights_are_tied_again(tmp_path: Path) -> None:
    tied = load(gguf_files.write(tmp_path / "a.gguf", model_of("llama", tie_word_embeddings=True), "llama"))
    apart = load(gguf_files.write(tmp_path / "b.gguf", model_of("llama", tie_word_embeddings=False), "llama"))
    assert tied.lm_head.weight is tied.model.embed_tokens.weight  # type: ignore[union-attr]
    assert apart.lm_head.weight is not apart.model.embed_tokens.weight  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_the_dtype_is_asked_for_or_float32(dtype: torch.dtype | None, tmp_path: Path) -> None:
    model = load(gguf_files.write(tmp_path / "m.gguf", model_of("llama"), "llama"), dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {dtype or torch.float32}


def file_of(tensors: dict[str, tuple[np.ndarray, Kind]], path: Path, architecture: str = "qwen2") -> GgufFile:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(1)
    for name, (data, kind) in tensors.items():
        writer.add_tensor(name, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return GgufFile(path)


def decodable() -> list[Kind]:
    """Every block type the package decodes: found by trying, since it has no list of them."""
    found = []
    for kind, (_, size) in gguf.GGML_QUANT_SIZES.items():
        try:
            gguf.quants.dequantize(np.zeros((1, size), dtype=np.uint8), kind)
        except NotImplementedError:
            continue
        found.append(kind)
    return found


def test_the_types_in_use_are_decodable() -> None:
    assert {k.name for k in decodable()} >= {
        "F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K",
        "IQ1_S", "IQ2_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS", "TQ1_0", "TQ2_0", "MXFP4", "NVFP4",
    }  # fmt: skip


@pytest.mark.parametrize("kind", decodable(), ids=lambda kind: kind.name)
def test_every_type_is_read_in_torchs_order(kind: Kind, tmp_path: Path) -> None:
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows, columns = 3, 2 * max(block, 32)
    raw = np.random.default_rng(0).integers(0, 100, (rows, columns // block * size), dtype=np.uint8)
    data = raw.view({"F32": np.float32, "F16": np.float16}.get(kind.name, np.uint8))
    got = file_of({"x": (data, kind)}, tmp_path / "x.gguf").read("x", None)
    assert (tuple(got.shape), got.dtype) == ((rows, columns), torch.float32)
    for row in range(rows):  # each row on its own: a wrong order or a wrong stride would show
        expected = torch.from_numpy(gguf.quants.dequantize(data[row], kind).copy())
        assert torch.equal(got[row].nan_to_num(7.0), expected.nan_to_num(7.0))


def test_mxfp4_and_nvfp4_mean_our_formats(tmp_path: Path, rng: torch.Generator) -> None:
    values = torch.randn(4, 64, generator=rng)
    mx = quantize(values, "mxfp4")
    nv = quantize(values, "nvfp4", tensor_amax=6.0 * 448)  # a tensor scale of one: the block holds none
    assert nv.tensor_scale is not None
    assert float(nv.tensor_scale) == 1.0
    tensors = {"mx": (mxfp4_blocks(mx), Kind.MXFP4), "nv": (nvfp4_blocks(nv), Kind.NVFP4)}
    file = file_of(tensors, tmp_path / "x.gguf")
    assert torch.equal(file.read("mx", None), mx.dequantize())
    assert torch.equal(file.read("nv", None), nv.dequantize())


def mxfp4_blocks(q: Any) -> np.ndarray:
    """A byte of scale, then 16 bytes that hold elements j and j + 16."""
    codes = q.unpack().reshape(4, 2, 2, 16)
    return torch.cat([q.scale[..., None], codes[:, :, 0] | codes[:, :, 1] << 4], -1).flatten(1).numpy()


def nvfp4_blocks(q: Any) -> np.ndarray:
    """Four scales, then for each 16 values 8 bytes that hold elements j and j + 8."""
    codes = q.unpack().reshape(4, 4, 2, 8)
    return torch.cat([q.scale, (codes[:, :, 0] | codes[:, :, 1] << 4).flatten(1)], -1).numpy()


def llama3_divisors(factor: float, theta: float, dimension: int) -> np.ndarray:
    """llama.cpp's loop over the frequencies."""
    divisors = []
    for i in range(0, dimension, 2):
        wavelength = 2 * math.pi * theta ** (i / dimension)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / (4 - 1)
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, dtype=np.float32)


def test_llama3_rotary_scaling_is_recovered(tmp_path: Path) -> None:
    theta, rule = 500000.0, {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    rope = {"rope_type": "llama3", "rope_theta": theta, "factor": 32.0, **rule}
    original = model_of("llama", head_dim=32, rope_parameters=rope)
    extra = {"rope_freqs.weight": llama3_divisors(32.0, theta, 32)}
    model = load(gguf_files.write(tmp_path / "m.gguf", original, "llama", extra=extra))
    ids = torch.arange(12)[None]
    with torch.no_grad():
        expected, got = original(ids).logits, model(ids).logits
        plain = model_of("llama", head_dim=32, rope_parameters={"rope_type": "default", "rope_theta": theta})(
            ids
        ).logits
    assert (got - expected).norm() / expected.norm() < 1e-6
    assert (plain - expected).norm() / expected.norm() > 1e-5, "the test would not see a rule that is lost"
    extra["rope_freqs.weight"][3] *= 1.5
    with pytest.raises(Unsupported, match="follows no rule"):
        load(gguf_files.write(tmp_path / "n.gguf", original, "llama", extra=extra))


def test_scaling_in_the_metadata_is_refused_not_lost(tmp_path: Path) -> None:
    strings = {"llama.rope.scaling.type": "yarn"}
    path = gguf_files.write(tmp_path / "m.gguf", model_of("llama"), "llama", strings=strings)
    with pytest.raises(Unsupported, match="'yarn'"):
        load(path)


def test_one_part_of_several_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m-00001-of-00002.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(1)
    writer.add_uint16("split.count", 2)
    writer.add_tensor("x", np.zeros((1, 4), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with pytest.raises(Unsupported, match="one of 2 parts"):
        load(path)


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    file_of({"x": (np.zeros((1, 4), np.float32), Kind.F32)}, tmp_path / "m.gguf", architecture="rwkv6")
    with pytest.raises(Unsupported, match="'rwkv6'"):
        load(tmp_path / "m.gguf")


def test_tensors_that_are_too_many_or_missing_are_named(tmp_path: Path) -> None:
    extra = {"blk.0.attn_q_norm.weight": np.ones(16, np.float32)}
    path = gguf_files.write(tmp_path / "m.gguf", model_of("llama"), "llama", extra=extra)
    with pytest.raises(BadInput, match=r"no place in the model, first: blk\.0\.attn_q_norm"):
        load(path)
    short = model_of("llama")
    del short.model.layers[1].mlp.up_proj
    with pytest.raises(BadInput, match=r"1 weights are missing, first: model\.layers\.1\.mlp\.up_proj"):
        load(gguf_files.write(tmp_path / "n.gguf", short, "llama"))


@pytest.mark.parametrize("keep", [0, 3, 20, 500, -200])
def test_a_truncated_file_is_named(keep: int, tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "cut.gguf", model_of("llama"), "llama")
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DamagedFile, match=r"cut\.gguf"):
        load(path)


def test_a_file_that_is_no_gguf_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"not a model" * 100)
    with pytest.raises(DamagedFile, match=r"x\.gguf"):
        load(tmp_path / "x.gguf")
