"""Plan a sweep: a grid of options, or a list of runs from a JSON file."""

from __future__ import annotations

import dataclasses
import itertools
import os
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dcil import METHODS
from dcil.errors import UserError, unknown
from dcil.runs.damage import naming_file
from dcil.runs.folder import RunFolder
from dcil.runs.json_file import parse, read_text
from dcil.train.config import Config
from dcil.train.method_settings import parse_value
from dcil.train.plan import DEFAULT_METHOD, REPORT, Options, PlannedRun, check_parent, new_config, plan_run


def grid(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return every combination of the axes' values; a method that prunes nothing comes once, not once per sparsity."""
    found: list[dict[str, Any]] = []
    for combination in itertools.product(*axes.values()):
        one = dict(zip(axes, combination, strict=True))
        method = one.get("method", DEFAULT_METHOD)
        if method not in METHODS:
            raise unknown("method", method, METHODS)
        if not METHODS[method].prunes:
            one.pop("sparsity", None)
        if one not in found:
            found.append(one)
    return found


def read_list(file: Path) -> list[dict[str, Any]]:
    """Read the runs of a JSON file: objects with names of options as keys, "settings" an object of its own."""
    allowed = option_types() | {"name": str}
    with naming_file(f"--list {file}", "give a JSON list of objects, each the options of a run", problem="is wrong"):
        runs = parse(read_text(file))
        if not isinstance(runs, list) or not runs or not all(isinstance(run, dict) for run in runs):
            raise ValueError("not a list of objects, at least one")
        return [typed_options(run, allowed) for run in runs]


def option_types() -> dict[str, Any]:
    """Return the type of every field of Config."""
    hints = typing.get_type_hints(Config)
    return {field.name: hints[field.name] for field in dataclasses.fields(Config)}


def typed_options(run: Mapping[str, Any], allowed: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of one run that were read from JSON, each of its type."""
    found: dict[str, Any] = {}
    for key, value in run.items():
        if key not in allowed:
            raise unknown("option", key, allowed)
        try:
            found[key] = parse_value(allowed[key], value)
        except ValueError as error:
            raise ValueError(f"{key} {error}") from None
    return found


def plan_sweep(out: Path, wanted: Sequence[Options], recipe: str | None) -> list[PlannedRun]:
    """Plan all runs below ``out``; options must agree with the runs that are in their folders already."""
    if os.path.lexists(out) and not out.is_dir():
        raise UserError(f"--out must be a folder for the runs, {out} is not a folder")
    if RunFolder(out).started:
        raise UserError(f"{out} is a run itself; a sweep needs a folder of its own: choose another --out")
    check_parent(out)
    runs: dict[str, PlannedRun] = {}
    for given in wanted:
        options = {key: value for key, value in given.items() if key not in ("name", "method")}
        method = given.get("method")
        if method is not None and method not in METHODS:
            raise unknown("method", method, METHODS)
        name = given["name"] if "name" in given else run_name(new_config(method, options, recipe))
        if name in runs:
            raise UserError(f"every run must have a name of its own, got {name} twice; give names in a --list")
        folder = run_folder(out, name)
        runs[name] = PlannedRun(name, folder, plan_run(folder, method, options, recipe, resume=True))
    return list(runs.values())


def run_folder(out: Path, name: str) -> RunFolder:
    """Return the folder of a run, which must be one below ``out`` itself."""
    if name.startswith(".") or "/" in name or not name.isprintable() or not 1 <= len(os.fsencode(name)) <= 255:
        raise UserError(f"the name of a run must be that of one folder below --out, got {name!r}")
    path = out / name
    if name == REPORT or path.is_symlink() or (path.exists() and not path.is_dir()):
        raise UserError(f"{path} must be a folder for a run, not the report, a link or a file; give it another name")
    return RunFolder(path)


def run_name(config: Config) -> str:
    """Return the name of a run's folder in a sweep."""
    pruned = f"-{config.granularity}{config.sparsity:g}" if METHODS[config.method].prunes else ""
    return f"{config.dataset}-{config.model}-{config.method}{pruned}-seed{config.seed}"
