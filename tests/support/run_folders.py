"""Run folders as the trainer writes them, made in a moment."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from dcil.runs.summary import summarise

LAYERS = [f"stage{stage}.{block}.conv.weight" for stage in range(3) for block in range(2)]


def make_run(
    folder: Path, method: str = "dcil", seed: int = 0, epochs: int = 6, done: int | None = None, offset: float = 0.0,
    granularity: str = "Weight", lost: str = "", notes: tuple[str, ...] = (), sparsity: float = 0.9, cost: bool = True,
    text: str = "",
) -> Path:  # fmt: skip
    """A run folder as the trainer writes it, unfinished if `done` < `epochs`; of images, or of the file `text`."""
    folder.mkdir(parents=True)
    dense = method == "dense"
    config = {
        "dataset": "digits", "model": "small", "seed": seed, "total_epochs": epochs, "out": str(folder),
        "classes": 10, "shape": [1, 8, 8],
        "sparsity": sparsity,
        "method": {
            "type": method.upper(), "name": method, "steps": 10 * epochs, "granularity": {"type": granularity},
            "sparsity": sparsity, "seed": seed,
        },
    }  # fmt: skip
    if text:
        config |= {"dataset": "text", "shape": [64], "optimizer": "adamw"}
        config["text"] = {"file": text, "bytes": 1000, "sha256": text * 3, "bytes_per_token": 2.0}
    (folder / "config.json").write_text(json.dumps(config))
    lines = [
        _metrics(epoch, epochs, 0.0 if dense else sparsity, offset, bool(text))
        for epoch in range(1, (epochs if done is None else done) + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    if done is None:
        summary = _summary(lines, dense, lost, notes)
        if cost:
            share = 1 - summary["sparsity"]
            counts = {"parameters": 6000, "macs": 1_000_000, "bytes": 24_000}
            counts |= {f"{name}_kept": round(value * share) for name, value in counts.items()}
            summary["cost"] = counts
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


def _metrics(epoch: int, epochs: int, sparsity: float, offset: float, text: bool) -> dict[str, Any]:
    dense = not sparsity
    top1 = 90 + offset - 50 / epoch + math.sin(epoch)
    loss = 1 + offset + 2 / epoch + 0.5 * (epoch == epochs)  # the last is not the best
    losses = {"val_loss": loss, "val_loss_super": None if dense else loss - 0.1} if text else {}
    return losses | {
        "epoch": epoch, "step": 10 * epoch, "lr": 0.1, "sparsity": sparsity * epoch / epochs,
        "train_loss": 1 / epoch, "top1": top1, "top1_super": None if dense else top1 + 1, "top1_train": 99,
        "seconds": 2.0, "updates": [] if dense else [[10 * epoch, 30, 60 + epoch]],
    }  # fmt: skip


def _summary(lines: list[dict[str, Any]], dense: bool, lost: str, notes: tuple[str, ...]) -> dict[str, Any]:
    end = summarise([line["top1"] for line in lines])
    layers = {name: {"weights": 1000, "kept": 1000 if dense else 100} for name in LAYERS}
    if lost:
        layers[lost]["kept"] = 0
    return {
        "top1_last": end["last"], "top1_best": end["best"], "best_epoch": end["best_epoch"],
        "std_last_10pct": end["std"], "sparsity": lines[-1]["sparsity"], "seconds": 125.0, "epochs": len(lines),
        "complete": True, "environment": {"torch": "2.13.0", "device": "cpu"}, "layers": layers,
        "weights": 6000, "kept": sum(layer["kept"] for layer in layers.values()), "notes": list(notes),
    }  # fmt: skip
