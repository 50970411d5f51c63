"""linear: every implementation on this machine over every declared case, and inputs that broke other libraries."""

import dataclasses

import pytest
import torch
from torch._dynamo.testing import CompileCounter

import nybble
from nybble.errors import BadInput, Mismatch, Unsupported
from nybble.formats import block
from nybble.ops import QuantLinear, explain, linear
from nybble.ops._choose import choose
from nybble.ops._declare import Agreement, Implementation
from nybble.ops.linear import LINEAR
from nybble.quantize import layouts

CASES = dict(LINEAR.cases())
CPU = LINEAR.implementations("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("implementation", CPU, ids=lambda i: i.name)
def test_agrees_with_the_reference_on_every_case_it_takes(implementation: Implementation) -> None:
    served = 0
    for label, args in CASES.items():
        if implementation.supports(*args) is None:
            before = args[0].clone()
            LINEAR.check(implementation.run(*args), args, f"{implementation.name} on {label}")
            layout = implementation.layout(args[1])
            if layout is not None:
                packed = args[1].to_layout(layout)
                LINEAR.check(implementation.run(args[0], packed, *args[2:]), args, f"packed, {label}")
            assert torch.equal(args[0], before), "the input is left alone"
            served += 1
    assert served >= 2, f"the cases never reach {implementation.name}"


def test_every_case_is_served() -> None:
    for label, args in CASES.items():
        x, w, bias, activation, amax = args
        LINEAR.check(linear(x, w, bias, activation, amax), args, label)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["int8_channel", "int4_g64", "nvfp4", "int4_g32_asym"])
def test_views_of_x_do_not_matter(name: str, dtype: torch.dtype) -> None:
    w = nybble.quantize(normal(32, 64), name)
    wide = normal(9, 200, dtype=dtype)
    views = [wide[:, :64], wide[:, 1:65], wide[:, 0:128:2], wide[::2, 3:67], wide[:1, :64].expand(9, 64),
             normal(64, 9, dtype=dtype).t(), normal(3, 5, 64, dtype=dtype)[:, 1:4], wide[0, :64], wide[:0, :64],
             normal(2, 0, 64, dtype=dtype)]  # fmt: skip
    for x in views:
        y = linear(x, w)
        assert y.shape == (*x.shape[:-1], 32)
        assert y.dtype == dtype
        assert torch.equal(y, linear(x.contiguous(), w))
        LINEAR.check(y, (x, w), f"{name} {tuple(x.shape)} {x.stride()}")


@pytest.mark.parametrize("name", ["int8_channel", "int4_g128", "nvfp4", "mxfp4", "fp8_channel", "nf4_g64"])
@pytest.mark.parametrize("k", [1, 15, 31, 64, 129, 192, 576])
def test_any_size(name: str, k: int) -> None:
    for m, n in ((1, 1), (2, 17), (17, 33), (3, 128)):
        x, w = normal(m, k), nybble.quantize(normal(n, k, seed=1), name)
        LINEAR.check(linear(x, w), (x, w), f"{name} {m}x{n}x{k}")


def test_large_half_precision_inputs_are_right_or_infinite_as_the_reference() -> None:
    x = torch.full((2, 8192), 6e4, dtype=torch.float16)
    small = nybble.quantize(torch.full((16, 8192), 1e-5), "int8_channel")
    y = linear(x, small)
    assert y.isfinite().all(), "the sum fits although partial products are large"
    LINEAR.check(y, (x, small), "fp16 at 6e4")
    large = nybble.quantize(torch.full((16, 8192), 1.0), "int8_channel")
    LINEAR.check(linear(x, large), (x, large), "fp16 overflow")


def test_a_transposed_weight_is_never_taken_for_a_right_one() -> None:
    w = nybble.quantize(normal(64, 128), "int4_g64")
    with pytest.raises(BadInput, match=r"must end in 128"):
        linear(normal(3, 64), w)


def test_what_does_not_fit_is_refused_with_values() -> None:
    w = nybble.quantize(normal(16, 32), "nvfp4")
    with pytest.raises(BadInput, match="float64"):
        linear(normal(2, 32).double(), w)
    with pytest.raises(BadInput, match=r"bias is \(15,\)"):
        linear(normal(2, 32), w, torch.zeros(15))
    with pytest.raises(BadInput, match="shape"):
        linear(normal(2, 32), nybble.quantize(normal(2, 16, 32), "nvfp4"))


def test_activations_are_rounded_token_by_token() -> None:
    w = nybble.quantize(normal(16, 64), "int8_channel")
    x = normal(4, 64) * torch.tensor([[1.0], [100.0], [1e-3], [0.0]])
    y = linear(x, w, activation="int8_token")
    for row in range(4):
        assert torch.equal(y[row], linear(x[row], w, activation="int8_token")), "a row does not see its neighbours"
    assert (y[3] == 0).all()


def test_a_static_input_scale_is_used() -> None:
    w, x = nybble.quantize(normal(16, 64), "nvfp4"), normal(3, 64)
    held = linear(x, w, activation="nvfp4", activation_amax=torch.tensor(50.0))
    assert torch.equal(held, linear(x, w, None, block("nvfp4"), torch.tensor(50.0)))
    assert not torch.equal(held, linear(x, w, activation="nvfp4"))


def test_nan_in_x_comes_out_as_nan_and_only_in_its_row() -> None:
    for activation in (None, "int8_token", "nvfp4", "mxfp4"):
        w = nybble.quantize(normal(16, 64), "int8_channel")
        x = normal(3, 64)
        x[1, 5] = torch.nan
        y = linear(x, w, activation=activation, activation_amax=torch.tensor(4.0) if activation == "nvfp4" else None)
        assert y[1].isnan().all(), activation
        assert y[0].isfinite().all(), activation
        assert y[2].isfinite().all(), activation


def test_explain_names_the_one_that_runs_and_why_not_the_others() -> None:
    x = normal(1, 64)
    lines = explain(LINEAR, "cpu", x, nybble.quantize(normal(32, 64), "nvfp4"), None, None, None)
    assert [line.name for line in lines if line.chosen] == ["linear_dequantize"]
    assert [line.path for line in lines if line.chosen] == ["emulated"]
    assert all(line.reason for line in lines if not line.chosen)
    assert any("the weight is nvfp4" in line.reason for line in lines)
    lines = explain(LINEAR, "cpu", x, nybble.quantize(normal(32, 64), "int8_channel"), None, None, None)
    assert next(line for line in lines if line.chosen).path == "native"
    lines = explain(LINEAR, "cpu", normal(1, 33), nybble.quantize(normal(32, 33), "int8_channel"), None, None, None)
    assert "K = 33" in lines[0].reason


def test_a_call_nobody_serves_lists_every_reason() -> None:
    refuse = Implementation("never", lambda *a: a[0], lambda *a: f"M = {a[0].shape[0]} is unlucky", native=True)
    op = dataclasses.replace(LINEAR, homes={}, fallback=refuse)
    with pytest.raises(Unsupported, match="never: M = 13 is unlucky") as caught:
        choose(op, "cpu", normal(13, 4))
    assert caught.value.reasons == {"never": "M = 13 is unlucky"}


def test_agreement_can_fail() -> None:
    agreement = Agreement({torch.float32: 1e-3})
    reference = normal(4, 4)
    wrong = reference.clone()
    wrong[2, 1] += 1
    with pytest.raises(Mismatch, match=r"element 9 of \(4, 4\)"):
        agreement.check(wrong, reference, "planted")
    with pytest.raises(Mismatch, match="float32"):
        agreement.check(reference.double(), reference, "dtype")
    assert agreement.distance(torch.zeros(2), torch.zeros(2)) == 0
    assert agreement.distance(torch.ones(1), torch.zeros(1), size=100.0) == 0.01
    assert agreement.distance(torch.ones(2), torch.zeros(2)) == float("inf")
    assert agreement.distance(torch.tensor([torch.nan]), torch.tensor([1.0])) == float("inf")
    assert agreement.distance(torch.tensor([torch.inf, 1]), torch.tensor([torch.inf, 1])) == 0
    assert agreement.distance(torch.tensor([-torch.inf, 1]), torch.tensor([torch.inf, 1])) == float("inf")


def test_cost_counts_operations_and_bytes() -> None:
    w = nybble.quantize(normal(16, 32), "int8_channel")
    cost = LINEAR.cost(normal(4, 32), w)
    assert cost.flops == 2 * 4 * 16 * 32
    assert cost.nbytes == 16 * 32 + 16 * 2 + 4 * (4 * 32 + 4 * 16)


@pytest.mark.parametrize("name", ["nvfp4", "int4_g64", "int8_channel"])
def test_compiles_without_breaks_and_recompiles_at_most_once(name: str) -> None:
    layer = QuantLinear(nybble.quantize(normal(32, 64), name)).prepare(torch.float32)
    counter = CompileCounter()
    compiled = torch.compile(layer, backend=counter, fullgraph=True, dynamic=True)
    for m in (1, 7, 128, 3):
        x = normal(m, 64)
        assert torch.equal(compiled(x), layer(x))
    assert counter.frame_count <= 2


def test_the_custom_op_passes_opcheck() -> None:
    w = nybble.quantize(normal(16, 64), "nvfp4")
    args = (normal(3, 64), w.codes, w.scale, w.tensor_scale, None, None, "nvfp4", "dense", [16, 64], "", None)
    torch.library.opcheck(torch.ops.nybble.linear.default, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", ["int4_g64", "int4_g128", "int4_g32", "int4_channel"])
@pytest.mark.parametrize("shape", [(16, 64), (64, 576), (48, 160), (128, 256)])
def test_the_int4_cpu_layout_is_invertible(name: str, shape: tuple[int, int]) -> None:
    w = nybble.quantize(normal(*shape), name)
    packed = w.to_layout(layouts.get("int4_cpu"))
    assert torch.equal(packed.unpack(), w.unpack())
    assert torch.equal(packed.dequantize(), w.dequantize())
    back = packed.to_layout(layouts.DENSE)
    assert all(torch.equal(back.parts[part], tensor) for part, tensor in w.parts.items())
