"""Outputs replace outputs: no file of a run, record or data set is written over, however its path is spelled."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from dcil.cli import main
from dcil.errors import UserError
from dcil.export import export
from dcil.runs.outputs import check_output, write_output_text

FILES = ["config.json", "metrics.jsonl", "checkpoint.safetensors", "checkpoint.json", "model.safetensors"]
FILES += ["summary.json", "sessions.jsonl", "at120.safetensors", "watch-3.safetensors", ".lock"]


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    for name in FILES:
        (folder / name).write_text("of the run")
    (folder / "config.json").write_text(json.dumps({"method": {"name": "dcil"}, "dataset": "digits"}))
    return folder


def refused(path: Path) -> bool:
    before = path.read_bytes() if path.exists() else None
    with pytest.raises(UserError) as error:
        write_output_text(path, "new")
    assert "\n" not in str(error.value)
    return (path.read_bytes() if path.exists() else None) == before


@pytest.mark.parametrize("name", FILES)
def test_files_of_a_run_are_kept(run, name, monkeypatch):
    (run.parent / "other").mkdir()
    (run.parent / "folder-link").symlink_to(run)
    (run.parent / "file-link").symlink_to(run / name)
    monkeypatch.chdir(run.parent / "other")
    places = [run / name, run.parent / "folder-link" / name, run.parent / "file-link", Path("../run") / name]
    for place in [*places, run / "." / ".." / "run" / name]:
        assert refused(place)


def test_a_file_that_the_run_has_not_written_yet_is_its_own_too(run):
    (run / "summary.json").unlink()
    assert refused(run / "summary.json")


@pytest.mark.parametrize("config", ["{", "null", None])
def test_a_run_with_a_damaged_config_is_kept(run, config):
    (run / "config.json").unlink()
    if config is not None:
        (run / "config.json").write_text(config)
    assert refused(run / "checkpoint.safetensors")


def test_links_in_a_run_folder_lead_to_files_of_the_run(run, tmp_path):
    (tmp_path / "large").write_text("checkpoint")
    (run / "checkpoint.safetensors").unlink()
    (run / "checkpoint.safetensors").symlink_to(tmp_path / "large")
    assert refused(run / "checkpoint.safetensors")


def test_checkpoints_and_records_are_known_anywhere(tmp_path):
    save_file({"a": torch.ones(3)}, tmp_path / "copy", {"format": "dcil checkpoint 2", "epoch": "3", "config": "{}"})
    assert refused(tmp_path / "copy")
    within = json.dumps([[step, 1000, 1000] for step in range(70_000)])  # the masks of every step of a long epoch
    for _ in range(5):  # safetensors writes the notes in an order of its own
        save_file({"a": torch.ones(3)}, tmp_path / "long", {"format": "dcil checkpoint 3", "within": within})
        assert refused(tmp_path / "long")
    for text in ('{\n "format": "dcil record 1",\n "cell": "x"}', '{"format":"dcil iterations 1"}'):
        (tmp_path / "record.json").write_text(text)
        assert refused(tmp_path / "record.json")


def test_files_of_data_sets_are_kept(tmp_path):
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for name, data in {
        "cat.JPEG": b"\xff\xd8\xff\xe0",
        "noname": b"\x89PNG\r\n\x1a\n",
        "x.bmp": b"BM",
        "cifar-10-batches-bin/data_batch_1.bin": b"\x03\x01",
    }.items():
        (tmp_path / name).write_bytes(data)
        assert refused(tmp_path / name)


def test_what_is_no_file_is_left_alone(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for place in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(UserError, match=r"is a folder|not an ordinary file"):
            write_output_text(place, "new")
    assert Path("/dev/null").is_char_device()


def test_other_files_are_replaced(run, tmp_path):
    """A report in the run folder, older outputs, and the files of other programs that are called alike."""
    (tmp_path / "hub").mkdir()
    (tmp_path / "hub" / "config.json").write_text('{"model_type": "bert"}')
    (tmp_path / "hub" / "model.safetensors").write_text("older")
    names = [
        run / "report.html",
        run / "pnet.safetensors",
        run.parent / "report.html",
        tmp_path / "hub/model.safetensors",
    ]
    for place in [*names, tmp_path / "summary.json", tmp_path / "attention.safetensors"]:
        for text in ("one", "two"):
            write_output_text(place, text)
            assert place.read_text() == text


def test_every_command_and_the_api_refuse(run, tmp_path, capsys):
    before = {name: (run / name).read_bytes() for name in FILES}
    place = str(run / "checkpoint.safetensors")
    for words in (
        ["report", str(run), "--out", place],
        ["export", str(run), "--to", "torch", "--out", place],
        ["export", str(tmp_path / "none"), "--to", "torch", "--out", str(run / "config.json")],
        ["bench", "train", "--device", "cpu", "--out", place],
        ["bench", "infer", "--model", "resnet20", "--masks", "erk", "--out", place],
    ):
        assert main(words) == 2
        assert "of the run itself" in capsys.readouterr().err
    with pytest.raises(UserError, match="of the run itself"):
        export(nn.Linear(2, 2), "safetensors", run / "model.safetensors")
    assert {name: (run / name).read_bytes() for name in FILES} == before


def test_a_check_writes_nothing(tmp_path):
    check_output(tmp_path / "new" / "file")
    assert not (tmp_path / "new").exists()
