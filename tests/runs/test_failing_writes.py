"""A write that fails is one line, leaves what was there and no draft, and the run can be resumed."""

from __future__ import annotations

import errno
import json
import os
import resource
from pathlib import Path

import pytest
import torch

from dcil.cli import main
from dcil.errors import UserError
from dcil.runs import atomic
from dcil.runs.atomic import write_atomically, write_text
from dcil.train import Config, RunFolder, train
from dcil.train.loop import RunInterrupted
from dcil.train.out_of_memory import OutOfMemory
from dcil.train.trainer import Trainer

CPU = torch.device("cpu")
CONFIG = Config(epochs=2, target_epoch=1, milestones=(1,), batch=500)
FAULTS = [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EDQUOT]


@pytest.mark.parametrize("function", ["os.fsync", "os.replace", "pathlib.Path.write_text", "pathlib.Path.chmod"])
@pytest.mark.parametrize("code", FAULTS)
def test_a_failed_write_keeps_the_old_file(tmp_path, monkeypatch, function, code):
    def fails(*_: object, **__: object) -> None:
        raise OSError(code, os.strerror(code))

    write_text(tmp_path / "f", "old")
    monkeypatch.setattr(function, fails)
    with pytest.raises(UserError, match=f"cannot write {tmp_path / 'f'}: {os.strerror(code)}"):
        write_text(tmp_path / "f", "new")
    monkeypatch.undo()
    assert (tmp_path / "f").read_text() == "old"
    assert [file.name for file in tmp_path.iterdir()] == ["f"]


def test_file_and_folder_are_synced_in_their_order(tmp_path, monkeypatch):
    """A rename that is on disk before the file's contents would leave an empty file after a power cut."""
    calls, fsync, rename = [], os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))
    monkeypatch.setattr(os, "replace", lambda a, b: (calls.append("rename"), rename(a, b)))
    write_text(tmp_path / "f", "text")
    assert calls == [str(tmp_path / f".f.{os.getpid()}.part"), "rename", str(tmp_path)]
    calls.clear()
    RunFolder(tmp_path).append({"epoch": 1})
    assert calls == [str(tmp_path / "metrics.jsonl"), str(tmp_path)]


def test_drafts_of_killed_processes_are_removed_by_the_next_write(tmp_path):
    if (child := os.fork()) == 0:
        write_atomically(tmp_path / "report.html", lambda draft: (draft.write_text("half"), os.kill(os.getpid(), 9)))
    os.waitpid(child, 0)
    mine, others = tmp_path / ".other.html.1.part", tmp_path / f".report.html.{os.getppid()}.part"
    mine.write_text(""), others.write_text("")  # of another file, and of a process that is running
    assert len(list(tmp_path.glob(".report.html.*.part"))) == 2
    write_text(tmp_path / "report.html", "whole")
    assert {file.name for file in tmp_path.iterdir()} == {"report.html", mine.name, others.name}


def test_half_a_line_of_metrics_is_taken_back(tmp_path):
    """A limit on the size of files cuts the line as a full disk does."""
    folder = RunFolder(tmp_path)
    folder.append({"epoch": 1})
    size = (tmp_path / "metrics.jsonl").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 20, limits[1]))
    try:
        with pytest.raises(UserError, match=r"cannot write .*metrics.jsonl: File too large"):
            folder.append({"epoch": 2, "text": "x" * 100})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "metrics.jsonl").read_text() == '{"epoch": 1}\n'


@pytest.mark.parametrize("name", ["metrics.jsonl", "checkpoint.safetensors", "model.safetensors", "summary.json"])
def test_a_run_whose_files_cannot_be_written_can_be_resumed(tmp_path, monkeypatch, capsys, name):
    fsync = os.fsync

    def fails(fd: int) -> None:
        opened = os.readlink(f"/proc/self/fd/{fd}")
        if name in opened and (name != "metrics.jsonl" or not opened.endswith(".part")):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", fails)
    folder = RunFolder(tmp_path / "r")
    with pytest.raises(RunInterrupted) as error:
        train(CONFIG, folder, Path("data"), CPU)
    assert str(error.value).startswith(f"cannot write {folder.path / name}: No space left on device; ")
    assert "--resume" in str(error.value)
    assert error.value.exit_code == 1
    assert not [file for file in folder.path.iterdir() if file.name.startswith(".")]
    monkeypatch.undo()
    assert train(CONFIG, folder, Path("data"), CPU)["complete"]
    assert [json.loads(line)["epoch"] for line in (folder.path / "metrics.jsonl").read_text().splitlines()] == [1, 2]


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["train", "--epochs", "1", "--batch", "500", "--out", str(tmp_path / "file" / "run")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_what_kills_leave_is_removed_also_from_a_finished_run(tmp_path):
    folder = RunFolder(tmp_path / "r")
    train(CONFIG, folder, Path("data"), CPU)
    names = {file.name for file in folder.path.iterdir()}
    running = f".report.html.{os.getppid()}.part"
    for name in (".lock", ".checkpoint.safetensors.1.part", ".tmpAb3dE9", running):
        (folder.path / name).write_text("")
    train(CONFIG, folder, Path("data"), CPU)
    assert {file.name for file in folder.path.iterdir()} == names | {running}


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nSee documentation"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        MemoryError(),
        OSError(errno.ENOMEM, "Cannot allocate memory"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_exhausted_memory_is_one_line_that_says_what_to_reduce(tmp_path, monkeypatch, capsys, error):
    epoch = Trainer.epoch

    def fails(self, number, *how):
        if number == 1:
            raise error
        return epoch(self, number, *how)

    monkeypatch.setattr(Trainer, "epoch", fails)
    words = ["train", "--epochs", "2", "--batch", "500", "--out", str(tmp_path / "r")]
    assert main(words) == OutOfMemory.exit_code == 1
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert all(word in said for word in ("memory", "--batch (now 500)", "--low-memory", "--resume"))
    monkeypatch.undo()
    assert main([*words, "--resume"]) == 0


def test_other_runtime_errors_pass(tmp_path, monkeypatch):
    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("a fault of ours")

    monkeypatch.setattr(Trainer, "epoch", fails)
    with pytest.raises(RuntimeError, match="a fault of ours"):
        train(CONFIG, RunFolder(tmp_path / "r"), Path("data"), CPU)


def test_a_folder_that_cannot_be_synced_is_no_error(tmp_path, monkeypatch):
    fsync = os.fsync

    def fails(fd: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{fd}")).is_dir():
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(fd)

    monkeypatch.setattr(atomic.os, "fsync", fails)
    write_text(tmp_path / "f", "text")
    assert (tmp_path / "f").read_text() == "text"
