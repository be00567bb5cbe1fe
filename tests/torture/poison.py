"""NaN and Inf in a user's loop, for every method: an error, or a network as sparse as it should be."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Iterator
from functools import partial

import torch
from api import model
from forks import isolated
from samples import Samples
from tally import FINE, WRONG, Case, Verdict, of_outcome

import dcil
from dcil.errors import UserError

STEPS = 24
TARGETS = ("weight", "gradient", "batch", "pruned weight", "momentum")
VALUES = (float("nan"), float("inf"), -float("inf"))


def cases(samples: Samples, chance: random.Random, factor: float) -> Iterator[Case]:
    for name in dcil.METHODS:
        wanted = isolated(partial(train, name, "nothing", 0.0, -1, 0))
        for target in TARGETS:
            for value in VALUES:
                for _ in range(max(1, round(factor))):
                    step, seed = chance.randrange(STEPS), chance.randrange(2**32)
                    label = f"{name}: {value} in a {target} at step {step} ({seed})"
                    yield label, partial(attempt, name, target, value, step, seed, wanted.out)


def attempt(name: str, target: str, value: float, step: int, seed: int, wanted: str) -> Verdict:
    outcome = isolated(partial(train, name, target, value, step, seed), limit=20)
    verdict = of_outcome(outcome)
    if verdict.kind == FINE and outcome.out != wanted:
        return Verdict(WRONG, f"{outcome.out.strip()} for {wanted.strip()}")
    return verdict


def train(name: str, target: str, value: float, at: int, seed: int) -> int:
    """Train as a user would, poison one number, and print the sparsity by layer."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    kind = dcil.METHODS[name]
    settings = {"granularity": dcil.Filter()} if dcil.granularity.Weight not in kind.granularities else {}
    try:
        net = dcil.SparseNet(model(), kind(sparsity=0.5 if kind.prunes else 0.0, steps=STEPS, every=3, **settings))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
        for step in range(STEPS):
            x, y = torch.randn(8, 6), torch.randint(3, (8,))
            if step == at:
                put(net, optimizer, target, value, seed, x)
            loss = net.loss(net(x), y)
            optimizer.zero_grad()
            loss.backward()
            if step == at and target == "gradient":
                net.layers[0].weight.grad.view(-1)[seed % 72] = value  # type: ignore[union-attr]
            optimizer.step()
            net.step(optimizer)
        sparse = net.finalize()
        print(f"sparsity {net.sparsity:.6f}")  # noqa: T201
        net.eval()
        same = torch.equal(sparse(x).isfinite(), net(x).isfinite())
        return 0 if same else print("the pruned path and finalize differ in what is finite") or 0  # type: ignore[func-returns-value]  # noqa: T201
    except UserError as error:
        sys.stderr.write(f"dcil: {error}\n")
        return 2


def put(net: dcil.SparseNet, optimizer: torch.optim.SGD, target: str, value: float, seed: int, x: torch.Tensor) -> None:
    """Poison one number, chosen by ``seed``."""
    layer = net.layers[seed % len(net.layers)]
    flat = layer.weight.data.view(-1)
    if target == "batch":
        x.view(-1)[seed % x.numel()] = value
    elif target == "weight":
        flat[seed % flat.numel()] = value
    elif target == "pruned weight" and not layer.mask.all():
        places = (~layer.mask).flatten().nonzero()
        flat[places[seed % len(places)]] = value
    elif target == "momentum" and "momentum_buffer" in optimizer.state.get(layer.weight, {}):
        optimizer.state[layer.weight]["momentum_buffer"].view(-1)[seed % flat.numel()] = value
