"""Write and run ONNX files, which ONNX Runtime and most other engines take. Needs the extra `onnx`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dcil.errors import missing_extra
from dcil.export.program import batch_is_free, quiet
from dcil.export.verify import Inputs, computed, inputs_of


def names(word: str, count: int) -> list[str]:
    return [word] if count == 1 else [f"{word}_{i}" for i in range(1, count + 1)]


def write_onnx(
    model: nn.Module, example: Tensor | Inputs, file: Path, notes: dict[str, str], any_batch: bool = True
) -> None:
    """Write the network for any batch size, or for the example's alone.

    One input is called "input", several "input_1" and so on; outputs alike.
    """
    try:
        import onnx  # type: ignore[import-not-found, unused-ignore]
        import onnxscript  # type: ignore[import-not-found, unused-ignore]  # noqa: F401
    except ModuleNotFoundError as error:
        raise missing_extra(error.name or "onnx", "onnx") from None
    inputs = inputs_of(example)
    with quiet():
        program = torch.onnx.export(
            model.eval(),
            inputs,
            input_names=names("input", len(inputs)),
            output_names=names("output", len(computed(model, inputs))),
            dynamic_shapes=batch_is_free(inputs) if any_batch else None,
            dynamo=True,
            verbose=False,
        )
        assert program is not None
        proto: Any = program.model_proto
    for key, value in notes.items():
        proto.metadata_props.add(key=key, value=value)
    onnx.checker.check_model(proto)
    file.write_bytes(proto.SerializeToString())


def session(file: Path, threads: int = 0) -> Any:
    """Open an ONNX Runtime session on the CPU; 0 threads: ONNX Runtime chooses."""
    try:
        import onnxruntime  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ModuleNotFoundError:
        raise missing_extra("onnxruntime", "onnx") from None
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    # Idle threads of a session would otherwise spin and take the cores from the next session.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(file.read_bytes(), options, providers=["CPUExecutionProvider"])


def run_onnx(file: Path, inputs: Inputs) -> list[Tensor]:
    feed = dict(zip(names("input", len(inputs)), (x.numpy() for x in inputs), strict=True))
    return [torch.from_numpy(out) for out in session(file).run(None, feed)]
