"""Describe what is in a plan, for people and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from dcil_runtime.plan import Plan


def as_json(plan: Plan) -> str:
    """Return what ``Plan.info`` gives and the instruction set that this CPU would use."""
    return json.dumps({**plan.info(), "isa": plan.isa}) + "\n"


def as_text(file: str, plan: Plan) -> str:
    """Return a summary, then a line per operator."""
    info = plan.info()
    ops = info["operators"]
    weights, kept = (sum(op.get(name, 0) for op in ops) for name in ("weights", "kept"))
    counts = ", ".join(f"{count} {kind}" for kind, count in Counter(op["kind"] for op in ops).most_common())
    lines = [
        f"{file}: a plan of format version {info['version']}, {info['bytes']:,} bytes",
        *(
            f"{side[:-1]:9} {tensor['dtype']} {_shape(['n', *tensor['shape']])}"
            for side in SIDES
            for tensor in info[side]
        ),
        f"weights   {_kept(kept, weights)}",
        f"operators {counts or 'none'}",
        f"runs with {plan.isa}",
        *(f"note      {key}: {' '.join(value.split())}" for key, value in info["notes"].items()),
        "",
        *(_operator(i, op) for i, op in enumerate(ops)),
    ]
    return "\n".join(lines) + "\n"


SIDES = ("inputs", "outputs")


def _operator(number: int, op: dict[str, Any]) -> str:
    kernel = f"{op['kernel'][0]} x {op['kernel'][1]}" if "kernel" in op else ""
    weights = f"{op['dtype']} {_kept(op['kept'], op['weights'])}" if "weights" in op else ""
    source = _shape(op["input"]) if op["input"][0] else ""  # a constant has no input
    shapes = f"{source:>16} -> {_shape(op['output']):16}"
    act = op["activation"] if op["activation"] != "none" else ""
    return f"{number:4d} {op['kind']:8} {shapes} {kernel:8} {act:10} {weights}".rstrip()


def _kept(kept: int, weights: int) -> str:
    zeros = f", {100 * (1 - kept / weights):.2f} % zeros" if weights else ""
    return f"{kept:,} of {weights:,} kept{zeros}"


def _shape(shape: list[Any]) -> str:
    return " x ".join(map(str, shape))
