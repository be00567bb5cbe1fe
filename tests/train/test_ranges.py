"""Every option of a run: a value is refused in one line before anything is written, or a run trains with it."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dcil import data
from dcil.cli import main
from dcil.data import Dataset, Split
from dcil.engine import Diverged
from dcil.errors import UserError
from dcil.runs.folder import RunFolder
from dcil.train import Config, train

POISON: list[Any] = ["x", "", None, True, 1.5, -1, -3, 0, 1, 2, 1e300, -1e300, 1e-300, math.nan, math.inf, 2**63]
POISON += [10**30, 10**5000, [], (), {}, object(), (1, 2), (-1,), (1,) * 500, ("x",), "wrn-1000000-1", "1:99999999999"]
BASE = Config(epochs=2, target_epoch=1, milestones=(1,), lr_warmup_epochs=1, finetune_epochs=1, batch=8, settings={})


def tiny(name: str, folder: Path) -> Dataset:
    images = torch.randint(256, (16, 1, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    split = Split(images, torch.arange(16) % 10)
    return Dataset(name, split, split, 10, (0.5,), (0.5,), pad=1, flip=False)


def outcome(config: Config, folder: Path) -> dict[str, Any]:
    """A run cut after two epochs: a million of them may be asked for."""
    train(config, RunFolder(folder), folder, torch.device("cpu"), load=tiny, until=2)
    rows = RunFolder(folder).metrics()
    assert rows and all(math.isfinite(row["train_loss"]) for row in rows)
    return rows[-1]


@pytest.mark.parametrize("field", [field.name for field in fields(Config)])
def test_every_field_of_a_config(field, tmp_path):
    refused = 0
    for i, value in enumerate(POISON):
        try:
            config = replace(BASE, **{field: value})
        except UserError as error:
            assert "\n" not in str(error) and len(str(error)) < 500
            refused += 1
            continue
        if config.dataset != "digits":
            continue
        try:
            outcome(config, tmp_path / str(i))
        except Diverged as error:  # a learning rate may be too large, and the run says so
            assert "learning rate" in str(error)
        except UserError as error:
            assert "\n" not in str(error) and field == "batch"
    assert refused


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--lr-decay 1e-300", "--lr-decay must be"),
        ("--lr-decay 1e300", "--lr-decay must be"),
        ("--finetune-lr 1e300", "--finetune-lr must be > 0 and <= 1e+30"),
        ("--lr-warmup-from 1e308", "--lr-warmup-from must be"),
        ("--lr nan", "--lr must be a finite number"),
        ("--weight-decay 1e300", "--weight-decay must be"),
        ("--batch 1", "two images"),
        ("--milestones -1", "--milestones must be"),
        ("--device cpu:1", "there is one CPU device"),
        ("--device meta", "must be a device of this machine"),
        ("--seed -1", "--seed must be >= 0"),
        ("--seed 99999999999999999999999", "--seed must be less than 2**64"),
        ("--epochs 99999999999999999999999", "--epochs must be <= 1000000"),
        ("--model wrn-1000000-1", "depth must be"),
        ("--model wrn-1000000000000-1", "unknown model"),
        ("--model wrn-10-1000000", "at most 500,000,000 weights"),
        ("--granularity 1:99999999999999999999", "unknown granularity"),
        ("--method sm --set drop_end=-3", "drop_end must be"),
        ("--method rewind --set rounds=1000000000", "rounds must be"),
        ("--method dns --set gamma=-1", "gamma must be"),
        ("--set temperature=1e300", "temperature must be"),
        ("--set kl=1e400", "kl must be a finite number"),
        ("--set every=1.5", "every of DCIL must be a whole number"),
    ],
)
def test_wrong_numbers_on_the_command_line(words, said, tmp_path, capsys):
    before = [*words.split(), "--out", str(tmp_path / "run")]
    assert main(["train", "--epochs", "1", *before] if "--epochs" not in words else ["train", *before]) == 2
    error = capsys.readouterr().err
    assert said in error and error.count("\n") == 1
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("method", ["rigl", "set", "sm", "dsr", "dns"])
def test_a_seed_of_the_size_of_a_clock(method, tmp_path):
    config = replace(BASE, method=method, seed=1_763_470_000_123_456_789)
    assert outcome(config, tmp_path)["sparsity"] == pytest.approx(0.95, abs=0.01) or method == "dns"


def test_a_small_wide_network_is_not_refused():
    assert data.names() and replace(BASE, model="wrn-40-14").model == "wrn-40-14"
