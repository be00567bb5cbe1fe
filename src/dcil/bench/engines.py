"""Adapt the installed inference engines to one call."""

from __future__ import annotations

import contextlib
import copy
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dcil.export.onnx import session, write_onnx
from dcil.export.program import quiet

#: Runs the batch once, or another of its size, and returns the output.
Run = Callable[..., Any]
#: An engine is made of the network, the batch, a number of threads and, in int8, images to calibrate on.
Make = Callable[[nn.Module, Tensor, int, Tensor], Run]


def ours(model: nn.Module, x: Tensor, threads: int, images: Tensor) -> Run:
    from dcil.runtime import compile_plan  # needs the extra `cpu`

    plan, batch = compile_plan(model, x[:1], threads), x.numpy()
    plan.prepare(len(batch))
    return lambda x=batch: plan(x)


def ours_int8(model: nn.Module, x: Tensor, threads: int, images: Tensor) -> Run:
    from dcil.runtime import Plan
    from dcil.runtime.lower import lower
    from dcil.runtime.quantize import calibrated, layers_of, quantized

    network = lower(model, x[:1])
    every = quantized(network, calibrated(network, images.numpy()), layers_of(network))
    plan, batch = Plan(every, threads, max_memory=None, max_work=None), x.numpy()
    plan.prepare(len(batch))
    return lambda x=batch: plan(x)


def torch_eager(model: nn.Module, x: Tensor, threads: int, images: Tensor) -> Run:
    order = torch.channels_last if x.ndim == 4 else torch.contiguous_format
    last = copy.deepcopy(model).to(memory_format=order)  # type: ignore[call-overload]
    batch = x.contiguous(memory_format=order)

    def run() -> Any:
        with torch.inference_mode():
            return last(batch).numpy()

    return run


def torch_compiled(model: nn.Module, x: Tensor, threads: int, images: Tensor) -> Run:
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
    opened, batch = session(file, threads), x.numpy()
    return lambda x=batch: opened.run(None, {"input": x})[0]


def onnx_runtime(model: nn.Module, x: Tensor, threads: int, images: Tensor) -> Run:
    with onnx_file(model, x) as file:
        return _session_run(file, x, threads)


def _openvino_run(file: Path, x: Tensor, threads: int) -> Run:
    import openvino

    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "NUM_STREAMS": 1}
    core = openvino.Core()
    request = core.compile_model(core.read_model(file), "CPU", settings).create_infer_request()
    batch = x.numpy()

    def run(x: Any = batch) -> Any:
        request.infer({0: x}, share_inputs=True, share_outputs=True)
        return request.get_output_tensor(0).data

    return run


def openvino(model: nn.Module, x: Tensor, threads: int, images: Tensor) -> Run:
    with onnx_file(model, x) as file:
        return _openvino_run(file, x, threads)


@contextlib.contextmanager
def quantized_file(model: nn.Module, x: Tensor, images: Tensor) -> Iterator[Path]:
    """The model in static INT8 (per channel), calibrated on images, in batches of the size of ``x``."""
    from onnxruntime.quantization import (  # type: ignore[import-untyped]
        CalibrationDataReader,
        QuantFormat,
        QuantType,
        quantize_static,
    )

    whole = torch.cat([images] * -(-len(x) // len(images)))  # at least one batch

    class Images(CalibrationDataReader):  # type: ignore[misc]
        batches = ({"input": whole[i : i + len(x)].numpy()} for i in range(0, len(whole) // len(x) * len(x), len(x)))

        def get_next(self) -> Any:
            return next(self.batches, None)

    with onnx_file(model, x) as file:
        small = file.with_name("int8.onnx")
        kinds = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
        with quiet():
            quantize_static(file, small, Images(), quant_format=QuantFormat.QDQ, per_channel=True, **kinds)
        yield small


def onnx_runtime_int8(model: nn.Module, x: Tensor, threads: int, images: Tensor) -> Run:
    with quantized_file(model, x, images) as file:
        return _session_run(file, x, threads)


def openvino_int8(model: nn.Module, x: Tensor, threads: int, images: Tensor) -> Run:
    with quantized_file(model, x, images) as file:
        return _openvino_run(file, x, threads)


def deepsparse(model: nn.Module, x: Tensor, threads: int, images: Tensor) -> Run:
    from deepsparse import Engine

    with onnx_file(model, x) as file:
        engine = Engine(model=str(file), batch_size=len(x), num_cores=threads)
    batch = [x.numpy()]
    return lambda: engine.run(batch)[0]


DENSE: dict[str, Make] = {
    "torch": torch_eager,
    "torch compiled": torch_compiled,
    "onnxruntime": onnx_runtime,
    "openvino": openvino,
}
INT8: dict[str, Make] = {"onnxruntime int8": onnx_runtime_int8, "openvino int8": openvino_int8}
QUANTIZED = ("ours int8", *INT8)
SPARSE: dict[str, Make] = {"ours": ours, "ours int8": ours_int8, "deepsparse": deepsparse}
