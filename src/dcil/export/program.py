"""Export as a torch.export program: it loads with torch alone, for any batch size.

model = torch.export.load("model.pt2").module()
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from dcil.export.verify import Inputs


def batch_is_free(inputs: Inputs) -> tuple[Any, ...]:
    """Return torch.export's dynamic shapes: the first dimension of every input may vary."""
    return ({0: torch.export.Dim("batch")},) * len(inputs)


def write_program(model: nn.Module, inputs: Inputs, file: Path, notes: dict[str, str]) -> None:
    whole = io.BytesIO()
    zeros = tuple(torch.zeros_like(x) for x in inputs)  # because the example goes into the file
    with quiet():
        program = torch.export.export(model.eval(), zeros, dynamic_shapes=batch_is_free(inputs))
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # paths of this machine
        torch.export.save(program, whole, extra_files={"dcil.json": json.dumps(notes)})
    # torch stores its archive without compression, and its description of the graph is long and repetitive.
    with zipfile.ZipFile(whole) as stored, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as deflated:
        for part in stored.infolist():
            deflated.writestr(zipfile.ZipInfo(part.filename), stored.read(part), zipfile.ZIP_DEFLATED)


def run_program(file: Path, inputs: Inputs) -> list[Tensor]:
    with quiet():
        out = torch.export.load(io.BytesIO(file.read_bytes())).module()(*inputs)
    return [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence the warnings, logs and prints of torch's exporters."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
