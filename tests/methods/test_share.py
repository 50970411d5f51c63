"""Rows shared among processes give the codes of one process."""

from pathlib import Path

import pytest
import torch
from torch import distributed as dist
from torch import multiprocessing

from method_layers import layer
from nybble.methods import gptq, schur
from nybble.methods.layer import Layer
from nybble.methods.share import agreed, processes, rounded, shares
from nybble.quantize import QuantTensor

CASES = (("NVFP4A16", 21), ("W4A16_G32_ASYM", 8), ("FP8_BLOCK", 200), ("W4A16_G32", 1))


def solve(one: Layer) -> QuantTensor:
    method = gptq if one.scheme.weight.block[0] != 1 else schur
    return method.apply(one, method.Config())


def work(rank: int, meeting: str, out: str) -> None:
    """One process: solve every case and save what came out."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=2)
    try:
        found = [rounded(layer(name, n, 64, seed=1), solve).parts for name, n in CASES]
        torch.save(found, f"{out}/{rank}.pt")
        assert agreed("mine" if rank == 0 else None) is None, "what one process lacks, all do again"
        assert agreed(rank) == rank
    finally:
        dist.destroy_process_group()


def test_two_processes_give_the_codes_of_one(tmp_path: Path) -> None:
    multiprocessing.spawn(work, args=(str(tmp_path / "meeting"), str(tmp_path)), nprocs=2)
    alone = [solve(layer(name, n, 64, seed=1)).parts for name, n in CASES]
    for rank in range(2):
        for parts, expected in zip(torch.load(tmp_path / f"{rank}.pt"), alone, strict=True):
            assert parts.keys() == expected.keys()
            assert all(torch.equal(parts[name], value) for name, value in expected.items())


@pytest.mark.parametrize(("rows", "block", "count"), [(10, 1, 3), (200, 128, 2), (1, 1, 4), (0, 1, 2), (256, 128, 5)])
def test_shares_are_whole_blocks_and_cover_every_row_once(rows: int, block: int, count: int) -> None:
    runs = shares(rows, block, count)
    assert len(runs) == count
    assert [r for start, stop in runs for r in range(start, stop)] == list(range(rows))
    assert all(start % block == 0 or start == rows for start, _ in runs)
    assert processes() == 1
