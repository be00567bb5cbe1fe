"""Searches, as far as they go without Ray: what is drawn, the record, and what the report says of it."""

from __future__ import annotations

import json

import pytest

from dcil import report
from dcil.cli import main
from dcil.cli.search import how_many
from dcil.errors import UserError
from dcil.report.search import Scored, influence, ranks
from dcil.train.search_record import COMPLETE, FAILED, STOPPED, SearchRecord, Trial, read
from dcil.train.search_space import Axis, check_space, config_with, not_tried, parse_space, trial_name

QUICK = ["--epochs", "2", "--batch", "300", "--device", "cpu"]


def test_axes_are_ranges_and_lists_of_their_type():
    texts = [
        "lr=0.01..1:log",
        "target-epoch=10..50",
        "kl=0..2",
        "set.schedule=cubic,constant",
        "granularity=weight,2:4",
    ]
    lr, target, kl, schedule, granularity = parse_space(texts, {})
    assert lr == Axis("lr", (), 0.01, 1.0, log=True)
    assert target == Axis("target_epoch", (), 10, 50, whole=True)
    assert kl == Axis("kl", (), 0.0, 2.0)
    assert schedule == Axis("set.schedule", ("cubic", "constant"))
    assert granularity.choices == ("weight", "2:4")
    assert parse_space(["method=dpf,gmp", "every=8,16"], {})[1].choices == (8, 16)


def test_lists_have_no_more_trials_than_combinations(capsys):
    lists = ["lr=0.1,0.2,0.3", "every=8,16"]
    assert how_many(16, parse_space(lists, {})) == 6
    assert capsys.readouterr().out == "the lists have 6 combinations: as many trials, not 16\n"
    assert how_many(6, parse_space(lists, {})) == 6 and how_many(16, parse_space([*lists, "kl=0..1"], {})) == 16
    assert not capsys.readouterr().out
    known = {"lr": 0.2, "every": 16}
    rest = not_tried(parse_space(lists, {}), [known])
    assert len(rest) == 5 and known not in rest and {"lr": 0.3, "every": 8} in rest


def test_values_become_the_config_of_a_run():
    values = {"lr": 0.3, "kl": 0.5, "set.schedule": "constant"}
    config = config_with(values, {"sparsity": 0.9, "settings": {"warmup": "0.1"}}, None)
    assert (config.lr, config.sparsity, config.method) == (0.3, 0.9, "dcil")
    assert config.settings["kl"] == 0.5 and config.settings["warmup"] == 0.1
    assert type(config.settings["schedule"]).__name__ == "Constant"
    assert trial_name(values) == trial_name(dict(reversed(values.items()))) != trial_name(values | {"kl": 0.6})


@pytest.mark.parametrize(
    ("texts", "said"),
    [
        (["lr"], "must be NAME=LOW..HIGH"),
        (["lr=0.1"], "two values at least"),
        (["lr=1..0.1"], "from a smaller to a larger"),
        (["lr=0..1:log"], "both above 0"),
        (["lr=a..b"], "must be a number"),
        (["ir=0..1"], "did you mean 'lr'"),
        (["seed=0,1"], "unknown option or setting to search 'seed'"),
        (["sparsity=0.1..0.9", "sparsity=0.1,0.2"], "once, got sparsity twice"),
        (["method=dcli,dpf"], "did you mean 'dcil'"),
        (["method=dcil,dpf", "kl=0..1"], "unknown option or setting to search 'kl'"),
        (["batch=32,32"], "each once"),
    ],
)
def test_wrong_axes_are_one_line(texts, said):
    with pytest.raises(UserError, match=said) as caught:
        parse_space(texts, {})
    assert "\n" not in str(caught.value)


def test_both_ends_of_every_axis_are_checked_before_anything_begins():
    with pytest.raises(UserError, match="sparsity"):
        check_space(parse_space(["sparsity=0.5..1.5"], {}), {}, None)
    with pytest.raises(UserError, match="give one of the two"):
        parse_space(["lr=0.1..1"], {"lr": 0.1})


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--search", "lr=0.1..1"], "give --on ray"),
        (["--search", "lr=0.1..1", "--on", "ray", "--seeds", "0,1"], "--search draws the runs"),
        (["--search", "lr=0.1..1", "--on", "ray", "--grace", "3"], "--grace must be at most"),
        (["--trials", "3"], "--trials is for --search"),
    ],
)
def test_options_that_do_not_fit_are_one_line(tmp_path, capsys, words, said):
    if words[-1] == "3" and "--on" in words:
        pytest.importorskip("ray.tune")
    assert main(["sweep", *QUICK, *words, "--out", str(tmp_path / "out")]) == 2
    err = capsys.readouterr().err
    assert said in err and err.count("\n") == 1 and not list(tmp_path.iterdir())


def test_the_record_is_that_of_the_same_search_or_refused(tmp_path):
    record = SearchRecord({"lr": "0..1"}, {"options": {"milestones": (1, 2)}, "recipe": None}, "top1", 3)
    record.trial("trial-1", {"lr": 0.5}).ended = COMPLETE
    assert record.trial("trial-1", {}) is record.trials[0]
    assert read(tmp_path) is None and record.resume(tmp_path) is record
    record.write(tmp_path)
    there = SearchRecord(record.space, record.base, "top1", 3).resume(tmp_path)
    assert there.trials == [Trial("trial-1", {"lr": 0.5}, COMPLETE)]
    with pytest.raises(UserError, match="is of a search with space"):
        SearchRecord({"lr": "0..2"}, record.base, "top1", 3).resume(tmp_path)
    file = tmp_path / "search.json"
    file.write_text(file.read_text().replace("trial-1", "trial-2"))
    with pytest.raises(UserError, match="checksum"):
        read(tmp_path)


def scored(**trials: tuple[dict, str, tuple[float, ...]]) -> list[Scored]:
    return [Scored(Trial(name, values, ended), scores) for name, (values, ended, scores) in trials.items()]


def test_influence_is_the_explained_variance_of_ranks_at_the_first_rung():
    record = SearchRecord({"lr": "0.001..1:log", "kl": "0..2", "form": "a,b"}, {}, "top1", 2)
    found = scored(
        a=({"lr": 0.001, "kl": 1.0, "form": "a"}, STOPPED, (5.0, 10.0)),
        b=({"lr": 0.01, "kl": 0.0, "form": "a"}, STOPPED, (5.0, 20.0)),
        c=({"lr": 0.1, "kl": 0.5, "form": "b"}, COMPLETE, (5.0, 30.0, 7.0)),  # what comes later does not count
        d=({"lr": 1.0, "kl": 2.0, "form": "b"}, COMPLETE, (5.0, 40.0, 90.0)),
    )
    lr = influence(record, "lr", found)
    assert lr.share == pytest.approx(1) and lr.better == "higher"
    form = influence(record, "form", found)
    assert form.share == pytest.approx(0.8) and form.better == "b"  # 2 of 2.5: between the pairs (0, 1) and (2, 3)
    assert influence(record, "kl", found).share == pytest.approx(0.4**2)
    failed = scored(**{name: ({"lr": float(name == "a")}, FAILED, ()) for name in "abcd"})
    assert influence(record, "lr", failed).share == 0  # all are equally bad
    assert ranks([3.0, 1.0, 3.0]) == [1.5, 0.0, 1.5]


def test_the_report_shows_trials_and_what_matters(tmp_path):
    record = SearchRecord({"lr": "0.01..0.3:log", "method": "gmp,dpf"}, {}, "top1", 1)
    lines = [(0.02, "gmp", "2"), (0.05, "dpf", "1"), (0.1, "gmp", "2"), (0.2, "dpf", "1")]
    for lr, method, epochs in lines:
        trial = record.trial(f"trial-{lr}", {"lr": lr, "method": method})
        words = ["--lr", str(lr), "--method", method, "--epochs", epochs, "--out", str(tmp_path / trial.name)]
        assert main(["train", *QUICK, *words]) == 0
        trial.ended, trial.epochs = (COMPLETE if epochs == "2" else STOPPED), int(epochs)
    record.write(tmp_path)
    report.build([tmp_path / trial.name for trial in record.trials], tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "The search" in page and "stopped after epoch 1" in page and "Which settings matter" in page
    assert page.index("trial-0.02") and "The values that were drawn" in page
    assert json.loads((tmp_path / "search.json").read_text())["trials"][1]["ended"] == STOPPED
