"""Memory of a quantized checkpoint on its way to the GPU: its packed bytes and at most one layer more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import nybble
from nybble.ops import QuantLinear
from tiny_models import tiny

pytestmark = [pytest.mark.gpu, pytest.mark.raw_memory]


@pytest.mark.parametrize("scheme", ["W4A16", "NVFP4A16"])
def test_loading_needs_at_most_one_layer_more_and_does_not_grow(scheme: str, tmp_path: Path) -> None:
    original = tiny(hidden_size=1024, intermediate_size=4096, num_hidden_layers=6, num_attention_heads=8).cuda()
    layer = sum(p.numel() * p.element_size() for p in original.model.layers[0].parameters())
    nybble.save(nybble.quantize_(original, scheme), tmp_path / "model")
    del original
    torch.cuda.empty_cache()
    sizes = []
    for _ in range(10):
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model = nybble.load(tmp_path / "model", device="cuda")
        held, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
        parts = [m.weight.nbytes for m in model.modules() if isinstance(m, QuantLinear)]
        assert parts
        rest = sum(p.numel() * p.element_size() for p in model.parameters()) + sum(
            b.numel() * b.element_size() for name, b in model.named_buffers() if "inv_freq" in name
        )
        assert held <= 1.03 * (sum(parts) + rest)
        assert peak <= held + layer, f"{(peak - held) / layer:.2f} layers above what is kept"
        sizes.append(torch.cuda.memory_allocated())
        del model
    assert sizes[-1] <= sizes[1]
