"""linear_invariant on the CPU: near the definition, and a row's bits are its own."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import nybble
from nybble.errors import BadInput, Unsupported
from nybble.ops import linear
from nybble.ops.linear_exact import LINEAR_EXACT
from nybble.ops.linear_invariant import LINEAR_INVARIANT, linear_invariant

INTEGER = {2: torch.int16, 4: torch.int32}
KINDS = [torch.float32, torch.bfloat16, torch.float16, "int8_channel", "int4_g128", "nvfp4"]
CASES = dict(LINEAR_INVARIANT.cases())
BATCHES = (1, 2, 7, 16, 33)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.view(INTEGER[a.element_size()]), b.view(INTEGER[b.element_size()]))


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def weight(n: int, k: int, kind: torch.dtype | str) -> torch.Tensor | nybble.QuantTensor:
    w = normal(n, k, seed=1)
    return nybble.quantize(w, kind) if isinstance(kind, str) else w.to(kind)


@pytest.mark.parametrize("implementation", LINEAR_INVARIANT.implementations("cpu"), ids=lambda i: i.name)
def test_agrees_with_the_reference_on_every_case(implementation) -> None:
    for label, args in CASES.items():
        before = args[0].clone()
        LINEAR_INVARIANT.check(implementation.run(*args), args, f"{implementation.name} on {label}")
        assert torch.equal(args[0], before), "the input is left alone"


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_row_keeps_its_bits_in_every_batch_and_place(kind: torch.dtype | str) -> None:
    dtype = torch.bfloat16 if isinstance(kind, str) else kind
    w, x = weight(576, 500, kind), normal(33, 500, dtype=dtype)
    alone = [linear_invariant(row, w) for row in x]
    for m in BATCHES:
        for shift in (0, 1, 5):
            order = [(i + shift) % 33 for i in range(m)]
            y = linear_invariant(x[order], w)
            assert all(same_bits(y[place], alone[i]) for place, i in enumerate(order)), f"{m} rows from {shift} on"
    strided = normal(40, 1001, seed=2, dtype=dtype)[3:36, 1::2]
    assert all(
        same_bits(y, linear_invariant(x.clone(), w)) for x, y in zip(strided, linear_invariant(strided, w), strict=True)
    )


def test_torchs_own_product_fails_the_same_test() -> None:
    """Or the test above would be blind."""
    found = 0
    for dtype, n, k in ((torch.float32, 576, 500), (torch.bfloat16, 576, 1536), (torch.float32, 1536, 576)):
        w, x = normal(n, k, seed=1, dtype=dtype), normal(64, k, dtype=dtype)
        whole = torch.nn.functional.linear(x, w)
        found += sum(not same_bits(whole[i], torch.nn.functional.linear(x[i : i + 1], w)[0]) for i in range(len(x)))
    assert found > 0


def test_autocast_changes_nothing() -> None:
    x, w = normal(4, 300), normal(9, 300, seed=1)
    plain = linear_invariant(x, w)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert same_bits(linear_invariant(x, w), plain)


def test_the_promises_are_declared_and_held() -> None:
    assert LINEAR_INVARIANT.promise == "batch-invariant"
    assert LINEAR_EXACT.promise == "cross-machine"
    x, w, q = normal(2, 64), normal(16, 64, seed=1), nybble.quantize(normal(16, 64), "int8_channel")
    with nybble.promise("batch-invariant"):
        linear_invariant(x, w)
        nybble.ops.linear_exact.linear_exact(x, w)
        with pytest.raises(Unsupported, match="linear_exact, linear_invariant"):
            linear(x, q)
    with nybble.promise("cross-machine"), pytest.raises(Unsupported, match="linear_exact"):
        linear_invariant(x, w)


def test_what_does_not_fit_is_refused_with_values() -> None:
    with pytest.raises(BadInput, match=r"linear_invariant takes .* got torch\.float64; nearest"):
        linear_invariant(normal(2, 32).double(), normal(16, 32))
    with pytest.raises(BadInput, match=r"must end in 32"):
        linear_invariant(normal(2, 31), normal(16, 32))


def test_compiles_whole() -> None:
    w, q = normal(16, 64), nybble.quantize(normal(16, 64, seed=1), "int4_g64")
    compiled = torch.compile(
        lambda x: linear_invariant(x, w) + linear_invariant(x, q), fullgraph=True, backend="aot_eager"
    )
    for m in (2, 5):
        x = normal(m, 64, seed=m)
        assert same_bits(compiled(x), linear_invariant(x, w) + linear_invariant(x, q))


@pytest.mark.parametrize("name", ["int8_channel", "int4_g128", "int4_g32_asym", "nvfp4", "fp8_block128", "nf4_g64"])
@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_quantized_plans_never_split_and_keep_to_one_kernel(name: str, capability: tuple[int, int]) -> None:
    from nybble.formats import table
    from nybble.ops.linear import config
    from nybble.ops.linear_invariant.quantized import plan

    machine, served = dataclasses.replace(config.H200, capability=capability), 0
    for n, k in ((16, 128), (576, 576), (4096, 14336), (28672, 8192)):
        found = []
        for m in (1, 2, 3, 16, 64, 257, 2048):
            try:
                found.append(plan(config.Problem(m, n, k, table.block(name), False, machine)))
            except ValueError:
                found.append(None)
        assert len({type(p) for p in found}) == 1, "the number of tokens does not choose the kernel"
        for p in filter(None, found):
            assert [getattr(p, part, 1) for part in ("cluster", "split", "slices")] == [1, 1, 1]
            assert getattr(p, "wk", 8) == 8
            served += 1
    assert served >= 14


def test_some_tile_fits_every_machine() -> None:
    from nybble.ops.linear_invariant.triton import plans

    smallest = 99 * 1024  # what a block of compute capability 8.6 or 8.9 can have
    assert all(plans(m, n)[-1].shared_bytes <= smallest for m in (1, 16, 64, 256, 4096) for n in (16, 4096, 28672))


@pytest.mark.parametrize(("few", "tokens"), [(True, 16), (False, 32)])
def test_the_tile_kernel_in_the_interpreter(few: bool, tokens: int) -> None:
    """Edges of tokens, outputs and columns; a GPU compiles the kernel instead and runs tests/gpu."""
    if torch.cuda.is_available():
        pytest.skip("kernels are compiled where there is a GPU")
    from triton.tools.tensor_descriptor import TensorDescriptor

    from nybble.ops.linear_invariant.triton import _linear_invariant_kernel

    m, n, k = 35, 40, 72
    x, w, bias = normal(m, k, dtype=torch.float16), normal(n, k, seed=1, dtype=torch.float16), normal(n, seed=2)
    y = torch.empty(m, n, dtype=torch.float16)
    rows = x if few else TensorDescriptor.from_tensor(x, [tokens, 32])
    weight = TensorDescriptor.from_tensor(w, [16, 32])
    grid = (-(-m // tokens) * -(-n // 16),)
    _linear_invariant_kernel[grid](rows, weight, bias, y, m, n, k, k, True, few, tokens, 16, 32, 2)
    LINEAR_INVARIANT.check(y, (x, w, bias), "the kernel")
