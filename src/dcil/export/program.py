"""The small network as a program of its own (torch.export): loads with torch alone, for any batch size.

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

#: For torch.export: the first dimension of the one input may be anything.
BATCH_IS_FREE: tuple[Any, ...] = ({0: torch.export.Dim("batch")},)


def write_program(model: nn.Module, example: Tensor, file: Path, notes: dict[str, str]) -> None:
    whole = io.BytesIO()
    with quiet():
        # Zeros, because the example goes into the file.
        program = torch.export.export(model.eval(), (torch.zeros_like(example),), dynamic_shapes=BATCH_IS_FREE)
        for node in program.graph.nodes:
            node.meta.pop("stack_trace", None)  # paths of this machine
        torch.export.save(program, whole, extra_files={"dcil.json": json.dumps(notes)})
    # torch stores its archive without compression, and its description of the graph is long and repetitive.
    with zipfile.ZipFile(whole) as stored, zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as deflated:
        for part in stored.infolist():
            deflated.writestr(zipfile.ZipInfo(part.filename), stored.read(part), zipfile.ZIP_DEFLATED)


def run_program(file: Path, x: Tensor) -> Tensor:
    with quiet():
        out: Tensor = torch.export.load(io.BytesIO(file.read_bytes())).module()(x)
    return out


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """torch's exporters warn, log and print about their own insides."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)
