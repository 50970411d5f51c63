"""The dtype a model runs in: a function of the device, of what the checkpoint holds, and of what was asked for."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import gguf_files
import tiny
from nybble.errors import BadInput
from nybble.methods import quantize_
from nybble.models import load, save
from nybble.models.precision import deployed, judged, stored

F32, BF16, F16, F64 = torch.float32, torch.bfloat16, torch.float16, torch.float64


@pytest.mark.parametrize(
    ("device", "held", "runs", "measured"),
    [
        ("cuda", F32, BF16, BF16),
        ("cuda", F64, BF16, BF16),
        ("cuda", BF16, BF16, BF16),
        ("cuda", F16, F16, F16),
        ("cpu", F32, F32, F32),
        ("cpu", BF16, BF16, F32),
        ("cpu", F16, F16, F32),
    ],
)
def test_a_gpu_runs_in_sixteen_bits(device: str, held: torch.dtype, runs: torch.dtype, measured: torch.dtype) -> None:
    assert deployed(device, held) == runs
    assert judged(device, held) == measured
    for asked in (F32, BF16, F16):
        assert deployed(device, held, asked) == judged(device, held, asked) == asked


@pytest.mark.parametrize("dtype", [F32, BF16, F16], ids=str)
def test_what_a_directory_holds(dtype: torch.dtype, tmp_path: Path) -> None:
    tiny.directory(tmp_path / "model", tiny.llama().to(dtype))
    assert stored(tmp_path / "model") == dtype == load(tmp_path / "model").dtype


@pytest.mark.parametrize("scheme", ["W4A16_G32", "FP8_DYNAMIC", "NVFP4"])
def test_scales_do_not_speak_for_a_quantized_checkpoint(scheme: str, tmp_path: Path) -> None:
    model = quantize_(tiny.llama().to(BF16), scheme, calibration=[{"input_ids": torch.arange(32)[None]}])
    save(model, tmp_path / "model", tiny.tokenizer())
    assert stored(tmp_path / "model") == BF16 == load(tmp_path / "model").dtype


def test_a_gguf_file_is_dequantized_to_float32(tmp_path: Path) -> None:
    path = gguf_files.write(tmp_path / "m.gguf", tiny.llama(), "llama")
    assert stored(path) == F32 == load(path).dtype


def test_a_model_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no such model"):
        stored(tmp_path / "nowhere")


def test_a_directory_without_weights_is_left_to_load(tmp_path: Path) -> None:
    tiny.directory(tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    assert stored(tmp_path / "model") == F32
