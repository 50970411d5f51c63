"""The choice of a GPU kernel: a pure function of a description, and what the kernels are compiled for."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

import house
from nybble.formats import table
from nybble.ops._declare import Implementation
from nybble.ops.linear import CASE_FORMATS, config, cuda, macros
from nybble.quantize import quantize

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


def test_few_tokens_stream_some_go_through_tiles_and_many_through_blocks_that_stay() -> None:
    for m, kind in ((1, config.Stream), (64, config.Tile), (2048, config.Walk)):
        assert isinstance(config.choose(config.Problem(m, 4096, 4096, INT4)).plan, kind)


MEASURED = {"linear.json": 1, "linear-nf4-fp8block.json": 16}
"""Files, and from how many tokens on; blocks with a single unit of rows are younger than the second."""
NOT_TIMED = {("nf4_g64", 512, 4096, 4096), ("nf4_g64", 512, 4096, 14336)}
"""Format, M, N, K whose choice was not among what a run timed."""


def test_the_chosen_plan_was_measured_to_be_the_fastest_or_near_it() -> None:
    """Against every other plan that a committed run timed."""
    timed: dict[tuple[str, config.Problem], dict[str, float]] = {}
    for name, least in MEASURED.items():
        result = json.loads((house.ROOT / "benchmarks" / "results" / "h200" / name).read_text(encoding="utf-8"))
        for row in [*result["rows"], *result["other plans"]]:
            if row["kernel"].startswith("linear_") and "x" not in row and row["m"] >= least:
                p = config.Problem(row["m"], row["n"], row["k"], table.block(row["format"]))
                timed.setdefault((name, p), {})[row["plan"]] = row["us"]
    lost, untimed = [], set()
    for (_, p), times in timed.items():
        chosen = str(config.choose(p).plan)
        if len(times) > 1 and chosen not in times:
            untimed.add((p.format.name, p.m, p.n, p.k))
        elif len(times) > 1:
            lost.append(times[chosen] / min(times.values()) - 1)
    assert untimed == NOT_TIMED
    assert len(lost) >= 180
    assert sorted(lost)[-2] < 0.075
    assert sum(lost) / len(lost) < 0.01


@pytest.mark.parametrize("implementation", cuda.IMPLEMENTATIONS, ids=lambda i: i.name)
def test_every_implementation_says_why_not(implementation: Implementation, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the number of tokens: also where a kernel is not among the candidates at all."""
    monkeypatch.setattr(cuda, "machine", lambda device: config.H200)
    monkeypatch.setattr(cuda._nvrtc, "available", lambda: None)
    w = quantize(torch.randn(256, 512, generator=torch.Generator().manual_seed(0)), "int4_g128")
    for m in (1, 16, 33, 256, 2048):
        x = torch.zeros(m, 512, dtype=torch.bfloat16)
        willing = [each.name for each in cuda.IMPLEMENTATIONS if each.supports(x, w, None, None, None) is None]
        assert len(willing) == 1
        reason = implementation.supports(x, w, None, None, None)
        assert reason is None or reason


@pytest.mark.parametrize("name", CASE_FORMATS)
@pytest.mark.parametrize(("n", "k"), [(28672, 8192), (14336, 4096), (4096, 14336), (4096, 4096)])
def test_cublas_is_never_passed_over_for_something_slower(name: str, n: int, k: int) -> None:
    fmt = table.block(name)
    if fmt.element.bits == 6:
        pytest.skip("not decoded by these kernels")
    for m in (256, 512, 2048, 8192):
        p = config.Problem(m, n, k, fmt)
        assert config.choose(p).scored[0][0] <= config.Widen().score(p)


def _segments(plan: config.Walk, p: config.Problem) -> list[list[tuple[int, int, int]]]:
    """walk.cu's Segments: for each cluster, the chunks [begin, end) of which tiles it computes, in its order."""
    clusters, shared, found = plan.clusters(p), plan.shared_tiles(p), []
    for cluster in range(clusters):
        low, high = (shared * p.chunks * (cluster + i) // clusters for i in (0, 1))
        mine = []
        while high > low:
            tile = (high - 1) // p.chunks
            begin = max(low - tile * p.chunks, 0)
            mine.append((tile, begin, high - tile * p.chunks))
            high = tile * p.chunks + begin
        found.append(mine + [(tile, 0, p.chunks) for tile in range(shared + cluster, plan.tiles(p), clusters)])
    return found


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(256, 28672, 8192), (256, 14336, 4096), (2048, 14336, 4096), (257, 4096, 4096), (33, 8, 64), (300, 264, 131072)],
)
def test_every_chunk_is_computed_once_and_waiting_goes_backwards(m: int, n: int, k: int, even: bool) -> None:
    p, plan = config.Problem(m, n, k, INT4), config.Walk(256, 5, 3, even)
    found = _segments(plan, p)
    assert all(found), "no cluster is idle, or those after it would wait for ever"
    covered = sorted(segment for mine in found for segment in mine)
    for tile in range(plan.tiles(p)):
        pieces = [(begin, end) for t, begin, end in covered if t == tile]
        assert pieces[0][0] == 0
        assert pieces[-1][1] == p.chunks
        assert all(before[1] == after[0] for before, after in pairwise(pieces))
    for mine in found:
        unfinished = [i for i, (_, _, end) in enumerate(mine) if end < p.chunks]
        assert unfinished in ([], [0]), "what another cluster finishes is put down once, before any waiting"
    load = [sum(end - begin for _, begin, end in mine) for mine in found]
    assert not even or max(load) - min(load) <= (0 if not plan.shared_tiles(p) else 1)


def test_tiles_refuse_what_they_would_round_too_much_and_other_machines() -> None:
    plan = config.Tile(2, 64, 1, 5)
    for name in ("fp8_g64", "ufp4"):
        assert "rounded the same way" in (plan.refusal(config.Problem(64, 4096, 4096, table.block(name))) or "")
    for name in ("fp8_block128", "fp8_g128", "nf4_g64"):
        assert plan.refusal(config.Problem(64, 4096, 4096, table.block(name))) is None
    assert "8.0" in (plan.refusal(config.Problem(64, 4096, 4096, INT4, machine=AMPERE)) or "")
    assert "fp16" in (plan.refusal(config.Problem(64, 4096, 4096, table.block("mxfp4"), True)) or "")


def test_the_model_never_beats_the_memory() -> None:
    for m, (n, k) in ((1, (4096, 4096)), (16, (28672, 8192)), (2048, (4096, 14336))):
        p = config.Problem(m, n, k, INT4)
        assert config.choose(p).scored[0][0] > p.memory_time


def test_thousands_of_tokens_go_through_cublas_where_tiles_do_not_serve() -> None:
    for p in (
        config.Problem(2048, 4096, 4096, INT4, machine=AMPERE),
        config.Problem(512, 4096, 4096, table.block("fp8_g64")),
        config.Problem(512, 4096, 4096, table.block("fp8_block128"), usual=False),
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
    assert isinstance(config.choose(usual).plan, config.Tile | config.Walk)
    assert isinstance(config.choose(unusual).plan, config.Stream)
