"""The small ops of a decode step and of calibration: each implementation against its definition.

Without a GPU the Triton kernels run in Triton's interpreter (tests/conftest.py). Its conversion to bfloat16 cuts
bits off instead of rounding (Triton 3.6 and 3.7), so bfloat16 cases of kernels are for a GPU only.
"""

import pytest
import torch

from nybble.errors import BadInput
from nybble.ops import (
    decode_attention,
    embed_token,
    greedy_token,
    rmsnorm,
    rope_cache,
    round_columns,
    silu_mul,
)
from nybble.ops._declare import Implementation, Op

OPS = [
    rmsnorm.ADD_RMSNORM,
    silu_mul.SILU_MUL,
    rope_cache.ROPE_CACHE,
    decode_attention.DECODE_ATTENTION,
    embed_token.EMBED_TOKEN,
    greedy_token.GREEDY_TOKEN,
    round_columns.ROUND_COLUMNS,
]
PAIRS = [(op, implementation) for op in OPS for implementation in op.implementations("cuda")]


def copied(args: tuple) -> tuple:
    return tuple(a.clone() if isinstance(a, torch.Tensor) and a.is_contiguous() else a for a in args)


def check_on(op: Op, implementation: Implementation, device: str, bf16: bool) -> None:
    served = 0
    for label, args in op.cases(device):
        if "bfloat16" in label and not bf16:
            continue
        ours, theirs = copied(args), copied(args)
        assert implementation.supports(*ours) is None, label
        got, expected = implementation.run(*ours), op.reference(*theirs)
        pairs = zip(got, expected, strict=True) if isinstance(got, tuple) else [(got, expected)]
        for y, reference in pairs:
            op.agreement.check(y, reference, f"{implementation.name} on {label}")
        for mine, other, before in zip(ours, theirs, args, strict=True):
            if isinstance(mine, torch.Tensor):
                assert torch.equal(mine.nan_to_num(), other.nan_to_num()), f"{label}: what is written is rounded alike"
                if not op.name.endswith("_"):
                    assert torch.equal(mine.nan_to_num(), before.nan_to_num()), "the input is left alone"
        served += 1
    assert served >= 3


@pytest.mark.parametrize(("op", "implementation"), PAIRS, ids=lambda x: x.name)
def test_agrees_with_the_reference(op: Op, implementation: Implementation) -> None:
    if implementation is not op.fallback and torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU, and do not take tensors of the CPU")
    check_on(op, implementation, "cpu", bf16=implementation is op.fallback)


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "implementation"), PAIRS, ids=lambda x: x.name)
def test_agrees_with_the_reference_on_a_gpu(op: Op, implementation: Implementation) -> None:
    check_on(op, implementation, "cuda", bf16=True)


def test_definitions_are_those_of_transformers() -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama", reason="the definition of the model")
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32):
        x = torch.randn(2, 5, 64, generator=generator).to(dtype)
        module = llama.LlamaRMSNorm(64, 1e-5).to(dtype)
        module.weight.data = torch.randn(64, generator=generator).to(dtype)
        y, h = rmsnorm.add_rmsnorm(x, None, module.weight, 1e-5)
        assert torch.equal(y, module(x))
        assert h is x or torch.equal(h, x)
        residual = torch.randn(2, 5, 64, generator=generator).to(dtype)
        assert torch.equal(rmsnorm.add_rmsnorm(x, residual, module.weight, 1e-5)[0], module(x + residual))

        q, k, v = (torch.randn(1, heads, 1, 16, generator=generator).to(dtype) for heads in (4, 2, 2))
        cos, sin = (torch.randn(8, 16, generator=generator).to(dtype) for _ in range(2))
        turned_q, turned_k = llama.apply_rotary_pos_emb(q, k, cos[None, 3:4], sin[None, 3:4])
        caches = torch.zeros(1, 2, 8, 16, dtype=dtype), torch.zeros(1, 2, 8, 16, dtype=dtype)
        qkv = torch.cat([q.flatten(), k.flatten(), v.flatten()])[None, None]
        got = rope_cache.rope_cache_(qkv, cos, sin, *caches, torch.tensor([3], dtype=torch.int32))
        assert torch.equal(got, turned_q.transpose(1, 2))
        assert torch.equal(caches[0][:, :, 3], turned_k[:, :, 0])
        assert torch.equal(caches[1][:, :, 3], v[:, :, 0])
        assert (caches[0][:, :, :3] == 0).all()


def test_attention_is_sdpa_over_the_valid_part() -> None:
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(2, 6, 32, generator=generator)
    k, v = torch.randn(2, 2, 2, 50, 32, generator=generator)
    got = decode_attention.decode_attention(q, k, v, torch.tensor([20], dtype=torch.int32))
    valid = torch.nn.functional.scaled_dot_product_attention(q[:, :, None], k[:, :, :21], v[:, :, :21], enable_gqa=True)
    assert float((got - valid[:, :, 0]).norm() / valid.norm()) < 1e-6


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_count_of_turns_serves_again(device: str) -> None:
    if device == "cpu" and torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU, and do not take tensors of the CPU")
    kernel = greedy_token.GREEDY_TOKEN.implementations("cuda")[0]
    generator = torch.Generator().manual_seed(0)
    turns, token = torch.zeros(3, dtype=torch.int32, device=device), torch.zeros(3, dtype=torch.int64, device=device)
    position = torch.zeros(1, dtype=torch.int32, device=device)
    for call in (1, 2, 3):
        logits = torch.randn(3, 9000, generator=generator).to(device)
        assert kernel.run(logits, token, position, turns) is token
        assert torch.equal(token, logits.argmax(-1))
        assert int(position) == call
        assert not turns.any()


def test_parts_fill_the_machine_and_none_is_shorter_than_a_step() -> None:
    from nybble.ops.decode_attention.triton import parts_for

    assert parts_for(8, 256) == 4
    assert parts_for(8, 8192) == 33
    assert parts_for(512, 8192) == 1
    assert parts_for(0, 1) == 1


def test_an_odd_width_has_no_two_halves() -> None:
    with pytest.raises(BadInput, match="even width"):
        silu_mul.silu_mul(torch.ones(2, 5))


def test_attention_in_double_precision_is_the_definition() -> None:
    q, cache = torch.randn(1, 2, 64).double(), torch.randn(2, 1, 2, 8, 64).double()
    position = torch.tensor([3], dtype=torch.int32)
    triton, *_ = decode_attention.DECODE_ATTENTION.implementations("cuda")
    assert "got torch.float64" in str(triton.supports(q, *cache, position))
    served = next(
        i for i in decode_attention.DECODE_ATTENTION.implementations("cuda") if not i.supports(q, *cache, position)
    )
    expected = decode_attention.decode_attention_reference(q, *cache, position)
    assert torch.equal(served.run(q, *cache, position), expected)
