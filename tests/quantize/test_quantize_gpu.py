"""On a GPU: the same bits as on the CPU, and no more memory than promised."""

import pytest
import torch
from torch import nn

import nybble
from nybble.formats import table
from nybble.quantize import layouts

pytestmark = pytest.mark.gpu
BLOCKS = list(table.BLOCKS.values())


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def same(a: nybble.QuantTensor, b: nybble.QuantTensor) -> bool:
    return a.parts.keys() == b.parts.keys() and all(torch.equal(t, b.parts[n].cpu()) for n, t in a.parts.items())


@pytest.mark.parametrize("fmt", BLOCKS, ids=str)
def test_quantize_gives_the_bits_of_the_cpu(fmt) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = (normal(130, 300) * torch.logspace(-6, 3, 130)[:, None]).to(dtype)
        q, g = nybble.quantize(x, fmt), nybble.quantize(x.cuda(), fmt)
        assert same(q, g)
        assert torch.equal(q.dequantize(), g.dequantize().cpu())


@pytest.mark.parametrize("rounding", ["stochastic", "stochastic_8bit", "up", "toward_zero"])
@pytest.mark.parametrize("name", ["nvfp4", "mxfp8_e4m3", "int4_g128", "nf4_g64", "mxint8"])
def test_rounding_gives_the_bits_of_the_cpu(name: str, rounding: str) -> None:
    x = normal(70, 257)
    options = {"rounding": rounding, "seed": 11}
    assert same(nybble.quantize(x, name, **options), nybble.quantize(x.cuda(), name, **options))


@pytest.mark.parametrize("rule", ["four_over_six", "two_level"])
def test_rules_give_the_bits_of_the_cpu(rule: str) -> None:
    x = normal(64, 256)
    assert same(nybble.quantize(x, "nvfp4", rule=rule), nybble.quantize(x.cuda(), "nvfp4", rule=rule))


@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_layouts_give_the_bytes_of_the_cpu(bits: int) -> None:
    codes = torch.randint(0, 1 << bits, (33, 129), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    for layout in (layouts.DENSE, layouts.DENSE_INT32):
        packed = layout.pack(codes, bits)
        assert torch.equal(layout.pack(codes.cuda(), bits).cpu(), packed)
        assert torch.equal(layout.unpack(packed.cuda(), (33, 129), bits).cpu(), codes)


@pytest.mark.raw_memory
@pytest.mark.parametrize("scheme", ["W4A16", "NVFP4A16", "W8A16", "W3A16"])
def test_quantize_in_place_needs_at_most_one_layer_more(scheme: str) -> None:
    """Peak while a stack is quantized: the model and one of its layers; afterwards the packed bytes, without growth.

    The poisoned allocator stays out: it would count its own fences."""

    def stack() -> nn.Sequential:
        torch.manual_seed(0)
        with torch.device("cuda"):
            return nn.Sequential(*(nn.Linear(4096, 14336, bias=False, dtype=torch.bfloat16) for _ in range(8)))

    nybble.quantize_(nn.Sequential(nn.Linear(4096, 64, bias=False, dtype=torch.bfloat16)).cuda(), scheme)
    torch.cuda.empty_cache()
    layer = 4096 * 14336 * 2
    after = []
    for _ in range(10):
        model = stack()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        nybble.quantize_(model, scheme)
        peak = torch.cuda.max_memory_allocated()
        assert peak <= before + layer, f"{(peak - before) / layer:.2f} layers above the model"
        packed = sum(m.weight.nbytes for m in model)
        left = torch.cuda.memory_allocated()
        assert left - (before - 8 * layer) <= packed * 1.02
        after.append(left)
        del model
    assert after[-1] <= after[1]
