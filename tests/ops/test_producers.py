"""quantize_rows: every implementation gives the bits of the separate passes.

Without a GPU the kernel runs in Triton's interpreter, whose conversion to bfloat16 cuts bits off instead of rounding:
bfloat16 is for a GPU only.
"""

import pytest
import torch
from torch import Tensor

from nybble.ops._declare import Implementation
from nybble.ops.quantize_rows import QUANTIZE_ROWS
from nybble.ops.silu_mul import SILU_MUL
from nybble.quantize import QuantTensor

IMPLEMENTATIONS = QUANTIZE_ROWS.implementations("cuda")


def assert_same(q: QuantTensor, expected: QuantTensor, label: str) -> None:
    """The same bytes; in a block that holds NaN or infinity, NaN."""
    assert (q.format, q.shape, q.layout, q.dtype) == (expected.format, expected.shape, expected.layout, expected.dtype)
    assert q.parts.keys() == expected.parts.keys(), label
    values = expected.dequantize(torch.float32)
    assert torch.equal(q.dequantize(torch.float32).nan_to_num(1e30), values.nan_to_num(1e30)), label
    for name, part in q.parts.items():
        other = expected.parts[name]
        assert (part.shape, part.dtype) == (other.shape, other.dtype), f"{label}: {name}"
        if values.isfinite().all():
            assert torch.equal(part, other), f"{label}: {name}"


def separate(implementation: Implementation, args: tuple) -> tuple[QuantTensor, Tensor]:
    """The separate passes on the same device: the gate by the same kernel, since its exponential is the device's."""
    x, fmt, prologue, *_, amax, hadamard = args
    if prologue != "silu_mul" or implementation is QUANTIZE_ROWS.fallback:
        return QUANTIZE_ROWS.reference(*args)
    gate = SILU_MUL.implementations("cuda")[0]
    y = gate.run(x)
    SILU_MUL.agreement.check(y, SILU_MUL.reference(x), gate.name)
    return QUANTIZE_ROWS.reference(y, fmt, "plain", None, None, 0.0, amax, hadamard)[0], x


def check_on(implementation: Implementation, device: str, bf16: bool) -> None:
    served = 0
    for label, args in QUANTIZE_ROWS.cases(device):
        if "bfloat16" in label and not bf16:
            continue
        assert implementation.supports(*args) is None, label
        before = args[0].clone()
        q, h = implementation.run(*args)
        expected, sum_ = separate(implementation, args)
        assert_same(q, expected, label)
        assert torch.equal(h, sum_), label
        assert torch.equal(args[0], before), "the input is left alone"
        served += 1
    assert served > 90


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: i.name)
def test_gives_the_bits_of_the_separate_passes(implementation: Implementation) -> None:
    if implementation is not QUANTIZE_ROWS.fallback and torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU, and do not take tensors of the CPU")
    check_on(implementation, "cpu", bf16=implementation is QUANTIZE_ROWS.fallback)


@pytest.mark.gpu(capability=(8, 0))
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS, ids=lambda i: i.name)
def test_gives_the_bits_of_the_separate_passes_on_a_gpu(implementation: Implementation) -> None:
    check_on(implementation, "cuda", bf16=True)
