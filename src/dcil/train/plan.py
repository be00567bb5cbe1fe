"""Plan runs: from a recipe and options to configs, all of them checked before anything is written.

Options are fields of Config by name; their "settings" hold text or JSON, which is converted here.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dcil import METHODS, data
from dcil.errors import UserError, unknown
from dcil.runs.folder import RunFolder
from dcil.train.config import Config
from dcil.train.method_settings import granularity_named, parse_settings
from dcil.train.recipes import RECIPES, scaled_epochs
from dcil.train.restore import config_of

#: What --model is without --model and --recipe.
MODELS = {"digits": "resnet8-digits", "cifar10": "resnet20", "cifar100": "resnet20", "imagefolder": "resnet18"}
MODELS |= {"webdataset": "resnet18"}
MODELS |= {"text": "gpt-6-384", "shakespeare": "gpt-6-384", "pydoc": "gpt-4-128"}
DEFAULT_METHOD = "dcil"
#: The file beside several runs.
REPORT = "report.html"
Options = Mapping[str, Any]


@dataclass(frozen=True)
class PlannedRun:
    """A run that is to be trained in ``folder``, from its checkpoint if there is one."""

    name: str
    folder: RunFolder
    config: Config


def plan_comparison(
    options: Options, recipe: str | None, out: Path | None, resume: bool
) -> tuple[Path, list[PlannedRun]]:
    """Plan a run for each of the methods named in ``options``; return them with their common folder."""
    common = {name: value for name, value in options.items() if name != "method"}
    methods = method_names(options.get("method"), options.get("granularity"))
    base = out or Path("runs") / comparison_name(common, recipe, methods)
    several = len(methods) > 1
    if several and RunFolder(base).started:
        raise UserError(f"{base} is a run itself; several methods need a folder of their own: choose another --out")
    if several:
        check_parent(base)
    runs = []
    for method in methods:
        folder = RunFolder(base / (method or "") if several else base)
        config = plan_run(folder, method, for_method(method or DEFAULT_METHOD, common, methods), recipe, resume)
        runs.append(PlannedRun(config.method, folder, config))
    return base, runs


def check_parent(base: Path) -> None:
    """Refuse a folder for several runs whose report would replace somebody's file: there is no run below it yet."""
    if os.path.lexists(base / REPORT) and not any(base.glob("*/config.json")):
        raise UserError(f"{base / REPORT} is not of these runs and would be replaced; choose another --out")


def plan_run(folder: RunFolder, method: str | None, options: Options, recipe: str | None, resume: bool) -> Config:
    """Return the config of one run, from its folder or from recipe and options."""
    if folder.started:
        if not resume:
            raise UserError(f"{folder.path} holds a run already: --resume continues it, or choose another --out")
        return resumed_config(folder, method, options, recipe)
    if inside := [path.parent.name for path in sorted(folder.path.glob("*/config.json"))]:
        names = ",".join(inside)
        raise UserError(f"{folder.path} holds the runs {names}: resume them with --method {names} --resume")
    if os.path.lexists(folder.path) and not folder.path.is_dir():
        raise UserError(f"--out must be a folder, {folder.path} is none; choose another --out")
    if strange := sorted(set(folder.path.glob("*")) - set(folder.leftovers())):
        raise UserError(f"{folder.path} is not a run folder, it has {strange[0].name} in it; choose another --out")
    return new_config(method, options, recipe)


def new_config(method: str | None, options: Options, recipe: str | None) -> Config:
    """Return the config of a new run, from recipe and options."""
    return override(base_config(options, recipe, method or DEFAULT_METHOD), options)


def resumed_config(folder: RunFolder, method: str | None, options: Options, recipe: str | None) -> Config:
    """Return the config of a run to resume; refuse options that ask for another one."""
    config = config_of(folder)
    same_method = method in (None, config.method)
    base = config if recipe is None else base_config(options, recipe, config.method)
    asked = override(base, options) if same_method else config
    names = [field.name for field in dataclasses.fields(Config)]
    changes = {n: (getattr(config, n), getattr(asked, n)) for n in names if getattr(config, n) != getattr(asked, n)}
    if not same_method:
        changes["method"] = (config.method, method)
    for name, (there, wanted) in changes.items():
        raise UserError(
            f"--resume: {folder.path} was started with {name} {there}, not {wanted}; "
            "drop that option, or choose another --out"
        )
    return config


def base_config(options: Options, recipe: str | None, method: str) -> Config:
    """Return the config of the recipe named, or of the one that matches data set and model."""
    if recipe is not None:
        if recipe not in RECIPES:
            raise unknown("recipe", recipe, RECIPES)
        return RECIPES[recipe](method=method)
    dataset = options.get("dataset", "digits")
    if dataset not in data.names():
        raise unknown("dataset", dataset, data.names())
    model = options.get("model", MODELS[dataset])
    # Without --recipe a method has its own, original settings; a recipe is the paper's protocol.
    return replace(RECIPES[recipe_like(dataset, model)](method=method, protocol=False), dataset=dataset, model=model)


def recipe_like(dataset: str, model: str) -> str:
    """Return the name of the recipe for a network on a data set, or of the one that is most like it."""
    if model.startswith("vit-"):
        family = f"vit-{dataset}" if f"vit-{dataset}" in RECIPES else "vit-cifar10"
    elif dataset in data.TEXTS:
        family = "gpt-pydoc" if dataset == "pydoc" else "gpt-text"
    else:
        family = {"digits": "digits", **dict.fromkeys(data.IMAGES_IN_FILES, "imagenet-resnet18")}.get(dataset, "")
        family = family or f"{dataset}-{'wrn-28-2' if model.startswith('wrn') else 'resnet20'}"
    own = f"imagenet-{model}" if dataset in data.IMAGES_IN_FILES else f"{dataset}-{model}"
    return own if own in RECIPES else family


def override(config: Config, options: Options) -> Config:
    """Return ``config`` with the options' values; a new number of epochs scales the epochs that options do not name."""
    changes = dict(options)
    if "settings" in options:
        changes["settings"] = config.settings | parse_settings(METHODS[config.method], options["settings"])
    if "epochs" in options:
        changes = scaled_epochs(config, options["epochs"]) | changes
    if ":" in options.get("granularity", ""):  # the sparsity of N:M follows from N and M
        changes.setdefault("sparsity", granularity_named(options["granularity"]).max_sparsity)
    return replace(config, **changes)


def method_names(text: str | None, granularity: str | None) -> list[str | None]:
    """Return the methods of --method: one, several, or all that suit the granularity; [None] if it is not given."""
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
        raise UserError(f"--method must name each method once, got {text}")
    return names


def for_method(method: str, options: Options, methods: Sequence[str | None]) -> Options:
    """Return the options for one of several methods: a setting applies to those that have it; one of them must."""
    if "settings" not in options or len(methods) == 1:
        return options
    fields = {name: {field.name for field in dataclasses.fields(METHODS[name])} for name in methods if name}
    for name in options["settings"]:
        if not any(name in own for own in fields.values()):
            raise unknown(f"setting of {', '.join(fields)}", name, set().union(*fields.values()))
    settings = {name: value for name, value in options["settings"].items() if name in fields[method]}
    return {**options, "settings": settings}


def comparison_name(options: Options, recipe: str | None, methods: Sequence[str | None]) -> str:
    """Return the name of the run folder when --out is not given."""
    first = methods[0] or DEFAULT_METHOD
    config = new_config(first, for_method(first, options, methods), recipe)
    names = "+".join(name or config.method for name in methods)
    return f"{config.dataset}-{config.model}-{names}-{config.granularity}{config.sparsity:g}-seed{config.seed}"
