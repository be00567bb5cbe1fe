"""Wrong uses of the API: a UserError of one line where the mistake is made."""

from __future__ import annotations

import dataclasses
import random
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from forks import isolated
from samples import Samples
from tally import FINE, WRONG, Case, Verdict, of_outcome
from torch import nn

import dcil
from dcil.errors import UserError

VALUES: list[Any] = [None, "0.5", "x", "", float("nan"), float("inf"), -1, -0.5, 2, 10**30, 1.5, [], {}, object(), b"1"]
VALUES += [torch.tensor([1.0, 2.0]), 1j, True]
#: Values that these fields may well have.
ALLOWED = {"sparsity": (0, 0.0), "every": (2,), "min_kept": (2,), "steps": (2, 10**30)}


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 12), nn.Linear(12, 3))


def net(method: dcil.Method | None = None, **options: Any) -> dcil.SparseNet:
    return dcil.SparseNet(model(), method or dcil.DCIL(sparsity=0.5, steps=10), **options)


def trained(net: dcil.SparseNet, steps: int = 10) -> None:
    """Train a few steps as the README does."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        loss = net.loss(net(torch.randn(8, 6)), torch.randint(3, (8,)))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        net.step(optimizer)


class Tied(nn.Module):
    """A network whose classifier's weight is that of an inner layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.head = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 12)
        self.head.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.head(self.inner(self.first(x).relu()).relu())
        return hidden


DPF = dcil.DPF(sparsity=0.5, steps=10)
#: What is done wrong -> how. All of these must be refused.
MISTAKES: dict[str, Callable[[], object]] = {
    "SparseNet(None)": lambda: dcil.SparseNet(None, DPF),  # type: ignore[arg-type]
    "SparseNet of a class": lambda: dcil.SparseNet(nn.Linear, DPF),  # type: ignore[arg-type]
    "SparseNet of a string": lambda: dcil.SparseNet("resnet20", DPF),  # type: ignore[arg-type]
    "no method": lambda: dcil.SparseNet(model(), None),  # type: ignore[arg-type]
    "method by name": lambda: dcil.SparseNet(model(), "dcil"),  # type: ignore[arg-type]
    "method's class": lambda: dcil.SparseNet(model(), dcil.DCIL),  # type: ignore[arg-type]
    "SparseNet of a SparseNet": lambda: dcil.SparseNet(net(), DPF),
    "SparseNet inside": lambda: dcil.SparseNet(nn.Sequential(net(), nn.Linear(3, 3)), DPF),
    "no layer": lambda: dcil.SparseNet(nn.ReLU(), DPF),
    "empty layer": lambda: dcil.SparseNet(nn.Sequential(nn.Linear(0, 4), nn.Linear(4, 3)), DPF),
    "empty Sequential": lambda: dcil.SparseNet(nn.Sequential(), DPF),
    "prunable=3": lambda: net(prunable=3),
    "prunable=[3]": lambda: net(prunable=[3]),
    "prunable of nothing": lambda: net(prunable=["nothing"]),
    "prunable=[]": lambda: net(prunable=[]),
    "private=3": lambda: net(private=3),
    "private of nothing": lambda: net(private=["nothing"]),
    "classifier=3": lambda: net(classifier=3),
    "classifier of nothing": lambda: net(classifier="nothing"),
    "masks=3": lambda: net(masks=3),
    "masks of nothing": lambda: net(masks={"nothing": torch.ones(1, dtype=torch.bool)}),
    "masks of floats": lambda: net(masks={"0.weight": torch.ones(12, 6)}),
    "masks of other shapes": lambda: net(masks={"0.weight": torch.ones(3, dtype=torch.bool)}),
    "criterion by name": lambda: dcil.DPF(sparsity=0.5, steps=10, criterion="obd"),  # type: ignore[arg-type]
    "schedule by name": lambda: dcil.DPF(sparsity=0.5, steps=10, schedule="cubic"),  # type: ignore[arg-type]
    "scope by name": lambda: dcil.DPF(sparsity=0.5, steps=10, scope="erk"),  # type: ignore[arg-type]
    "granularity by name": lambda: dcil.DPF(sparsity=0.5, steps=10, granularity="filter"),  # type: ignore[arg-type]
    "criterion's class": lambda: dcil.DPF(sparsity=0.5, steps=10, criterion=dcil.Magnitude),  # type: ignore[arg-type]
    "steps=1.5": lambda: dcil.DPF(sparsity=0.5, steps=1.5),  # type: ignore[arg-type]
    "smooth='no'": lambda: dcil.DPF(sparsity=0.5, steps=10, smooth="no"),  # type: ignore[arg-type]
    "complex weights": lambda: dcil.SparseNet(model().to(torch.complex64), DPF),
    "loss in evaluation": lambda: (n := net().eval()).loss(n(torch.randn(2, 6)), torch.zeros(2).long()),
    "loss of a tensor": lambda: net().loss(torch.randn(2, 3), torch.zeros(2).long()),  # type: ignore[arg-type]
    "loss of one path": lambda: net().loss({"pruned": torch.randn(2, 3)}, torch.zeros(2).long()),
    "step of nothing": lambda: net().step("optimizer"),  # type: ignore[arg-type]
    "step of another optimizer": lambda: net().step(torch.optim.SGD(model().parameters(), lr=0.1)),
    "attach nothing": lambda: net().attach(),
    "attach a string": lambda: net().attach("optimizer"),
    "step after attach": lambda: attached_and_stepped(),
    "mse without distill": lambda: (n := net()).loss(n(torch.randn(2, 6)), torch.randn(2, 3), F.mse_loss),
    "state of another method": lambda: net(DPF).load_state_dict(net().state_dict()),
    "state of another sparsity": lambda: net().load_state_dict(net(dcil.DCIL(sparsity=0.7, steps=10)).state_dict()),
    "EMA of nothing": lambda: dcil.EMA(None),  # type: ignore[arg-type]
    "EMA decay=2": lambda: dcil.EMA(net(), decay=2.0),
    "EMA decay='x'": lambda: dcil.EMA(net(), decay="x"),  # type: ignore[arg-type]
    "NM(0, 0)": lambda: dcil.NM(0, 0),
    "NM('2', 4)": lambda: dcil.NM("2", 4),  # type: ignore[arg-type]
    "Cubic called bare": lambda: dcil.Cubic()(3),
    "DCIL distill='x'": lambda: dcil.DCIL(sparsity=0.5, steps=10, distill="x"),
    "DCIL kl=-1": lambda: dcil.DCIL(sparsity=0.5, steps=10, kl=-1),
    "DCIL temperature=0": lambda: dcil.DCIL(sparsity=0.5, steps=10, temperature=0),
}
#: Uses that may be refused in one line but must not be wrong or raise something else.
ODD: dict[str, Callable[[], object]] = {
    "sm after zero_grad": lambda: stepped_after_zero_grad("sm"),
    "rigl after zero_grad": lambda: stepped_after_zero_grad("rigl"),
    "set after zero_grad": lambda: stepped_after_zero_grad("set"),
    "tied classifier": lambda: trained(dcil.SparseNet(Tied(), DPF)),
    "tied classifier by its other name": lambda: trained(dcil.SparseNet(Tied(), DPF, prunable=["inner.weight"])),
    "half precision": lambda: dcil.SparseNet(model().half(), DPF).update_masks(),
    "double": lambda: dcil.SparseNet(model().double(), DPF).update_masks(),
}


def attached_and_stepped() -> None:
    sparse = net()
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.1)
    sparse.attach(optimizer)
    sparse.step(optimizer)


def stepped_after_zero_grad(name: str) -> None:
    sparse = net(dcil.METHODS[name](sparsity=0.5, steps=8, every=2))
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.1)
    for _ in range(8):
        loss = sparse.loss(sparse(torch.randn(8, 6)), torch.randint(3, (8,)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        sparse.step(optimizer)


def cases(samples: Samples, chance: random.Random, factor: float) -> Iterator[Case]:
    for name, mistake in MISTAKES.items():
        yield name, partial(attempt, mistake, must_refuse=True)
    for name, use in ODD.items():
        yield name, partial(attempt, use, must_refuse=False)
    for method, kind in dcil.METHODS.items():
        fields = [field.name for field in dataclasses.fields(kind) if field.name not in ("sparsity", "steps")]
        for field in ("sparsity", "steps", *chance.sample(fields, min(len(fields), round(6 * factor)))):
            for value in VALUES:
                settings = {"sparsity": 0.5, "steps": 10} | {field: value}
                label = f"{method}: {field}={value!r}"
                yield label, partial(attempt, partial(build_and_train, kind, settings), must_refuse=False)


def build_and_train(kind: type[dcil.Method], settings: dict[str, Any]) -> None:
    """Train with settings that were taken: then the masks must be what the method says."""
    method = kind(**settings)
    if method.steps > 100:  # a training that long is not wrong
        return
    sparse = net(method)
    trained(sparse, 12)
    if not 0 <= sparse.sparsity < 1:
        raise RuntimeError(f"sparsity {sparse.sparsity}")


def attempt(use: Callable[[], object], must_refuse: bool) -> Verdict:
    def guarded() -> int:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        try:
            use()
        except UserError as error:
            sys.stderr.write(f"dcil: {error}\n")
            return 2
        return 0

    verdict = of_outcome(isolated(guarded, limit=20, memory=8 << 30))
    return Verdict(WRONG, "was taken without a word") if must_refuse and verdict.kind == FINE else verdict
