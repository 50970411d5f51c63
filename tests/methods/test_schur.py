"""Schur replay: the identities of the method, on random layers and against brute force."""

import pytest
import torch

from method_layers import layer
from nybble.errors import BadInput, Unsupported
from nybble.formats import table
from nybble.methods import gptq, rtn, schur
from nybble.methods.columns import GroupScale, Target, commit, sweep, target
from nybble.methods.layer import Layer, relative_error
from nybble.quantize import elements
from nybble.quantize.schemes import Scheme
from textbook_gptq import positive_scales

SERVED = ("nvfp4", "mxfp4", "int4_g32", "int4_g32_asym", "nf4_g64", "ufp4", "ue5m3fp4", "mxint8", "int2_g32")


def of(name: str) -> Scheme:
    return Scheme(name, table.block(name))


def first_group(one: Layer, width: int) -> tuple[Target, torch.Tensor, torch.Tensor]:
    upper = one.inputs.factor(0.01, torch.arange(one.weight.shape[1])).upper
    return target(one), one.weight.double().t()[:width].contiguous(), upper[:width, :width]


def test_the_metric_is_the_schur_complement() -> None:
    one = layer(of("nvfp4"), 4, 96, seed=0)
    h = one.inputs.second_moment
    h = h + 0.01 * h.diagonal().mean() * torch.eye(96, dtype=torch.float64)
    upper = one.inputs.factor(0.01, torch.arange(96)).upper
    for start in range(0, 96, 16):
        g, f = slice(start, start + 16), slice(start + 16, 96)
        complement = h[g, g] - h[g, f] @ torch.linalg.solve(h[f, f], h[f, g]) if start < 80 else h[g, g]
        found = schur.metric(upper[g, g])
        assert float((found - complement).norm() / complement.norm()) < 1e-8


@pytest.mark.parametrize("name", SERVED)
def test_the_loss_is_what_later_columns_cannot_repair(name: str) -> None:
    """Replay's sum of squares is d S d^T of the codes that the group would be committed with."""
    one = layer(of(name), 6, 128, seed=1)
    width = table.block(name).block[1]
    t, group, upper = first_group(one, width)
    old = t.propose(group)
    loss = schur.replay(t, group, upper, old.effective[None], t.zeros(old))[0]
    elements_of, _ = commit(t, group.clone(), upper, old)
    zero = 0 if t.zeros(old) is None else t.zeros(old)
    rounded = (elements_of - zero) * old.effective
    d = (group - rounded).t()
    expected = ((d @ schur.metric(upper)) * d).sum(1)
    assert float((loss - expected).norm() / expected.norm()) < 1e-8


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("act_order", [False, True])
def test_the_chosen_scale_is_never_worse_and_is_the_one_committed(name: str, act_order: bool) -> None:
    one = layer(of(name), 12, 160, seed=2)
    factor = gptq.prepared(one, 0.01, act_order)
    t = target(one)
    chosen: list[GroupScale] = []

    def watched(t: Target, group: torch.Tensor, upper: torch.Tensor) -> GroupScale:
        scale = schur.choose(t, group, upper, 4, 3)
        old = t.propose(group)
        both = torch.stack([old.effective, scale.effective])
        before, after = schur.replay(t, group, upper, both, t.zeros(old))
        assert (after <= before).all()
        chosen.append(scale)
        return scale

    q = sweep(one, t, factor, watched)
    same = schur.apply(one, schur.Config(act_order=act_order))
    assert torch.equal(q.codes, same.codes)
    assert torch.equal(q.scale, same.scale)
    replayed = iter(chosen)
    again = sweep(one, t, factor, lambda *_: next(replayed))
    assert torch.equal(again.codes, q.codes)


def test_all_rows_at_once_equal_one_row_at_a_time() -> None:
    one = layer(of("nvfp4"), 9, 96, seed=3)
    q = schur.apply(one, schur.Config())
    for row in range(9):
        alone = Layer("row", one.weight[row : row + 1], one.scheme, one.tensor_amax, one.inputs)
        single = schur.apply(alone, schur.Config())
        assert torch.equal(single.codes[0], q.codes[row])
        assert torch.equal(single.scale[0], q.scale[row])


def test_a_window_over_the_whole_grid_equals_brute_force() -> None:
    one = layer(of("nvfp4"), 8, 64, seed=4)
    t, group, upper = first_group(one, 16)
    grid = torch.tensor(positive_scales(t.format), dtype=torch.float32)
    assert len(grid) == 126
    effective = (grid * t.tensor.decode)[:, None].expand(126, 8)
    losses = schur.replay(t, group, upper, effective, None)
    chosen = schur.choose(t, group, upper, window=126, steps=3)
    loss = schur.replay(t, group, upper, chosen.effective[None], None)[0]
    assert torch.equal(loss, losses.amin(0))


def test_the_window_covers_most_of_what_brute_force_finds() -> None:
    """The note's coverage: h = 4 holds the best scale of most groups, h = 8 of nearly all."""
    inside = {0: 0, 4: 0, 8: 0}
    total = 0
    for seed in range(4):
        one = layer(of("nvfp4"), 64, 64, seed=seed)
        t, group, upper = first_group(one, 16)
        best = schur.replay(t, group, upper, schur.choose(t, group, upper, 126, 3).effective[None], None)[0]
        for window in inside:
            scale = schur.choose(t, group, upper, window, 3)
            inside[window] += int((schur.replay(t, group, upper, scale.effective[None], None)[0] == best).sum())
        total += 64
    assert 0.15 < inside[0] / total < 0.5
    assert 0.75 <= inside[4] / total <= 0.97
    assert inside[8] / total > 0.975


@pytest.mark.parametrize("name", SERVED)
def test_rounding_gptq_schur_in_this_order(name: str) -> None:
    errors = []
    for seed in range(3):
        one = layer(of(name), 48, 128, seed=seed)
        h = one.inputs.second_moment
        errors.append([relative_error(one.weight, m.apply(one, m.Config()), h) for m in (rtn, gptq, schur)])
    nearest, compensated, replayed = torch.tensor(errors).mean(0).tolist()
    assert replayed < nearest
    assert replayed <= compensated * (0.9 if name in ("nvfp4", "int4_g32", "int2_g32") else 1.0)


def test_ties_prefer_the_old_scale_then_the_smaller() -> None:
    t = target(layer(of("nvfp4"), 2, 16, seed=0))
    upper = torch.eye(16, dtype=torch.float64)
    old = t.propose(torch.zeros(16, 2, dtype=torch.float64))
    chosen = schur.choose(t, torch.zeros(16, 2, dtype=torch.float64), upper, 4, 3)
    assert torch.equal(chosen.stored, old.stored)
    around = elements.decode(t.format.scale, schur.candidates(t.format, torch.ones(2), old.stored[:, 0], None, 3))
    assert (around[1:].diff(dim=0) > 0).all()


def test_formats_whose_scales_span_rows_are_refused() -> None:
    for name in ("fp8_block128", "int8_channel", "fp8_tensor"):
        with pytest.raises(Unsupported, match="gptq serves"):
            schur.apply(layer(of(name), 4, 32, seed=0), schur.Config())
    with pytest.raises(BadInput, match="window -1"):
        schur.apply(layer(of("nvfp4"), 4, 32, seed=0), schur.Config(window=-1))
