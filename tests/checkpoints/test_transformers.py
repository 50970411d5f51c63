"""The test that matters: plain transformers loads what is saved here, and computes the same.

How near two runs of one checkpoint can be depends on where they round. Weights are compared bit for bit. Whole models
are compared with weights only quantized: one step of bfloat16. With quantized inputs, transformers chooses scales and
divides in bfloat16 where we do in float32; an input that lands on the other side of a boundary then moves by a whole
step of its format, and in the next layer others follow (a two-layer model in NVFP4 differs from itself in float32 by
a tenth). So there the layers are compared one by one on equal inputs in float32, and whole models by the nats that
their predictions differ.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from nybble.methods import quantize_
from nybble.models import load, save
from nybble.quantize.schemes import SCHEMES
from tiny_models import linears, logits, quantized, tiny

pytestmark = pytest.mark.skipif(
    find_spec("compressed_tensors") is None, reason="transformers reads these checkpoints with compressed-tensors only"
)

PRESETS = [name for name, row in SCHEMES.items() if row.preset]
BEYOND = ["FP8A16", "W4A16_G64", "W4A16_G32", "W4A16_G32_ASYM", "W3A16", "W2A16", "MXFP6A16", "NVFP4A16_4OVER6"]
BF16_STEP = 2.0**-7  # of the largest logit
INPUTS = 0.03  # relative for a layer with quantized inputs, nats (root mean square) for a model


def saved(scheme: str, folder: Path, **more: Any) -> Path:
    return save(quantized(scheme, **more), folder / "out")


def read_by_transformers(folder: Path, scheme: str) -> Any:
    """The model, decompressed.

    From 5.23 transformers gives zero points that are packed along N the shape of unpacked ones and refuses the file,
    compressed-tensors' own files as well; told to decompress while loading, it reads them.
    """
    import transformers
    from packaging.version import Version

    broken = SCHEMES[scheme].weight.zero_point and Version(transformers.__version__) >= Version("5.23")
    options = {"quantization_config": transformers.CompressedTensorsConfig(dequantize=True)} if broken else {}
    model, seen = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **options)
    assert not any(seen[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    logits(model)  # weights are decompressed by the first call
    return model


def relative(got: Tensor, expected: Tensor) -> float:
    return float((got.double() - expected.double()).norm() / expected.double().norm())


@pytest.mark.parametrize("scheme", PRESETS + BEYOND)
def test_weights_are_the_same_bits(scheme: str, tmp_path: Path) -> None:
    folder = saved(scheme, tmp_path)
    theirs = read_by_transformers(folder, scheme)
    for name, module in linears(load(folder)).items():
        weight = module.weight
        if weight.format.scale.name == "fp32":  # transformers holds the scales of a bfloat16 model in bfloat16
            codes, scale = weight.dequantize(torch.float32) / weight_scale(weight), weight_scale(weight)
            expected = codes.to(torch.bfloat16) * scale.to(torch.bfloat16)
        else:
            expected = weight.dequantize(torch.bfloat16)
        assert torch.equal(theirs.get_submodule(name).weight, expected), name


def weight_scale(weight: Any) -> Tensor:
    from nybble.quantize.blocks import expand

    return expand(weight.scales()[0], weight.format, weight.shape)


@pytest.mark.parametrize("scheme", [name for name in PRESETS + BEYOND if SCHEMES[name].activation is None])
def test_logits_agree_to_a_step_of_bfloat16(scheme: str, tmp_path: Path) -> None:
    folder = saved(scheme, tmp_path)
    ours, theirs = logits(load(folder)), logits(read_by_transformers(folder, scheme))
    assert (ours - theirs).abs().max() <= BF16_STEP * theirs.abs().max()


WITH_INPUTS = [name for name in PRESETS if SCHEMES[name].activation is not None]


@pytest.mark.parametrize("scheme", WITH_INPUTS)
def test_layers_with_quantized_inputs_agree(scheme: str, tmp_path: Path) -> None:
    folder = saved(scheme, tmp_path)
    theirs = read_by_transformers(folder, scheme)
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    nn.Module.float(theirs)
    ours = linears(load(folder, dtype=torch.float32))
    for name in ours:
        theirs.get_submodule(name).register_forward_hook(lambda m, x, y, name=name: seen.update({name: (x[0], y)}))
    logits(theirs)
    assert seen.keys() == ours.keys()
    for name, (x, y) in seen.items():
        assert relative(ours[name](x), y) < INPUTS, name
        if ours[name].weight.format.element.name[:3] != "int":  # compressed-tensors divides by 127.5, and we by 127
            plain = nn.functional.linear(x, ours[name].weight.dequantize(torch.float32))
            assert relative(plain, y) > 2 * relative(ours[name](x), y), "inputs were not rounded the same way"


@pytest.mark.parametrize("scheme", WITH_INPUTS)
def test_logits_with_quantized_inputs_agree(scheme: str, tmp_path: Path) -> None:
    folder = saved(scheme, tmp_path)
    ours, theirs = logits(load(folder)), logits(read_by_transformers(folder, scheme))
    nats = ours.log_softmax(-1) - theirs.log_softmax(-1)
    assert nats.square().mean().sqrt() <= INPUTS


@pytest.mark.parametrize("scheme", ["W8A8", "FP8_DYNAMIC", "FP8_BLOCK", "W4A16"])
def test_a_float32_model_agrees_in_float32(scheme: str, tmp_path: Path) -> None:
    folder = saved_float32(scheme, tmp_path)
    theirs = read_by_transformers(folder, scheme)
    assert theirs.dtype == torch.float32
    limit = INPUTS if scheme == "W8A8" else 1e-6
    assert relative(logits(load(folder)), logits(theirs)) < limit


@pytest.mark.parametrize("scheme", ["NVFP4A16", "MXFP4A16", "MXFP8A16", "MXFP6A16"])
def test_formats_that_transformers_runs_in_bfloat16_only_say_so(scheme: str, tmp_path: Path) -> None:
    folder = saved_float32(scheme, tmp_path)
    theirs, ours = read_by_transformers(folder, scheme), load(folder)
    assert (theirs.dtype, next(ours.parameters()).dtype) == (torch.bfloat16, torch.float32)
    assert (logits(ours) - logits(theirs)).abs().max() <= 2 * BF16_STEP * logits(theirs).abs().max()


def saved_float32(scheme: str, folder: Path) -> Path:
    return save(quantize_(tiny().float(), scheme), folder / "out")


def test_ties_and_mixed_schemes_are_understood(tmp_path: Path) -> None:
    model = tiny(tie_word_embeddings=True)
    quantize_(model, "W4A16", ignore=["lm_head", "re:.*mlp"])
    quantize_(model, "MXFP8A16")
    folder = save(model, tmp_path / "out")
    theirs = read_by_transformers(folder, "W4A16")
    assert theirs.lm_head.weight is theirs.model.embed_tokens.weight
    assert (logits(load(folder)) - logits(theirs)).abs().max() <= BF16_STEP * logits(theirs).abs().max()


@pytest.mark.parametrize("preset", ["W4A16", "W4A16_ASYM", "W8A8", "FP8_DYNAMIC", "NVFP4A16", "MXFP4A16", "MXFP8"])
def test_what_the_library_writes_is_read(preset: str, tmp_path: Path) -> None:
    model = written_by_library(preset, tmp_path)
    ours = linears(load(tmp_path))
    decompressed = {name: theirs(module) for name, module in model.named_modules() if name in ours}
    assert len(ours) == 14
    for name, module in ours.items():
        assert torch.equal(module.weight.dequantize(torch.bfloat16), decompressed[name].to(torch.bfloat16)), name


def written_by_library(preset: str, folder: Path) -> nn.Module:
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme

    model = tiny()
    scheme = preset_name_to_scheme(preset, ["Linear"])
    apply_quantization_config(model, QuantizationConfig(config_groups={"g": scheme}, ignore=["lm_head"]))
    for module in model.modules():
        if hasattr(module, "weight_scale"):
            set_parameters(module, scheme.weights)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return model


def set_parameters(module: Any, args: Any) -> None:
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    weight = module.weight.detach()
    blocks = weight.unflatten(1, (-1, args.group_size)) if args.group_size else weight[:, None]
    low, high = blocks.amin(-1), blocks.amax(-1)
    whole = None
    if hasattr(module, "weight_global_scale"):
        whole = generate_gparam(weight.amin(), weight.amax())
        module.weight_global_scale.data.copy_(whole)
    scale, zero_point = calculate_qparams(low, high, args, global_scale=whole)
    module.weight_scale.data.copy_(scale)
    if hasattr(module, "weight_zero_point"):
        module.weight_zero_point.data.copy_(zero_point)


def theirs(module: Any) -> Tensor:
    from compressed_tensors.compressors import BaseCompressor

    scheme = module.quantization_scheme
    stored = {name: tensor.data for name, tensor in module.named_parameters(recurse=False)}
    stored.update(module.named_buffers(recurse=False))
    return BaseCompressor.get_value_from_registry(str(scheme.format.value)).decompress(stored, scheme)["weight"]
