"""Restore the config and the network of a run folder."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors.torch import load

from dcil import GMP, SparseNet
from dcil.errors import UserError
from dcil.runs.checkpoint import check_settings
from dcil.runs.damage import naming_file
from dcil.runs.folder import RunFolder
from dcil.runs.json_file import read_bytes
from dcil.runs.position import START
from dcil.train.building import build_empty, build_net
from dcil.train.config import Config, from_record, to_json


def config_of(folder: RunFolder) -> Config:
    """Return the config of a recorded run."""
    return settings_of(folder)[0]


def settings_of(folder: RunFolder) -> tuple[Config, dict[str, Any]]:
    """Return the config of a recorded run and all its settings as config.json has them, which must agree."""
    record, file = folder.record(), folder.path / "config.json"
    with naming_file(file):
        config = from_record(record)
        method = config.build_method(record["method"]["steps"] // config.epochs)
        settings = json.loads(to_json(config, method, data_of(record)))
        check_settings(file, record, settings)
    return config, settings


def data_of(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return what config.json says about the data, as ``describe_data`` does."""
    return {name: record[name] for name in ("classes", "shape", "text") if name in record}


def check_data(folder: RunFolder, given: dict[str, Any]) -> dict[str, Any]:
    """Return what the run in ``folder`` was trained on, according to its record; refuse other data."""
    there = data_of(folder.record())
    if there.get("text", {}).get("sha256") != given.get("text", {}).get("sha256"):
        raise UserError(
            f"{folder.path} was trained on {named(there)}, got {named(given)}; give the --data-dir that it was "
            "trained with"
        )
    if (there["classes"], there["shape"]) != (given["classes"], given["shape"]):
        raise UserError(
            f"{folder.path} was trained on {there['classes']} classes of images {there['shape']}, the data have "
            f"{given['classes']} of {given['shape']}; give the --data-dir that it was trained with"
        )
    return there


def named(data: Mapping[str, Any]) -> str:
    """Name a text by its file, size and the beginning of its SHA-256."""
    text = data.get("text")
    return "images" if text is None else f"{text['file']} ({text['bytes']:,} bytes, SHA-256 {text['sha256'][:12]}…)"


def load_net(folder: RunFolder) -> SparseNet:
    """Load the network of the last checkpoint, on the CPU; of a finished run without one, the pruned net alone."""
    config, settings = settings_of(folder)
    model = build_empty(config, settings["classes"], tuple(settings["shape"]))
    net = build_net(config, model, settings["method"]["epoch_steps"])
    if folder.restore(net, config=settings) == START:
        return load_result(folder, config, settings).eval()
    check_result(folder, net)
    return net.eval()


def load_result(folder: RunFolder, config: Config, settings: Mapping[str, Any]) -> SparseNet:
    """Load the pruned net that a finished run has written, masks by its zeros; other paths are not in that file.

    A kept weight that is 0, as weights that have just grown may be, counts as pruned.
    """
    summary = folder.summary()
    if summary is None:
        raise UserError(f"{folder.path} has no checkpoint yet; train it further with dcil train --resume")
    model = build_empty(config, settings["classes"], tuple(settings["shape"]))
    model.load_state_dict(load(read_result(folder, summary, "copy it again from where the run was trained")))
    # Gradual magnitude pruning that has ended: one path, which computes with what the masks keep.
    net = SparseNet(model, GMP(sparsity=summary["sparsity"], steps=1), prunable=list(summary["layers"]), masks="zeros")
    net.set_extra_state(torch.tensor(1))
    return net


def check_result(folder: RunFolder, net: SparseNet) -> None:
    """Refuse the summary and model of a finished run that are not those of its checkpoint."""
    if (summary := folder.summary()) is None:
        return
    advice = f"remove summary.json, and dcil train --resume --out {folder.path} writes both again"
    kept = sum(int(mask.sum()) for mask in net.masks.values())
    if (summary["kept"], summary["sparsity"]) != (kept, net.sparsity):
        raise UserError(f"{folder.path / 'summary.json'} must fit the checkpoint beside it, and does not; {advice}")
    read_result(folder, summary, advice)


def read_result(folder: RunFolder, summary: Mapping[str, Any], advice: str) -> bytes:
    """Return the content of model.safetensors, which must be what the summary says."""
    file = folder.path / "model.safetensors"
    with naming_file(file, advice):
        content = read_bytes(file)
        if summary.get("model_sha256", said := hashlib.sha256(content).hexdigest()) != said:
            raise ValueError("its checksum is not the one in summary.json")
    return content
