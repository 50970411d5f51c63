"""rope_attention_: its two ops, everywhere; its kernel, compiled, on a CPU thread by thread, and on a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import cuda_on_cpu
from nybble.errors import BadInput
from nybble.ops import _nvrtc
from nybble.ops.rope_attention import ROPE_ATTENTION, composed, cuda, rope_attention_
from nybble.ops.rope_cache import query_heads

HALVES = (torch.bfloat16, torch.float16)


def copied(args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.clone() for a in args)


def served(device: str) -> list[tuple[str, tuple[Any, ...]]]:
    return [(label, args) for label, args in ROPE_ATTENTION.cases(device) if cuda.unfit(*args) is None]


def agree(run: Any, label: str, args: tuple[Any, ...]) -> torch.Tensor:
    """Runs on a copy; the result is within the agreement, what is written into the caches is the definition's."""
    ours, theirs = copied(args), copied(args)
    o, expected = run(*ours), ROPE_ATTENTION.reference(*theirs)
    ROPE_ATTENTION.agreement.check(o, expected, label)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine.nan_to_num(), other.nan_to_num()), f"{label}: caches alike, inputs left alone"
    return o


def on_cpu(*args: torch.Tensor) -> torch.Tensor:
    """attend.cu with one block a cluster."""
    qkv, _, _, k_cache, *_ = args
    batch, kv_heads, capacity, d = k_cache.shape
    q_heads = query_heads(qkv, k_cache)
    heads, parts, _ = cuda.cut(batch, q_heads, kv_heads, 1)
    o = torch.full((batch, q_heads, d), math.nan, dtype=qkv.dtype)
    pointers = [part.data_ptr() for part in (*args[:5], o, args[5])]
    argument = cuda.Arguments(*pointers, capacity, q_heads, kv_heads, parts, math.log2(math.e) / math.sqrt(d))
    given = tuple(cuda.defines(d, heads, 1, qkv.dtype == torch.float16).items())
    cuda_on_cpu.run(cuda.SOURCE, "rope_attention", given, (kv_heads * parts, batch), cuda.THREADS, argument)
    return o


@pytest.mark.skipif(cuda_on_cpu.COMPILER is None, reason="g++ is not installed")
def test_the_kernel_run_on_a_cpu_is_the_definition() -> None:
    found = served("cpu")
    assert len(found) >= 5
    for label, args in found:
        agree(on_cpu, label, args)


def test_without_a_kernel_it_is_its_two_ops() -> None:
    for label, args in ROPE_ATTENTION.cases():
        assert torch.equal(agree(rope_attention_, label, args), composed(*copied(args))), label


def test_a_machine_is_filled_once() -> None:
    assert [cuda.cut(batch, 32, 8, 132)[2] for batch in (1, 2, 4, 8, 64)] == [8, 4, 2, 1, 1]
    assert cuda.cut(1, 9, 3, 132) == (2, 2, 8)
    assert cuda.cut(1, 3, 3, 132) == (1, 1, 8)


@pytest.mark.parametrize("arch", ["90a", "100a", "120a"])
@pytest.mark.skipif(_nvrtc.available() is not None, reason=str(_nvrtc.available()))
def test_compiles(arch: str, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NYBBLE_CACHE", str(tmp_path))
    for d, heads, cluster, fp16 in ((128, 2, 8, False), (64, 1, 2, True), (64, 2, 1, False), (256, 2, 4, True)):
        assert _nvrtc.build(cuda.SOURCE, cuda.defines(d, heads, cluster, fp16), arch).startswith(b"\x7fELF")


def test_refusals() -> None:
    label, args = next(iter(ROPE_ATTENTION.cases()))
    qkv, cos, sin, k, v, position = args
    assert "not torch.float32" in str(cuda.unfit(*args)), label
    halves = [a.bfloat16() for a in args[:5]]
    assert cuda.unfit(*halves, position) is None
    assert "shorter" in str(cuda.unfit(halves[0], halves[1][:9], *halves[2:], position))
    assert "does not lie so" in str(cuda.unfit(halves[0].repeat(1, 2)[:, ::2], *halves[1:], position))
    assert "64, 128, 256" in str(cuda.unfit(*[a.bfloat16() for a in list(ROPE_ATTENTION.cases())[1][1][:5]], position))
    with pytest.raises(BadInput, match=r"\[B, \(Hq \+ 2 Hkv\) D\], got \[1, 384\]"):
        rope_attention_(qkv[:, :384], cos, sin, k, v, position)
    with pytest.raises(BadInput, match="rope_attention_ takes"):
        rope_attention_(qkv[None], cos, sin, k, v, position)


@pytest.mark.gpu(capability=(9, 0))
def test_agrees_on_a_gpu() -> None:
    for label, args in served("cuda"):
        first = agree(cuda.run, label, args)
        assert torch.equal(agree(cuda.run, label, args), first), "the same bits when run again"


@pytest.mark.gpu(capability=(9, 0))
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("batch", [1, 2, 4, 16])
def test_every_length_and_number_of_sequences(batch: int, dtype: torch.dtype) -> None:
    """Lengths round the keys that a cluster takes at once, and every size of a cluster."""
    generator = torch.Generator("cuda").manual_seed(0)
    capacity, d = 1100, 128 if batch < 16 else 64

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").to(dtype)

    qkv, tables = normal(batch, 48 * d), [normal(capacity, d) for _ in range(2)]
    caches = [normal(batch, 8, capacity, d) for _ in range(2)]
    for length in (0, 1, 15, 16, 17, 127, 128, 129, 255, 257, 1023, 1025, 1099):
        position = torch.tensor([length], dtype=torch.int32, device="cuda")
        agree(cuda.run, f"{batch} sequences at {length}", (qkv, *tables, *caches, position))


@pytest.mark.gpu(capability=(9, 0))
def test_a_position_that_changes_just_before_is_seen() -> None:
    """The kernel starts before its predecessor has ended and has then read the position already."""
    generator = torch.Generator("cuda").manual_seed(0)
    qkv, cos, sin = (
        torch.randn(*s, generator=generator, device="cuda").bfloat16() for s in ((1, 768), (300, 64), (300, 64))
    )
    caches = torch.randn(2, 1, 2, 300, 64, generator=generator, device="cuda").bfloat16()
    position, positions = torch.zeros(1, dtype=torch.int32, device="cuda"), list(range(0, 300, 7))
    steps = [torch.tensor([p], dtype=torch.int32, device="cuda") for p in positions]
    expected = [ROPE_ATTENTION.reference(qkv, cos, sin, *(c.clone() for c in caches), p) for p in steps]
    graph, mine = torch.cuda.CUDAGraph(), [caches.clone() for _ in steps]
    cuda.run(qkv, cos, sin, *caches.clone(), position)
    with torch.cuda.graph(graph):
        found = []
        for p, (k, v) in zip(steps, mine, strict=True):
            position.copy_(p)
            found.append(cuda.run(qkv, cos, sin, k, v, position))
    for _ in range(3):
        graph.replay()
        for o, other, p in zip(found, expected, positions, strict=True):
            ROPE_ATTENTION.agreement.check(o, other, f"position {p}")
