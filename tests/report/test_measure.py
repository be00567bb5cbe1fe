"""Runs on texts are compared by their loss, runs on images by their accuracy, also on one page."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from run_folders import make_run

from dcil.report import build, read_runs, run_table
from dcil.report.experiments import experiments
from dcil.report.measure import ACCURACY, LOSS, measure_of
from dcil.runs.summary import summarise_loss
from dcil.train.config import EARLIER


def texts(folder: Path) -> list[Path]:
    return [
        make_run(folder / "dense", "dense", text="play.txt", offset=-0.25),
        make_run(folder / "a", text="play.txt"),
        make_run(folder / "b", text="play.txt", seed=1, offset=0.5),
        make_run(folder / "other", text="book.txt"),
    ]


def test_the_lowest_loss_is_the_best_of_those_as_sparse() -> None:
    found = summarise_loss([1.0, 3.0, 2.0, 2.5], [0.0, 0.9, 0.9, 0.9])
    assert found == {"last": 2.5, "best": 2.0, "best_epoch": 3, "std": 0.25}
    assert summarise_loss([None, 2.0], [0.9, 0.9]) == {"last": 2.0, "best": 2.0, "best_epoch": 2, "std": 0.0}
    assert summarise_loss([], []) is None and summarise_loss([1.0, None], [0.9, 0.9]) is None


def test_what_a_run_is_measured_by(tmp_path: Path) -> None:
    text, image = read_runs([make_run(tmp_path / "t", text="play.txt"), make_run(tmp_path / "i")])
    assert (measure_of(text), measure_of(image)) == (LOSS, ACCURACY)
    last = text.epochs[-1]
    assert LOSS.last(text) == LOSS.at(last) == pytest.approx(1 + 2 / 6 + 0.5)
    assert LOSS.super(last) == pytest.approx(1 + 2 / 6 + 0.4)
    assert image.loss is None and LOSS.last(image) is None and ACCURACY.last(image) is not None


def test_rows_of_texts_have_losses(tmp_path: Path) -> None:
    table = {row.label: row for row in run_table.rows(read_runs(texts(tmp_path)))}
    row = table["a"]
    assert row.last == row.best == pytest.approx(1 + 2 / 6 + 0.5)  # no other epoch is as sparse
    assert table["dense"].best == pytest.approx(0.75 + 2 / 5)
    assert row.to_dense == pytest.approx(0.25) and row.dataset == "play.txt"
    assert row.bits == pytest.approx(row.last / math.log(2) / 2) and row.top1 is not None
    assert table["other"].to_dense is None  # there is no dense run on that text
    mean = table["mean ± std (2)"]
    assert mean.last == pytest.approx(row.last + 0.25) and mean.last_spread == pytest.approx(0.5 / 2**0.5)
    cells = dict(zip(run_table.HEADINGS, run_table.cells(row), strict=True))
    assert (cells["Last"], cells["vs dense"], cells["Bits/byte"]) == ("1.833", "+0.250", "1.322")


def test_columns_that_no_run_has_are_left_out(tmp_path: Path) -> None:
    def shown(folders: list[Path]) -> set[str]:
        table = run_table.rows(read_runs(folders))
        return {run_table.HEADINGS[index] for index in run_table.telling(table)}

    image = make_run(tmp_path / "image")
    assert {"Bits/byte", "Top-1"} <= shown(texts(tmp_path)) and "Loss" not in shown(texts(tmp_path / "again"))
    assert not {"Bits/byte", "Top-1", "Loss"} & shown([image])


def test_a_page_of_both_kinds(tmp_path: Path) -> None:
    build([*texts(tmp_path), make_run(tmp_path / "image")], tmp_path / "both.html")
    page = (tmp_path / "both.html").read_text()
    for expected in (
        "Validation loss by epoch",
        "Test accuracy by epoch",
        "validation loss, nats per token",
        "lower is better",
    ):
        assert expected in page
    build(texts(tmp_path / "texts"), tmp_path / "texts.html")
    page = (tmp_path / "texts.html").read_text()
    assert "Test accuracy" not in page and "Loss against cost" in page and "down and to the left is better" in page
    build([make_run(tmp_path / "other" / "image")], tmp_path / "image.html")
    assert "nats" not in (tmp_path / "image.html").read_text()


def test_runs_of_earlier_versions_are_of_the_same_experiment(tmp_path: Path) -> None:
    """Settings that they do not record are what these were then."""
    old, new = make_run(tmp_path / "old"), make_run(tmp_path / "new", seed=1)
    config = json.loads((new / "config.json").read_text())
    (new / "config.json").write_text(json.dumps(EARLIER | config))
    assert len(experiments(read_runs([old, new]))) == 1
    (new / "config.json").write_text(json.dumps(EARLIER | config | {"optimizer": "adamw"}))
    assert len(experiments(read_runs([old, new]))) == 2


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"val_loss": 1', '"val_loss": "1"'),
        ('"bytes_per_token": 2.0', '"bytes_per_token": 0'),
        ('"bytes": 1000', '"bytes": -1'),
    ],
)
def test_damage_is_named(tmp_path: Path, old: str, new: str) -> None:
    run = make_run(tmp_path / "t", text="play.txt")
    for file in (run / "config.json", run / "metrics.jsonl"):
        file.write_text(file.read_text().replace(old, new))
    with pytest.raises(ValueError, match="damaged"):
        read_runs([run])
