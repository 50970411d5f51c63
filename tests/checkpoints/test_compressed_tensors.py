"""compressed-tensors: what is stored is read back to the bit, and means the same to the library itself."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from nybble.checkpoints import compressed_tensors as ct
from nybble.checkpoints.huggingface import Weights
from nybble.checkpoints.stored import Ledger, StoredLinear, amax_of, encode_of
from nybble.errors import BadInput, DamagedFile, Unsupported
from nybble.formats import table
from nybble.quantize import QuantTensor, quantize
from nybble.quantize.schemes import SCHEMES

needs_library = pytest.mark.skipif(
    find_spec("compressed_tensors") is None, reason="compressed-tensors is not installed: its own reading is the oracle"
)

# (weight format, input format): every scheme that can be stored, and what the schema holds beyond them.
PAIRS = sorted(
    {
        (s.weight.name, s.activation.name if s.activation else None)
        for s in SCHEMES.values()
        if ct.group(s.weight, s.activation) is not None
    }
    | {("int3_channel", None), ("int5_g32", None), ("int7_g64_asym", None), ("int8_g128", None), ("int4_channel", None)}
    | {("int4_channel_asym", None), ("int8_channel_asym", "int8_token"), ("fp8_tensor", "fp8_token")},
    key=str,
)
SHAPES = [(64, 256), (17, 128), (1, 384)]
RAGGED = {"int3_channel": (5, 33), "int4_channel_asym": (9, 7), "fp8_channel": (3, 129), "int8_channel": (1, 1)}


def linear_of(weight: str, activation: str | None, shape: tuple[int, int], rng: torch.Generator) -> StoredLinear:
    values = torch.randn(shape, generator=rng)
    values[0, : shape[1] // 2] = 0.0
    act = table.block(activation) if activation else None
    amax = torch.tensor(3.7) if act is not None and act.tensor_scale is not None else None
    return StoredLinear(quantize(values, weight), act, amax)


def written(stored: dict[str, Tensor], folder: Path, name: str = "a.b") -> Ledger:
    save_file({f"{name}.{leaf}": tensor.contiguous() for leaf, tensor in stored.items()}, folder / "model.safetensors")
    return Ledger(Weights(folder))


def read_back(linear: StoredLinear, folder: Path, **changes: Any) -> StoredLinear:
    one = ct.group(linear.weight.format, linear.activation)
    assert one is not None
    config = json.loads(json.dumps(ct.config({one: ["a.b"]}, ["lm_head"])))
    config["config_groups"]["group_0"]["weights"].update(changes)
    reader = ct.Reader(config)
    ledger = written(ct.store(linear), folder)
    found = reader.find("a.b", nn.Linear(1, 1))
    assert found is not None
    result = reader.read("a.b", found, tuple(linear.weight.shape), ledger)  # type: ignore[arg-type]
    assert ledger.used == ledger.names()
    return result


def assert_same(got: QuantTensor, expected: QuantTensor) -> None:
    assert (got.format, got.shape, got.layout) == (expected.format, expected.shape, expected.layout)
    assert got.parts.keys() == expected.parts.keys()
    for name, part in expected.parts.items():
        assert got.parts[name].dtype == part.dtype, name
        assert torch.equal(got.parts[name].view(-1), part.view(-1)), name


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("weight", "activation"), PAIRS)
def test_reading_gives_back_every_bit(
    weight: str, activation: str | None, shape: tuple[int, int], tmp_path: Path, rng: torch.Generator
) -> None:
    linear = linear_of(weight, activation, shape, rng)
    got = read_back(linear, tmp_path)
    assert_same(got.weight, linear.weight)
    assert got.activation == linear.activation
    if linear.activation_amax is None:
        assert got.activation_amax is None
    else:
        assert got.activation is not None
        assert got.activation_amax is not None
        assert torch.equal(encode_of(got.activation, got.activation_amax), encode_of(got.activation, torch.tensor(3.7)))


@pytest.mark.parametrize(("weight", "shape"), RAGGED.items())
def test_rows_of_any_length_are_stored(
    weight: str, shape: tuple[int, int], tmp_path: Path, rng: torch.Generator
) -> None:
    linear = linear_of(weight, None, shape, rng)
    assert_same(read_back(linear, tmp_path).weight, linear.weight)


@needs_library
@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize(("weight", "activation"), PAIRS)
def test_the_library_reads_the_same_values(
    weight: str, activation: str | None, shape: tuple[int, int], rng: torch.Generator
) -> None:
    linear = linear_of(weight, activation, shape, rng)
    one = ct.group(linear.weight.format, linear.activation)
    assert one is not None
    decompressed, dtype = library_reading(one, ct.store(linear))
    expected = linear.weight.dequantize(torch.float32)
    # Weights with 8-bit scales are multiplied out in bfloat16 there.
    assert torch.equal(decompressed.to(torch.float32), expected.to(dtype).to(torch.float32))


def library_reading(one: ct.Group, stored: dict[str, Tensor]) -> tuple[Tensor, torch.dtype]:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    described = dict(ct.config({one: ["a"]}, []))
    scheme = next(iter(QuantizationConfig.model_validate(described).config_groups.values()))
    dtype = ct.run_dtype([one], torch.float32)
    if dtype == torch.float32:
        stored["weight_scale"] = stored["weight_scale"].to(torch.float32)
    weight = BaseCompressor.get_value_from_registry(one.layout).decompress(dict(stored), scheme)["weight"]
    return weight, dtype


@needs_library
@pytest.mark.parametrize(("weight", "activation"), PAIRS)
def test_the_library_would_choose_the_same_layout_and_presets_mean_the_same(
    weight: str, activation: str | None
) -> None:
    from compressed_tensors.compressors.format import infer_module_format
    from compressed_tensors.quantization import QuantizationConfig, is_preset_scheme, preset_name_to_scheme

    one = ct.group(table.block(weight), table.block(activation) if activation else None)
    assert one is not None
    scheme = QuantizationConfig.model_validate(ct.config({one: ["a"]}, [])).config_groups["group_0"]
    assert infer_module_format(nn.Linear, scheme).value == one.layout
    for row in SCHEMES.values():
        own = (row.weight, row.activation) == (one.weight, one.activation)
        if row.preset and own and row.name != "W8A16" and is_preset_scheme(row.name):  # theirs has groups, ours rows
            theirs = preset_name_to_scheme(row.name, ["Linear"])
            for mine, their in ((scheme.weights, theirs.weights), (scheme.input_activations, theirs.input_activations)):
                assert meaning(mine) == meaning(their), row.name


def meaning(args: Any) -> Any:
    """A library's arguments without what concerns calibration only."""
    calibration = {"observer", "observer_kwargs", "zp_dtype"}
    return args and {k: v for k, v in args.model_dump().items() if k not in calibration and v is not None}


def test_global_scales_are_divisors(rng: torch.Generator) -> None:
    weight = quantize(torch.randn(32, 64, generator=rng), "nvfp4")
    stored = ct.store(StoredLinear(weight))
    assert stored["weight_global_scale"].shape == (1,)
    assert torch.equal(1 / stored["weight_global_scale"][0], weight.tensor_scale)
    wrong = replace(weight, tensor_scale=stored["weight_global_scale"][0])
    values = weight.dequantize()
    assert (wrong.dequantize() - values).norm() / values.norm() > 1


def test_the_input_scale_gives_the_largest_input_the_largest_block_scale(rng: torch.Generator) -> None:
    fmt, amax = table.block("nvfp4"), torch.tensor(3.7)
    stored = ct.store(StoredLinear(quantize(torch.randn(8, 32, generator=rng), fmt), fmt, amax))
    assert torch.equal(stored["input_global_scale"], (448 * 6 / amax).reshape(1))


MANTISSAS = (torch.arange(1 << 23, dtype=torch.int32) + 0x3F800000).view(torch.float32)


def test_every_reciprocal_survives_being_turned_over_twice() -> None:
    multipliers = 1 / MANTISSAS
    assert torch.equal(1 / (1 / multipliers), multipliers)


def test_every_encode_factor_is_given_by_its_amax() -> None:
    fmt = table.block("nvfp4")
    encode = encode_of(fmt, MANTISSAS)
    assert torch.equal(encode_of(fmt, amax_of(fmt, encode)), encode)


def test_quantized_inputs_need_calibration(rng: torch.Generator) -> None:
    fmt = table.block("nvfp4")
    with pytest.raises(BadInput, match="calibration="):
        ct.store(StoredLinear(quantize(torch.randn(8, 32, generator=rng), fmt), fmt))


@pytest.mark.parametrize(
    ("weight", "activation", "k", "says"),
    [
        ("int4_g128", None, 576, "K = 576 is not a multiple of 128, the group of its weights"),
        ("fp8_block128", "fp8_g128", 576, "the group of its inputs"),
        ("nvfp4", None, 24, "multiple of 16"),
        ("nf4_g64", None, 128, "no way to say nf4_g64"),
        ("ternary_channel", None, 128, "no way to say"),
        ("mxint8", None, 128, "no way to say"),
        ("int4_g128", "ufp4", 128, "int4_g128 with ufp4 inputs"),
    ],
)
def test_what_cannot_be_stored_is_refused_with_a_way_out(
    weight: str, activation: str | None, k: int, says: str
) -> None:
    fmt, act = table.block(weight), table.block(activation) if activation else None
    assert says in (ct.refusal(fmt, act, k) or "")
    able = ct.nearest(fmt, act, {k})
    assert able
    assert all(ct.refusal(SCHEMES[n].weight, SCHEMES[n].activation, k) is None for n in able)


def test_ragged_fp8_blocks_are_stored() -> None:
    assert ct.refusal(table.block("fp8_block128"), None, 300) is None


def test_the_nearest_scheme_is_the_same_with_a_group_that_divides() -> None:
    assert ct.nearest(table.block("int4_g128"), None, {576, 1536})[0] == "W4A16_G64"


def test_targets_and_ignore_follow_the_librarys_rule() -> None:
    one = ct.group(table.block("int8_channel"), None)
    assert one is not None
    reader = ct.Reader({**ct.config({one: []}, ["lm_head", "re:.*router"]), "config_groups": both_targets(one)})
    linear, other = nn.Linear(1, 1), nn.Embedding(1, 1)
    assert reader.find("model.q", linear) == one
    assert reader.find("lm_head", linear) is None
    assert reader.find("model.lm_head", linear) == one
    assert reader.find("model.0.router", linear) is None
    assert reader.find("model.embed", other) is None


def both_targets(one: ct.Group) -> dict[str, Any]:
    return {"x": {"targets": ["Linear"], "weights": ct.describe(one.weight), "format": one.layout}}


def test_a_strategy_left_out_is_inferred(tmp_path: Path, rng: torch.Generator) -> None:
    linear = linear_of("int4_g128", None, (16, 256), rng)
    assert_same(read_back(linear, tmp_path, strategy=None).weight, linear.weight)
    channel = linear_of("int4_channel", None, (16, 256), rng)
    assert_same(read_back(channel, tmp_path, strategy=None, group_size=-1).weight, channel.weight)


def test_scales_that_bfloat16_cannot_hold_keep_their_precision(tmp_path: Path, rng: torch.Generator) -> None:
    linear = linear_of("int4_g128", None, (16, 256), rng)
    stored = ct.store(linear)
    stored["weight_scale"] = (linear.weight.scale.float() * 1.001).to(torch.float16)
    one = ct.group(linear.weight.format, None)
    assert one is not None
    got = ct.Reader(ct.config({one: []}, [])).read("a.b", one, (16, 256), written(stored, tmp_path)).weight
    assert (got.format.scale.name, got.scale.dtype) == ("fp16", torch.float16)
    assert torch.equal(got.scales()[0], stored["weight_scale"].to(torch.float32))


def transforms(kind: str, location: str) -> dict[str, Any]:
    return {"transform_config": {"config_groups": {"R": {"type": kind, "apply": [apply(location)]}}}}


def apply(location: str) -> dict[str, Any]:
    return {"targets": ["Linear"], "location": location}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (transforms("random-hadamard", "input"), r"transform_config: R \(random-hadamard of input\)"),
        (transforms("hadamard", "output"), r"hadamard of output"),
        ({"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config"),
    ],
)
def test_what_is_not_read_is_named(change: dict[str, Any], says: str) -> None:
    one = ct.group(table.block("int8_channel"), None)
    assert one is not None
    with pytest.raises(Unsupported, match=says):
        ct.Reader({**ct.config({one: []}, []), **change})


@pytest.mark.parametrize(
    ("inputs", "says"),
    [
        ({"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}, "static input scales"),
        ({"num_bits": 12, "type": "int", "strategy": "token", "dynamic": True}, "no format here means"),
    ],
)
def test_inputs_that_are_not_read_are_named(inputs: dict[str, Any], says: str) -> None:
    weights = ct.describe(table.block("fp8_channel"))
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "format": "float-quantized"}
    with pytest.raises(Unsupported, match=says):
        ct.Reader({"config_groups": {"group_0": group}})


def test_zero_points_of_symmetric_weights_must_be_zero(tmp_path: Path, rng: torch.Generator) -> None:
    linear = linear_of("int4_g128", None, (16, 256), rng)
    one = ct.group(linear.weight.format, None)
    assert one is not None
    reader = ct.Reader(ct.config({one: []}, []))
    zeros = torch.zeros(16, 2, dtype=torch.int8)
    ledger = written({**ct.store(linear), "weight_zero_point": zeros}, tmp_path)
    assert_same(reader.read("a.b", one, (16, 256), ledger).weight, linear.weight)
    assert ledger.used == ledger.names()
    with pytest.raises(DamagedFile, match="says symmetric"):
        reader.read("a.b", one, (16, 256), written({**ct.store(linear), "weight_zero_point": zeros + 1}, tmp_path))


@pytest.mark.parametrize(
    ("leaf", "spoiled"),
    [
        ("weight_packed", torch.zeros(16, 31, dtype=torch.int32)),
        ("weight_packed", torch.zeros(16, 32, dtype=torch.int16)),
        ("weight_scale", torch.zeros(16, 3, dtype=torch.bfloat16)),
        ("weight_shape", torch.tensor([16, 255])),
    ],
)
def test_tensors_that_do_not_fit_are_named(leaf: str, spoiled: Tensor, tmp_path: Path, rng: torch.Generator) -> None:
    one = ct.group(table.block("int4_g128"), None)
    assert one is not None
    ledger = written({**ct.store(linear_of("int4_g128", None, (16, 256), rng)), leaf: spoiled}, tmp_path)
    with pytest.raises(DamagedFile, match=leaf):
        ct.Reader(ct.config({one: []}, [])).read("a.b", one, (16, 256), ledger)


def test_a_missing_tensor_and_activation_order_are_named(tmp_path: Path, rng: torch.Generator) -> None:
    one = ct.group(table.block("int4_g128"), None)
    assert one is not None
    reader = ct.Reader(ct.config({one: []}, []))
    stored = ct.store(linear_of("int4_g128", None, (16, 256), rng))
    ordered = written({**stored, "weight_g_idx": torch.arange(256)}, tmp_path)
    with pytest.raises(Unsupported, match="weight_g_idx"):
        reader.read("a.b", one, (16, 256), ordered)
    del stored["weight_scale"]
    with pytest.raises(DamagedFile, match=r"has no a\.b\.weight_scale"):
        reader.read("a.b", one, (16, 256), written(stored, tmp_path))
