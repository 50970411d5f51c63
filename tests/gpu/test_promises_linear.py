"""The promises of linear_exact and linear_invariant on a GPU, in every bit.

linear_exact's oracle is its CPU twin: two machines that share no kernel and no compiler. linear_invariant is compared
with itself: a row in a batch against the row alone. Stock torch has to fail the same tests, or they would be blind.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import nybble
from nybble.ops._declare import Implementation
from nybble.ops.linear_exact import LINEAR_EXACT, linear_exact
from nybble.ops.linear_invariant import LINEAR_INVARIANT, linear_invariant

pytestmark = pytest.mark.gpu(capability=(8, 0))
INTEGER = {2: torch.int16, 4: torch.int32}
TOKENS = (1, 2, 3, 7, 8, 16, 64, 257)
HALVES = (torch.bfloat16, torch.float16)
QUANTIZED = ("int8_channel", "int4_g128", "int4_g32_asym", "nvfp4", "fp8_block128")
SETS = 12  # of 18 shapes, one test each


def same_bits(a: Tensor, b: Tensor) -> bool:
    integer = INTEGER[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.cpu().view(integer), b.cpu().view(integer))


def scattered(*shape: int, dtype: torch.dtype, seed: int, powers: int = 3) -> Tensor:
    """Normal numbers times powers of two up to 2^powers either way, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    scale = torch.exp2(torch.randint(-powers, powers + 1, shape, generator=generator).double())
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * scale).to(dtype)


def hostile(x: Tensor, kind: int, draw: random.Random) -> Tensor:
    """x with infinities and NaN in some rows (kind 2), or scaled to the ends of its range (kind 3)."""
    if kind == 2:
        for value in (torch.inf, -torch.inf, torch.nan, 0.0):
            x[draw.randrange(len(x)), draw.randrange(x.shape[1])] = value
    return x * (torch.finfo(x.dtype).max / 2 if draw.random() < 0.5 else torch.finfo(x.dtype).tiny) if kind == 3 else x


@pytest.mark.parametrize("part", range(SETS))
def test_exact_is_the_cpus_result_in_every_bit(part: int) -> None:
    draw = random.Random(part)
    for number in range(18):
        n, k = draw.choice((1, 8, 17, 64, 130, 200)), draw.choice((1, 7, 8, 64, 255, 256, 257, 576, 1032, 1536))
        dtype, powers = HALVES[number % 2], (3, 14, 3, 2)[number % 4] if number % 2 else (3, 70, 3, 2)[number % 4]
        x = hostile(scattered(257, k, dtype=dtype, seed=number, powers=powers), number % 4, draw)
        w = scattered(n, k, dtype=dtype, seed=number + 100, powers=powers)
        bias = scattered(n, dtype=dtype, seed=3) if number % 3 == 0 else None
        expected = linear_exact(x, w, bias)
        there = x.cuda(), w.cuda(), None if bias is None else bias.cuda()
        for m in TOKENS:
            y = linear_exact(there[0][:m], *there[1:])
            assert same_bits(y, expected[:m]), f"N {n}, K {k}, M {m}, {dtype}, {(y.cpu() != expected[:m]).sum()} differ"


@pytest.mark.parametrize("implementation", LINEAR_EXACT.implementations("cuda"), ids=lambda i: i.name)
def test_exact_on_every_declared_case(implementation: Implementation) -> None:
    served = 0
    for (label, here), (_, there) in zip(LINEAR_EXACT.cases(), LINEAR_EXACT.cases("cuda"), strict=True):
        if implementation.supports(*there) is None:
            assert same_bits(implementation.run(*there), linear_exact(*here)), f"{implementation.name} on {label}"
            served += 1
    assert served >= 8


def test_every_plan_gives_the_same_bits() -> None:
    from nybble.ops.linear_exact.cuda import Stream, Tile, run

    plans = (
        Stream(1, 1, 8),
        Stream(1, 2, 4),
        Stream(2, 2, 4),
        Stream(4, 4, 2),
        Stream(8, 4, 2),
        Tile(2),
        Tile(4),
        Tile(8),
        Tile(8, 16, 1),
    )
    for n, k in ((131, 1032), (64, 4096)):
        x, w = (
            scattered(130, k, dtype=torch.bfloat16, seed=1, powers=9),
            scattered(n, k, dtype=torch.bfloat16, seed=2, powers=9),
        )
        expected = linear_exact(x, w)
        for plan in plans:
            assert same_bits(run(x.cuda(), w.cuda(), None, plan), expected), plan


@pytest.mark.parametrize("name", QUANTIZED)
def test_exact_with_quantized_weights(name: str) -> None:
    for n, k in ((48, 256), (200, 1536), (17, 300)):
        q = nybble.quantize(scattered(n, k, dtype=torch.float32, seed=5), name)
        for dtype in HALVES:
            x = scattered(70, k, dtype=dtype, seed=6)
            expected = linear_exact(x, q)
            for m in (1, 3, 8, 70):
                assert same_bits(linear_exact(x[:m].cuda(), q.to("cuda")), expected[:m]), f"{name} {n} {k} {m} {dtype}"


def weight(n: int, k: int, kind: torch.dtype | str) -> Tensor | nybble.QuantTensor:
    w = scattered(n, k, dtype=torch.float32, seed=7).cuda()
    return nybble.quantize(w, kind) if isinstance(kind, str) else w.to(kind)


@contextmanager
def competition() -> Iterator[None]:
    """Products on another stream that take processors, cache and bandwidth meanwhile."""
    stream, a = torch.cuda.Stream(), torch.randn(2048, 2048, device="cuda")
    with torch.cuda.stream(stream):
        for _ in range(60):
            a = torch.nn.functional.normalize(a @ a)
    yield
    stream.synchronize()


OPS = {"exact": linear_exact, "invariant": linear_invariant}
KINDS = [torch.bfloat16, torch.float16, torch.float32, *QUANTIZED]


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_a_row_of_a_batch_is_the_row_alone(op: str, kind: torch.dtype | str) -> None:
    run, dtype = OPS[op], torch.bfloat16 if isinstance(kind, str) else kind
    for n, k in ((576, 576), (192, 1536), (520, 4096)):
        w, x = weight(n, k, kind), scattered(257, k, dtype=dtype, seed=8).cuda()
        whole = run(x, w)
        for i in (*range(0, 257, 16), 1, 7, 255):
            assert same_bits(run(x[i : i + 1], w), whole[i : i + 1]), f"{op} {kind} [{n}, {k}], row {i}"
        for m in (*TOKENS, 33, 100, 128, 200):
            y = run(x[-m:], w)
            assert same_bits(y, whole[-m:]), f"{op} {kind} [{n}, {k}], M = {m}: {(y != whole[-m:]).sum()} differ"
    assert same_bits(run(x.repeat(8, 1), w), whole.repeat(8, 1)), "2,056 tokens"


@pytest.mark.parametrize("op", OPS)
def test_a_hundred_repeats_with_competition(op: str) -> None:
    w, x = weight(1024, 2048, torch.bfloat16), scattered(64, 2048, dtype=torch.bfloat16, seed=9).cuda()
    expected = [OPS[op](x[:m], w).clone() for m in TOKENS[:7]]
    for _ in range(100):
        with competition():
            assert all(torch.equal(OPS[op](x[:m], w), one) for m, one in zip(TOKENS, expected, strict=False))


def test_stock_torch_fails_the_same_tests() -> None:
    stock: Callable[[Tensor, Tensor], Tensor] = torch.nn.functional.linear
    found = {"alone": 0, "another machine": 0}
    for n, k in ((576, 1536), (4096, 4096), (4096, 14336)):
        w, x = weight(n, k, torch.bfloat16), scattered(33, k, dtype=torch.bfloat16, seed=10).cuda()
        alone, ours = (torch.cat([run(x[i : i + 1], w) for i in range(33)]) for run in (stock, linear_invariant))
        for m in range(2, 34):
            found["alone"] += not same_bits(stock(x[:m], w), alone[:m])
            assert same_bits(linear_invariant(x[:m], w), ours[:m]), f"[{n}, {k}], M = {m}"
        found["another machine"] += not same_bits(stock(x, w), stock(x.cpu(), w.cpu()))
    assert all(found.values()), found


@pytest.mark.parametrize("implementation", LINEAR_INVARIANT.implementations("cuda"), ids=lambda i: i.name)
def test_invariant_agrees_with_the_reference(implementation: Implementation) -> None:
    served = 0
    for label, args in LINEAR_INVARIANT.cases("cuda"):
        if implementation.supports(*args) is None:
            LINEAR_INVARIANT.check(implementation.run(*args), args, f"{implementation.name} on {label}")
            served += 1
    assert served >= 8


@pytest.mark.parametrize("op", OPS)
def test_tf32_and_autocast_change_nothing(op: str) -> None:
    x, w = (scattered(8, 512, dtype=torch.float32, seed=seed).cuda() for seed in (1, 2))
    plain, before = OPS[op](x, w), torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            assert same_bits(OPS[op](x, w), plain)
    finally:
        torch.set_float32_matmul_precision(before)


@pytest.mark.parametrize("op", OPS)
def test_capture_and_compilation(op: str) -> None:
    w = weight(256, 1024, torch.bfloat16)
    for m in (1, 16, 300):
        x = scattered(m, 1024, dtype=torch.bfloat16, seed=m).cuda()
        expected = OPS[op](x, w)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = OPS[op](x, w)
        graph.replay()
        assert torch.equal(y, expected)
    compiled = torch.compile(lambda x: OPS[op](x, w), fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), expected)
