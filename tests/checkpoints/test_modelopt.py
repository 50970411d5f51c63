"""ModelOpt NVFP4 is compressed-tensors' NVFP4 with the scales turned over: both import equal to the bit."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nybble.checkpoints import compressed_tensors as ct
from nybble.checkpoints import modelopt
from nybble.checkpoints.huggingface import Weights
from nybble.checkpoints.stored import Ledger, StoredLinear
from nybble.errors import DamagedFile, Unsupported
from nybble.formats import table
from nybble.quantize import quantize

SHAPE = (32, 64)


def both(rng: torch.Generator, inputs: bool = True) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The same linear under compressed-tensors' names and under ModelOpt's."""
    fmt = table.block("nvfp4")
    weight = quantize(torch.randn(SHAPE, generator=rng) * 0.02, fmt)
    theirs = ct.store(StoredLinear(weight, fmt, torch.tensor(11.3)) if inputs else StoredLinear(weight))
    renamed = {
        "weight": theirs["weight_packed"],
        "weight_scale": theirs["weight_scale"],
        "weight_scale_2": 1 / theirs["weight_global_scale"][0],
    }
    if inputs:  # ModelOpt measures the multiplier; what is made from it is its reciprocal
        renamed["input_scale"] = torch.tensor(11.3) / torch.tensor(6.0 * 448)
        theirs["input_global_scale"] = 1 / renamed["input_scale"].reshape(1)
    return theirs, renamed


def ledger(tensors: dict[str, Tensor], folder: Path) -> Ledger:
    folder.mkdir()
    save_file({f"m.{leaf}": tensor for leaf, tensor in tensors.items()}, folder / "model.safetensors")
    return Ledger(Weights(folder))


def read_modelopt(tensors: Ledger, algorithm: str = "NVFP4") -> StoredLinear:
    reader = modelopt.Reader({"quant_algo": algorithm}, tensors)
    found = reader.find("m", nn.Linear(1, 1))
    assert found is not None
    return reader.read("m", found, SHAPE, tensors)


@pytest.mark.parametrize("inputs", [True, False])
def test_both_layouts_import_equal_to_the_bit(inputs: bool, tmp_path: Path, rng: torch.Generator) -> None:
    theirs, renamed = both(rng, inputs)
    fmt = table.block("nvfp4")
    one = ct.group(fmt, fmt if inputs else None)
    assert one is not None
    first = ct.Reader(ct.config({one: []}, [])).read("m", one, SHAPE, ledger(theirs, tmp_path / "ct"))
    second = read_modelopt(ledger(renamed, tmp_path / "modelopt"))
    assert first.weight.parts.keys() == second.weight.parts.keys()
    for name, part in first.weight.parts.items():
        assert torch.equal(part, second.weight.parts[name]), name
    assert first.activation == second.activation
    if inputs:
        assert first.activation_amax is not None
        assert second.activation_amax is not None
        assert torch.equal(first.activation_amax, second.activation_amax)


def test_reading_the_scale_the_wrong_way_round_would_be_seen(tmp_path: Path, rng: torch.Generator) -> None:
    _, renamed = both(rng)
    right = read_modelopt(ledger(renamed, tmp_path / "right")).weight.dequantize()
    turned = {**renamed, "weight_scale_2": 1 / renamed["weight_scale_2"]}
    wrong = read_modelopt(ledger(turned, tmp_path / "wrong")).weight.dequantize()
    assert (wrong - right).norm() / right.norm() > 1


def test_plain_linears_are_left_alone(tmp_path: Path) -> None:
    tensors = ledger({"weight": torch.zeros(4, 4)}, tmp_path / "x")
    assert modelopt.Reader({"quant_algo": "NVFP4"}, tensors).find("m", nn.Linear(4, 4)) is None


def test_other_algorithms_and_scaled_inputs_are_named(tmp_path: Path, rng: torch.Generator) -> None:
    _, renamed = both(rng)
    tensors = ledger({**renamed, "pre_quant_scale": torch.ones(SHAPE[1])}, tmp_path / "x")
    with pytest.raises(Unsupported, match="W4A8_AWQ"):
        modelopt.Reader({"quant_algo": "W4A8_AWQ"}, tensors)
    with pytest.raises(Unsupported, match="pre_quant_scale"):
        read_modelopt(tensors)


@pytest.mark.parametrize("value", [0.0, float("inf"), float("nan"), -1.0])
def test_a_scale_that_is_no_scale_is_named(value: float, tmp_path: Path, rng: torch.Generator) -> None:
    _, renamed = both(rng)
    tensors = ledger({**renamed, "weight_scale_2": torch.tensor(value)}, tmp_path / "x")
    with pytest.raises(DamagedFile, match=r"m\.weight_scale_2"):
        read_modelopt(tensors)


NVFP4: dict[str, Any] = {"quant_algo": "NVFP4", "group_size": 16}


@pytest.mark.parametrize(
    ("config", "side", "found"),
    [
        ({"quantization_config": {"quant_method": "modelopt", **NVFP4}}, None, True),
        ({}, {"producer": {"name": "modelopt"}, "quantization": NVFP4}, True),
        ({}, None, False),
        ({"quantization_config": {"quant_method": "compressed-tensors"}}, {"quantization": NVFP4}, False),
    ],
)
def test_where_its_configuration_is_found(config: Any, side: Any, found: bool, tmp_path: Path) -> None:
    if side is not None:
        (tmp_path / modelopt.SIDE_FILE).write_text(json.dumps(side))
    described = modelopt.find_config(tmp_path, config)
    assert (described is not None and described["quant_algo"] == "NVFP4") == found


def test_the_multiplier_is_kept_as_it_is(tmp_path: Path, rng: torch.Generator) -> None:
    _, renamed = both(rng)
    weight = read_modelopt(ledger(renamed, tmp_path / "x")).weight
    assert weight.tensor_scale is not None
    assert torch.equal(weight.tensor_scale, renamed["weight_scale_2"])
    assert torch.equal(replace(weight, tensor_scale=None).scales()[0], renamed["weight_scale"].to(torch.float32))
