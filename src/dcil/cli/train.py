"""Train a network sparse; --recipe fills everything in and the other options override it."""

from __future__ import annotations

import argparse
import dataclasses
import os
import typing
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dcil import METHODS, data
from dcil.cli import report
from dcil.cli.parser import Parser, device, epochs, number, pair, say, whole
from dcil.engine.settings import ENGINES, PRECISIONS, EngineSettings
from dcil.errors import UserError, unknown
from dcil.runs.progress import progress_bar
from dcil.train import RECIPES, Config, ProcessGroup, RunFolder
from dcil.train import train as run_training
from dcil.train.config import granularity_named, setting
from dcil.train.memory import keep_freed_memory
from dcil.train.restore import config_of

CONFIG = {f.name: f for f in dataclasses.fields(Config)}
MODELS_FOR = {"digits": "resnet8-digits", "cifar10": "resnet20", "cifar100": "resnet20", "imagefolder": "resnet18"}


def main(words: Sequence[str]) -> int:
    team = ProcessGroup.of(os.environ)
    with team.planning():
        args = read(words)
        base, runs = plan(args)
        team, speed, device = replace(team, local_norms=args.local_norms), speed_of(args), team.device(args.device)
    keep_freed_memory()
    console = Console()
    with team.working(device):
        for folder, config in runs:
            run_one(console, folder, config, args.data_dir, device, speed, team)
    if team.first:
        finish(base, [folder.path for folder, _ in runs])
    return 0


def read(words: Sequence[str]) -> argparse.Namespace:
    parser = Parser("dcil train", __doc__)
    add_options(parser)
    parser.add_argument("--local-norms", action="store_true", help="under torchrun: norms see one process's images")
    return parser.parse(words)


def plan(args: argparse.Namespace) -> tuple[Path, list[tuple[RunFolder, Config]]]:
    """The folder of all runs, and each run."""
    flags = {name: getattr(args, name) for name in CONFIG if hasattr(args, name)}
    methods = method_names(flags.pop("method", None), flags.get("granularity"))
    base = args.out or Path("runs") / run_name(flags, args.recipe, methods)
    if len(methods) > 1 and RunFolder(base).started:
        raise UserError(f"{base} is a run itself; several methods need a folder of their own: choose another --out")
    folders = [RunFolder(base / (name or "")) for name in methods] if len(methods) > 1 else [RunFolder(base)]
    configs = [
        plan_run(folder, name, for_method(name or "dcil", flags, methods), args.recipe, args.resume)
        for folder, name in zip(folders, methods, strict=True)
    ]
    return base, list(zip(folders, configs, strict=True))


def add_options(parser: Parser) -> None:
    parser.add_argument("--recipe", metavar="NAME", help="start from a named recipe (see: dcil list)")
    for name, field in CONFIG.items():
        if name != "settings":
            option = f"--{name.replace('_', '-')}"
            kind = reader(typing.get_type_hints(Config)[name])
            default = field.default if field.default is not dataclasses.MISSING else None
            if isinstance(default, tuple):  # as it is typed
                default = ",".join(map(str, default))
            parser.add_argument(
                option,
                dest=name,
                type=kind,
                default=argparse.SUPPRESS,
                metavar=name.upper(),
                help=f"{field.metadata['help']} (digits recipe: {default})",
            )
    settings = CONFIG["settings"].metadata["help"]
    parser.add_argument(
        "--set", dest="settings", type=pair, action="append", default=argparse.SUPPRESS, metavar="N=V", help=settings
    )
    parser.add_argument("--out", type=Path, metavar="RUN", help="run folder (with several methods: their parent)")
    parser.add_argument("--data-dir", type=Path, default=Path("data"), metavar="DIR", help="where data sets are")
    parser.add_argument("--device", type=device, default="auto", help="cpu, cuda, … or auto: cuda where there is one")
    parser.add_argument("--resume", action="store_true", help="go on with the run in --out")
    add_speed(parser)


def add_speed(parser: Parser) -> None:
    """How fast, not what: these do not belong to the config."""
    parser.add_argument("--engine", default="auto", help=f"{', '.join(ENGINES)} (auto: graph on CUDA, else eager)")
    parser.add_argument("--precision", default="auto", help=f"{', '.join(PRECISIONS)} (auto: bf16 on CUDA, else fp32)")
    parser.add_argument("--low-memory", action="store_true", help="one path's activations at a time; a slower step")


def speed_of(args: argparse.Namespace) -> EngineSettings:
    return EngineSettings(args.engine, args.precision, args.low_memory)


def reader(kind: Any) -> Any:
    """How a flag of type ``kind`` is read."""
    readers = {int: whole, float: number, str: str}
    return readers.get(kind, epochs)


def method_names(text: str | None, granularity: str | None) -> list[str | None]:
    """The methods asked for: one, several with commas, or all that the granularity suits; [None] if none was named."""
    if text is None:
        return [None]
    if text == "all":
        wanted = granularity_named(granularity) if granularity else None
        return [n for n, kind in METHODS.items() if wanted is None or isinstance(wanted, kind.granularities)]
    names: list[str | None] = [*text.split(",")]
    for name in names:
        if name not in METHODS:
            raise unknown("method", name or "", [*METHODS, "all"])
    if len(set(names)) != len(names):
        raise UserError(f"--method {text}: name each method once")
    return names


def for_method(method: str, flags: dict[str, Any], methods: Sequence[str | None]) -> dict[str, Any]:
    """The flags for one of several methods: a setting reaches those that have it, and one of them must."""
    if "settings" not in flags or len(methods) == 1:
        return flags
    has = {name: {field.name for field in dataclasses.fields(METHODS[name])} for name in methods if name}
    for name, _ in flags["settings"]:
        if not any(name in fields for fields in has.values()):
            raise unknown(f"setting of {', '.join(has)}", name, set().union(*has.values()))
    return flags | {"settings": [(name, value) for name, value in flags["settings"] if name in has[method]]}


def run_name(flags: dict[str, Any], recipe: str | None, methods: Sequence[str | None]) -> str:
    """The name of the run folder if none is given."""
    first = methods[0] or "dcil"
    config = override(base_config(flags, recipe, first), for_method(first, flags, methods))
    names = "+".join(name or config.method for name in methods)
    return f"{config.dataset}-{config.model}-{names}-{config.granularity}{config.sparsity:g}-seed{config.seed}"


def plan_run(folder: RunFolder, method: str | None, flags: dict[str, Any], recipe: str | None, resume: bool) -> Config:
    """The config of one run, from its folder or from recipe and flags; complains before anything is written."""
    if folder.started:
        if not resume:
            raise UserError(f"{folder.path} holds a run already: --resume goes on with it, or choose another --out")
        return check_same(folder, method, flags, recipe)
    if inside := [path.parent.name for path in sorted(folder.path.glob("*/config.json"))]:
        raise UserError(
            f"{folder.path} holds the runs {', '.join(inside)}: say --method {','.join(inside)} with --resume"
        )
    if folder.path.is_file() or any(not file.name.startswith(".") for file in folder.path.glob("*")):
        raise UserError(f"{folder.path} exists and is not a run folder; choose another --out")
    if resume:
        say(f"no run in {folder.path} yet: starting it")
    return override(base_config(flags, recipe, method or "dcil"), flags)


def check_same(folder: RunFolder, method: str | None, flags: dict[str, Any], recipe: str | None) -> Config:
    """The config of a run to resume, if the flags do not ask for another one."""
    config = config_of(folder)
    same_method = method in (None, config.method)
    base = config if recipe is None else base_config(flags, recipe, config.method)
    asked = override(base, flags) if same_method else config
    changes = {n: (getattr(config, n), getattr(asked, n)) for n in CONFIG if getattr(config, n) != getattr(asked, n)}
    if not same_method:
        changes["method"] = (config.method, method)
    for name, (there, wanted) in changes.items():
        raise UserError(
            f"--resume: {folder.path} was started with {name} {there}, not {wanted}; "
            "drop that option, or choose another --out"
        )
    return config


def base_config(flags: dict[str, Any], recipe: str | None, method: str) -> Config:
    """The recipe named, or the one that fits data set and model."""
    if recipe is not None:
        if recipe not in RECIPES:
            raise unknown("recipe", recipe, RECIPES)
        return RECIPES[recipe](method=method)
    dataset = flags.get("dataset", "digits")
    if dataset not in data.names():
        raise unknown("dataset", dataset, data.names())
    model = flags.get("model", MODELS_FOR[dataset])
    family = {"digits": "digits", "imagefolder": "imagenet-resnet18"}.get(dataset)
    family = family or f"{dataset}-{'wrn-28-2' if model.startswith('wrn') else 'resnet20'}"
    # Without --recipe a method has its own, original settings; a recipe is the paper's protocol.
    names = (f"{dataset}-{model}", f"imagenet-{model}" if dataset == "imagefolder" else family, family)
    recipe_for = next(RECIPES[name] for name in names if name in RECIPES)
    return replace(recipe_for(method=method, protocol=False), model=model)


def override(config: Config, flags: dict[str, Any]) -> Config:
    """``config`` with the flags' values; a new number of epochs scales the epochs that flags do not name."""
    changes = dict(flags)
    if "settings" in flags:
        kind = METHODS[config.method]
        for name, value in flags["settings"]:
            setting(kind, name, value)  # complains if it does not fit; the record keeps what was said
        changes["settings"] = config.settings | dict(flags["settings"])
    if "epochs" in flags and flags["epochs"] >= 1:
        factor = flags["epochs"] / config.epochs
        changes.setdefault("target_epoch", max(1, round(config.target_epoch * factor)))
        changes.setdefault("milestones", tuple(max(1, round(m * factor)) for m in config.milestones))
        changes.setdefault("lr_warmup_epochs", round(config.lr_warmup_epochs * factor))
    if ":" in flags.get("granularity", ""):  # N:M has one final sparsity, so nobody needs to work it out
        changes.setdefault("sparsity", granularity_named(flags["granularity"]).max_sparsity)
    return replace(config, **changes)


def run_one(
    console: Console,
    folder: RunFolder,
    config: Config,
    data_dir: Path,
    device: torch.device,
    speed: EngineSettings,
    team: ProcessGroup,
) -> None:
    label = f"{config.method} {config.sparsity:g}" if METHODS[config.method].prunes else config.method
    try:
        with progress_bar(console, f"{label:12}", config.total_epochs) as progress:
            summary = run_training(config, folder, data_dir, device, progress, speed, team=team)
    except KeyboardInterrupt:
        console.print(f"[bold]stopped[/]; to go on: the same command with --resume (run: {folder.path})")
        raise
    for note in summary.get("notes", []):
        console.print(f"note: {note}", highlight=False)


def finish(base: Path, runs: Sequence[Path]) -> None:
    """The table, the report, and what to do next."""
    report.show(runs, base / "report.html")
    say(f"runs:   {', '.join(map(str, runs))}")
    shown = next((run for run in runs if run.name == "dcil"), runs[-1])
    say(f"next:   dcil eval {shown}")
    say(f"        dcil export {shown} --to safetensors --out pnet.safetensors")
