"""linear on a GPU: every implementation over every declared case, odd sizes, capture and compilation."""

from __future__ import annotations

import pytest
import torch

import nybble
from nybble.errors import BadInput
from nybble.ops._choose import choose
from nybble.ops._declare import Implementation
from nybble.ops.linear import LINEAR, QuantLinear, config, linear
from nybble.quantize import QuantTensor

pytestmark = pytest.mark.gpu(capability=(8, 0))
TOKENS = (0, 1, 2, 7, 15, 16, 17, 33, 64, 65, 128, 257, 2048)
HALVES = (torch.bfloat16, torch.float16)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def weight(n: int, k: int, name: str) -> QuantTensor:
    return weight_of(normal(n, k, seed=1), name)


def weight_of(original: torch.Tensor, name: str) -> QuantTensor:
    w = nybble.quantize(original, name)
    probe = torch.empty(1, original.shape[1], dtype=torch.bfloat16, device="cuda")
    layout = choose(LINEAR, "cuda", probe, w, None, None, None).layout(w)
    return w if layout is None else w.to_layout(layout)


def implementations() -> list[Implementation]:
    return LINEAR.implementations("cuda")


@pytest.mark.parametrize("implementation", implementations(), ids=lambda i: i.name)
def test_agrees_with_the_reference_on_every_case_it_takes(implementation: Implementation) -> None:
    served = 0
    for label, args in LINEAR.cases("cuda", HALVES):
        if implementation.supports(*args) is None:
            before = args[0].clone()
            LINEAR.check(implementation.run(*args), args, f"{implementation.name} on {label}")
            assert torch.equal(args[0], before), "the input is left alone"
            served += 1
    # More tokens than a case has, for which there are tests below, or machines that were never at hand.
    elsewhere = any(way in implementation.name for way in ("cublas", "walk")) or implementation.note
    assert served >= 2 or elsewhere, f"the cases never reach {implementation.name}"


def test_every_plan_agrees_and_repeats_itself() -> None:
    """Not only the plan that config.py likes best: one of every kind, and the same bits when run again."""
    cuda = pytest.importorskip("nybble.ops.linear.cuda")
    for label, args in LINEAR.cases("cuda", HALVES):
        x, w, bias, activation, _ = args
        if activation is not None or cuda._refusal(x, w, None) is not None:
            continue
        kinds: dict[object, object] = {}
        for _, plan in config.choose(cuda.problem(x, w)).scored:
            split = getattr(plan, "slices", 1) > 1 or getattr(plan, "cluster", 1) > 1
            more = getattr(plan, "split", 1), getattr(plan, "tiles", 1), getattr(plan, "even", False)
            kinds.setdefault((type(plan), split, *more), plan)
        single = (config.Stream(1, 2, 7, 2, 3), config.Stream(1, 1, 14, 1, 4), config.Stream(1, 1, 3, 5, 3))
        fit = [plan for plan in single if plan.refusal(cuda.problem(x, w)) is None]  # of widths that large weights get
        for plan in [*kinds.values(), *fit]:
            y = cuda.run(x, w, bias, plan)
            LINEAR.check(y, args, f"{plan} on {label}")
            assert torch.equal(cuda.run(x, w, bias, plan), y)


@pytest.mark.parametrize(
    "name", ["int4_g128", "int4_g32_asym", "nvfp4", "int8_channel", "fp8_block128", "fp8_g128", "nf4_g64"]
)
@pytest.mark.parametrize(("n", "k"), [(129, 200), (96, 321)])
def test_any_number_of_tokens(name: str, n: int, k: int) -> None:
    w = weight(n, k, name)
    for number, m in enumerate(TOKENS):
        dtype = HALVES[number % 2]
        x, bias = normal(m, k, seed=m, dtype=dtype), normal(n, seed=2, dtype=dtype)
        args = (x, w, bias, None, None)
        LINEAR.check(linear(x, w, bias), args, f"{name} [{n}, {k}], M = {m}, {dtype}")


@pytest.mark.parametrize("m", [3, 70])
@pytest.mark.parametrize("name", ["int4_g64", "mxfp4"])
def test_views_of_x_do_not_matter(name: str, m: int) -> None:
    w = weight(48, 128, name)
    wide = normal(m, 400, dtype=torch.bfloat16)
    views = [wide[:, :128], wide[:, 1:129], wide[:, 0:256:2], wide[::2, 3:131], wide[:1, :128].expand(m, 128),
             normal(128, m, dtype=torch.bfloat16).t(), normal(2, m, 128, dtype=torch.bfloat16)[:, 1:]]  # fmt: skip
    for x in views:
        y = linear(x, w)
        assert y.shape == (*x.shape[:-1], 48)
        assert torch.equal(y, linear(x.contiguous(), w))


@pytest.mark.parametrize("name", ["int4_g128", "int8_channel", "fp8_channel", "nvfp4", "fp8_block128", "nf4_g64"])
@pytest.mark.parametrize("m", [2, 96])
def test_the_largest_fp16_inputs_and_zero_groups(name: str, m: int) -> None:
    """Inputs of 6e4 whose products cancel or stay small in float32; a finite result must come out finite."""
    original = normal(64, 512, seed=3) * 2.0**-14
    original[:, :256] = 0
    w = nybble.quantize(original, name)
    x = torch.full((m, 512), 6e4, dtype=torch.float16, device="cuda")
    x[:, ::2] *= -1
    args = (x, w, None, None, None)
    y = linear(x, w)
    assert y.isfinite().all()
    LINEAR.check(y, args, name)
    assert not linear(x, nybble.quantize(torch.zeros(64, 512, device="cuda"), name)).any()


@pytest.mark.parametrize("name", ["int4_g128", "nvfp4", "fp8_block128", "nf4_g64", "int8_channel"])
@pytest.mark.parametrize(("n", "k"), [(1030, 1100), (2048, 1024)])
def test_many_tokens_through_cublas(name: str, n: int, k: int) -> None:
    cuda = pytest.importorskip("nybble.ops.linear.cuda")
    w, x = weight(n, k, name), normal(4096, k, seed=4, dtype=torch.bfloat16)
    bias = normal(n, seed=5, dtype=torch.bfloat16)
    LINEAR.check(cuda.run(x, w, bias, config.Widen()), (x, w, bias, None, None), name)
    plain, expected = cuda.widened(w), w.dequantize(torch.float32).to(torch.bfloat16)
    if name in ("nvfp4", "nf4_g64"):  # float32 rounds the reference's product first, or the table's values
        assert (plain == expected).float().mean() > 0.99
        assert ((plain - expected).abs() <= expected.abs() * 2.0**-7).all()
    else:
        assert torch.equal(plain, expected), "each value is rounded once"


@pytest.mark.parametrize(
    "plan", [config.Walk(256, 5, 3), config.Walk(256, 5, 3, even=False), config.Walk(128, 8, 3)], ids=str
)
@pytest.mark.parametrize("name", ["int4_g128", "int4_g32_asym", "nvfp4", "fp8_channel", "fp8_block128", "nf4_g64"])
@pytest.mark.parametrize(("m", "n", "k"), [(257, 136, 200), (300, 1032, 1100), (1000, 4096, 512), (513, 2504, 2048)])
def test_blocks_that_stay_agree_and_repeat_themselves(plan: config.Walk, name: str, m: int, n: int, k: int) -> None:
    """Tiles that divide nothing, cut along K among clusters or not; the same bits in every run and in a graph."""
    cuda = pytest.importorskip("nybble.ops.linear.cuda")
    w, dtype = weight(n, k, name), torch.float16 if name.startswith("int4") else torch.bfloat16
    x, bias = normal(m, k, seed=m, dtype=dtype), normal(n, seed=5, dtype=dtype) if m % 2 else None
    if (why := plan.refusal(cuda.problem(x, w))) is not None:
        pytest.skip(why)
    y = cuda.run(x, w, bias, plan)
    LINEAR.check(y, (x, w, bias, None, None), f"{plan} on {name}")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = cuda.run(x, w, bias, plan)
    for _ in range(3):
        again.fill_(torch.nan)
        graph.replay()
        assert torch.equal(again, y)


@pytest.mark.raw_memory
def test_the_plain_weight_for_cublas_is_given_back() -> None:
    """Peak: the plain weight and the result; afterwards nothing, over ten calls."""
    cuda = pytest.importorskip("nybble.ops.linear.cuda")
    n, k = 2048, 1024
    w, x = weight(n, k, "int4_g128"), normal(4096, k, seed=4, dtype=torch.bfloat16)
    cuda.run(x, w, None, config.Widen())
    held = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(10):
        cuda.run(x, w, None, config.Widen())
    assert torch.cuda.memory_allocated() == held
    assert torch.cuda.max_memory_allocated() <= held + 2 * n * k + 2 * 4096 * n


def uneven(n: int, k: int, seed: int) -> torch.Tensor:
    """Weights whose blocks of 128 x 128 differ in size by up to 2^12, some of them zero."""
    sizes = torch.exp2(12 * torch.rand(-(-n // 128), -(-k // 128), generator=torch.Generator().manual_seed(seed)) - 12)
    sizes[0, 0] = sizes[-1, -1] = 0
    return normal(n, k, seed=seed) * sizes.cuda().repeat_interleave(128, 0).repeat_interleave(128, 1)[:n, :k]


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", ["fp8_block128", "fp8_g128", "nf4_g64"])
@pytest.mark.parametrize("kind", [config.Stream, config.Tile, config.Walk])
def test_scales_that_differ_and_tokens_that_do_not(kind: type, name: str, dtype: torch.dtype) -> None:
    """Sums change their units from one chunk to the next, and roundings must not add up where x is constant."""
    cuda = pytest.importorskip("nybble.ops.linear.cuda")
    n, k, m = 264, 1100, 70
    for original in (normal(n, k, seed=8) / 32, uneven(n, k, 9)):
        w = weight_of(original, name)
        for x in (normal(m, k, seed=10), torch.ones(m, k, device="cuda"), normal(m, k, seed=11).abs()):
            args = (x.to(dtype), w, None, None, None)
            plans = [plan for _, plan in config.choose(cuda.problem(*args[:2])).scored if isinstance(plan, kind)]
            for plan in (plans[0], plans[-1]):
                LINEAR.check(cuda.run(args[0], w, None, plan), args, f"{plan} on {name}")


@pytest.mark.parametrize("m", [1, 16, 64])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("int4_g128", torch.float16), ("nf4_g64", torch.float16), ("mxfp4", torch.bfloat16),
     ("fp8_block128", torch.bfloat16), ("fp8_block128", torch.float16)],
)  # fmt: skip
@pytest.mark.parametrize("size", [2.0**-40, 2.0**-12, 1.0, 2.0**12, 2.0**70])
def test_weights_of_unusual_sizes_are_right(name: str, dtype: torch.dtype, size: float, m: int) -> None:
    """Where the shortcuts of macros.usual_scales do not hold, another way is taken."""
    w = weight_of(normal(96, 512, seed=6) * size, name)
    x = normal(m, 512, seed=7) / (size if dtype == torch.bfloat16 else max(1.0, size / 16))
    if dtype == torch.float16 and not 2.0**-20 < size < 2.0**20:
        pytest.skip("beyond what fp16 results hold")
    args = (x.to(dtype), w, None, None, None)
    LINEAR.check(linear(*args[:2]), args, f"{name} of size {size}")


@pytest.mark.parametrize(("name", "part", "code"), [("fp8_channel", "codes", 0x7F), ("nvfp4", "scale", 0x7F),
                                                    ("mxfp4", "scale", 0xFF)])  # fmt: skip
def test_codes_that_are_no_numbers_are_refused_when_the_weight_is_laid_out(name: str, part: str, code: int) -> None:
    w = nybble.quantize(normal(64, 256), name)
    getattr(w, part).view(torch.uint8).view(-1)[17] = code
    with pytest.raises(BadInput, match=r"1 (elements|scales) of the weight are NaN"):
        linear(normal(1, 256, dtype=torch.bfloat16), w)
    with pytest.raises(BadInput):
        QuantLinear(w).prepare(torch.bfloat16)


@pytest.mark.parametrize("m", [1, 16, 64])
def test_capture_in_a_graph_and_replay_with_new_inputs(m: int) -> None:
    w, x = weight(256, 1024, "int4_g128"), normal(m, 1024, dtype=torch.bfloat16)
    linear(x, w)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = linear(linear(x, w)[:, :256].repeat(1, 4), w)
    for seed in (5, 6):
        x.copy_(normal(m, 1024, seed=seed, dtype=torch.bfloat16))
        graph.replay()
        assert torch.equal(y, linear(linear(x, w)[:, :256].repeat(1, 4), w))


def test_a_side_stream_is_respected() -> None:
    w, x = weight(512, 2048, "int4_g128"), normal(4, 2048, dtype=torch.bfloat16)
    expected = linear(x, w)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # the default stream would be far ahead
        late = x * 1
        y = linear(late, w)
    stream.synchronize()
    assert torch.equal(y, expected)


def test_compiles_whole_with_any_number_of_tokens() -> None:
    layer = QuantLinear(nybble.quantize(normal(64, 256, seed=1), "int4_g128")).prepare(torch.bfloat16)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (2, 17, 130):
        x = normal(m, 256, seed=m, dtype=torch.bfloat16)
        assert torch.equal(compiled(x), layer(x))
