"""The fields of records and iteration traces that the results page is made from, with their ranges."""

from __future__ import annotations

from typing import Any

from dcil.runs.run_fields import CONFIG, EPOCHS, LAYERS, NOTES, PERCENT, SECONDS, SEED, SHARE, UPDATES
from dcil.runs.schema import Check, entries, fields, list_of, mapping_of, nullable, number, text, whole, wrong

#: Lifetimes of revived weights are counted in classes of steps that begin here: 1, 2-3, 4-7, …
LIFETIMES = [2**power for power in range(24)]
COUNT = number(0)
#: Column of a record, one value per epoch -> the check of a value.
EPOCH_COLUMNS: dict[str, Check] = {
    "top1": nullable(PERCENT),  # where the epoch was evaluated
    "top5": nullable(PERCENT),
    "top1_super": nullable(PERCENT),
    "top1_train": nullable(PERCENT),
    "train_loss": number(),
    "sparsity": SHARE,
    "lr": number(),
    "seconds": SECONDS,
    "updates": COUNT,
    "revived": nullable(COUNT),
    "dropped": nullable(COUNT),
}

#: A column that records of earlier versions lack.
LOSSES = list_of(nullable(number()))


def session_environment(value: Any, name: str) -> None:
    """Accept an environment that names the version of torch and the CPU or the GPU."""
    mapping_of(text)(value, name)
    fields({"torch": text})(value, name)
    if not (value.get("gpu") or value.get("cpu")):
        raise ValueError(f"field {f'{name}.cpu'!r} is missing")


def recorded_config(value: Any, name: str) -> None:
    """Accept the config of a run that was trained: with the steps of an epoch."""
    CONFIG(value, name)
    fields({"method": fields({"epoch_steps": whole(1)})})(value, name)


def stays(value: Any, name: str) -> None:
    """Accept counts of lifetimes, one per class."""
    counts = {"ended": list_of(whole(), len(LIFETIMES)), "at_least": list_of(whole())}
    fields({**counts, "steps_stayed": number(0), "still_there": whole()})(value, name)
    if value["at_least"] != LIFETIMES:
        raise wrong(f"{name}.at_least", str(LIFETIMES), value["at_least"])


CODE = fields({"dcil": text}, {"commit": text, "source": text, "revision": whole()})
SESSION = fields({"after": whole(), "code": CODE, "environment": session_environment, "at_once": whole(1)})
LOOKS = entries(("epoch", EPOCHS), ("step", whole()), ("before", PERCENT), ("after", PERCENT))
OBSERVED = fields({"looks": LOOKS, "stays": nullable(stays)})
RECORD = fields(
    {
        "cell": text,
        "config": recorded_config,
        "sessions": list_of(SESSION),
        "environment": mapping_of(text),
        "summary": fields({"std_last_10pct": number(0, 100), "weights": whole(1), "notes": NOTES}),
        "layers": LAYERS,
        "epochs": fields({name: list_of(check) for name, check in EPOCH_COLUMNS.items()}, {"val_loss": LOSSES}),
        "around_changes": LOOKS,
        "stays": nullable(stays),
    },
    {"trial_epochs": EPOCHS},
)
TRACE = fields(
    {
        "cell": text,
        "seed": SEED,
        "epoch": EPOCHS,
        "config": recorded_config,
        "top1": list_of(PERCENT, shortest=1),
        "updates": UPDATES,
    }
)
FINDINGS = mapping_of(text)
