"""Other schemes for some layers: which pattern decides, what a model of any shape becomes, and what is refused."""

import copy
import warnings

import pytest
import torch
from torch import nn

import nybble
from nybble.errors import BadInput, UnknownName, Unsupported
from nybble.methods import record
from nybble.methods.calibrate import collect
from nybble.models import check_saveable, load, save
from nybble.ops import QuantLinear
from nybble.quantize.schemes import SCHEMES
from tiny_models import IDS, tiny

MIXED = {"*.v_proj": "W4A4_G32", "*.down_proj": "W4A4_G32"}


def formats(model: nn.Module) -> dict[str, tuple[str, str | None]]:
    return {
        name: (m.weight.format.name, m.activation.name if m.activation else None)
        for name, m in model.named_modules()
        if isinstance(m, QuantLinear)
    }


class Block(nn.Module):
    """A block of a diffusion transformer: modulated norms, one projection for q, k and v, an MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = (nn.LayerNorm(width, elementwise_affine=False) for _ in range(2))
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(c)[:, None].chunk(6, -1)
        q, k, v = self.qkv(self.norm1(x) * (1 + scale1) + shift1).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        x = x + gate1 * self.proj(mixed)
        return x + gate2 * self.fc2(nn.functional.gelu(self.fc1(self.norm2(x) * (1 + scale2) + shift2)))


class Diffusion(nn.Module):
    """A diffusion transformer in small."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Conv2d(4, width, 2, 2)
        self.condition = nn.Linear(16, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(2))
        self.final = nn.Linear(width, 16)

    def forward(self, image: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        x, c = self.embed(image).flatten(2).transpose(1, 2), self.condition(t)
        for block in self.blocks:
            x = block(x, c)
        return self.final(x)


def test_a_diffusion_transformer_in_eight_bits() -> None:
    model = Diffusion().eval()
    image, t = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0)), torch.ones(2, 16)
    with torch.no_grad():
        original = model(image, t)
        nybble.quantize_(model, "W8A8", overrides={"*.modulation.1": None, "blocks.0.fc2": "W4A8_G32", "final": None})
        y = model(image, t)
    assert 0 < float((y - original).norm() / original.norm()) < 0.05
    got = formats(model)
    assert got.pop("blocks.0.fc2") == ("int4_g32", "int8_token")
    assert set(got) == {
        "condition",
        *(f"blocks.{i}.{n}" for i in (0, 1) for n in ("qkv", "proj", "fc1", "fc2")[: 4 - (i == 0)]),
    }
    assert set(got.values()) == {("int8_channel", "int8_token")}
    done = record(model)
    assert done is not None
    assert {name: row.name for name, row in done.others.items()} == {"blocks.0.fc2": "W4A8_G32"}
    reasons = {s.name: s.reason for s in done.skipped}
    assert reasons["final.weight"] == reasons["blocks.1.modulation.1.weight"] == "ignored on request"
    assert "Conv2d" in reasons["embed.weight"]


def test_the_last_pattern_decides_over_scheme_and_ignore() -> None:
    model = tiny()
    nybble.quantize_(
        model,
        "W8A8",
        overrides={"*.mlp.*": "W4A16_G32", "down_proj": None, "*.1.*.down_proj": "W8A16", "lm_head": "W8A16"},
    )
    got = formats(model)
    assert got["model.layers.0.mlp.up_proj"] == ("int4_g32", None)
    assert "model.layers.0.mlp.down_proj" not in got
    assert got["model.layers.1.mlp.down_proj"] == got["lm_head"] == ("int8_channel", None)
    assert got["model.layers.0.self_attn.q_proj"] == ("int8_channel", "int8_token")


def test_without_overrides_nothing_changes() -> None:
    first, second = tiny(), tiny()
    nybble.quantize_(first, "W4A16_G32")
    nybble.quantize_(second, "W4A16_G32", overrides={})
    assert all(
        torch.equal(a, b) for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    )


def test_a_pattern_that_matches_nothing_is_an_error() -> None:
    model = tiny()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(BadInput, match=r"'\*\.v_prj' matches no linear layer; nearest: v_proj"):
        nybble.quantize_(model, "W8A8", overrides={"*.v_prj": "W4A16"})
    with pytest.raises(UnknownName, match="W4A4_G32"):
        nybble.quantize_(model, "W8A8", overrides={"*.v_proj": "W4A4_G33"})
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_a_checkpoint_keeps_them_as_groups(tmp_path) -> None:
    model = tiny()
    overrides = {"*.v_proj": "W4A8_G32", "*.down_proj": "W8A16", "lm_head": None}
    check_saveable(model, "W8A8", overrides=overrides)
    nybble.quantize_(model, "W8A8", overrides=overrides)
    save(model, tmp_path / "out")
    again = load(str(tmp_path / "out"))
    assert formats(again) == formats(model)
    done, before = record(again), record(model)
    assert done is not None
    assert before is not None
    assert done.others == before.others
    assert done.scheme == SCHEMES["W8A8"]
    with torch.no_grad():
        assert torch.equal(again(IDS).logits, model(IDS).logits)


def test_what_no_checkpoint_can_say_is_refused_by_layer() -> None:
    with pytest.raises(Unsupported, match=r"model\.layers\.0\.self_attn\.v_proj"):
        check_saveable(tiny(), "W8A8", overrides={"*.v_proj": "NF4"})


def test_methods_round_each_layer_to_its_own_scheme() -> None:
    batches = [IDS, IDS.flip(0)]
    for method in ("gptq", "smoothquant+rtn", "hadamard+rtn"):
        model = tiny()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            nybble.quantize_(model, "W4A4_CHANNEL", method, overrides=MIXED, calibration=batches)
        kinds = {name.rpartition(".")[2]: pair for name, pair in formats(model).items()}
        assert kinds["v_proj"] == kinds["down_proj"] == ("int4_g32", "int4_g32")
        assert kinds["q_proj"] == kinds["o_proj"] == kinds["up_proj"] == ("int4_channel", "int4_token")


def test_training_takes_one_scheme() -> None:
    batches = [torch.zeros(1, 8, dtype=torch.int64)]
    with pytest.raises(Unsupported, match="W4A16, W8A16"):
        nybble.quantize_(tiny(), "W4A16", "distill+rtn", overrides={"*.v_proj": "W8A16"}, calibration=batches)


def test_inputs_that_are_rounded_differently_are_kept_apart() -> None:
    a, b, c = (nn.Linear(32, 8) for _ in range(3))
    x = torch.randn(40, 32, generator=torch.Generator().manual_seed(0))
    fmt = SCHEMES["W4A4_G32"].activation
    seen = collect({"a": a, "b": b, "c": c}, ((a(x), b(x), c(x)) for _ in (1,)), activations={"b": fmt})
    assert seen["a"] is seen["c"]
    assert seen["a"].cross is None
    rounded = nybble.quantize(x, "int4_g32").dequantize()
    assert torch.allclose(seen["b"].fed, (rounded.t() @ rounded).double() / 40, rtol=1e-5)
