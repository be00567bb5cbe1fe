"""Runs on texts: the same from any interruption, identified by their text, evaluated and exported like others."""

from __future__ import annotations

import json
import math
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
from test_optimization import SMALL, TEXT, write_text
from test_train import metrics, same_result

from dcil import data, models
from dcil.cli import main
from dcil.errors import UserError
from dcil.export import load_sparse
from dcil.runs.position import Position
from dcil.runs.read import read_run
from dcil.train import Config, RunFolder, Trainer, train
from dcil.train.restore import load_net
from dcil_runtime import load
from dcil_runtime.native import LIBRARY

CPU = torch.device("cpu")
RUN = replace(SMALL, epochs=3, target_epoch=2, schedule="step", lr_schedule="cosine", lr_warmup_epochs=1, dropout=0.1)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of DCIL, beside its text."""
    folder = tmp_path_factory.mktemp("text") / "run"
    train(RUN, RunFolder(folder), write_text(folder.parent), CPU)
    return folder


@pytest.mark.parametrize("method", ["dense", "dpf", "dcil"])
def test_same_seed_same_run_and_resume_from_every_epoch(tmp_path: Path, method: str) -> None:
    """AdamW's moments and step, dropout's random numbers, and the order of the sequences go on as they were."""
    config, text = replace(RUN, method=method), write_text(tmp_path)
    train(config, RunFolder(tmp_path / "whole"), text, CPU)
    for until in range(1, 4):
        train(config, RunFolder(tmp_path / "broken"), text, CPU, until=until)
    same_result(tmp_path / "whole", tmp_path / "broken")
    rows = metrics(tmp_path / "whole")
    assert [round(row["lr"], 4) for row in rows][-1] < 0.006
    assert rows[-1]["val_loss"] < math.log(20)


def test_checkpoints_hold_the_moments_and_the_step(run: Path) -> None:
    tensors = load_file(run / "checkpoint.safetensors")
    of = {key.split(".", 2)[2] for key in tensors if key.startswith("optimizer.")}
    assert of == {"step", "exp_avg", "exp_avg_sq"}
    steps = int(json.loads((run / "checkpoint.json").read_text())["step"])
    assert {float(tensors[key]) for key in tensors if key.endswith(".step") and key.startswith("optimizer.")} == {steps}


def damaged(run: Path, to: Path, change: str) -> Path:
    """A copy of the run, whose checkpoint is ``change``d and valid otherwise."""
    loaded = data.prepare(data.Text("text", "numbers.txt", TEXT.encode()), RUN.tokens, RUN.length)
    config = {"sgd": replace(RUN, optimizer="sgd"), "plain": replace(RUN, decay_on="all")}.get(change, RUN)
    trainer = Trainer.build(config, loaded, CPU)
    trainer.epoch(0, lambda *_: None)
    folder = RunFolder(to)
    folder.path.mkdir()
    if change == "shape":
        first = next(iter(trainer.optimizer.state.values()))
        first["step"] = first["step"].repeat(2)
    rows = RunFolder(run).metrics()[:1]
    folder.save(trainer.net, trainer.optimizer, RunFolder(run).record(), rows, Position(1))
    return folder.path / "checkpoint.safetensors"


@pytest.mark.parametrize(
    ("change", "said"),
    [("sgd", "momentum_buffer belongs to another optimizer"), ("shape", r"step must have shape \(\), has \(2,\)")],
)
def test_a_checkpoint_of_another_optimizer_is_refused(run: Path, tmp_path: Path, change: str, said: str) -> None:
    file = damaged(run, tmp_path / "other", change)
    loaded = data.prepare(data.Text("text", "numbers.txt", TEXT.encode()), RUN.tokens, RUN.length)
    trainer = Trainer.build(RUN, loaded, CPU)
    with pytest.raises(UserError, match=said):
        RunFolder(run).restore(trainer.net, trainer.optimizer, RunFolder(run).record(), file)


# -- which text it is ------------------------------------------------------------------------------------------------


def test_config_json_identifies_the_text(run: Path) -> None:
    record = json.loads((run / "config.json").read_text())
    assert record["text"]["file"] == "numbers.txt" and record["text"]["bytes"] == len(TEXT)
    assert len(record["text"]["sha256"]) == 64 and record["text"]["vocabulary"] == "".join(sorted(set(TEXT)))
    assert record["shape"] == [16] and record["classes"] == len(set(TEXT))
    assert read_run(run).dataset == "numbers.txt"


def test_another_text_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text, folder = write_text(tmp_path), tmp_path / "run"
    train(RUN, RunFolder(folder), text, CPU, until=1)
    copy = tmp_path / "copy.txt"
    copy.write_text(TEXT)
    other = tmp_path / "other.txt"
    other.write_text(TEXT.replace("line", "Line"))
    for words in (["train", "--resume", "--out", folder], ["eval", folder]):
        assert main([str(word) for word in [*words, "--data-dir", other]]) == 2
        said = capsys.readouterr().err
        assert "was trained on numbers.txt (" in said and "got other.txt (" in said and said.count("\n") == 1
        assert main([str(word) for word in [*words, "--data-dir", tmp_path / "none"]]) == 2
        assert "does not exist" in capsys.readouterr().err
    assert main(["train", "--resume", "--out", str(folder), "--data-dir", str(copy)]) == 0  # the name does not matter


def test_another_length_or_token_is_another_run(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option, value in (("--length", "8"), ("--tokens", "bytes"), ("--private", "norms"), ("--optimizer", "sgd")):
        assert main(["train", "--resume", "--out", str(run), option, value]) == 2
        assert f"was started with {option[2:]}" in capsys.readouterr().err


# -- what is made of a run -------------------------------------------------------------------------------------------


def test_summary_and_metrics_have_the_loss(run: Path) -> None:
    rows, summary = metrics(run), json.loads((run / "summary.json").read_text())
    assert summary["val_loss_last"] == rows[-1]["val_loss"]
    assert summary["val_loss_best"] == min(row["val_loss"] for row in rows if row["sparsity"] > 0.79)
    assert summary["val_loss_std_last_10pct"] >= 0 and summary["top1_last"] == rows[-1]["top1"]
    found = read_run(run)
    assert found.loss is not None and found.loss["last"] == rows[-1]["val_loss"]
    net = load_net(RunFolder(run))
    assert net.model.get_parameter("head.weight") is net.model.get_parameter("wte.weight")
    assert summary["cost"]["parameters"] == sum(p.numel() for p in net.model.parameters())
    weights = sum(mask.numel() for mask in net.masks.values())
    # every weight meets every token, the head too; then two products of 16 x 16 x 32 in two layers
    assert summary["cost"]["macs"] == 16 * (weights + 32 * len(set(TEXT))) + 2 * 2 * 16 * 16 * 32


def test_eval_and_report_show_the_loss(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = run.parent / "numbers.txt"
    assert main(["eval", str(run), "--data-dir", str(text)]) == 0
    out = capsys.readouterr().out
    last = metrics(run)[-1]
    for expected in ("nats per token", "bits per byte", "multiply-adds per sequence", "attention"):
        assert expected in out
    for loss in (last["val_loss"], last["val_loss_super"], last["val_loss"] / math.log(2)):
        assert f"{loss:.4f}" in out
    assert main(["report", str(run), "--out", str(tmp_path / "r.html")]) == 0
    out, page = capsys.readouterr().out, (tmp_path / "r.html").read_text()
    assert f"{last['val_loss']:.3f}" in out and "lower is better" in out and "numbers.txt" in out
    assert "Bits/byte" in page and "Validation loss by epoch" in page and "Test accuracy by epoch" not in page


@pytest.mark.parametrize("to", ["safetensors", "torch", "sparse", "onnx", "compact"])
def test_exports_compute_the_same(run: Path, to: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "file"
    assert main(["export", str(run), "--to", to, "--out", str(out)]) == 0
    assert "multiply-adds per sequence" in capsys.readouterr().out
    want = load_net(RunFolder(run)).finalize()
    if to == "sparse":
        model = load_sparse(out, models.build_for(RUN.model, len(set(TEXT)), (16,)))
        x = models.example((16,), len(set(TEXT)), 3)
        assert torch.equal(model.eval()(x), want(x))
    elif to in ("safetensors", "torch"):
        state = load_file(out) if to == "safetensors" else torch.load(out, weights_only=True)
        assert state.keys() == want.state_dict().keys()


@pytest.mark.skipif(not LIBRARY.exists(), reason="the native module is not built: make native")
def test_a_language_model_runs_with_numpy(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "net.dcil"
    assert main(["export", str(run), "--to", "cpu", "--out", str(out)]) == 0
    net, plan = load_net(RunFolder(run)), load(out, tune_seconds=0)
    ((shape, kind),) = plan.inputs
    x = torch.randint(len(set(TEXT)), (3, *shape))
    assert kind == "int64"
    with torch.no_grad():
        torch.testing.assert_close(torch.from_numpy(plan(x.numpy())), net(x), rtol=1e-4, atol=1e-5)


def test_filters_of_a_transformer(tmp_path: Path) -> None:
    """Whole rows of its matrices: neurons, and channels of queries, keys and values."""
    config = replace(RUN, granularity="filter", sparsity=0.3, epochs=1, target_epoch=1)
    summary = train(config, RunFolder(tmp_path / "run"), write_text(tmp_path), CPU)
    assert summary["sparsity"] > 0.2


# -- interruptions ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_killed_and_resumed_is_the_same_run(tmp_path: Path) -> None:
    text = write_text(tmp_path)
    words = [sys.executable, "-m", "dcil", "train", "--dataset", "text", "--data-dir", str(text), "--epochs", "6"]
    words += ["--model", "gpt-2-32", "--length", "16", "--batch", "8", "--device", "cpu", "--dropout", "0.1"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([*words, "--out", str(tmp_path / "whole")], check=True, env=environment, capture_output=True)
    process = subprocess.Popen([*words, "--out", str(tmp_path / "killed")], env=environment, stdout=subprocess.DEVNULL)
    file = tmp_path / "killed" / "metrics.jsonl"
    while process.poll() is None and not (file.exists() and file.read_text().count("\n") >= 2):
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    resume = [*words, "--out", str(tmp_path / "killed"), "--resume"]
    subprocess.run(resume, check=True, env=environment, capture_output=True)
    same_result(tmp_path / "whole", tmp_path / "killed")


@pytest.mark.slow
def test_two_processes_make_the_run_of_one(tmp_path: Path) -> None:
    """Masks and metrics of AdamW with clipped gradients, on shards of a text."""
    text = write_text(tmp_path)
    words = [
        "train",
        "--dataset",
        "text",
        "--data-dir",
        str(text),
        "--epochs",
        "2",
        "--model",
        "gpt-2-32",
        "--batch",
        "8",
    ]
    words += ["--length", "16", "--device", "cpu", "--dropout", "0", "--sparsity", "0.8"]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "dcil"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [*torchrun, *words, "--out", str(tmp_path / "two")], check=True, env=environment, capture_output=True
    )
    assert main([*words, "--out", str(tmp_path / "one")]) == 0
    for one, two in zip(metrics(tmp_path / "one"), metrics(tmp_path / "two"), strict=True):
        assert one["updates"] == two["updates"] or one["sparsity"] == two["sparsity"]
        for name in ("train_loss", "val_loss", "val_loss_super"):
            assert two[name] == pytest.approx(one[name], rel=1e-3)


def test_a_vit_trains_by_its_recipes_settings(tmp_path: Path) -> None:
    """On the embedded digits: AdamW, groups, smoothing and the cosine, for images."""
    config = Config(
        model="vit-2-32-4", epochs=2, target_epoch=1, batch=240, optimizer="adamw", decay_on="matrices", lr=3e-3,
        lr_schedule="cosine", milestones=(), label_smoothing=0.1, dropout=0.1, sparsity=0.5, weight_decay=0.05,
    )  # fmt: skip
    summary = train(config, RunFolder(tmp_path / "run"), Path("data"), CPU)
    assert summary["complete"] and summary["val_loss_last"] < 2.4
    assert "text" not in RunFolder(tmp_path / "run").record()
