"""linear with narrow activations on a GPU: integer sums bit for bit, odd sizes, extreme rows, graphs, compilation."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from nybble.formats import table
from nybble.ops.linear import LINEAR, QuantLinear, linear
from nybble.quantize import QuantTensor, elements, quantize

pytestmark = pytest.mark.gpu(capability=(8, 0))
EXACT = (("int8_channel", "int8_token"), ("int4_channel", "int8_token"), ("int4_channel", "int4_token"))
GROUPED = (
    ("int8_g128", "int8_token"), ("int4_g128", "int8_token"), ("int4_g128", "int4_g128"), ("int4_g64", "int4_g64"),
    ("int4_g32", "int4_g32"), ("int4_g32", "int8_token"), ("int8_channel", "int8_g128"),
)  # fmt: skip
FLOATS = (
    ("fp8_channel", "fp8_token"), ("fp8_tensor", "fp8_token"), ("fp8_block128", "fp8_g128"),
    ("fp8_channel", "fp8_g128"), ("fp8_block128", "fp8_token"),
)  # fmt: skip
HALVES = (torch.bfloat16, torch.float16)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def kernels() -> list[ModuleType]:
    from nybble.ops.linear import narrow_cuda, narrow_fp8, narrow_torch, triton

    if torch.cuda.get_device_capability() != (9, 0):
        return [triton]
    return [narrow_torch, narrow_fp8, narrow_cuda, triton]


def multiply(a: QuantTensor, w: QuantTensor, bias: torch.Tensor | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The product by every kernel and plan."""
    from nybble.ops.linear import gpu, narrow

    p = gpu._problem(a.shape, w, a.format, dtype, a.device)
    found = {}
    for kernel in kernels():
        reason = kernel.refusal(p)
        if reason and "pays from" not in reason:  # narrow.cu can take few tokens, it is only slow
            continue
        for plan in kernel.plans(p):
            y = torch.full((p.m, p.n), float("nan"), dtype=dtype, device="cuda")
            kernel.run(a, w.to_layout(narrow.layout_for(w.format)), bias, p, plan, y)
            found[f"{kernel.__name__} {plan}"] = y
    return found


def integers(q: QuantTensor) -> torch.Tensor:
    return elements.decode_int(q.format.element, q.unpack())  # type: ignore[arg-type]


@pytest.mark.parametrize(("weight", "activation"), EXACT)
@pytest.mark.parametrize("k", [64, 129, 192, 576, 1152])
def test_integer_sums_are_exact_and_rescaled_in_the_declared_order(weight: str, activation: str, k: int) -> None:
    for m, n in ((1, 8), (17, 40), (65, 136), (257, 520), (130, 33)):
        dtype = HALVES[m % 2]
        a, w = quantize(normal(m, k, seed=m), activation), quantize(normal(n, k, seed=n), weight)
        bias = normal(n, dtype=dtype)
        sums = integers(a).double() @ integers(w).double().t()
        if m > 16 and k % 8 == 0 and n % 8 == 0:
            assert torch.equal(torch._int_mm(integers(a), integers(w).t()).double(), sums)
        expected = (sums.to(torch.float32) * a.scale * w.scales()[0].flatten() + bias.float()).to(dtype)
        for name, y in multiply(a, w, bias, dtype).items():
            assert torch.equal(y, expected), f"{name} on [{m}, {n}, {k}]"


@pytest.mark.parametrize(("weight", "activation"), [*GROUPED, *FLOATS])
def test_groups_and_floats_agree_at_every_size(weight: str, activation: str) -> None:
    for m, n, k in ((1, 8, 16), (65, 136, 192), (257, 264, 576), (130, 1000, 1152), (33, 17, 129), (300, 128, 4608)):
        for dtype in HALVES:
            x, w, bias = (
                normal(m, k, seed=m, dtype=dtype),
                quantize(normal(n, k, seed=n), weight),
                normal(n, dtype=dtype),
            )
            args = (x, w, bias, table.block(activation), None)
            for name, y in multiply(quantize(x, activation, check=False), w, bias, dtype).items():
                LINEAR.check(y, args, f"{name}, {weight} {activation} {m, n, k}")


@pytest.mark.parametrize(("weight", "activation"), FLOATS)
def test_fp8_sums_that_do_not_cancel_keep_the_agreement(weight: str, activation: str) -> None:
    """The tensor cores add FP8 products to about fourteen bits; sums of one sign show whether they are taken out."""
    x = normal(128, 8192, dtype=torch.float16).abs() + 0.5
    w = quantize(normal(256, 8192, seed=1).abs() + 0.5, weight)
    LINEAR.check(linear(x, w, None, activation), (x, w, None, table.block(activation), None), weight)


@pytest.mark.parametrize(("weight", "activation"), [*EXACT, GROUPED[2], *FLOATS[:1]])
def test_rows_of_zeros_of_one_outlier_and_at_the_ends_of_the_range(weight: str, activation: str) -> None:
    x = normal(96, 256, dtype=torch.bfloat16)
    x[0], x[1], x[2], x[3] = 0, 1e-30, 1e28, torch.eye(256, device="cuda", dtype=torch.bfloat16)[3] * 3e4
    original = normal(64, 256, seed=1)
    original[5] = 0
    original[6] *= 1e6
    w = quantize(original, weight)
    y = linear(x, w, None, activation)
    assert not y[0].any()
    assert not y[:, 5].any()
    LINEAR.check(y, (x, w, None, table.block(activation), None), weight)
    for row in (1, 2, 3, 40):  # each on its own: the largest would hide the others
        LINEAR.check(y[row], (x[row], w, None, table.block(activation), None), f"{weight}, row {row}")


def test_the_lowest_codes_do_not_overflow() -> None:
    w = quantize(normal(128, 4096), "int8_channel")
    a = quantize(normal(128, 4096, seed=1), "int8_token")
    w, a = (QuantTensor(q.format, q.shape, torch.full_like(q.codes, 0x80), q.scale) for q in (w, a))
    expected = (torch.full((128, 128), 2.0**14 * 4096, device="cuda") * a.scale * w.scales()[0].flatten()).bfloat16()
    for name, y in multiply(a, w, None, torch.bfloat16).items():
        assert torch.equal(y, expected), name


@pytest.mark.parametrize(("weight", "activation"), [EXACT[0], GROUPED[1], FLOATS[2]])
@pytest.mark.parametrize("m", [3, 100])
def test_views_of_x_and_of_more_axes(weight: str, activation: str, m: int) -> None:
    w, wide = quantize(normal(48, 128), weight), normal(m, 400, dtype=torch.bfloat16)
    turned, deep = normal(128, m, dtype=torch.bfloat16).t(), normal(2, m, 128, dtype=torch.bfloat16)
    views = [wide[:, 1:129], wide[:, 0:256:2], wide[::2, 3:131], wide[:1, :128].expand(m, 128), wide[0, :128]]
    views += [turned, deep[:, 1:]]
    for x in views:
        y = linear(x, w, None, activation)
        assert y.shape == (*x.shape[:-1], 48)
        assert torch.equal(y, linear(x.contiguous(), w, None, activation))


def test_no_rows_and_no_outputs() -> None:
    w = quantize(normal(48, 128), "int8_channel")
    assert linear(normal(0, 128, dtype=torch.bfloat16), w, None, "int8_token").shape == (0, 48)
    empty = quantize(torch.empty(0, 128, device="cuda"), "int8_channel")
    assert linear(normal(3, 128, dtype=torch.bfloat16), empty, None, "int8_token").shape == (3, 0)


@pytest.mark.parametrize(("weight", "activation"), [EXACT[0], EXACT[1], GROUPED[2], FLOATS[0], FLOATS[2]])
@pytest.mark.parametrize("m", [4, 200])
def test_capture_in_a_graph_and_replay_with_new_inputs(weight: str, activation: str, m: int) -> None:
    layer = QuantLinear(quantize(normal(256, 512, seed=1), weight), None, table.block(activation)).prepare(
        torch.bfloat16
    )
    x = normal(m, 512, dtype=torch.bfloat16)
    layer(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer(layer(x).repeat(1, 2))
    for seed in (5, 6):
        x.copy_(normal(m, 512, seed=seed, dtype=torch.bfloat16))
        graph.replay()
        assert torch.equal(y, layer(layer(x).repeat(1, 2)))


@pytest.mark.parametrize(("weight", "activation"), [EXACT[0], EXACT[1], FLOATS[2]])
def test_compiles_whole_with_any_number_of_tokens(weight: str, activation: str) -> None:
    layer = QuantLinear(quantize(normal(64, 256, seed=1), weight), None, table.block(activation)).prepare(
        torch.bfloat16
    )
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for m in (2, 17, 130):
        x = normal(m, 256, seed=m, dtype=torch.bfloat16)
        assert torch.equal(compiled(x), layer(x))


def test_the_product_of_what_a_producer_gives_is_linear() -> None:
    from nybble.ops.linear.gpu import product
    from nybble.ops.quantize_rows import quantize_rows

    w, x = quantize(normal(264, 512), "int8_channel"), normal(2, 70, 512, dtype=torch.bfloat16)
    y = product(quantize_rows(x, "int8_token"), w)
    assert torch.equal(y, linear(x, w, None, "int8_token"))
    wide = product(quantize_rows(x, "int8_token"), w, dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert torch.equal(wide.bfloat16(), y)


def test_a_large_product_is_measured_once_and_the_choice_kept(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    from nybble.ops.linear import narrow_tune

    monkeypatch.setenv("NYBBLE_CACHE", str(tmp_path))
    narrow_tune.Choices.of.cache_clear()
    try:
        w, x = quantize(normal(1024, 1024), "int8_channel"), normal(1100, 1024, dtype=torch.bfloat16)
        first = linear(x, w, None, "int8_token")
        known = narrow_tune.Choices.of(torch.cuda.get_device_name())
        assert len(known.found) == 1
        assert torch.equal(linear(x, w, None, "int8_token"), first)
        assert len(known.found) == 1
        assert known.path.is_relative_to(tmp_path)
    finally:
        narrow_tune.Choices.of.cache_clear()
