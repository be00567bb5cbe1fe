"""dcil train --shard: the run of one process in parts, from any interruption and with any number of processes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, cast
from unittest import mock

import pytest
import torch
from processes import said, together
from safetensors import safe_open
from safetensors.torch import load_file
from test_optimization import write_text
from test_train import metrics, same_result
from torch.distributed.checkpoint import save

from dcil import SparseNet, cli
from dcil.data.batches import Normalize
from dcil.errors import UserError
from dcil.runs import checkpoint
from dcil.runs.file_lock import is_held
from dcil.runs.folder import RunFolder
from dcil.runs.position import START
from dcil.runs.sharded_checkpoint import PartsWriter, ShardedCheckpoints
from dcil.runs.tensors import write_tensors
from dcil.train import train as run_here
from dcil.train.plan import new_config
from dcil.train.restore import load_net

GPT = ["--dataset", "text", "--model", "gpt-2-32", "--length", "16", "--batch", "8", "--dropout", "0", "--epochs", "2"]
GPT += ["--target-epoch", "1", "--optimizer", "adamw", "--lr-schedule", "cosine", "--decay-on", "matrices"]
GPT += ["--clip-norm", "1", "--lr", "0.002", "--sparsity", "0.8"]
#: A step of the second epoch.
KILLED_AT = 18
#: The steps of all epochs.
LAST = 28
DIGITS = ["--dataset", "digits", "--batch", "301", "--epochs", "2", "--target-epoch", "1", "--lr", "0.01"]


def dcil(*words: str) -> int:
    """The command line in double precision: rounding that differs with the number of processes moves no mask."""
    torch.set_default_dtype(torch.double)
    normalize = Normalize.__call__
    doubled = mock.patch.object(Normalize, "__call__", lambda self, pixels: normalize(self, pixels).double())
    with mock.patch("dcil.train.loop.SAVE_EVERY", 0), doubled:
        return cli.main(words)


def in_float(*words: str) -> int:
    return cli.main(words)


def train(world: int, out: Path, *words: str, command=dcil) -> list[int]:
    return together(world, said_by(out), command, "train", "--device", "cpu", "--out", str(out), *words)


def said_by(out: Path) -> Path:
    return out.with_name(f"{out.name}-said")


def tensors_of(run: Path) -> dict[str, torch.Tensor]:
    """The whole tensors of a checkpoint, in parts or not."""
    found = checkpoint.read(run / "checkpoint.safetensors")
    assert found is not None
    return dict(found.tensors)


def nearly_the_same(one: Path, two: Path) -> None:
    """Masks bit for bit, weights and moments but for rounding, and the same metrics."""
    a, b = tensors_of(one), tensors_of(two)
    assert a.keys() == b.keys()
    for key, value in a.items():
        if value.is_floating_point():
            torch.testing.assert_close(value, b[key], rtol=1e-6, atol=1e-9, msg=lambda m, k=key: f"{k}: {m}")
        else:
            assert torch.equal(value, b[key]), key
    for row, other in zip(metrics(one), metrics(two), strict=True):
        assert row["updates"] == other["updates"] and row["sparsity"] == other["sparsity"]
        assert row["train_loss"] == pytest.approx(other["train_loss"], rel=1e-7)
        assert row["val_loss"] == pytest.approx(other["val_loss"], rel=1e-7)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    return ["--data-dir", str(write_text(tmp_path_factory.mktemp("text")))]


@pytest.fixture(scope="module")
def alone(text: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process, not sharded."""
    out = tmp_path_factory.mktemp("alone") / "run"
    assert train(1, out, *GPT, *text) == [0], said(said_by(out))
    return out


@pytest.mark.parametrize(
    ("world", "method"),
    [
        pytest.param(world, method, marks=[] if (world, method) == (2, "dcil") else pytest.mark.slow)
        for method in ("dcil", "dpf", "gmp", "rigl")
        for world in (1, 2, 4)
    ],
)
def test_the_run_of_one_process_in_parts(world: int, method: str, text: list[str], alone: Path, tmp_path: Path) -> None:
    out, words = tmp_path / "run", [*GPT, *text, "--method", method]
    if method != "dcil":
        alone = tmp_path / "alone"
        assert train(1, alone, *words) == [0]
    assert train(world, out, *words, "--shard") == [0] * world, said(said_by(out))
    nearly_the_same(alone, out)
    parts = sorted((out / "checkpoint-parts").rglob("*.*"))
    assert len(parts) == world and {file.suffix for file in parts} == {".safetensors"}
    for file in parts:  # a process holds its part of every weight, moment and mask
        with safe_open(file, "pt") as found:
            sizes = [found.get_slice(key).get_shape()[0] for key in found.keys() if key.endswith("mlp.fc1.weight")]  # noqa: SIM118
        assert sizes and set(sizes) == {128 // world}
    summary, other = (json.loads((run / "summary.json").read_text()) for run in (out, alone))
    assert summary["layers"] == other["layers"] and summary["notes"] == other["notes"]
    assert summary["environment"]["weights"] == "sharded" and summary["cost"] == other["cost"]
    model, its = load_file(out / "model.safetensors"), load_net(RunFolder(out)).finalize().state_dict()
    assert all(torch.equal(value.float(), its[key].float()) for key, value in model.items())


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], ["--low-memory"], ["--local-norms"]])
def test_convolutions_and_batch_norms(words: list[str], tmp_path: Path) -> None:
    for name, world, more in (("alone", 1, []), ("parts", 2, ["--shard", *words])):
        assert train(world, tmp_path / name, *DIGITS, *more) == [0] * world, said(said_by(tmp_path / name))
    if "--local-norms" not in words:  # else the result depends on the number of processes
        nearly_the_same(tmp_path / "alone", tmp_path / "parts")


# -- interruptions -----------------------------------------------------------------------------------------------------


def killed(*words: str) -> int:
    """Rank 1 is killed in the thread that writes a checkpoint within the second epoch."""
    write = PartsWriter.write_data

    def die(self, plan, planner):
        if int(self.folder.name) == KILLED_AT and os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        return write(self, plan, planner)

    with mock.patch.object(PartsWriter, "write_data", die):
        return dcil(*words, "--checkpoint-minutes", "1e-9")


def test_killed_in_one_rank_and_resumed(text: list[str], alone: Path, tmp_path: Path) -> None:
    """With one process, whose network is not sharded."""
    out = tmp_path / "run"
    assert -signal.SIGKILL in train(2, out, *GPT, *text, "--shard", command=killed)
    assert json.loads((out / "checkpoint.json").read_text())["step"] == str(KILLED_AT - 1)
    assert train(1, out, *GPT, *text, "--resume") == [0], said(said_by(out))
    nearly_the_same(alone, out)
    assert not (out / "checkpoint-parts").exists()


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [(4, 2, 4), (2, 1, 3)])
@pytest.mark.parametrize("method", ["dcil", "dpf", "gmp", "rigl"])
def test_killed_and_resumed_with_another_number(
    method: str, worlds: tuple[int, ...], text: list[str], tmp_path: Path
) -> None:
    """Killed while a checkpoint is written; stopped after an epoch; and to the end."""
    out, words = tmp_path / "run", [*GPT, *text, "--method", method, "--epochs", "3", "--target-epoch", "2"]
    assert train(1, tmp_path / "alone", *words) == [0]
    assert -signal.SIGKILL in train(worlds[0], out, *words, "--shard", command=killed)
    assert 130 in train(worlds[1], out, *words, "--shard", "--resume", command=one_epoch), said(said_by(out))
    assert len(metrics(out)) == 2
    assert train(worlds[2], out, *words, "--shard", "--resume") == [0] * worlds[2], said(said_by(out))
    nearly_the_same(tmp_path / "alone", out)


def one_epoch(*words: str) -> int:
    """Somebody presses Ctrl-C after it."""
    write = RunFolder.append

    def stop(self, row):
        write(self, row)
        raise KeyboardInterrupt

    with mock.patch.object(RunFolder, "append", stop):
        return dcil(*words)


@pytest.mark.slow
def test_the_same_number_of_processes_goes_on_bit_for_bit(text: list[str], tmp_path: Path) -> None:
    words = [*GPT, *text, "--dropout", "0.1", "--shard"]
    assert train(2, tmp_path / "whole", *words, command=in_float) == [0, 0]
    assert -signal.SIGKILL in train(2, tmp_path / "parts", *words, command=killed_in_float)
    assert train(2, tmp_path / "parts", *words, "--resume", command=in_float) == [0, 0]
    same_result(tmp_path / "whole", tmp_path / "parts")
    one, two = (tensors_of(tmp_path / name) for name in ("whole", "parts"))
    assert all(torch.equal(value, two[key]) for key, value in one.items())


def killed_in_float(*words: str) -> int:
    with mock.patch("torch.set_default_dtype"):
        return killed(*words)


@pytest.mark.slow
def test_torchrun_restarts_what_was_killed(text: list[str], alone: Path, tmp_path: Path) -> None:
    """torchrun starts all processes again, and the same command goes on with its run."""
    out = tmp_path / "run"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += ["--max-restarts", "1", "--monitor-interval", "0.1", "-m", "dcil", "train", "--shard", "--out", str(out)]
    command += [*GPT, *text, "--device", "cpu", "--checkpoint-minutes", "0.001", "--epochs", "6"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    torchrun = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while torchrun.poll() is None and not (out / "metrics.jsonl").exists():
        time.sleep(0.02)
    workers = Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children").read_text().split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    stdout, stderr = torchrun.communicate(timeout=300)
    assert torchrun.returncode == 0, stderr
    assert "epoch 6 of 6" in stdout and len(metrics(out)) == 6


def slow_disk(*words: str) -> int:
    """A checkpoint is written when the step after it is done, and fails if the training waits for it."""
    write, count, steps = PartsWriter.write_data, SparseNet.count_step, [0]

    def wait(self, plan, planner):
        end = time.monotonic() + 30
        while steps[0] <= int(self.folder.name) < LAST:
            time.sleep(0.01)
            if time.monotonic() > end:
                raise RuntimeError("the training waits")
        return write(self, plan, planner)

    def counted(self, optimizer):
        steps[0] += 1
        return count(self, optimizer)

    with mock.patch.object(PartsWriter, "write_data", wait), mock.patch.object(SparseNet, "count_step", counted):
        return dcil(*words, "--checkpoint-minutes", "1e-9")


@pytest.mark.slow
def test_the_training_goes_on_while_a_checkpoint_is_written(text: list[str], alone: Path, tmp_path: Path) -> None:
    """And the checkpoint is that of its step, not of a later one."""
    out = tmp_path / "run"
    assert train(1, out, *GPT, *text, "--shard", command=slow_disk) == [0], said(said_by(out))
    nearly_the_same(alone, out)
    assert -signal.SIGKILL in train(2, tmp_path / "killed", *GPT, *text, "--shard", command=killed)
    found = tensors_of(tmp_path / "killed")
    assert {float(value) for key, value in found.items() if key.endswith(".step")} == {KILLED_AT - 1}


class Recorded(RunFolder):
    """Notes whether the folder is still locked when the last checkpoint is waited for."""

    def wait(self) -> None:
        (self.path / "waited").write_text(str(is_held(self.path / ".lock")))


def test_a_run_that_is_stopped_keeps_its_lock_until_its_checkpoint_is_written(tmp_path: Path) -> None:
    """Else the process that takes it up would meet the thread of the one that leaves."""

    def stop(epoch: int, part: float, row: Any) -> None:
        raise KeyboardInterrupt

    config = new_config("gmp", {"epochs": 1, "batch": 720}, None)
    recorded = mock.patch("dcil.train.loop.checkpoints_of", lambda folder, group: Recorded(folder.path))
    with recorded, pytest.raises(KeyboardInterrupt):
        run_here(config, RunFolder(tmp_path / "run"), tmp_path, torch.device("cpu"), stop)
    assert (tmp_path / "run" / "waited").read_text() == "True"


# -- refused -----------------------------------------------------------------------------------------------------------


def test_parts_that_are_not_those_of_the_checkpoint(text: list[str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert train(1, out, *GPT, *text, "--shard", "--epochs", "1", command=in_float) == [0], said(said_by(out))
    (out / "summary.json").unlink()
    [part] = (out / "checkpoint-parts").rglob("*.safetensors")
    whole = part.read_bytes()
    for content, words in ((whole[:-1] + b"x", "its checksum is wrong"), (None, "is missing")):
        part.write_bytes(content) if content else part.unlink()
        with pytest.raises(UserError, match=f"{part.name}.*{words}"):
            load_net(RunFolder(out))
    assert train(1, out, *text, "--shard", "--resume") == [2]
    assert said(said_by(out)).count("\n") == 1 and f"{part.name} is missing; restore it" in said(said_by(out))
    part.write_bytes(whole)
    (part.parent / "more.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"must hold its parts alone, has more.safetensors; remove that file$"):
        load_net(RunFolder(out))
    (part.parent / "more.safetensors").rename(part.parent / ".nfs0123")
    load_net(RunFolder(out))
    notes = checkpoint.read_notes(file := out / "checkpoint.safetensors")
    del notes["sha256"]
    for parts, words in (('{"../../config.json": "0"}', "is the name of no part"), ("[1", "Expecting")):
        checkpoint.publish(file, {}, {**notes, "parts": parts})
        with pytest.raises(UserError, match=words):
            load_net(RunFolder(out))


def test_a_checkpoint_that_is_missing_or_altered_is_no_new_beginning(tmp_path: Path) -> None:
    """Else the metrics and the parts would be removed."""
    with mock.patch("torch.distributed.new_group"):
        checkpoints = ShardedCheckpoints(tmp_path)
    net, file = cast("Any", None), tmp_path / "checkpoint.safetensors"
    assert checkpoints.restore(net, net, {}) == START
    notes = {"format": checkpoint.IN_PARTS, "epoch": "1", "step": "14", "config": "{}", "metrics": "0", "parts": "{}"}
    checkpoint.publish(file, {}, notes)
    write_tensors(file, {}, checkpoint.read_notes(file) | {"epoch": "2"})
    with pytest.raises(UserError, match="its checksum is wrong"):
        checkpoints.restore(net, net, {})
    file.unlink()
    with pytest.raises(UserError, match="is missing; restore it"):
        checkpoints.restore(net, net, {})


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_parts_are_on_disk_before_the_checkpoint_names_them(tmp_path: Path) -> None:
    """All of them: DCP syncs a file whose last bytes Python may still hold."""
    synced: dict[int, int] = {}
    published: list[dict[str, str]] = []

    def fsync(file: int) -> None:
        found = os.fstat(file)
        synced[found.st_ino] = found.st_size

    with mock.patch("os.fsync", fsync):
        save({"w": torch.ones(3)}, storage_writer=PartsWriter(tmp_path, published.append), no_dist=True)
    [part] = tmp_path.iterdir()
    assert synced[part.stat().st_ino] == part.stat().st_size and [*published[0]] == [part.name]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_what_a_killed_attempt_left_is_removed_but_no_part_of_the_checkpoint(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoint-parts" / "14"
    folder.mkdir(parents=True)
    stray, other = folder / "shard-00004-model-00001-of-00001.safetensors", folder / ".nfs0123"
    notes = {"format": checkpoint.IN_PARTS, "epoch": "1", "config": "{}", "metrics": "0", "parts": "{}"}
    for present, left in (("14", True), ("7", False)):
        stray.touch()
        other.touch()
        checkpoint.publish(tmp_path / "checkpoint.safetensors", {}, notes | {"step": present})
        save({"w": torch.ones(3)}, storage_writer=PartsWriter(folder, lambda digests: None), no_dist=True)
        assert stray.exists() == left and other.exists() and len([*folder.iterdir()]) == 2 + left


def full_disk(*words: str) -> int:
    """No space for the parts of the second checkpoint."""
    write = PartsWriter.write_data

    def fail(self, plan, planner):
        if int(self.folder.name) > 20:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(self, plan, planner)

    with mock.patch.object(PartsWriter, "write_data", fail):
        return dcil(*words)


@pytest.mark.slow
def test_a_full_disk_ends_the_run_with_one_line(text: list[str], alone: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    assert 1 in train(2, out, *GPT, *text, "--shard", command=full_disk)
    words = said(said_by(out))
    assert words.count("\n") == 1 and "checkpoint-parts: No space left on device; once that is mended" in words
    assert train(2, out, *GPT, *text, "--shard", "--resume") == [0, 0], said(said_by(out))
    nearly_the_same(alone, out)


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--method", "sm"], "--method sm must see whole weights, which --shard divides: leave --shard out"),
        (["--engine", "graph"], "--engine graph trains in one process"),
    ],
)
def test_what_cannot_be_sharded_is_refused(words: list[str], line: str, tmp_path: Path) -> None:
    assert train(1, tmp_path / "run", *DIGITS, "--shard", *words, command=in_float) == [2]
    assert line in said(said_by(tmp_path / "run")) and not (tmp_path / "run").exists()
