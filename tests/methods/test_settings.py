"""Every setting of every method and part: a value is refused in one line, or a network trains with it."""

from __future__ import annotations

import math
import warnings
from dataclasses import MISSING, fields, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from dcil import (
    DCIL,
    DNS,
    DPF,
    DSR,
    ERK,
    GMP,
    METHODS,
    NM,
    OBD,
    OBS,
    SM,
    Alternating,
    AtSteps,
    Constant,
    Criterion,
    Cubic,
    Filter,
    Granularity,
    Method,
    Never,
    OneShot,
    Rewind,
    RigL,
    Schedule,
    Scope,
    SparseNet,
    UserError,
)
from dcil.methods.dsr import spread
from dcil.schedule import Stretched, Thinned
from dcil.scope import apportion

POISON: list[Any] = [
    "x",
    "",
    None,
    True,
    1.5,
    -1,
    -3,
    0,
    1,
    2,
    1e300,
    -1e300,
    1e-300,
    math.nan,
    math.inf,
    2**63,
    10**30,
]
POISON += [10**5000, [], (), {}, object(), "softmax", np.float32(0.5), np.int64(3), np.array([1, 2]), 1j, torch.ones(2)]
POISON += [Criterion(), Scope(), Schedule(), Granularity(), Never(), AtSteps(), Filter(), NM(), ERK(), OBD()]
STEPS = 6


def network() -> nn.Module:
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Sequential())
    body[3].conv1 = nn.Conv2d(8, 8, 3)  # the one that L1 filter pruning looks for
    return nn.Sequential(body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))


def train(method: Method, steps: int = STEPS) -> SparseNet:
    """A few steps with finite losses; afterwards the masks are as sparse as the method says."""
    net = SparseNet(network(), method).train()
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
    generator = torch.Generator().manual_seed(0)
    for _ in range(min(steps, sum(phase.steps for phase in method.phases()))):
        x, y = torch.randn(4, 2, 6, 6, generator=generator), torch.randint(4, (4,), generator=generator)
        loss = net.loss(net(x), y)
        assert math.isfinite(loss.item())
        opt.zero_grad()
        loss.backward()
        opt.step()
        update = net.step(opt)
        assert method.due(net.steps_done) == (update is not None)
        assert 0 <= method.sparsity_at(net.steps_done) < 1
    assert all(parameter.isfinite().all() for parameter in net.parameters())
    return net


def refused_or_trained(build: Any) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            train(build())
    except UserError as error:
        assert "\n" not in str(error) and len(str(error)) < 400
        return False
    return True


def example(name: str, **settings: Any) -> Method:
    kind = METHODS[name]
    given = {"sparsity": 0.5 if kind.prunes else 0.0, "steps": STEPS, "epoch_steps": 2, "every": 1, **settings}
    return kind(**given)


#: Every field of every method; those that a method has from the base class are slow, except for DCIL.
SETTINGS = [
    pytest.param(name, field.name, id=f"{name}-{field.name}", marks=[] if own else [pytest.mark.slow])
    for name, kind in METHODS.items()
    for field in fields(kind)
    for own in [name == "dcil" or field.name in vars(kind).get("__annotations__", {})]
]


@pytest.mark.parametrize(("name", "field"), SETTINGS)
def test_every_setting_of_every_method(name, field):
    trained = [value for value in POISON if refused_or_trained(lambda v=value: example(name, **{field: v}))]
    assert len(trained) < len(POISON)
    default = METHODS[name].__dataclass_fields__[field].default
    if default is not MISSING:
        train(example(name, **{field: default}))


PARTS = [Cubic(), Stretched(), Thinned(), ERK(), NM(), OBD(), OBS()]
PART_FIELDS = [(part, field.name) for part in PARTS for field in fields(part)]


@pytest.mark.parametrize(("part", "field"), PART_FIELDS, ids=[f"{type(p).__name__}-{f}" for p, f in PART_FIELDS])
def test_every_setting_of_every_part(part, field):
    role = next(r for r in (Criterion, Scope, Schedule, Granularity) if isinstance(part, r)).__name__.lower()
    for value in POISON:
        refused_or_trained(
            lambda v=value: GMP(sparsity=0.5, steps=STEPS, every=1, stem=True, **{role: replace(part, **{field: v})})
        )


def test_what_was_accepted_and_failed():
    wrong = [
        (SM, {"drop_end": -3}, "drop_end must be >= 0 and <= 1, got -3"),
        (DCIL, {"temperature": 1e300}, "temperature must be from 0.001 to 1000"),
        (DNS, {"gamma": -1}, "gamma must be >= 0"),
        (DPF, {"steps": 1.5}, "steps must be a whole number, got 1.5"),
        (DPF, {"smooth": "no"}, "smooth must be True or False, got 'no'"),
        (DPF, {"sparsity": "0.5"}, "sparsity must be a finite number, got '0.5'"),
        (DPF, {"criterion": Criterion()}, "criterion must be a kind of Criterion"),
        (Rewind, {"rounds": 10**9}, "rounds must be from 1 to 1000"),
        (GMP, {"granularity": NM(), "schedule": Cubic(final=0.9)}, "schedule must be one up to 0.5"),
    ]
    for kind, settings, said in wrong:
        with pytest.raises(UserError, match=f"^{kind.__name__}: {said}"):
            kind(**{"sparsity": 0.5, "steps": 10} | settings)


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("schedule", [Alternating(), AtSteps(), Thinned(AtSteps())])
def test_a_schedule_that_would_never_prune_is_refused(name, schedule):
    if METHODS[name].extra_steps:
        for steps in (1, 6, 1000):
            assert example(name, steps=steps, schedule=schedule).timeline.extra
    else:
        with pytest.raises(UserError, match=r"schedule must be one with regular updates, got .* \(.*Cubic\(\)\)"):
            example(name, schedule=schedule)


@pytest.mark.parametrize("kind", [OneShot, Rewind])
@pytest.mark.parametrize("schedule", [Alternating(), Thinned(Alternating())])
def test_rounds_that_would_end_dense_are_refused(kind, schedule):
    for rounds in (1, 3):
        method = kind(sparsity=0.5, steps=10, rounds=rounds, schedule=schedule)
        assert method.sparsity_at(method.prunings[-1]) == 0.5
    with pytest.raises(UserError, match=r"rounds must be odd with a schedule that alternates, got 2 \("):
        kind(sparsity=0.5, steps=10, rounds=2, schedule=schedule)
    assert kind(sparsity=0.5, steps=10, rounds=2).prunings


def test_numpy_scalars_are_python_numbers_afterwards():
    method = DPF(sparsity=np.float64(0.5), steps=np.int64(10), smooth=np.bool_(True), ramp=torch.tensor(0.5))
    assert method == DPF(sparsity=0.5, steps=10, smooth=True, ramp=0.5)
    assert {type(getattr(method, name)) for name in ("sparsity", "steps", "smooth", "ramp")} == {float, int, bool}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("seed", [2**31, 1_763_470_000_123_456_789, 2**63, 2**64 - 1, -1, -(2**63)])
def test_any_seed(name, seed):
    train(example(name, seed=seed), steps=3)


def test_small_seeds_draw_as_before():
    method = RigL(sparsity=0.5, steps=4, seed=7)
    noise = method.noise(SparseNet(network(), method).context(None))[0]
    assert torch.equal(noise, torch.rand(noise.shape, generator=torch.Generator().manual_seed(7 * 1_000_003)))


def one_by_one(shares, sizes, total, limits=None):
    """The largest-remainder method, one unit at a time."""
    exact = [share * size for share, size in zip(shares, sizes, strict=True)]
    limits = limits or sizes
    found = [min(int(value), limit) for value, limit in zip(exact, limits, strict=True)]
    order = sorted(range(len(sizes)), key=lambda i: (found[i] - exact[i], i))
    while sum(found) != total:
        step = 1 if sum(found) < total else -1
        for i in order[::step]:
            if sum(found) != total and 0 <= found[i] + step <= limits[i]:
                found[i] += step
    return found


def test_apportion_equals_the_slow_way_and_ends():
    random = np.random.default_rng(0)
    for _ in range(300):
        sizes = random.integers(0, 40, random.integers(1, 6)).tolist()
        shares, total = random.random(len(sizes)).tolist(), int(random.integers(0, sum(sizes) + 1))
        assert apportion(shares, sizes, total) == one_by_one(shares, sizes, total)
    assert apportion([0.0, 0.0], [10**12, 10**12], 10**12 + 1) == [10**12 // 2 + 1, 10**12 // 2]
    assert apportion([0.5], [4], 99) == [4]
    assert apportion([0.5], [4], -3) == [0]


def slow_spread(left, room, total):
    grow = [0] * len(left)
    while total > sum(grow):
        open_ = [i for i in range(len(left)) if grow[i] < room[i]]
        share = (total - sum(grow)) / sum(left[i] for i in open_)
        sizes = [left[i] for i in open_]
        for i, n in zip(
            open_, one_by_one([share] * len(open_), sizes, min(total - sum(grow), sum(sizes))), strict=True
        ):
            grow[i] = min(room[i], grow[i] + n)
    return grow


def test_spread_equals_the_slow_way_and_ends():
    random = np.random.default_rng(1)
    for _ in range(300):
        left, room = (random.integers(1, 30, 4).tolist() for _ in range(2))
        total = int(random.integers(0, sum(room) + 1))
        assert spread(left, room, total) == slow_spread(left, room, total)
    assert spread([1, 1], [10**9, 5], 10**9) == [10**9 - 5, 5]
    assert spread([0, 0], [3, 4], 5) == [3, 2]


@pytest.mark.parametrize("sparsity", [0.0, 0.1, 0.5, 0.95])
def test_dsr_keeps_its_count_whatever_the_threshold(sparsity):
    for threshold in (1e-12, 0.05, 1e12):
        net = train(DSR(sparsity=sparsity, steps=STEPS, every=1, stem=True, threshold=threshold))
        total = sum(mask.numel() for mask in net.masks.values())
        assert sum(int((~mask).sum()) for mask in net.masks.values()) == int(sparsity * total)


def test_a_ramp_within_one_step():
    method = DPF(sparsity=0.5, steps=10, begin=0.5, ramp=0.5001)
    assert [method.sparsity_at(step) for step in (0, 4, 5, 9)] == [0.0, 0.0, 0.5, 0.5]


def test_surgery_happens_in_short_trainings_too():
    net = train(DNS(sparsity=0.5, steps=2, begin=0.1, until=0.2))
    assert abs(net.sparsity - 0.5) < 0.05


def test_constant_schedule_is_a_kind():
    assert DPF(sparsity=0.5, steps=3, schedule=Constant()).sparsity_at(2) == 0.5
