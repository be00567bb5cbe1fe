"""Adapt the installed inference engines to one call."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from dcil.export.onnx import session, write_onnx
from dcil.export.program import quiet

#: Runs the batch once and returns the output.
Run = Callable[[], Any]
Make = Callable[[nn.Module, Tensor, int], Run]


def ours(model: nn.Module, x: Tensor, threads: int) -> Run:
    from dcil.runtime import compile_plan  # needs the extra `cpu`

    plan, images = compile_plan(model, x[:1], threads), x.numpy()
    plan.prepare(len(images))
    return lambda: plan(images)


def torch_eager(model: nn.Module, x: Tensor, threads: int) -> Run:
    order = torch.channels_last if x.ndim == 4 else torch.contiguous_format
    last = copy.deepcopy(model).to(memory_format=order)  # type: ignore[call-overload]
    images = x.contiguous(memory_format=order)

    def run() -> Any:
        with torch.inference_mode():
            return last(images).numpy()

    return run


def torch_compiled(model: nn.Module, x: Tensor, threads: int) -> Run:
    from torch._inductor import config

    torch._dynamo.reset()
    config.freezing = True
    compiled = torch.compile(copy.deepcopy(model))

    def run() -> Any:
        with torch.no_grad():
            return compiled(x).numpy()

    return run


@contextlib.contextmanager
def onnx_file(model: nn.Module, x: Tensor) -> Iterator[Path]:
    """Write the network for batches of the size of ``x``, which some engines run faster than any size."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.onnx"
        write_onnx(model, x, file, {}, any_batch=False)
        yield file


def _session_run(file: Path, x: Tensor, threads: int) -> Run:
    opened, images = session(file, threads), x.numpy()
    return lambda: opened.run(None, {"input": images})[0]


def onnx_runtime(model: nn.Module, x: Tensor, threads: int) -> Run:
    with onnx_file(model, x) as file:
        return _session_run(file, x, threads)


def _openvino_run(file: Path, x: Tensor, threads: int) -> Run:
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1}
    core = openvino.Core()
    request = core.compile_model(core.read_model(file), "CPU", settings).create_infer_request()
    images = x.numpy()

    def run() -> Any:
        request.infer({0: images}, share_inputs=True, share_outputs=True)
        return request.get_output_tensor(0).data

    return run


def openvino(model: nn.Module, x: Tensor, threads: int) -> Run:
    with onnx_file(model, x) as file:
        return _openvino_run(file, x, threads)


@contextlib.contextmanager
def quantized_file(model: nn.Module, x: Tensor) -> Iterator[Path]:
    """The model in static INT8 (per channel), calibrated on noise: for time only, not for accuracy."""
    from onnxruntime.quantization import (  # type: ignore[import-untyped]
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    class Noise(CalibrationDataReader):  # type: ignore[misc]
        batches = iter([{"input": np.random.default_rng(i).standard_normal(x.shape, np.float32)} for i in range(2)])

        def get_next(self) -> Any:
            return next(self.batches, None)

    with onnx_file(model, x) as file:
        small = file.with_name("int8.onnx")
        kinds = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
        with quiet():
            quantize_static(file, small, Noise(), quant_format=QuantFormat.QDQ, per_channel=True, **kinds)
        yield small


def onnx_runtime_int8(model: nn.Module, x: Tensor, threads: int) -> Run:
    with quantized_file(model, x) as file:
        return _session_run(file, x, threads)


def openvino_int8(model: nn.Module, x: Tensor, threads: int) -> Run:
    with quantized_file(model, x) as file:
        return _openvino_run(file, x, threads)


def deepsparse(model: nn.Module, x: Tensor, threads: int) -> Run:
    from deepsparse import Engine

    with onnx_file(model, x) as file:
        engine = Engine(model=str(file), batch_size=len(x), num_cores=threads)
    images = [x.numpy()]
    return lambda: engine.run(images)[0]


DENSE: dict[str, Make] = {
    "torch": torch_eager,
    "torch compiled": torch_compiled,
    "onnxruntime": onnx_runtime,
    "openvino": openvino,
}
INT8: dict[str, Make] = {"onnxruntime int8": onnx_runtime_int8, "openvino int8": openvino_int8}
SPARSE: dict[str, Make] = {"ours": ours, "deepsparse": deepsparse}
