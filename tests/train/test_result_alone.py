"""A finished run without its checkpoint: what it has written is read, the pruned net alone."""

from __future__ import annotations

import hashlib
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from dcil.cli import main
from dcil.errors import UserError
from dcil.runs.folder import RunFolder
from dcil.runs.seal import sealed
from dcil.train.restore import load_net

RUN = ["--dataset", "digits", "--model", "resnet8-digits", "--epochs", "1", "--engine", "eager"]


@pytest.fixture(scope="module", params=["dcil --sparsity 0.9", "st3 --sparsity 0.9", "dense"])
def run(request, tmp_path_factory):
    out = tmp_path_factory.mktemp("result") / "run"
    assert main(["train", *RUN, "--method", *request.param.split(), "--out", str(out)]) == 0
    return out


def without_checkpoint(run, folder):
    shutil.copytree(run, folder, ignore=shutil.ignore_patterns("checkpoint*"))
    return folder


def test_the_result_is_the_one_of_the_checkpoint(run, tmp_path, capsys):
    whole, alone = load_net(RunFolder(run)), load_net(RunFolder(without_checkpoint(run, tmp_path / "alone")))
    assert list(alone.method.paths) == ["pruned"] and alone.sparsity == whole.sparsity
    assert all(torch.equal(mask, alone.masks[name]) for name, mask in whole.masks.items())
    for name, value in whole.finalize().state_dict().items():
        assert torch.equal(value, alone.finalize().state_dict()[name]), name
    assert main(["eval", str(run), "--no-layers"]) == 0
    before = capsys.readouterr().out
    assert main(["eval", str(tmp_path / "alone"), "--no-layers"]) == 0
    after = capsys.readouterr().out
    assert "super" not in after and all(line in before for line in after.splitlines() if "pruned" in line)


def test_its_export_is_the_same(run, tmp_path):
    alone = without_checkpoint(run, tmp_path / "run")
    for folder, file in ((run, "a"), (alone, "b")):
        assert main(["export", str(folder), "--to", "cpu", "--out", str(tmp_path / file)]) == 0
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_kept_weights_that_are_zero_are_no_fault(run, tmp_path):
    """Weights that have just grown may be: they count as pruned then."""
    alone = without_checkpoint(run, tmp_path / "alone")
    summary, state = json.loads((alone / "summary.json").read_text()), load_file(alone / "model.safetensors")
    name = next(iter(summary["layers"]))
    state[name].view(-1)[state[name].view(-1).nonzero()[0]] = 0
    save_file(state, alone / "model.safetensors")
    summary.pop("sha256", None)
    summary["model_sha256"] = hashlib.sha256((alone / "model.safetensors").read_bytes()).hexdigest()
    (alone / "summary.json").write_text(json.dumps(sealed(summary)))
    assert sum(int(mask.sum()) for mask in load_net(RunFolder(alone)).masks.values()) == summary["kept"] - 1


def test_what_is_damaged_or_unfinished_is_refused(run, tmp_path):
    alone = without_checkpoint(run, tmp_path / "alone")
    content = bytearray((alone / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (alone / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"model\.safetensors"):
        load_net(RunFolder(alone))
    (alone / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"model\.safetensors"):
        load_net(RunFolder(alone))
    assert json.loads((alone / "summary.json").read_text())["complete"]
    (alone / "summary.json").unlink()
    with pytest.raises(UserError, match="has no checkpoint yet"):
        load_net(RunFolder(alone))
