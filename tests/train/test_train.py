"""Runs: the same again from the same seed, from any interruption, and nothing touched by a loss that is not finite."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dcil import data
from dcil.errors import UserError
from dcil.train import RECIPES, Config, Diverged, RunFolder, Trainer, train
from dcil.train.config import from_record
from dcil.train.restore import config_of, load_net

CPU = torch.device("cpu")
SHORT = Config(epochs=3, target_epoch=2, milestones=(1, 2), batch=200)


def metrics(folder):
    """The metrics without the timings."""
    rows = [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]


def same_result(a: Path, b: Path) -> None:
    assert metrics(a) == metrics(b)
    for file in ("checkpoint.safetensors", "model.safetensors"):
        one, two = load_file(a / file), load_file(b / file)
        assert list(one) == list(two)
        for key in one:
            assert torch.equal(one[key], two[key]), key
    one, two = (json.loads((f / "summary.json").read_text()) for f in (a, b))
    for summary in (one, two):
        for name in ("seconds", "environment", "metrics_sha256", "sha256"):  # times, and what follows from them
            del summary[name]
    assert one == two


def test_a_run_leaves_the_files_of_the_contract(tmp_path):
    folder = RunFolder(tmp_path / "run")
    summary = train(SHORT, folder, Path("data"), CPU)
    names = {p.name for p in folder.path.iterdir()}
    assert names == {
        "config.json",
        "metrics.jsonl",
        "checkpoint.safetensors",
        "checkpoint.json",
        "model.safetensors",
        "summary.json",
    }
    for row in metrics(folder.path):
        assert {"epoch", "step", "lr", "sparsity", "train_loss", "top1", "top1_super"} <= set(row)
    want = {"top1_last", "top1_best", "std_last_10pct", "sparsity", "seconds", "environment", "complete"}
    assert want <= set(summary)
    assert summary["complete"] is True
    assert summary["epochs"] == 3
    total = summary["weights"]
    assert total - summary["kept"] == int(0.95 * total)
    config = json.loads((folder.path / "config.json").read_text())
    assert config["method"]["kl"] == 1.0
    assert config["method"]["steps"] == 3 * 8
    assert from_record(config) == SHORT
    header = json.loads((folder.path / "checkpoint.json").read_text())
    assert header["epoch"] == "3"
    model = load_file(folder.path / "model.safetensors")
    assert sum(int((v == 0).sum()) for k, v in model.items() if v.dim() == 4) >= int(0.95 * total)


@pytest.mark.parametrize("method", ["dense", "dpf", "dcil"])
def test_same_seed_same_run_and_resume_from_every_epoch(tmp_path, method):
    config = replace(SHORT, method=method, finetune_epochs=1)
    whole = RunFolder(tmp_path / "whole")
    train(config, whole, Path("data"), CPU)

    class Stop(Exception):
        pass

    broken = RunFolder(tmp_path / "broken")
    for stop_after in range(4):

        def progress(epoch, part, row, stop_after=stop_after):
            if epoch == stop_after and part > 0.5:
                raise Stop

        with pytest.raises(Stop):
            train(config, broken, Path("data"), CPU, progress)
        assert broken.summary() is None
    train(config, broken, Path("data"), CPU)
    same_result(whole.path, broken.path)
    phases = [row["phase"] for row in metrics(whole.path)]
    assert phases == ["train"] * 3 + ["fine-tune"]
    assert metrics(whole.path)[-1]["updates"] == []
    assert metrics(whole.path)[-1]["lr"] == config.finetune_lr


def test_the_best_epoch_is_one_that_was_pruned(tmp_path):
    """Before one-shot pruning the network is dense, and better; that is not the best of the pruned one."""
    config = replace(SHORT, method="oneshot", epochs=6, target_epoch=4, milestones=(), batch=100)
    summary = train(config, RunFolder(tmp_path / "r"), Path("data"), CPU)
    rows = metrics(tmp_path / "r")
    assert [row["sparsity"] > 0.9 for row in rows] == [False] * 3 + [True] * 3
    assert max(row["top1"] for row in rows[:3]) > summary["top1_best"] == max(row["top1"] for row in rows[3:])
    assert summary["best_epoch"] > 3


def test_two_processes_cannot_work_in_one_folder(tmp_path):
    folder = RunFolder(tmp_path / "r")
    with folder.locked(), pytest.raises(UserError, match="one process at a time"):
        train(replace(SHORT, epochs=1, target_epoch=1), folder, Path("data"), CPU)
    assert not folder.started


def test_a_last_batch_of_one_image_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(UserError, match="one image"):
        train(replace(SHORT, batch=359), RunFolder(tmp_path / "r"), Path("data"), CPU)
    assert not (tmp_path / "r").exists()


def test_another_seed_is_another_run(tmp_path):
    for seed in (0, 1):
        train(replace(SHORT, seed=seed, epochs=1, target_epoch=1), RunFolder(tmp_path / str(seed)), Path("data"), CPU)
    assert metrics(tmp_path / "0") != metrics(tmp_path / "1")


def test_a_line_cut_short_by_a_kill_is_dropped(tmp_path):
    config = replace(SHORT, epochs=2)
    whole, cut = RunFolder(tmp_path / "a"), RunFolder(tmp_path / "b")
    train(config, whole, Path("data"), CPU)
    train(config, cut, Path("data"), CPU)
    (cut.path / "summary.json").unlink()
    with (cut.path / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 3, "st')
    train(config, cut, Path("data"), CPU)
    same_result(whole.path, cut.path)


def test_a_loss_that_is_not_finite_touches_no_weight(tmp_path):
    trainer = Trainer.build(SHORT, data.load("digits", Path("data")), CPU)
    trainer.net.train()
    x, y = next(iter(trainer.loader.train(0)))
    trainer.engine.step(x, y)
    before = {k: v.clone() for k, v in trainer.net.named_parameters()}
    with pytest.raises(Diverged, match=r"nan at step 2\b"):
        trainer.engine.step(x * float("nan"), y)
    assert all(torch.equal(before[k], v) for k, v in trainer.net.named_parameters())
    assert trainer.net.steps_done == 1


def test_damaged_files_are_named(tmp_path):
    folder = RunFolder(tmp_path / "run")
    train(replace(SHORT, epochs=2), folder, Path("data"), CPU)
    file = folder.path / "checkpoint.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(UserError, match=r"checkpoint\.safetensors is damaged"):
        load_net(folder)
    (folder.path / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json is damaged"):
        config_of(folder)


def test_learning_rate_of_the_papers_recipe():
    config = RECIPES["cifar10-resnet20"]()
    assert config.lr_at(0) == pytest.approx(0.1)
    assert config.lr_at(2.5) == pytest.approx(0.15)
    assert [config.lr_at(e) for e in (5, 149.99, 150, 225, 299)] == pytest.approx([0.2, 0.2, 0.02, 0.002, 0.002])
    method = config.build_method(391)
    assert (method.target_step, method.steps, method.epoch_steps, method.every) == (225 * 391, 300 * 391, 391, 16)
    assert [method.kl_at(s) for s in (70 * 391 - 1, 70 * 391)] == [0.0, 1.0]


def test_recipes_against_the_papers_protocol():
    """Every number that protocol.json (taken from the paper) states."""
    wrn = RECIPES["cifar100-wrn-28-2"]()
    assert (wrn.epochs, wrn.lr, wrn.milestones, wrn.lr_decay, wrn.weight_decay) == (200, 0.1, (60, 120, 160), 5.0, 5e-4)
    assert wrn.build_method(391).kl_at(70 * 391) == 1.0 > wrn.build_method(391).kl_at(70 * 391 - 1)
    resnet = RECIPES["cifar100-resnet56-bottleneck"]()
    assert (resnet.epochs, resnet.lr, resnet.milestones, resnet.weight_decay) == (300, 0.2, (150, 225), 1e-4)
    for name, batch in (("imagenet-resnet18", 128), ("imagenet-resnet50", 1024)):
        config = RECIPES[name]()
        assert (config.epochs, config.milestones, config.lr_decay, config.batch) == (90, (30, 60, 80), 10.0, batch)
    for name, recipe in RECIPES.items():
        for method in ("dense", "dpf", "dcil"):
            assert recipe(method=method).momentum == 0.9, name


def dcil(*words, **popen):
    return subprocess.Popen(
        [sys.executable, "-m", "dcil", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **popen,
    )


WORDS = ["--epochs", 6, "--batch", 100, "--method", "dcil", "--out"]


def test_killed_at_any_moment_and_resumed(tmp_path):
    """SIGKILL at random times, then --resume until done: the same as never stopped."""
    whole = dcil("train", *WORDS, tmp_path / "whole")
    assert whole.wait() == 0, whole.stderr.read()
    kills = 0
    for wait in (0.05, 0.4, 0.15, 0.7):
        run = dcil("train", *WORDS, tmp_path / "killed", "--resume")
        start, before = time.monotonic(), progress_of(tmp_path / "killed")
        # Let it do something first: at least one new line of metrics, or 60 s.
        while progress_of(tmp_path / "killed") == before and run.poll() is None and time.monotonic() - start < 60:
            time.sleep(0.01)
        time.sleep(wait)
        if run.poll() is None:
            run.send_signal(signal.SIGKILL)
            kills += 1
        run.wait()
    last = dcil("train", *WORDS, tmp_path / "killed", "--resume")
    assert last.wait() == 0, last.stderr.read()
    assert kills >= 2
    same_result(tmp_path / "whole", tmp_path / "killed")
    assert not list((tmp_path / "killed").glob(".*"))


def progress_of(folder: Path) -> int:
    file = folder / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def test_ctrl_c_leaves_a_resumable_run(tmp_path):
    run = dcil("train", *WORDS, tmp_path / "run", start_new_session=True)
    while progress_of(tmp_path / "run") < 2 and run.poll() is None:
        time.sleep(0.01)
    os.killpg(run.pid, signal.SIGINT)
    out, err = run.communicate()
    assert run.returncode == 130, (out, err)
    assert "--resume" in out
    assert "Traceback" not in err
    again = dcil("train", *WORDS, tmp_path / "run", "--resume")
    assert again.wait() == 0, again.stderr.read()
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["epochs"] == 6
