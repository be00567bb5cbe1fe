"""The benchmarks of image input and of sharded memory measure what they say."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dcil.bench import image_input
from dcil.cli import main


def test_image_loaders_are_measured_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    for name, value in (("IMAGES", 24), ("WIDTH", 60), ("HEIGHT", 40)):
        monkeypatch.setattr(image_input, name, value)
    out = tmp_path / "images.json"
    assert main(["bench", "images", "--batch", "8", "--workers", "1", "--rounds", "2", "--out", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (found["images"], found["batch"], found["workers"]) == (24, 8, 1)
    assert {"imagefolder", "webdataset"} <= found["images_per_second"].keys() <= set(image_input_names())
    assert all(len(rates) == 2 and min(rates) > 0 for rates in found["images_per_second"].values())
    assert "images / s" in capsys.readouterr().out


def image_input_names() -> tuple[str, ...]:
    return image_input.OURS, image_input.TARS, image_input.THEIRS


def test_what_bench_shard_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "shard", "--model", "resnet20"]) == 2
    assert "--model must read tokens (gpt-LAYERS-WIDTH), got resnet20" in capsys.readouterr().err


@pytest.mark.slow
def test_what_a_process_holds_falls_with_their_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "memory.json"
    words = ["--model", "gpt-2-128", "--processes", "1,2", "--steps", "1", "--device", "cpu", "--out", str(out)]
    assert main(["bench", "shard", *words]) == 0
    whole, one, two = json.loads(out.read_text())["rows"]
    assert (whole["sharded"], one["processes"], two["processes"]) == (False, 1, 2)
    assert one["held"] == pytest.approx(whole["held"], rel=0.01)
    assert two["held"] == pytest.approx(whole["held"] / 2, rel=0.02)
    assert min(row["peak"] for row in (whole, one, two)) > 0 and "in parts" in capsys.readouterr().out
