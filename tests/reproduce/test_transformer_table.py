"""The table of transformers: its cells, and a section of the page by their losses once there are records."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dcil.data import Text
from dcil.reproduce import paper, records, report, sections, tables
from dcil.reproduce.cells import Cell
from dcil.reproduce.comparison import Measurements
from dcil.reproduce.estimate import Estimate, inputs_per_epoch
from dcil.reproduce.session import CellRun, RunOptions, resume_run

GPT = Cell("shakespeare", "gpt-1-16", "dcil", 0.8)
SHARED = replace(GPT, private="none")
PLAY = "".join(f"ACT {i}. Enter a king, a fool and {i * i} others.\n" for i in range(120))


def load(name: str, folder: Path) -> Text:
    assert name == "shakespeare"
    return Text(name, "play.txt", PLAY.encode())


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("results")
    options = RunOptions(Path("nowhere"), torch.device("cpu"), load=load)
    for cell in (GPT, SHARED, GPT.dense):
        resume_run(CellRun(cell, 0, out, 2), options, lambda *_: None)
    return out


@pytest.fixture
def tiny_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paper, "numbers", lambda: ())
    cells = (GPT.dense, GPT, SHARED, replace(GPT, method="dpf"))
    monkeypatch.setattr(tables, "FURTHER", {tables.BEYOND: (), tables.TRANSFORMERS: cells})


def test_cells_have_the_recipe_of_their_kind() -> None:
    cells = tables.cells_of(tables.TRANSFORMERS)
    assert len(cells) == len({cell.id for cell in cells}) == 58
    for cell in cells:
        config = cell.config(3)
        assert (config.dataset, config.model, config.seed) == (cell.dataset, cell.model, 3)
        assert config.private == (cell.private or "norms,head") and config.optimizer == "adamw"
        assert config.dropout == (0.2 if cell.dataset == "shakespeare" else 0.0)
        assert cell.dense in cells
    assert Cell("cifar10", "resnet20", "dcil", 0.9).config(0).optimizer == "sgd"


def test_names_tell_what_is_private() -> None:
    assert SHARED.id == "shakespeare/gpt-1-16/dcil-0.8-private-none"
    chosen = tables.select(tables.cells_of(tables.TRANSFORMERS), "shakespeare/gpt-6-384/dcil-0.9-*,private-none")
    assert [cell.name for cell in chosen] == [
        *(f"dcil-0.9-private-{own}" for own in ("norms", "head", "none")),
        "dcil-0.95-private-none",
        "dcil-0.9-private-none",
        "dcil-0.95-private-none",
        "dcil-0.9-private-none",
    ]


def test_records_have_the_loss_and_name_the_text(trained: Path) -> None:
    record = records.read(CellRun(SHARED, 0, trained, 2).record)
    assert record.raw["config"]["text"]["file"] == "play.txt" and record.raw["config"]["private"] == "none"
    assert len(record.column("val_loss")) == 2
    assert record.last_loss == record.column("val_loss")[-1] >= record.best_loss
    assert record.raw["summary"]["val_loss_last"] == pytest.approx(record.last_loss, abs=1e-5)
    assert not any(name.startswith("super.") for name in record.raw["layers"])


def test_the_page_has_a_section_once_there_are_records(trained: Path, tiny_table: None, tmp_path: Path) -> None:
    report.build(trained, tmp_path / "docs", 2)
    page = (tmp_path / "docs" / "results.md").read_text()
    ours = Measurements(records.read_all(trained))
    [dense], [last] = ours.values(GPT.dense, "loss", "last"), ours.values(SHARED, "loss", "last")
    assert "Transformers (transformers)" in page and "1 cells were not run" in page
    assert f"| {SHARED.id} | 1 | {last:.4f} |" in page
    assert f"{last - dense:+.4f}".replace("-", "\N{MINUS SIGN}") in page
    assert "DCIL, last" in page and f"| {GPT.id} | {last:.2f}" not in page  # the claim is about accuracies
    assert sections.transformers(Measurements([]), {}) == []


def test_a_record_of_before_has_no_losses(trained: Path, tmp_path: Path) -> None:
    path = CellRun(GPT, 0, trained, 2).record
    raw = json.loads(path.read_text())
    del raw["epochs"]["val_loss"], raw["sha256"]
    old = tmp_path / "shakespeare" / "gpt-1-16" / path.name
    old.parent.mkdir(parents=True)
    old.write_text(json.dumps(raw))
    assert records.read(old).last == raw["epochs"]["top1"][-1]


def test_estimates_count_sequences() -> None:
    cell = Cell("shakespeare", "gpt-6-384", "dcil", 0.9)
    assert inputs_per_epoch(cell.config(0)) == 3920  # 1,003,854 tokens by 256, less one
    pace = Estimate([], 2).pace(CellRun(cell, 0, Path("nowhere")))
    assert pace.seconds == pytest.approx(62 * 0.0125 * 1.5 * 2)
