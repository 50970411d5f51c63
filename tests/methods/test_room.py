"""Blocks worked on elsewhere, activations kept elsewhere, and runs that would not fit.

To torch "cpu:0" is another device than "cpu": tensors are copied, so that visits can be tested without a GPU.
"""

import copy
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import nybble
from method_layers import layer
from nybble.errors import BadInput, Unsupported
from nybble.methods import gptq, memory, schur
from nybble.methods.room import Visits
from nybble.ops import QuantLinear
from nybble.quantize.schemes import scheme

ASKED = {"scheme": "W4A16_G32", "ignore": ["head"]}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up_proj, self.down_proj = nn.Linear(32, 64), nn.Linear(64, 32)
        self.register_buffer("gain", torch.tensor(0.9))

    def forward(self, x: torch.Tensor, shift: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return x + self.down_proj(torch.tanh(self.up_proj(self.norm(x)) + shift[0])) * self.gain


class Model(nn.Module):
    """A chain of blocks; with `skip` none."""

    def __init__(self, skip: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.skip = nn.Embedding(40, 32), skip
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.head = nn.Linear(32, 40)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = first = self.embed(tokens)
        shift = torch.full((1,), 0.1), torch.zeros(1)
        for block in self.blocks:
            x = block(x + first if self.skip else x, shift=shift)
        return self.head(x)


def calibration(count: int = 4) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 40, (2, 24), generator=generator) for _ in range(count)]


def codes(model: nn.Module) -> list[torch.Tensor]:
    return [layer.weight.unpack() for layer in model.modules() if isinstance(layer, QuantLinear)]


def same(a: nn.Module, b: nn.Module) -> bool:
    pairs = list(zip(codes(a), codes(b), strict=True))
    others = zip(a.parameters(), b.parameters(), strict=True)
    return len(pairs) == 8 and all(torch.equal(x, y) for x, y in [*pairs, *others])


@pytest.mark.parametrize("method", ["gptq", "smoothquant+schur"])
@pytest.mark.parametrize("device", [None, "cpu:0"])
@pytest.mark.parametrize("spill", [None, "cpu", "folder"])
def test_wherever_it_is_done_the_result_is_the_same(
    method: str, device: str | None, spill: str | None, tmp_path: Path
) -> None:
    where = {"device": device, "spill": tmp_path / "kept" if spill == "folder" else spill}
    expected, model = (nybble.quantize_(Model(), **ASKED, method=method, calibration=calibration(), **w)
                       for w in ({}, where))  # fmt: skip
    assert same(model, expected)
    assert torch.equal(model(calibration()[0]), expected(calibration()[0]))
    assert not list((tmp_path / "kept").glob("*")), "nothing is left behind"


def test_what_was_lent_comes_back_as_it_was() -> None:
    model = Model()
    before = {name: p for name, p in model.named_parameters() if "proj.weight" not in name}
    original, gains = copy.deepcopy(model), [block.gain for block in model.blocks]
    nybble.quantize_(model, **ASKED, method="gptq", calibration=calibration(), device="cpu:0")
    after = dict(model.named_parameters())
    assert all(after[name] is p for name, p in before.items())
    assert all(block.gain is gain for block, gain in zip(model.blocks, gains, strict=True))
    assert all(torch.equal(after[name], p) for name, p in original.named_parameters() if name in after)


def test_two_blocks_are_there_at_any_time(monkeypatch: pytest.MonkeyPatch) -> None:
    there, most = set(), []

    def watched(name: str, change: str) -> None:
        real = getattr(Visits, name)

        def call(self: Visits, module: nn.Module, *rest: object) -> None:
            getattr(there, change)(id(module))
            most.append(len(there))
            real(self, module, *rest)

        monkeypatch.setattr(Visits, name, call)

    watched("expect", "add")
    watched("back", "discard")
    nybble.quantize_(Model(), **ASKED, method="gptq", calibration=calibration(), device="cpu:0")
    assert max(most) == 2
    assert not there


def test_a_run_that_was_stopped_goes_on(tmp_path: Path) -> None:
    class Stopped(Exception):
        pass

    def stop(done: int, total: int, name: str) -> None:
        if done == 5:
            raise Stopped

    asked = {**ASKED, "method": "gptq", "calibration": calibration(), "work_dir": tmp_path / "work", "device": "cpu:0"}
    with pytest.raises(Stopped):
        nybble.quantize_(Model(), **asked, spill=tmp_path / "kept", progress=stop)
    model = nybble.quantize_(Model(), **asked, spill=tmp_path / "kept")
    assert same(model, nybble.quantize_(Model(), **ASKED, method="gptq", calibration=calibration()))


def test_a_model_that_is_no_chain_is_worked_on_where_it_is() -> None:
    with pytest.raises(Unsupported, match="no chain of blocks"):
        nybble.quantize_(Model(skip=True), **ASKED, method="gptq", calibration=calibration(), spill="cpu")


def test_what_does_not_fit_is_refused_with_what_would(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = {**ASKED, "method": "gptq", "calibration": calibration()}
    moments = 8 * (32 * 32 + 64 * 64) + 4 * 8 * 64 * 64 + 36 * 32 * 64
    batch = 2 * 24 * 32 * 4
    monkeypatch.setattr(memory, "free", lambda device: moments + 2 * batch)
    model = Model()
    with pytest.raises(BadInput, match=r"2 batches would fit, or all of them kept elsewhere"):
        nybble.quantize_(model, **asked)
    assert not codes(model), "nothing was changed"
    monkeypatch.setattr(memory, "free", lambda device: moments - 1)
    with pytest.raises(BadInput, match=r"0.000246 GB are needed for blocks\.\d .*work on a larger device"):
        nybble.quantize_(model, **asked)
    monkeypatch.setattr(memory, "free", lambda device: moments + 4 * batch)
    nybble.quantize_(model, **asked)


def test_rounded_inputs_need_three_moments() -> None:
    from nybble.methods.stages import Stage

    stage = Stage("b", Block(), {"up_proj": nn.Linear(32, 64)})
    sizes = [memory.statistics(stage, {"up_proj": scheme(name)}) for name in ("W4A16", "W4A4")]
    assert sizes == [8 * 32 * 32 * (1 + 4) + 36 * 32 * 64, 8 * 32 * 32 * (3 + 4) + 36 * 32 * 64]


@pytest.mark.raw_memory
@pytest.mark.parametrize("method", [gptq, schur], ids=lambda m: m.__name__.rpartition(".")[2])
@pytest.mark.parametrize("name", ["W4A16_G32", "NVFP4A16", "W4A4_G32"])
@pytest.mark.parametrize(("n", "k"), [(64, 512), (2048, 512)])
def test_a_layer_needs_no_more_than_was_counted(method: Any, name: str, n: int, k: int) -> None:
    """Without fences, which are held until the test ends."""
    from nybble.methods.stages import Stage

    row, linear = scheme(name), nn.Linear(k, n, bias=False)
    one = layer(name, n, k, seed=0)
    counted = memory.statistics(Stage("b", linear, {"l": linear}), {"l": row})
    held = sum(t.nbytes for t in vars(one.inputs).values() if isinstance(t, torch.Tensor))
    peak = held + most_held(lambda: method.apply(one, method.Config()))
    assert 0.4 * counted < peak < 1.02 * counted


def most_held(run: Callable[[], object]) -> int:
    """The most bytes that were held at a time of what was allocated meanwhile."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        run()
    events = [(e.start_ns(), e.nbytes()) for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    return max(accumulate(size for _, size in sorted(events)))


def test_memory_is_measured() -> None:
    assert memory.free(torch.device("cpu")) > 2**30
