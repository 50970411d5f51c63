"""Going through a model block by block: what is seen, what is kept on disk, what is wrong with the input."""

import copy
import json
import warnings
from pathlib import Path

import pytest
import torch
from torch import nn

import nybble
from nybble.errors import BadInput, DamagedFile, UnknownName
from nybble.methods import Settings, compose, gptq, record, rtn
from nybble.methods.calibrate import collect
from nybble.methods.layer import Inputs, Layer
from nybble.methods.stages import Chain, Whole, drive, split
from nybble.ops import QuantLinear
from nybble.quantize.schemes import scheme


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.down_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
        y = nn.functional.layer_norm(x, x.shape[-1:])
        return x + self.down_proj(torch.tanh(self.q_proj(y) * self.k_proj(y) + shift))


class Model(nn.Module):
    """A chain of blocks, or with `skip` one whose last block is fed something else than the block before gave."""

    def __init__(self, skip: bool = False, depth: int = 3, width: int = 32) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(40, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(depth)])
        self.head = nn.Linear(width, 40)
        self.spare = nn.Linear(width, width)
        self.skip = skip
        self.calls = 0

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = first = self.embed(tokens)
        shift = torch.full((1,), 0.1)
        for block in self.blocks:
            x = block(x + first if self.skip else x, shift=shift)
        return self.head(x)


def calibration(batches: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 40, (2, 24), generator=generator) for _ in range(batches)]


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {n: m for n, m in model.named_modules() if type(m) is nn.Linear}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.filterwarnings("ignore", message="calibration never reached")


def test_a_chain_is_found_and_what_is_none_is_not_taken_for_one() -> None:
    for skip, kind in ((False, Chain), (True, Whole)):
        model = Model(skip)
        stages = split(model, linears(model))
        assert [s.name for s in stages] == ["blocks.0", "blocks.1", "blocks.2", ""]
        assert list(stages[-1].linears) == ["head", "spare"]
        with torch.no_grad():
            assert type(drive(model, stages, calibration())) is kind
    assert [s.name for s in split(nn.Sequential(nn.Linear(2, 2)), {"0": nn.Linear(2, 2)})] == [""]


@pytest.mark.parametrize("skip", [False, True])
def test_each_block_learns_from_the_quantized_blocks_before_it(skip: bool) -> None:
    """The definition, by running the whole model anew for every block."""
    model, expected = Model(skip), Model(skip)
    nybble.quantize_(model, "W4A16_G32", "gptq", ignore=["head", "spare"], calibration=calibration())
    for number in range(3):
        names = [f"blocks.{number}.{kind}" for kind in ("q_proj", "k_proj", "down_proj")]
        inside = {n: expected.get_submodule(n) for n in names}
        with torch.no_grad():
            seen = collect(inside, (expected(batch) for batch in calibration()))
        for name, linear in inside.items():
            layer = Layer(name, linear.weight, scheme("W4A16_G32"), None, seen[name])
            weight = gptq.apply(layer, gptq.Config())
            assert torch.equal(model.get_submodule(name).weight.unpack(), weight.unpack()), name
            expected.set_submodule(name, QuantLinear(weight, linear.bias))


def test_a_chain_runs_the_model_only_to_its_first_block() -> None:
    model = Model()
    nybble.quantize_(model, "W4A16_G32", "gptq", ignore=["head", "spare"], calibration=calibration(4))
    assert model.calls == 1 + 4, "one to see that it is a chain, one a batch to enter it"


def test_what_is_fed_the_same_tensor_is_gathered_once() -> None:
    model = Model(depth=1)
    with torch.no_grad():
        seen = collect(linears(model), (model(batch) for batch in calibration()))
    assert seen["blocks.0.q_proj"] is seen["blocks.0.k_proj"]
    assert seen["blocks.0.q_proj"] is not seen["blocks.0.down_proj"]
    assert "spare" not in seen
    assert seen["head"].tokens == 4 * 48


def test_a_linear_that_is_called_twice_sees_both_inputs() -> None:
    linear, other = nn.Linear(4, 4), nn.Linear(4, 4)
    a, b = torch.randn(3, 4), torch.randn(5, 4)
    with torch.no_grad():
        seen = collect({"l": linear, "o": other}, ((linear(a), linear(b), other(b)) for _ in range(1)))
    whole = Inputs(4)
    whole.add(torch.cat([a, b]))
    assert seen["l"].tokens == 8
    assert torch.allclose(seen["l"].second_moment, whole.second_moment, rtol=2.0**-20, atol=0)
    assert seen["o"].tokens == 5


def test_a_layer_that_nothing_reaches_is_named_and_rounded_to_nearest() -> None:
    model, plain = Model(), Model()
    with pytest.warns(UserWarning, match=r"never reached 1 layers.*spare"):
        nybble.quantize_(model, "W4A16_G32", "gptq", calibration=calibration())
    assert record(model).unreached == ("spare",)
    nearest = rtn.apply(Layer("spare", plain.spare.weight, scheme("W4A16_G32")), rtn.Config())
    assert torch.equal(model.spare.weight.unpack(), nearest.unpack())


def test_short_calibration_is_said_with_numbers() -> None:
    with pytest.warns(UserWarning, match="has 32 inputs and saw 10 tokens"):
        nybble.quantize_(Model(), "W4A16_G32", "gptq", calibration=[torch.arange(10)[None]])


def test_nan_is_named_with_layer_and_batch() -> None:
    model = Model()
    model.embed.weight.data[39] = torch.nan
    fine = [torch.arange(10)[None] for _ in range(2)]
    with pytest.raises(BadInput, match=r"input of blocks\.0\.q_proj .*batch 3"):
        nybble.quantize_(model, "W4A16_G32", "gptq", calibration=[*fine, torch.tensor([[39]])])


def test_calibration_is_asked_for_and_may_be_a_callable_or_a_generator() -> None:
    with pytest.raises(BadInput, match="gptq"):
        nybble.quantize_(Model(), "W4A16_G32", "gptq")
    with pytest.raises(BadInput, match="give calibration"):
        nybble.quantize_(Model(), "W4A16_G32", "gptq", calibration=[])
    codes = []
    for given in (calibration(), calibration, (b for b in calibration()), [{"tokens": b} for b in calibration()]):
        model = nybble.quantize_(Model(), "W4A16_G32", "gptq", calibration=given)
        codes.append(model.blocks[2].q_proj.codes)
    assert all(torch.equal(c, codes[0]) for c in codes)


class _Stopped(Exception):
    pass


def _stop_after(layers: int):  # type: ignore[no-untyped-def]
    def progress(done: int, total: int, name: str) -> None:
        if done > layers:
            raise _Stopped

    return progress


def test_a_run_that_was_stopped_goes_on_and_gives_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = nybble.quantize_(Model(), "NVFP4", "schur", calibration=calibration())
    with pytest.raises(_Stopped):
        nybble.quantize_(
            Model(), "NVFP4", "schur", calibration=calibration(), work_dir=tmp_path, progress=_stop_after(4)
        )
    assert list(json.loads((tmp_path / "manifest.json").read_text())["stages"]) == ["blocks.0"]
    seen: list[tuple[int, int, str]] = []
    gathered = []
    monkeypatch.setattr(Inputs, "add", lambda self, *x, add=Inputs.add: gathered.append(x) or add(self, *x))
    model = nybble.quantize_(
        Model(), "NVFP4", "schur", calibration=calibration(), work_dir=tmp_path, progress=lambda *a: seen.append(a)
    )
    assert len(gathered) == 4 * (2 * 2 + 1), "a finished block's inputs are not gathered again"
    assert seen[0] == (3, 11, "blocks.0")
    assert [s[0] for s in seen] == list(range(3, 12))
    for name, layer in whole.named_modules():
        if isinstance(layer, QuantLinear):
            other = model.get_submodule(name)
            assert all(torch.equal(p, other.weight.parts[n]) for n, p in layer.weight.parts.items())
            assert name == "spare" or torch.equal(other.activation_amax, layer.activation_amax)
    assert record(model).unreached == record(whole).unreached == ("spare",)


def test_another_run_or_a_damaged_file_is_refused(tmp_path: Path) -> None:
    nybble.quantize_(Model(), "W4A16_G32", "gptq", calibration=calibration(), work_dir=tmp_path)
    for kwargs in ({"method": "rtn"}, {"scheme": "W8A16"}, {"calibration": calibration(3)}):
        asked = {"scheme": "W4A16_G32", "method": "gptq", "calibration": calibration(), **kwargs}
        with pytest.raises(BadInput, match="holds another run"):
            nybble.quantize_(Model(), **asked, work_dir=tmp_path)
    first = sorted(tmp_path.glob("*.pt"))[0]
    first.write_bytes(first.read_bytes()[:-1] + b"x")
    with pytest.raises(DamagedFile, match=first.name):
        nybble.quantize_(Model(), "W4A16_G32", "gptq", calibration=calibration(), work_dir=tmp_path)


def test_names_compose_and_refusals_name_the_part() -> None:
    assert {"rtn", "gptq", "schur", "four_over_six"} <= set(compose.methods())
    for name in compose.methods():
        assert compose.method_module(name).Config()
    with pytest.raises(UnknownName, match="gptq"):
        compose.plan("rtn+gtpq")
    with pytest.raises(BadInput, match="rtn rounds"):
        compose.plan("rtn+gptq")
    with pytest.raises(BadInput, match="settings"):
        compose.plan("gptq", rtn.Config())
    assert compose.plan("rtn", Settings(seed=7)).rounds.config.seed == 7
    assert compose.plan("gptq", Settings(parts={"gptq": gptq.Config(damping=0.5)})).rounds.config.damping == 0.5


def test_four_over_six_is_its_scheme() -> None:
    model = nybble.quantize_(Model(), "NVFP4A16", "four_over_six")
    same = nybble.quantize_(Model(), "NVFP4A16_4OVER6")
    assert torch.equal(model.head.codes, same.head.codes)
    assert torch.equal(model.head.scale, same.head.scale)
    with pytest.raises(nybble.errors.Unsupported, match="int4_g128"):
        nybble.quantize_(Model(), "W4A16", "four_over_six")


def test_parameters_are_never_written_to_and_modes_come_back() -> None:
    model = Model()
    twin = copy.deepcopy(model, {id(p): p for p in model.parameters()})
    before = {n: p.clone() for n, p in model.named_parameters()}
    twin.train()
    nybble.quantize_(twin, "NVFP4A16", "gptq", calibration=calibration())
    assert twin.training
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())


def test_an_expert_without_tokens_is_unreached() -> None:
    """Routers send some experts nothing: an empty input says as little as none."""
    expert, other = nn.Linear(4, 4), nn.Linear(4, 4)
    with torch.no_grad():
        seen = collect({"e": expert, "o": other}, ((expert(torch.ones(0, 4)), other(torch.ones(2, 4))) for _ in (1,)))
    assert list(seen) == ["o"]
