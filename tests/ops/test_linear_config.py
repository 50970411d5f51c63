"""The choice of a GPU kernel: a pure function of a description, and what the kernels are compiled for."""

from __future__ import annotations

from dataclasses import replace

import pytest

from nybble.formats import table
from nybble.ops.linear import CASE_FORMATS, config, macros

AMPERE = replace(config.H200, capability=(8, 0), processors=108, shared_bytes=163 * 1024)
INT4 = table.block("int4_g128")


@pytest.mark.parametrize("m", [1, 2, 7, 8, 9, 16, 17, 33, 64, 65, 128, 257, 2048])
@pytest.mark.parametrize(
    ("n", "k"), [(1, 1), (17, 129), (4096, 4096), (28672, 8192), (4096, 14336), (151936, 896), (64, 131072)]
)
@pytest.mark.parametrize("machine", [config.H200, AMPERE], ids=["hopper", "ampere"])
def test_something_fits_whatever_the_size(m: int, n: int, k: int, machine: config.Machine) -> None:
    p = config.Problem(m, n, k, INT4, machine=machine)
    plan = config.choose(p).plan
    assert plan.refusal(p) is None
    assert plan.shared_bytes(p) <= machine.shared_bytes
    rows, slices = plan.grid(p)
    assert rows >= 1
    assert slices >= 1


@pytest.mark.parametrize("name", CASE_FORMATS)
@pytest.mark.parametrize("fp16", [False, True])
def test_every_case_format_is_decoded_or_refused_with_a_reason(name: str, fp16: bool) -> None:
    fmt = table.block(name)
    if fmt.element.bits == 6:
        with pytest.raises(ValueError, match=fmt.element.name):
            macros.describe(fmt)
        return
    defines = macros.defines(fmt, fp16)
    assert defines["BITS"] == fmt.element.bits
    assert config.choose(config.Problem(3, 64, 256, fmt, fp16)).scored


def test_the_same_description_gives_the_same_choice_and_prints_it() -> None:
    p = config.Problem(16, 4096, 4096, INT4)
    assert config.choose(p) == config.choose(replace(p))
    lines = str(config.choose(p)).splitlines()
    assert lines[0] == "x[16, 4096] @ W[4096, 4096]^T, int4_g128, bf16"
    times = [float(line.split()[0]) for line in lines[1:]]
    assert times == sorted(times)


def test_few_tokens_stream_and_many_go_through_tiles() -> None:
    assert isinstance(config.choose(config.Problem(1, 4096, 4096, INT4)).plan, config.Stream)
    assert isinstance(config.choose(config.Problem(256, 4096, 4096, INT4)).plan, config.Tile)


def test_tiles_refuse_what_they_would_round_too_much_and_other_machines() -> None:
    plan = config.Tile(2, 64, 1, 5)
    fp8 = config.Problem(64, 4096, 4096, table.block("fp8_block128"))
    assert "rounded the same way" in (plan.refusal(fp8) or "")
    assert "8.0" in (plan.refusal(config.Problem(64, 4096, 4096, INT4, machine=AMPERE)) or "")
    assert "fp16" in (plan.refusal(config.Problem(64, 4096, 4096, table.block("mxfp4"), True)) or "")


def test_the_model_never_beats_the_memory() -> None:
    for m, (n, k) in ((1, (4096, 4096)), (16, (28672, 8192)), (2048, (4096, 14336))):
        p = config.Problem(m, n, k, INT4)
        assert config.choose(p).scored[0][0] > p.memory_time


def test_thousands_of_tokens_go_through_cublas_where_tiles_do_not_serve() -> None:
    for p in (
        config.Problem(2048, 4096, 4096, INT4, machine=AMPERE),
        config.Problem(512, 4096, 4096, table.block("fp8_block128")),
        config.Problem(512, 4096, 4096, table.block("nf4_g64")),
    ):
        assert isinstance(config.choose(p).plan, config.Widen)
    fp16 = config.Problem(2048, 4096, 4096, INT4, fp16=True, machine=AMPERE)
    assert "fp16" in (config.Widen().refusal(fp16) or "")
    assert isinstance(config.choose(fp16).plan, config.Stream)


@pytest.mark.parametrize(("n", "k", "m"), [(4096, 4096, 16), (14336, 4096, 64), (28672, 8192, 256), (128256, 4096, 16)])
def test_no_more_blocks_share_a_processor_than_an_even_spread_puts_there(n: int, k: int, m: int) -> None:
    p = config.Problem(m, n, k, INT4)
    for plan in config.candidates(p):
        if isinstance(plan, config.Tile) and plan.refusal(p) is None:
            even = -(-plan.grid(p)[0] // p.machine.processors)
            assert p.machine.shared_bytes // plan.shared_bytes(p) <= even
            assert plan.shared_bytes(p) <= p.machine.shared_bytes


def test_weights_of_unusual_scales_are_not_given_to_fp16_tiles() -> None:
    usual, unusual = (config.Problem(256, 4096, 4096, INT4, fp16=True, usual=usual) for usual in (True, False))
    assert isinstance(config.choose(usual).plan, config.Tile)
    assert isinstance(config.choose(unusual).plan, config.Stream)
