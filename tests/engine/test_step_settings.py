"""Steps on tokens, smoothed targets and clipped gradients: the same one path at a time, and in several processes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from processes import in_group, said, together
from test_data_parallel import Given

from dcil import DCIL, SparseNet, models
from dcil import engine as engines
from dcil.engine import EngineSettings, StepSettings
from dcil.engine.evaluate import evaluate
from dcil.engine.process_group import ProcessGroup

TOKENS, LENGTH = 9, 9  # as many as the other: no dimension tells itself apart by its size
SIZES = [4, 4, 1, 3, 4, 2]  # of the global batches: with two processes one share is empty
STEP = StepSettings(label_smoothing=0.1, clip_norm=0.3)


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(1)
    return [tuple(torch.randint(TOKENS, (2, n, LENGTH))) for n in SIZES]  # type: ignore[misc]


def go(group: ProcessGroup, low_memory: bool, step: StepSettings = STEP):
    torch.manual_seed(0)
    model = models.build("gpt-1-16", TOKENS, size=LENGTH).double()
    net = SparseNet(model, DCIL(sparsity=0.6, steps=len(SIZES), every=2, warmup=0.3))
    matrices = [p for p in net.parameters() if p.dim() > 1]
    groups = [{"params": matrices}, {"params": [p for p in net.parameters() if p.dim() < 2], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.1, fused=True)
    settings = EngineSettings(low_memory=low_memory)
    engine = engines.build(net, optimizer, Given(batches(), group), settings, group, step)
    for _ in engine.epoch(0, lambda i: 0.01 * (i + 1)):
        pass
    assert [group["lr"] for group in optimizer.param_groups] == [0.01 * len(SIZES)] * 2
    return net, engine.totals(), engine.evaluate()


def go_and_save(group: ProcessGroup, folder: Path, low_memory: bool) -> None:
    net, totals, scores = go(group, low_memory)
    torch.save(
        (net.state_dict(), totals, {p: tuple(found) for p, found in scores.items()}), folder / f"{group.rank}.pt"
    )


def test_one_path_at_a_time_is_the_same() -> None:
    (one, totals, scores), (two, other_totals, other_scores) = (go(ProcessGroup(), low) for low in (False, True))
    assert totals == pytest.approx(other_totals) and totals[2] == sum(SIZES) * LENGTH
    assert scores == {path: pytest.approx(tuple(found)) for path, found in other_scores.items()}
    for a, b in zip(one.state_dict().values(), two.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("low_memory", [False, True])
def test_two_processes_are_one(low_memory: bool, tmp_path: Path) -> None:
    assert together(2, tmp_path, in_group, go_and_save, tmp_path, low_memory) == [0, 0], said(tmp_path)
    net, totals, scores = go(ProcessGroup(), low_memory)
    for rank in range(2):
        state, found_totals, found = torch.load(tmp_path / f"{rank}.pt")
        assert found_totals == pytest.approx(totals, rel=1e-9)
        assert found == {path: (*hits, pytest.approx(loss, rel=1e-6)) for path, (*hits, loss) in scores.items()}
        for key, value in net.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-7, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")


def test_smoothing_and_clipping_change_what_is_trained() -> None:
    plain, smoothed, clipped = (
        go(ProcessGroup(), False, step) for step in (StepSettings(), StepSettings(0.1), StepSettings(clip_norm=1e-3))
    )
    assert smoothed[1][0] != plain[1][0]
    weight = "model.blocks.0.mlp.fc1.weight"
    assert not torch.equal(clipped[0].state_dict()[weight], plain[0].state_dict()[weight])


def test_scores_are_means_over_tokens() -> None:
    net, _, _ = go(ProcessGroup(), False)
    found = evaluate(net, Given(batches(), ProcessGroup()))
    net.eval()
    for path in ("pruned", "super"):
        logits = torch.cat([net.path(path, x).flatten(0, 1) for x, _ in batches()])
        y = torch.cat([y.flatten() for _, y in batches()])
        top5 = (logits.topk(5).indices == y[:, None]).any(1)
        want = (
            100 * (logits.argmax(1) == y).double().mean().item(),
            100 * top5.double().mean().item(),
            F.cross_entropy(logits, y).item(),
        )
        assert tuple(found[path]) == pytest.approx(want, rel=1e-5)
