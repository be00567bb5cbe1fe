"""Experiments in the report: seeds as bands, accuracy against sparsity, and cost beside accuracy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from run_folders import LAYERS, make_run

from dcil.report import build, read_runs
from dcil.report.experiments import Experiment, experiments
from dcil.report.formatting import count, file_size
from dcil.report.run_figures import layers
from dcil.report.theme import styles
from dcil.report.tradeoffs import series


def found(folders: list[Path]) -> list[Experiment]:
    return experiments(read_runs(folders))


def test_complete_seeds_of_the_same_settings_are_one_experiment(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "a0", seed=0),
        make_run(tmp_path / "other", "dpf", seed=0),
        make_run(tmp_path / "a1", seed=1, offset=2),
        make_run(tmp_path / "again", seed=1),
        make_run(tmp_path / "going", seed=2, done=2),
    ]
    got = found(folders)
    assert [(one.label, [run.label for run in one.runs]) for one in got] == [
        ("dcil 90 %, 2 seeds", ["a0", "a1"]),
        ("other", ["other"]),
        ("again", ["again"]),
        ("going", ["going"]),
    ]
    mean, spread = got[0].spread(lambda run: run.summary["last"] if run.summary else None)
    assert mean == pytest.approx(got[0].first.summary["last"] + 1) and spread == pytest.approx(2**0.5)


def test_experiments_that_would_be_called_alike_are_told_apart(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"{epochs}-{seed}", seed=seed, epochs=epochs) for epochs in (6, 7) for seed in (0, 1)
    ]
    assert [one.label for one in found(folders)] == ["dcil 90 %, 2 seeds: 6-0 …", "dcil 90 %, 2 seeds: 7-0 …"]


def test_lines_join_runs_that_differ_in_sparsity_and_seed_alone(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / f"{method}-{sparsity}-{seed}", method, seed, sparsity=sparsity, offset=seed)
        for method in ("dpf", "dcil")
        for sparsity in (0.95, 0.8)
        for seed in (0, 1)
    ]
    lines = series(found([*folders, make_run(tmp_path / "long", epochs=9)]))
    assert list(lines) == ["dpf", "dcil: dcil-0.95-0 …", "dcil: long …"]
    assert [round(point.x, 6) for point in lines["dpf"]] == [20, 5]
    assert all(point.spread == pytest.approx(0.5**0.5) for point in lines["dpf"])


def page(folders: list[Path], out: Path) -> str:
    build(folders, out)
    return out.read_text(encoding="utf-8")


def test_several_sparsities_are_drawn_against_accuracy_first(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / f"s{s}-{seed}", seed=seed, sparsity=s) for s in (0.8, 0.9) for seed in (0, 1)]
    text = page([*folders, make_run(tmp_path / "dense", "dense")], tmp_path / "report.html")
    headings = re.findall("<h2[^>]*>(.*?)</h2>", text)
    assert headings[:3] == ["Accuracy against sparsity", "Accuracy against cost", "Test accuracy by epoch"]
    assert text.count("± the standard deviation over seeds") == 2 and "dcil 80 %, 2 seeds" in text
    assert {f"#{name}" for name in re.findall('<h2 id="([^"]+)"', text)} == set(re.findall('<a href="([^"]+)"', text))
    one = page(folders[:2], tmp_path / "one.html")
    assert "Accuracy against sparsity" not in one and "Accuracy against cost" not in one


def test_cost_stands_beside_accuracy_where_runs_have_it(tmp_path: Path) -> None:
    new, old = make_run(tmp_path / "new"), make_run(tmp_path / "old", "dpf", cost=False)
    text = page([new, old], tmp_path / "report.html")
    assert '<th scope="col" class="number">Multiply-adds</th>' in text
    assert '<td class="number">100 k</td><td class="number">2.34 KiB</td>' in text
    assert '<th scope="col" class="number">File</th>' not in page([old], tmp_path / "old.html")


def test_every_figure_has_a_drawing_for_phones_and_no_id_twice(tmp_path: Path) -> None:
    text = page([make_run(tmp_path / "a"), make_run(tmp_path / "b", "dpf", sparsity=0.8)], tmp_path / "report.html")
    assert text.count('class="drawing wide"') == text.count('class="drawing narrow"') == text.count("<figure") == 6
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', text))
    assert {one or other for one, other in used} <= set(ids)


def test_a_layer_lost_with_one_seed_gets_its_ring(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / "a", seed=0), make_run(tmp_path / "b", seed=1, lost=LAYERS[2])]
    whole = found([runs[0], make_run(tmp_path / "c", seed=2)])
    lost = found(runs)
    rings = [layers(one, styles([one[0].label])).svg.count("<use") for one in (whole, lost)]
    assert rings[1] > rings[0]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (640, "640"), (999.6, "1.00 k"), (97_000, "97.0 k"), (1.25e6, "1.25 M")],
)
def test_counts(value: float, text: str) -> None:
    assert count(value) == text


@pytest.mark.parametrize(("value", "text"), [(640, "640 B"), (12_800, "12.5 KiB"), (1_117_000, "1.07 MiB")])
def test_file_sizes(value: float, text: str) -> None:
    assert file_size(value) == text
