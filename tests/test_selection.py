"""Exact counts, the tie rule, and the ranking across layers."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from dcil import DPF, NM, Filter, Weight
from dcil.method import StepContext
from dcil.selection import MANY, SAMPLED, count_changes, keep_largest, kth_smallest, largest_among, radix_select
from dcil.weight import PrunableWeight

shapes = st.lists(st.integers(1, 6), min_size=1, max_size=4).map(lambda s: (s[0], *s[1:]) if len(s) > 1 else (s[0], 1))
fractions = st.floats(0, 1, exclude_max=True)


def layer(values: torch.Tensor, **where) -> PrunableWeight:
    return PrunableWeight("w", nn.Parameter(values), torch.ones_like(values, dtype=torch.bool), **where)


def masks_for(layers, sparsity, granularity):
    """The masks that a magnitude method makes of these layers, once it has reached its target."""
    method = DPF(sparsity=sparsity, steps=1, granularity=granularity)
    method.update(StepContext(layers, 1, None, {}, nn.Module()))
    return [one.mask for one in layers]


@given(scores=st.lists(st.integers(0, 5), min_size=1, max_size=60), data=st.data())
def test_keep_largest_is_the_stable_sort(scores, data):
    """Few distinct values, so nearly everything ties: the reference is a stable sort, first of equals kept."""
    pruned = data.draw(st.integers(0, len(scores)))
    kept = keep_largest(torch.tensor(scores, dtype=torch.float), pruned)
    order = sorted(range(len(scores)), key=lambda i: (-scores[i], i))
    assert kept.nonzero().flatten().tolist() == sorted(order[: len(scores) - pruned])


def test_a_candidate_of_score_zero_beats_what_is_none():
    candidates = torch.tensor([False, True, False, True])
    assert largest_among(candidates, torch.zeros(4), 1).tolist() == [False, True, False, False]
    assert largest_among(candidates, torch.tensor([9.0, 0, 9, 0]), 2).tolist() == candidates.tolist()


@given(
    scores=st.lists(st.floats(width=32, allow_nan=False) | st.sampled_from([0.0, -0.0, 1.0]), min_size=1, max_size=60),
    data=st.data(),
)
def test_radix_select_finds_the_kth_smallest(scores, data):
    """Any float32: negative ones, both zeros, subnormal and infinite ones."""
    k = data.draw(st.integers(1, len(scores)))
    values = torch.tensor(scores, dtype=torch.float32)
    assert float(radix_select(values, k)) == float(values.kthvalue(k).values)


@given(shapes=st.lists(shapes, min_size=1, max_size=5), sparsity=fractions, seed=st.integers(0, 99))
def test_weights_exact_count_and_kept_beat_dropped(shapes, sparsity, seed):
    torch.manual_seed(seed)
    layers = [layer(torch.randn(shape)) for shape in shapes]
    masks = masks_for(layers, sparsity, Weight())
    n = sum(math.prod(shape) for shape in shapes)
    assert sum(int((~mask).sum()) for mask in masks) == math.floor(sparsity * n)
    assert [m.shape for m in masks] == [torch.Size(s) for s in shapes]
    assert all(mask.dtype == torch.bool for mask in masks)
    values = torch.cat([x.weight.detach().abs().flatten() for x in layers])
    flat = torch.cat([mask.flatten() for mask in masks])
    if flat.any() and not flat.all():
        assert values[flat].min() >= values[~flat].max()


@given(shapes=st.lists(shapes, min_size=1, max_size=5), sparsity=fractions, constant=st.booleans())
def test_filters_exact_count_and_whole(shapes, sparsity, constant):
    layers = [layer(torch.ones(shape) if constant else torch.randn(shape)) for shape in shapes]
    masks = masks_for(layers, sparsity, Filter())
    rows = [mask.reshape(mask.shape[0], -1) for mask in masks]
    assert all(torch.equal(row.any(1), row.all(1)) for row in rows)
    dead = sum(int((~row.any(1)).sum()) for row in rows)
    assert dead == math.floor(sparsity * sum(shape[0] for shape in shapes))


def test_filters_are_ranked_across_layers_by_mean_square():
    # Sums would keep the long, weak filters; the mean keeps the short, strong ones.
    long, short = torch.full((2, 100), 0.5), torch.tensor([[1.0, 1.0], [0.1, 0.1]])
    masks = masks_for([layer(long), layer(short)], 0.5, Filter())
    assert masks[0][:, 0].tolist() == [True, False]
    assert masks[1][:, 0].tolist() == [True, False]


@pytest.mark.parametrize("groups", [1, 2])
def test_filters_of_a_transposed_convolution_are_its_outputs(groups):
    conv = nn.ConvTranspose2d(4, 6, 3, groups=groups, bias=False)
    with torch.no_grad():
        conv.weight.copy_(torch.randn_like(conv.weight))
    one = layer(conv.weight.detach().clone(), transposed=True, conv_groups=groups)
    assert torch.equal(one.from_rows(one.rows(one.weight)), one.weight)
    (mask,) = masks_for([one], 0.5, Filter())
    with torch.no_grad():
        conv.weight.mul_(mask)
    out = conv(torch.randn(1, 4, 5, 5))
    assert int((out.abs().amax((0, 2, 3)) == 0).sum()) == 3


def test_memory_format_does_not_change_the_order():
    values = torch.ones(3, 4, 2, 2)
    (plain,) = masks_for([layer(values)], 0.5, Weight())
    (last,) = masks_for([layer(values.to(memory_format=torch.channels_last))], 0.5, Weight())
    assert torch.equal(plain, last)
    assert plain.flatten().tolist() == [True] * 24 + [False] * 24


def test_changes_counts_revived_and_dropped():
    old = [torch.tensor([True, True, False]), torch.tensor([False])]
    new = [torch.tensor([True, False, True]), torch.tensor([True])]
    assert count_changes(old, new).tolist() == [2, 1]


@pytest.mark.parametrize("pruned", range(9))
def test_nan_counts_as_infinite(pruned):
    scores = torch.tensor([torch.nan, 1.0, torch.inf, torch.nan, 0.0, 2.0, torch.nan, 0.5])
    kept = keep_largest(scores, pruned)
    assert int((~kept).sum()) == pruned
    assert torch.equal(kept, keep_largest(scores.nan_to_num(torch.inf, posinf=torch.inf), pruned))


@pytest.mark.parametrize("dtype", [torch.float, torch.double])
@pytest.mark.parametrize("scale", [2.0**-110, 2.0**-75, 2.0**64, 2.0**110])
@pytest.mark.parametrize("granularity", [Weight(), Filter(), NM(2, 4)])
def test_the_scale_of_the_weights_does_not_change_the_ranking(granularity, scale, dtype):
    torch.manual_seed(1)
    weights = [torch.randint(1, 1000, shape).to(dtype) / 100 for shape in ((8, 12), (4, 8))]
    expected = masks_for([layer(w) for w in weights], 0.5, granularity)
    found = masks_for([layer(w * scale) for w in weights], 0.5, granularity)
    assert all(map(torch.equal, found, expected))


def test_radix_select_of_doubles():
    scores = torch.randn(1001, dtype=torch.double) * 1e-60
    for k in (1, 2, 500, 1000, 1001):
        assert radix_select(scores, k) == scores.kthvalue(k).values


PLACES = torch.arange(MANY + 7)
MANY_SCORES = {
    "random": torch.rand(MANY + 7, generator=torch.Generator().manual_seed(1)),
    "sorted": PLACES.float(),
    "equal": torch.ones(MANY + 7),
    "few values": (PLACES * 7919 % 5).float(),
    "samples of the smallest": torch.where(PLACES % SAMPLED == 0, 0.0, 1.0 + PLACES),
    "infinite": torch.where(PLACES % 3 == 0, torch.inf, PLACES.double()),
}


@pytest.mark.parametrize("scores", MANY_SCORES.values(), ids=MANY_SCORES)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.95, 1.0])
def test_many_scores_have_the_same_kth_smallest_and_exact_counts(scores, share):
    k = max(1, int(share * len(scores)))
    assert kth_smallest(scores, k) == scores.sort().values[k - 1]
    kept = keep_largest(scores, k)
    assert int(kept.sum()) == len(scores) - k
    assert k == len(scores) or scores[kept].min() >= scores[~kept].max()
