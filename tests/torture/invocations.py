"""Wrong command lines: refused in one line before anything is written, or harmless."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from forks import isolated
from samples import TRAIN, Samples, copied, scratch, without_pictures
from tally import FINE, HANG, LOST, REFUSED, Case, Verdict, of_outcome

LIMIT, MEMORY = 20.0, 8 << 30
NUMBERS = [
    "-1",
    "0",
    "1",
    "1.5",
    "nan",
    "inf",
    "-inf",
    "1e300",
    "1e-300",
    "1e308",
    "-0.0",
    "1e400",
    "x",
    "",
    "0x10",
    "½",
]
NUMBERS += ["1,2", "9" * 30, "1_000", " 1", "-5", str(2**63), str(2**64), "1732000000", "None", "True", "\udcff"]
NAMES = [
    "",
    "x",
    "dcil ",
    "DCIL",
    "../x",
    "/",
    "-",
    "--",
    "all,all",
    "dcil,dcil",
    "wrn-1000000-1",
    "wrn-0-0",
    "wrn-28-0",
]
NAMES += ["2:4", "4:2", "0:0", "1:1000000", "-1:4", "filter", "weight", "a" * 5000, "$HOME", "*", "\udcff"]
#: Option of train -> its wrong values. What trains nevertheless must end well.
OPTIONS = {
    **dict.fromkeys(["sparsity", "epochs", "target-epoch", "finetune-epochs", "finetune-lr", "batch", "lr"], NUMBERS),
    **dict.fromkeys(["lr-decay", "lr-warmup-epochs", "lr-warmup-from", "momentum", "weight-decay", "seed"], NUMBERS),
    **dict.fromkeys(["eps", "lr-floor", "label-smoothing", "clip-norm", "dropout", "length"], NUMBERS),
    **dict.fromkeys(["optimizer", "decay-on", "lr-schedule", "tokens", "private"], NAMES),
    "betas": [*NUMBERS, "0.9", "0.9,0.9,0.9", "0.9,1"],
    "milestones": [*NUMBERS, "2,1", "1,1", "-1", ",", "0,0,0"],
    **dict.fromkeys(["dataset", "model", "method", "granularity", "schedule", "recipe", "engine", "precision"], NAMES),
    "device": ["cuda", "cpu:1", "cpu:-1", "cuda:99", "meta", "mps", "x", "", "cpu,cpu"],
    "data-dir": ["/dev/null", "missing", "", "a" * 5000],
}
#: Settings of methods with values that they cannot have.
SETTINGS = {
    "dcil": ["kl", "temperature", "warmup", "every", "begin", "initial_sparsity", "min_kept", "smooth", "class_dim"],
    "dpf": ["every", "criterion", "scope", "schedule", "seed", "granularity", "nothing"],
    "rigl": ["every", "fraction", "until", "seed"],
    "set": ["fraction", "seed", "every"],
    "sm": ["drop", "drop_end", "seed", "every"],
    "dsr": ["threshold", "fraction", "seed", "tolerance"],
    "dns": ["gamma", "power", "every"],
    "rewind": ["rounds", "to", "every"],
    "oneshot": ["at", "every"],
    "autoprune": ["lr", "every"],
    "acdc": ["begin", "rounds", "last"],
    "topkast": ["backward", "penalty", "every"],
    "st3": ["sigma", "rescale", "scope"],
    "feather": ["p", "theta", "criterion"],
    "granet": ["drop", "drop_end", "every"],
    "srste": ["decay", "schedule", "every"],
}
TEXTS = [*NUMBERS, "no", "yes", "obd", "magnitude", "erk", "never", "{}", "[]", "null", "1000000000", "-3"]
#: Targets of --out that are no place to write to; {run} is a finished run, {file} a file, {folder} a full folder.
PLACES = ["{run}", "{run}/config.json", "{run}/checkpoint.safetensors", "{run}/model.safetensors", "{run}/summary.json"]
PLACES += ["{run}/metrics.jsonl", "{run}/checkpoint.json", "{run}/.lock", "{file}", "{file}/x", "{folder}", "/dev/null"]
PLACES += [
    "/dev/full",
    "/proc/x",
    "",
    ".",
    "..",
    "a" * 5000,
    "{link}",
    "{run}/../{runname}/config.json",
    "{run}/",
]
TRAINING = [*TRAIN, "--epochs", "1", "--batch", "1438"]


def cases(samples: Samples, chance: random.Random, factor: float) -> Iterator[Case]:
    lines = [*commands(chance)]
    chance.shuffle(lines)
    lines = [*fixed(), *lines[: round(500 * factor)]]
    for words in lines:
        rest = ["train", "…", *words[len(TRAINING) :]] if words[: len(TRAINING)] == TRAINING else words
        shown = " ".join(word if len(word) < 60 else f"{word[:20]}…" for word in rest)
        yield f"dcil {shown!r}", partial(attempt, samples.finished, words)


def commands(chance: random.Random) -> Iterator[list[str]]:
    for option, values in OPTIONS.items():
        for value in values:
            yield [*TRAINING, "--method", chance.choice(["dcil", "rigl", "sm"]), "--out", "new", f"--{option}={value}"]
    for method, names in SETTINGS.items():
        for name in names:
            for value in TEXTS:
                yield [*TRAINING, "--method", method, "--out", "new", "--set", f"{name}={value}"]
    for place in PLACES:
        yield [*TRAINING, "--method", "dense", "--out", place]
        yield [*TRAINING, "--method", "dense", "--out", place, "--resume"]
        yield [*TRAINING, "--method", "dense,dpf", "--out", place]
        yield ["sweep", *TRAINING[1:], "--methods", "dense", "--out", place]
        for command in ("eval", "report"):
            yield [command, place]
        yield ["report", "{run}", "--out", place]
        for to in ("safetensors", "sparse", "cpu", "torch"):
            yield ["export", "{run}", "--to", to, "--out", place]
            yield ["export", place, "--to", to, "--out", "new"]
        yield ["reproduce", "--report", "--out", place]
        yield ["sweep", "--list", place, "--out", "new", *TRAINING[1:]]
    for value in NUMBERS:
        for words in (["infer", f"--size={value}"], ["infer", f"--rounds={value}"], ["step", f"--steps={value}"]):
            yield ["bench", *words]
        yield ["export", "{run}", "--to", "compact", "--out", "new", f"--block={value}"]
        yield ["reproduce", "cifar10-unstructured", f"--seeds={value}", "--dry-run"]
        yield ["reproduce", "cifar10-unstructured", f"--budget={value}", "--dry-run"]
        yield ["sweep", *TRAINING[1:], "--out", "new", f"--seeds={value}"]
        yield ["sweep", *TRAINING[1:], "--out", "new", f"--parallel={value}", "--methods", "dense"]


def fixed() -> Iterator[list[str]]:
    """Combinations that once went wrong."""
    yield from (["report", "{run}", "--out", f"{{run}}/{name}"] for name in ("checkpoint.safetensors", "config.json"))
    yield ["export", "{run}", "--to", "safetensors", "--out", "{other}/checkpoint.safetensors"]
    yield ["export", "{run}", "--to", "sparse", "--out", "{other}/summary.json"]
    yield ["report", "{run}", "--out", "{other}/metrics.jsonl"]
    yield [*TRAINING, "--method", "sm", "--out", "new", "--set", "drop_end=-3"]
    yield [*TRAINING, "--model", "wrn-1000000-1", "--out", "new"]
    yield [*TRAINING, "--method", "rewind", "--out", "new", "--set", "rounds=1000000000"]
    for method in ("rigl", "set", "sm", "dsr"):
        yield [*TRAINING, "--method", method, "--out", "new", "--seed", "1732000000123456789"]
    yield [*TRAINING, "--out", "new", "--batch", "1"]
    yield [*TRAINING, "--method", "dns", "--out", "new", "--set", "gamma=-1"]


def attempt(run: Path, words: Sequence[str]) -> Verdict:
    """Run the command in a folder with two runs, a file and a full folder, and look at what has changed."""
    with scratch() as folder:
        copied(run, folder)
        (folder / run.name).rename(folder / "run")
        copied(run, folder).rename(folder / "other")
        (folder / "file").write_text("precious")
        (folder / "folder").mkdir()
        (folder / "folder" / "thesis.tex").write_text("precious")
        (folder / "link").symlink_to(folder / "run" / "checkpoint.safetensors")
        names = {"{run}": "run", "{runname}": "run", "{other}": "other", "{file}": "file", "{folder}": "folder"}
        names |= {"{link}": "link"}
        filled = [fill(word, names) for word in words]
        before = contents(folder)
        outcome = isolated(lambda: without_pictures(filled), LIMIT, MEMORY)
        verdict, after = of_outcome(outcome), contents(folder)
        if gone := [name for name in before if after.get(name) != before[name] and not mine(name, filled)]:
            return Verdict(LOST, f"{gone[0]} was changed; {verdict.kind} {verdict.detail}")
        new = sorted(name for name in after.keys() - before.keys() if not name.endswith("report.html"))
        if verdict.kind == REFUSED and new and outcome.code == 2:
            return Verdict(LOST, f"refused ({verdict.detail}), but wrote {new[:3]}")
        if verdict.kind == HANG and any("bench" in word for word in filled):
            return Verdict(FINE)  # a benchmark that was asked for takes its time
        return verdict


def mine(name: str, words: Sequence[str]) -> bool:
    """Whether the command was asked to replace this file: a plain file of nobody's run."""
    return name == "file" and "--out" in words and words[words.index("--out") + 1] == "file"


def fill(word: str, names: dict[str, str]) -> str:
    for place, name in names.items():
        word = word.replace(place, name)
    return word


def contents(folder: Path) -> dict[str, bytes]:
    """Return every file below ``folder`` with its bytes."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
