"""The fields of config.json, metrics.jsonl and summary.json that are read anywhere, with their ranges."""

from __future__ import annotations

import math
from typing import Any

from dcil.runs.schema import (
    anything,
    boolean,
    entries,
    fields,
    list_of,
    mapping_of,
    nullable,
    number,
    text,
    whole,
    wrong,
)

#: Accuracies in percent and shares are computed in floating point, which may round them over the edge.
PERCENT = number(0, 100.001)
SHARE = number(0, 1.00001)
SECONDS = number(0, 1e12)
EPOCHS = whole(1, 1e9)
SEED = whole(0, 2**64)
POSITIVE = number(0)
#: Far above any data set, far below what does not fit into memory.
CLASSES, LARGEST_IMAGE = whole(1, 1e5), 2**23


def shape(value: Any, name: str) -> None:
    """Accept the shape of an image, or the length of a sequence."""
    list_of(whole(1), shortest=1)(value, name)
    if math.prod(value) > LARGEST_IMAGE:
        raise wrong(name, f"that of at most {LARGEST_IMAGE:,} values", value)


#: Which text a run was trained on.
TEXT = fields({"file": text, "bytes": whole(1), "sha256": text, "bytes_per_token": number(1, 4)}, {"vocabulary": text})
METHOD = fields({"name": text, "steps": whole(1)}, {"epoch_steps": whole(1), "every": whole(0)})
CONFIG = fields(
    {
        "dataset": text,
        "model": text,
        "method": METHOD,
        "seed": SEED,
        "total_epochs": EPOCHS,
        "classes": CLASSES,
        "shape": shape,
    },
    {
        "sparsity": SHARE,
        "granularity": text,
        "schedule": text,
        "settings": mapping_of(anything),
        "epochs": EPOCHS,
        "target_epoch": EPOCHS,
        "finetune_epochs": whole(0, 1e9),
        "lr_warmup_epochs": whole(0, 1e9),
        "batch": whole(1),
        "milestones": list_of(whole(-1e9, 1e9)),
        **dict.fromkeys(("lr", "lr_decay", "lr_warmup_from", "finetune_lr", "momentum", "weight_decay"), number()),
        **dict.fromkeys(("eps", "lr_floor", "label_smoothing", "clip_norm", "dropout"), number(0)),
        **dict.fromkeys(("optimizer", "decay_on", "lr_schedule", "tokens", "private"), text),
        "betas": list_of(number(0, 1)),
        "length": whole(1),
        "text": TEXT,
    },
)
UPDATES = entries(("step", whole()), ("revived", whole()), ("dropped", whole()))
EPOCH = fields(
    {
        "epoch": EPOCHS,
        "step": whole(),
        "lr": number(),
        "sparsity": SHARE,
        "train_loss": number(),
        "top1": nullable(PERCENT),
        "top1_super": nullable(PERCENT),
        "seconds": SECONDS,
        "updates": UPDATES,
    },
    dict.fromkeys(("val_loss", "val_loss_super"), nullable(number())),
)
#: What a summary or a record that is still to be written needs besides.
TO_SUMMARISE = fields({"top5": nullable(PERCENT), "top1_train": PERCENT})
LAYERS = mapping_of(fields({"weights": whole(), "kept": whole()}))
COST = fields(dict.fromkeys(("parameters", "parameters_kept", "macs", "macs_kept", "bytes", "bytes_kept"), whole()))
NOTES = list_of(text)
LOSSES = ("val_loss_last", "val_loss_best", "val_loss_std_last_10pct")
SUMMARY = fields(
    {
        "complete": boolean,
        "top1_last": PERCENT,
        "top1_best": PERCENT,
        "best_epoch": EPOCHS,
        "std_last_10pct": number(0, 100),
        "sparsity": SHARE,
        "seconds": SECONDS,
        "weights": whole(),
        "kept": whole(),
        "layers": LAYERS,
        "environment": mapping_of(text),
    },
    {"notes": nullable(NOTES), "epochs": EPOCHS, "cost": COST, **dict.fromkeys(LOSSES, number())},
)
