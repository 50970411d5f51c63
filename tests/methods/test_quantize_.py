"""quantize_ on modules of every kind: what is replaced, what is kept and said so, and what is refused."""

import copy
import gc
import warnings
import weakref

import pytest
import torch
from torch import nn

import nybble
from nybble.errors import BadInput, UnknownName
from nybble.methods import record
from nybble.methods.rtn import Config
from nybble.methods.select import fused_groups, matches
from nybble.ops import QuantLinear
from nybble.quantize import schemes


class Block(nn.Module):
    """Llama's names in small, with a stacked expert weight beside them."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            setattr(self, name, nn.Linear(64, 64, bias=False))
        self.norm = nn.LayerNorm(64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.o_proj(self.q_proj(self.norm(x)) * self.k_proj(x) + self.v_proj(x))


class Model(nn.Module):
    def __init__(self, tie: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(50, 64)
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(64, 50, bias=False)
        if tie:
            self.lm_head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)


TOKENS = torch.arange(12).view(2, 6)


@pytest.mark.parametrize("name", schemes.names())
def test_every_scheme_runs_on_a_model(name: str) -> None:
    model = Model().eval()
    reference = model(TOKENS)
    assert nybble.quantize_(model, name) is model
    y = model(TOKENS)
    assert y.shape == reference.shape
    assert y.isfinite().all()
    assert sum(isinstance(m, QuantLinear) for m in model.modules()) == 8
    error = float((y - reference).norm() / reference.norm())
    assert error < {"TERNARY": 1.0, "BINARY": 1.2, "W2A16": 1.0}.get(name, 0.35)


def test_weights_and_activations_are_closer_with_more_bits() -> None:
    reference = Model().eval()
    errors = {}
    for name in ("W8A16", "W8A8", "W4A16", "W2A16"):
        y = nybble.quantize_(copy.deepcopy(reference), name)(TOKENS)
        errors[name] = float((y - reference(TOKENS)).norm())
    assert errors["W8A16"] < errors["W8A8"] < errors["W4A16"] < errors["W2A16"]


def test_what_is_kept_is_listed_with_its_share() -> None:
    model = nybble.quantize_(Model(), "W4A16")
    kept = {s.name: s for s in record(model).skipped}
    assert kept["embed.weight"].reason == "an embedding"
    assert model.lm_head.weight is model.embed.weight, "tied weights stay tied"
    assert len(record(model).quantized) == 8
    total = 50 * 64 + 8 * 64 * 64 + 4 * 64
    assert kept["embed.weight"].share == pytest.approx(50 * 64 / total)


def test_a_tied_head_is_not_torn_from_its_embedding() -> None:
    model = nybble.quantize_(Model(), "W8A16", ignore=[])
    assert model.lm_head.weight is model.embed.weight
    model = nybble.quantize_(Model(tie=False), "W8A16", ignore=[])
    assert isinstance(model.lm_head, QuantLinear)


def test_two_linears_with_one_weight_share_its_codes() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    nybble.quantize_(model, "NVFP4A16")
    assert model[0].codes.data_ptr() == model[2].codes.data_ptr()


def test_one_module_in_two_places_is_replaced_in_both() -> None:
    shared = nn.Linear(64, 64)
    model = nn.ModuleDict({"a": shared, "b": nn.Sequential(shared)})
    nybble.quantize_(model, "W8A16")
    assert isinstance(model["a"], QuantLinear)
    assert model["b"][0] is model["a"]


def test_fused_projections_share_their_tensor_scale() -> None:
    model = nybble.quantize_(Model(), "NVFP4A16")
    for layer in model.layers:
        scales = {float(getattr(layer, n).tensor_scale) for n in ("q_proj", "k_proj", "v_proj")}
        assert len(scales) == 1
        assert float(layer.o_proj.tensor_scale) not in scales
    assert fused_groups(["a.q_proj", "a.v_proj", "b.q_proj", "a.o_proj"]) == [
        ["a.q_proj", "a.v_proj"],
        ["b.q_proj"],
        ["a.o_proj"],
    ]


def test_ignore_by_name_tail_and_expression() -> None:
    assert matches("model.layers.0.q_proj", ["q_proj"])
    assert matches("lm_head", ["lm_head"])
    assert not matches("model.q_proj_extra", ["q_proj"])
    assert matches("model.layers.11.mlp", [r"re:.*layers\.1\d\."])
    model = nybble.quantize_(Model(), "W8A16", ignore=["re:layers.0", "o_proj", "lm_head"])
    assert record(model).quantized == [f"layers.1.{n}_proj" for n in "qkv"]
    with pytest.warns(UserWarning, match="q_prj"):
        nybble.quantize_(Model(), "W8A16", ignore=["q_prj"])


def test_stacked_experts_are_named_with_their_share() -> None:
    model = nn.Module()
    model.gate_up_proj = nn.Parameter(torch.randn(4, 128, 64))
    model.linear = nn.Linear(64, 64, bias=False)
    with pytest.warns(UserWarning, match="89% of the model's bytes"):
        nybble.quantize_(model, "W4A16")
    assert "experts" in record(model).skipped[0].reason


def test_parents_that_read_weights_themselves_keep_them() -> None:
    encoder = nn.TransformerEncoderLayer(64, 4, dim_feedforward=128, batch_first=True).eval()
    model = nn.Sequential(encoder, nn.Linear(64, 64))
    x = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        nybble.quantize_(model, "W8A16")(x)
    assert record(model).quantized == ["1"]
    assert any("read directly by its parent" in s.reason for s in record(model).skipped)


def test_a_bad_weight_is_named_and_nothing_is_changed() -> None:
    model = Model()
    with torch.no_grad():
        model.layers[1].v_proj.weight[3, 4] = torch.nan
    with pytest.raises(BadInput, match=r"layers\.1\.v_proj\.weight holds 1 values"):
        nybble.quantize_(model, "W8A16")
    assert not any(isinstance(m, QuantLinear) for m in model.modules())


def test_refusals_name_the_nearest() -> None:
    with pytest.raises(UnknownName, match="W4A16"):
        nybble.quantize_(Model(), "W4A61")
    with pytest.raises(UnknownName, match="rtn"):
        nybble.quantize_(Model(), "W4A16", method="rtm")
    with pytest.raises(BadInput, match=r"no nn\.Linear"):
        nybble.quantize_(nn.ReLU(), "W4A16")
    with pytest.raises(BadInput, match="meta"):
        nybble.quantize_(nn.Linear(4, 4, device="meta"), "W4A16")


def test_settings_of_the_method_are_used() -> None:
    weight = nn.Linear(64, 64)
    nearest = nybble.quantize_(nn.Sequential(copy.deepcopy(weight)), "W4A16")
    other = nybble.quantize_(nn.Sequential(copy.deepcopy(weight)), "W4A16", config=Config(rule="amax_half_range"))
    assert not torch.equal(nearest[0].weight.dequantize(), other[0].weight.dequantize())
    floor = nybble.quantize_(nn.Sequential(copy.deepcopy(weight)), "MXFP4A16_FLOOR")
    assert torch.equal(floor[0].weight.dequantize(), nybble.quantize(weight.weight, "mxfp4", rule="floor").dequantize())


def test_calibration_gives_activations_a_static_scale() -> None:
    model = nybble.quantize_(Model(), "NVFP4", calibration=[TOKENS, {"tokens": TOKENS + 30}, (TOKENS + 10,)])
    amax = model.layers[0].q_proj.activation_amax
    assert amax is not None
    assert float(amax) > 0
    assert all(model.layers[0].get_submodule(n).activation_amax is not None for n in ("k_proj", "o_proj"))
    with pytest.raises(BadInput, match="never reached"):
        nybble.quantize_(Model(), "NVFP4", calibration=[])
    assert nybble.quantize_(Model(), "NVFP4").layers[0].q_proj.activation_amax is None


def test_calibration_that_meets_nan_names_the_layer() -> None:
    model = Model()
    model.embed.weight.data[5, 0] = torch.nan
    with pytest.raises(BadInput, match=r"input of layers\.0\.q_proj"):
        nybble.quantize_(model, "NVFP4", calibration=[TOKENS])


def test_progress_is_told() -> None:
    seen: list[tuple[int, int, str]] = []
    nybble.quantize_(Model(), "W8A16", progress=lambda *args: seen.append(args))
    assert [s[0] for s in seen] == list(range(1, 9))
    assert all(s[1] == 8 for s in seen)


def test_a_model_in_bfloat16_and_float16() -> None:
    for dtype in (torch.bfloat16, torch.float16):
        model = nybble.quantize_(nn.Sequential(nn.Linear(64, 32)).to(dtype), "W4A16")
        assert model(torch.ones(2, 64, dtype=dtype)).dtype == dtype


def test_no_warning_where_nothing_is_wrong() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nybble.quantize_(Model(), "W4A16")


@pytest.mark.parametrize("method", ["rtn", "gptq"])
def test_an_original_weight_is_let_go_once_its_layers_are_done(method: str) -> None:
    """Memory: never all the originals beside all the codes."""
    model = Model(tie=False)
    originals = [weakref.ref(module.weight) for module in model.modules() if isinstance(module, nn.Linear)]
    held: list[int] = []

    def progress(done: int, total: int, name: str) -> None:
        held.append(sum(weight() is not None for weight in originals))

    batches = [torch.randint(0, 50, (1, 80))]
    nybble.quantize_(model, "W4A16_G32", method, ignore=(), calibration=batches, progress=progress)
    stage = 4 if method == "gptq" else 3  # a block's linears, or those that share a tensor scale
    assert all(count <= len(originals) - done + stage for done, count in enumerate(held))
    gc.collect()
    assert not any(weight() is not None for weight in originals)
