"""QuantLinear: a module like any other."""

import copy
import io

import pytest
import torch
from torch import nn

import nybble
from nybble.ops import QuantLinear


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def layer(name: str = "nvfp4", bias: bool = True) -> QuantLinear:
    return QuantLinear(nybble.quantize(normal(32, 64), name), nn.Parameter(normal(32)) if bias else None)


def test_changing_the_dtype_leaves_the_weight_alone() -> None:
    module, x = layer("ufp4"), normal(3, 64)
    before = {name: t.clone() for name, t in module.weight.parts.items()}
    y = module(x)
    module.to(torch.bfloat16)
    assert module.bias.dtype == torch.bfloat16
    assert all(torch.equal(module.weight.parts[name], t) for name, t in before.items())
    assert module.scale is module.weight.scale
    assert module(x.bfloat16()).dtype == torch.bfloat16
    assert (module(x.bfloat16()) - y).norm() / y.norm() < 0.01


def test_state_dict_round_trip_is_weights_only_safe() -> None:
    first, second = (
        layer(),
        QuantLinear(nybble.quantize(normal(32, 64, seed=9), "nvfp4"), nn.Parameter(torch.zeros(32))),
    )
    buffer = io.BytesIO()
    torch.save(first.state_dict(), buffer)
    buffer.seek(0)
    second.load_state_dict(torch.load(buffer, weights_only=True))
    assert torch.equal(second(normal(2, 64)), first(normal(2, 64)))


@pytest.mark.parametrize("name", ["int4_g64", "int8_channel", "nvfp4"])
def test_prepare_changes_no_result(name: str) -> None:
    module, x = layer(name), normal(5, 64)
    plain, values = module(x), module.weight.dequantize()
    module.prepare(torch.float32)
    assert torch.equal(module.weight.dequantize(), values)
    assert torch.equal(module(x), plain)
    assert torch.equal(copy.deepcopy(module)(x), plain)


def test_moving_to_a_device_moves_the_weight() -> None:
    module = layer().to("meta")
    assert module.weight.device.type == "meta"


def test_it_prints_what_it_is() -> None:
    module = QuantLinear(nybble.quantize(normal(32, 64), "nvfp4"), None, nybble.formats.block("nvfp4"))
    assert repr(module) == "QuantLinear(64, 32, nvfp4, activation=nvfp4)"
