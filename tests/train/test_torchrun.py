"""dcil train under torchrun: the number of processes changes nothing but the time, and one of them writes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
from PIL import Image
from processes import environment, said, together
from safetensors.torch import load_file, save_file
from test_train import same_result

from dcil import cli, data
from dcil.data import imagefolder
from dcil.runs.folder import ReadOnlyRunFolder
from dcil.train import RunFolder

TRAIN, VAL = (8, 8, 7), (4, 3, 3)  # 23 and 10: neither divides
#: A small learning rate: rounding differs with the number of processes, and large steps would amplify that.
WORDS = ["--dataset", "imagefolder", "--model", "resnet8-digits", "--batch", "7", "--epochs", "3", "--lr", "0.001"]
WORDS += ["--set", "every=2", "--set", "warmup=0.3"]
FILES = {"config.json", "metrics.jsonl", "checkpoint.safetensors", "checkpoint.json", "model.safetensors"}
FILES |= {"summary.json", "report.html"}


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> Path:
    """Three classes of different colours."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.default_rng(0)
    for split, counts in (("train", TRAIN), ("val", VAL)):
        for c, count in enumerate(counts):
            (folder / split / f"class{c}").mkdir(parents=True)
            for i in range(count):
                pixels = random.integers(0, 120, (30, 36, 3)) + 130 * np.eye(3)[c]
                suffix = "png" if i % 2 else "jpg"
                Image.fromarray(pixels.astype(np.uint8)).save(folder / split / f"class{c}" / f"{i}.{suffix}")
    return folder


def dcil(*words: str) -> int:
    """The command line with crops of 16 pixels, read without further processes; who saves nothing shows its network."""

    def load(folder, fetch):
        return replace(imagefolder.load(folder), crop=16, resize=18, workers=0)

    def show(self, net, *checkpoint):
        state = {name: value.contiguous().clone() for name, value in net.state_dict().items()}
        save_file(state, self.path.parent / f"rank{os.environ['RANK']}.safetensors")

    with mock.patch.dict(data.DATASETS, imagefolder=load), mock.patch.object(ReadOnlyRunFolder, "save", show):
        return cli.main(words)


def one_epoch(*words: str) -> int:
    """Somebody presses Ctrl-C after it."""
    save = RunFolder.save

    def stop(self, *checkpoint):
        save(self, *checkpoint)
        raise KeyboardInterrupt

    with mock.patch.object(RunFolder, "save", stop), mock.patch("dcil.train.loop.SAVE_EVERY", 0):
        return dcil(*words)


def two_batches(*words: str) -> int:
    """Somebody presses Ctrl-C after the checkpoint within the second epoch."""
    save = RunFolder.save

    def stop(self, *checkpoint):
        save(self, *checkpoint)
        if (checkpoint[-1].epoch, checkpoint[-1].batch) == (1, 2):
            raise KeyboardInterrupt

    with mock.patch.object(RunFolder, "save", stop):
        return dcil(*words)


def small_parts(*words: str) -> int:
    """Every second image is checked by the other of two processes."""
    with mock.patch("dcil.data.image_check.CHUNK", 1):
        return dcil(*words)


def train(world: int, images: Path, out: Path, *words: str, command=dcil) -> list[int]:
    everything = ["train", *WORDS, "--data-dir", str(images), "--out", str(out), *words]
    return together(world, words_of(out), command, *everything)


def words_of(out: Path) -> Path:
    """Where the processes of a run say what they say."""
    return out.with_name("said")


@pytest.fixture(scope="module")
def alone(images, tmp_path_factory) -> Path:
    """The run of one process."""
    out = tmp_path_factory.mktemp("alone") / "run"
    assert train(1, images, out) == [0], said(words_of(out))
    return out


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def nearly_the_same(one: Path, two: Path) -> None:
    """The same runs but for rounding. (With norms that see one process's images, weights would differ by 0.1.)"""
    a, b = (load_file(folder / "checkpoint.safetensors") for folder in (one, two))
    assert list(a) == list(b)
    for key, value in a.items():
        if value.dtype == torch.bool:
            assert (value != b[key]).sum() <= 2, key
        else:
            near = 1e-5 if key.startswith("net.") else 2e-3  # gradients are larger than weights here
            torch.testing.assert_close(value, b[key], rtol=1e-3, atol=near, msg=lambda m, k=key: f"{k}: {m}")
    for row, other in zip(metrics(one), metrics(two), strict=True):
        for key in ("epoch", "step", "lr", "sparsity", "top1", "top5", "top1_super"):
            assert row[key] == other[key], key
        assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-5)


@pytest.mark.parametrize("world", [2, 3])  # the last batch has two images: the share of a third process is empty
def test_several_processes_make_the_run_of_one(world, images, alone, tmp_path):
    out = tmp_path / "run"
    assert train(world, images, out) == [0] * world, said(words_of(out))
    nearly_the_same(alone, out)
    # The same network in every process, and one writer.
    kept = load_file(out / "checkpoint.safetensors")
    for rank in range(1, world):
        other = load_file(tmp_path / f"rank{rank}.safetensors")
        assert all(torch.equal(value, kept[f"net.{key}"]) for key, value in other.items())
        assert not (words_of(out) / f"{rank}.stdout").read_text()
    assert "epoch 3 of 3" in (words_of(out) / "0.stdout").read_text()
    assert {file.name for file in out.iterdir()} == FILES
    found = json.loads((out / "summary.json").read_text())["environment"]
    assert (found["processes"], found["norms"], found["engine"]) == (str(world), "joint", "eager")


def test_resume_with_another_number_of_processes(images, alone, tmp_path):
    out = tmp_path / "run"
    for done, world in enumerate((2, 1), start=1):
        assert train(world, images, out, "--resume", command=one_epoch)[0] == 130, said(words_of(out))
        assert said(words_of(out)) == "[0] dcil: interrupted\n"
        assert len(metrics(out)) == done
    assert train(3, images, out, "--resume") == [0, 0, 0], said(words_of(out))
    nearly_the_same(alone, out)


@pytest.mark.parametrize("norms", [[], ["--batch", "8", "--local-norms"]], ids=["joint", "local"])
def test_several_processes_resume_within_an_epoch(norms, images, tmp_path):
    """Each rank its share of the remaining batches: bit for bit the run that was not stopped."""
    words = ["--epochs", "2", "--checkpoint-minutes", "1e-9", *norms]
    assert train(2, images, tmp_path / "whole", *words) == [0, 0], said(words_of(tmp_path / "whole"))
    assert train(2, images, tmp_path / "parts", *words, command=two_batches)[0] == 130
    assert json.loads((tmp_path / "parts" / "checkpoint.json").read_text())["batch"] == "2"
    assert train(2, images, tmp_path / "parts", *words, "--resume") == [0, 0], said(words_of(tmp_path / "parts"))
    same_result(tmp_path / "whole", tmp_path / "parts")


def test_one_process_that_fails_ends_all_with_one_line(images, tmp_path):
    for split in ("train", "val"):
        for folder in sorted((images / split).iterdir()):
            (tmp_path / "bad" / split / folder.name).mkdir(parents=True)
            for file in folder.iterdir():
                (tmp_path / "bad" / split / folder.name / file.name).write_bytes(file.read_bytes())
    bad = [tmp_path / "bad" / "train" / name for name in ("class0/0.jpg", "class1/3.png")]
    for file in bad:
        file.write_bytes(file.read_bytes()[:200])
    codes = train(2, tmp_path / "bad", tmp_path / "run", command=small_parts)  # each process finds one of them
    assert 2 in codes and 0 not in codes
    words = said(words_of(tmp_path / "run"))
    assert words.count("\n") == 1 and all(f"{file}: not readable as an image" in words for file in bad)
    # Mended, the run goes on.
    for file in bad:
        file.write_bytes((images / file.relative_to(tmp_path / "bad")).read_bytes())
    assert train(2, tmp_path / "bad", tmp_path / "run", "--resume") == [0, 0]


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--sparsity", "2"], "sparsity must be >= 0 and < 1, got 2.0"),
        (["--sparsty", "0.5"], "did you mean '--sparsity'"),
        (["--engine", "graph"], "--engine graph trains in one process"),
        (["--batch", "8", "--local-norms"], None),
        (
            ["--batch", "7", "--local-norms"],
            "each of 2 processes must have two images of the last batch, --batch 7 leaves 2 images",
        ),
        (["--lr", "1e30"], "must be finite"),
    ],
)
def test_wrong_input_is_said_once(words, line, images, tmp_path):
    codes = train(2, images, tmp_path / "run", "--epochs", "2", *words)
    found = said(words_of(tmp_path / "run"))
    if line is None:
        assert codes == [0, 0], found
        assert json.loads((tmp_path / "run" / "summary.json").read_text())["environment"]["norms"] == "local"
        return
    assert found.count("\n") == 1 and line in found, found
    assert (1 if "finite" in line else 2) in codes and 0 not in codes
    assert not (tmp_path / "run" / "checkpoint.json").exists()


@pytest.mark.parametrize("command", ["sweep", "reproduce"])
def test_other_commands_refuse(command, monkeypatch, capsys):
    for name, value in environment(0, 2, 1).items():
        monkeypatch.setenv(name, value)
    assert cli.main([command, "--out", "nowhere"]) == 2
    assert f"dcil {command} does not run under torchrun" in capsys.readouterr().err


def torchrun(*words: str) -> subprocess.CompletedProcess:
    two = ["--nproc-per-node", "2", "--standalone"]
    command = [sys.executable, "-m", "torch.distributed.run", *two, "-m", "dcil", "train", *words]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_torchrun_itself(tmp_path):
    words = ["--dataset", "digits", "--epochs", "1", "--batch", "301", "--out", str(tmp_path / "run")]
    done = torchrun(*words)
    assert done.returncode == 0, done.stderr
    assert "report:" in done.stdout and done.stdout.count("epoch 1 of 1") == 1
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["environment"]["processes"] == "2"
    again = torchrun(*words)
    assert again.returncode == 1
    assert again.stderr.count("dcil: ") == again.stderr.count("holds a run already") == 1


@pytest.mark.slow
@pytest.mark.parametrize("model", ["resnet18", "resnet50"])
def test_the_papers_recipe(model, images, tmp_path):
    """At full size, with the processes that decode."""
    words = ["--recipe", f"imagenet-{model}", "--data-dir", str(images), "--epochs", "1", "--batch", "12"]
    done = torchrun(*words, "--out", str(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    record = json.loads((tmp_path / "run" / "config.json").read_text())
    assert (record["classes"], record["shape"], record["model"]) == (3, [3, 224, 224], model)
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["sparsity"] == pytest.approx(0.9, abs=1e-4)
