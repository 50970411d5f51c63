"""On a GPU: the codes of the CPU but for a few that sit on a tie, whole models, blocks brought from main memory, the
rows of a layer shared by processes, and how fast a layer is solved."""

import copy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import nybble
import tiny
from method_layers import layer
from nybble.methods import distill, gptq, memory, rtn, schur
from nybble.methods.layer import Inputs, Layer, relative_error
from nybble.methods.stages import split
from nybble.ops import QuantLinear
from nybble.quantize.schemes import scheme as find_scheme

pytestmark = pytest.mark.gpu


class Block(nn.Module):
    """A gated MLP after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.gate_proj, self.up_proj = nn.Linear(64, 96), nn.Linear(64, 96)
        self.down_proj = nn.Linear(96, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.norm(x)
        return x + self.down_proj(torch.tanh(self.gate_proj(x)) * self.up_proj(x))


class Model(nn.Module):
    """Two blocks between an embedding and a head that is not quantized."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.layers = nn.Embedding(50, 64), nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(64, 50, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.layers:
            x = block(x)
        return self.lm_head(x)


class Deep(nn.Module):
    """Eight blocks of 12 MiB each, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.blocks = nn.Embedding(50, 1024), nn.ModuleList([Wide() for _ in range(8)])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return x


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up_proj, self.down_proj = nn.Linear(1024, 1536, bias=False), nn.Linear(1536, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down_proj(torch.tanh(self.up_proj(x)))


def batches() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 50, (4, 16), generator=generator).cuda() for _ in range(8)]


def moved(one: Layer) -> Layer:
    """The same layer with the same statistics on the GPU."""
    seen = copy.deepcopy(one.inputs)
    seen._factors.clear()
    for name, value in vars(seen).items():
        if isinstance(value, torch.Tensor):
            setattr(seen, name, value.cuda())
    return Layer(one.name, one.weight.cuda(), one.scheme, one.tensor_amax.cuda(), seen)


@pytest.mark.parametrize("method", [gptq, schur], ids=lambda m: m.__name__.rpartition(".")[2])
@pytest.mark.parametrize("name", ["NVFP4A16", "MXFP4A16", "W4A16_G32_ASYM", "W4A16", "NF4", "W8A16"])
def test_a_layer_is_solved_as_on_the_cpu(method: object, name: str) -> None:
    one = layer(name, 96, 192, seed=0)
    if method is schur and one.scheme.weight.block[1] is None:
        pytest.skip("schur needs groups within a row")
    here, there = method.apply(one, method.Config()), method.apply(moved(one), method.Config())
    same = (here.unpack() == there.unpack().cpu()).float().mean()
    assert same > 0.995, "a sum in another order can turn a tie, and a scale with it"
    errors = [relative_error(one.weight, q, one.inputs.second_moment) for q in (here, there.to("cpu"))]
    assert errors[1] < 1.02 * errors[0]
    assert errors[1] < relative_error(one.weight, rtn.apply(one, rtn.Config()), one.inputs.second_moment)


@pytest.mark.parametrize("method", ["gptq", "schur", "awq+gptq", "smoothquant", "hadamard+gptq", "four_over_six"])
def test_a_model_is_quantized_where_it_is(method: str) -> None:
    model = Model().eval().cuda()
    expected = model(batches()[0])
    quantized = nybble.quantize_(copy.deepcopy(model), "NVFP4A16", method, calibration=batches())
    assert all(buffer.is_cuda for buffer in quantized.buffers())
    y = quantized(batches()[0])
    assert float((y - expected).norm() / expected.norm()) < 0.3


@pytest.mark.parametrize(("scheme", "rank"), [("NVFP4", 0), ("MXFP4", 0), ("NVFP4A16", 4)])
def test_distillation_learns(scheme: str, rank: int) -> None:
    original, data = Model().eval().cuda(), batches()
    nearest = nybble.quantize_(copy.deepcopy(original), scheme, calibration=data)
    config = distill.Config(steps=60, lr=2e-3, rank=rank)
    learned = nybble.quantize_(copy.deepcopy(original), scheme, "distill", calibration=data, config=config)
    with torch.no_grad():
        before, after = (distill.divergence(original(data[0]), m(data[0])) for m in (nearest, learned))
    assert float(after) < float(before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["NVFP4", "MXFP4", "W4A16", "W4A16_G32", "W8A8", "MXFP4A16_FLOOR"])
def test_what_training_sees_is_what_is_exported(name: str, dtype: torch.dtype) -> None:
    row = find_scheme(name)
    weights = [torch.randn(96, 256, device="cuda").to(dtype) * scale for scale in (0.05, 0.08)]
    amax = torch.stack([w.abs().amax().float() for w in weights]).amax()
    seen = distill._rounded(["q_proj", "k_proj"], weights, row)
    for weight, found in zip(weights, seen, strict=True):
        exported = rtn.apply(Layer("l", weight, row, amax), rtn.Config())
        assert torch.equal(found, exported.dequantize(dtype))


@pytest.mark.parametrize("name", ["NVFP4", "MXFP4", "W4A16_G32"])
def test_what_was_learned_is_saved_and_loaded_bit_for_bit(name: str, tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(3)
    data = [{"input_ids": torch.randint(0, tiny.VOCABULARY, (2, 16), generator=generator).cuda()} for _ in range(4)]
    model, config = tiny.llama().cuda(), distill.Config(steps=4, lr=1e-3, warmup=1)
    nybble.quantize_(model, name, "distill", calibration=data, config=config)
    nybble.save(model, tmp_path / "out")
    again = nybble.load(tmp_path / "out", device="cpu")
    layers = {n: m.weight for n, m in model.named_modules() if isinstance(m, QuantLinear)}
    assert len(layers) == 14
    for layer_name, weight in layers.items():
        loaded = again.get_submodule(layer_name).weight
        assert torch.equal(weight.unpack().cpu(), loaded.unpack()), layer_name
        assert torch.equal(weight.scales()[0].cpu(), loaded.scales()[0]), layer_name


@pytest.mark.raw_memory
@pytest.mark.parametrize("spill", [None, "cpu", "folder"])
def test_blocks_come_from_main_memory_one_by_one(spill: str | None, tmp_path: Path) -> None:
    """Without fences, which are held until the test ends."""
    generator = torch.Generator().manual_seed(1)
    data = [torch.randint(0, 50, (4, 256), generator=generator) for _ in range(8)]
    model = Deep().eval()
    expected = nybble.quantize_(copy.deepcopy(model).cuda(), "W4A16", "gptq", calibration=[b.cuda() for b in data])
    codes = [layer.weight.unpack().cpu() for layer in expected.modules() if isinstance(layer, QuantLinear)]
    linears = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}
    stages, schemes = split(model, linears), dict.fromkeys(linears, find_scheme("W4A16"))
    blocks = 2 * sum(p.nbytes for p in model.blocks[0].parameters())
    kept = 0 if spill else 8 * 4 * 256 * 1024 * 4
    del expected
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    where = tmp_path / "kept" if spill == "folder" else spill
    nybble.quantize_(model, "W4A16", "gptq", calibration=data, device="cuda", spill=where)
    peak = torch.cuda.max_memory_allocated() - before
    found = [layer.weight for layer in model.modules() if isinstance(layer, QuantLinear)]
    assert all(torch.equal(weight.unpack(), code) for weight, code in zip(found, codes, strict=True))
    assert all(weight.device.type == "cpu" for weight in found), "the model stays in main memory"
    # What the check before a run adds up; beside it a batch on its way through a block, and cuBLAS's workspace.
    assert peak < memory.statistics(stages[0], schemes) + blocks + kept + 4 * 4 * 256 * 1536 * 4 + 2**26


def test_two_processes_on_one_gpu_give_the_codes_of_one(tmp_path: Path) -> None:
    tiny.directory(tmp_path / "model")
    tiny.sentences(tmp_path / "text.txt")
    asked = ["quantize", "model", "W4A16_G32", "--method", "schur", "--calibration", "text.txt", "--device", "cuda"]
    programs = {"alone": ["-m", "nybble"], "shared": ["-m", "torch.distributed.run", "--standalone",
                                                      "--nproc-per-node=2", "-m", "nybble"]}  # fmt: skip
    for out, program in programs.items():
        command = [sys.executable, *program, *asked, "--samples", "3", "-o", out]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr[-3000:]
    files = [tmp_path / out / "model.safetensors" for out in programs]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_an_8b_layer_takes_seconds() -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(14336, 4096, generator=generator).cuda()
    seen = Inputs(4096, "cuda")
    seen.add(torch.randn(8192, 4096, generator=generator).cuda())
    one = Layer("l", weight, find_scheme("NVFP4A16"), weight.abs().amax(), seen)
    for _ in range(2):  # the first compiles the kernel
        seen._factors.clear()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        schur.apply(one, schur.Config())
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begin
    assert seconds < 8
