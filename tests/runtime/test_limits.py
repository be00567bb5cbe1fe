"""Small files that ask for much: refused at once, in one line that names the limit and how to raise it."""

from __future__ import annotations

import os
import resource
import signal
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_plan_file import parts, sealed

from dcil_runtime import Network, Op, Plan, PlanError, load, write
from dcil_runtime.native import LIBRARY

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the native module is not built: make native")


def conv(tensor: int, channels: int, window: tuple[int, ...], kept: int = 1) -> Op:
    """A convolution that keeps its first weights."""
    index, weight = np.arange(kept, dtype=np.uint32), np.ones(kept, np.float32)
    arrays = {"index": index, "weight": weight, "bias": np.zeros(channels, np.float32)}
    return Op("conv", (tensor,), window, arrays=arrays)


def linear(tensor: int, outputs: int) -> Op:
    op = conv(tensor, outputs, (1, 1, 1, 1, 0, 0, 0, 0, 1, 1))
    op.kind = "linear"
    return op


def padded(pad: int, stride: int = 1, kernel: int = 3, dilation: int = 1) -> tuple[int, ...]:
    return (kernel, kernel, stride, stride, pad, pad, pad, pad, dilation, dilation)


HOSTILE = {
    "maximum over 1000 x 1000": Network((1, 2000, 2000), [Op("maxpool", (0,), padded(0, 1, 1000))]),
    "average over 1000 x 1000": Network((1, 1000, 1000), [Op("avgpool", (0,), padded(999, 1, 1000), count_pad=1)]),
    "windows of 300 in a row": Network((8, 600, 600), [Op("maxpool", (i,), padded(150, 1, 300)) for i in range(9)]),
    "much padding": Network((3, 8, 8), [conv(0, 4, padded(2047)), conv(1, 4, padded(2047, 500))]),
    "padding around single pixels": Network((16, 1, 1), [conv(i, 16, padded(2047, 4096, 1)) for i in range(20)]),
    "wide dilation": Network((1, 8, 8), [conv(0, 1, padded(4096, 1, 3, 4096))]),
    "wide dilation of a pool": Network((64, 9, 9), [Op("maxpool", (0,), padded(1000, 9, 3, 1000)) for _ in range(9)]),
    "linear layers of one weight": Network((1 << 14, 1, 1), [linear(i, 1 << 14) for i in range(9)]),
    "millions of channels": Network((1, 1, 1), [conv(0, 1 << 23, padded(0, 1, 1))]),
    "doubled again and again": Network((16, 64, 64), [Op("concat", (i, i)) for i in range(12)]),
    "many tensors": Network((1, 2, 2), [Op("map", (i,)) for i in range(9000)]),
    "many inputs": Network((1, 1, 1), [Op("concat", (0,) * 10_000) for _ in range(7)]),
    "many layers over a large image": Network((64, 1024, 1024), [conv(i, 64, padded(1), 36_000) for i in range(4)]),
}


def in_child(body: Callable[[], int], memory: int) -> int:
    """Fork with a limit on memory and on seconds; return the child's status."""
    pid = os.fork()
    if pid == 0:
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + memory, size + memory))
        signal.alarm(20)
        try:
            os._exit(body())
        finally:
            os._exit(99)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def refused(file: Path) -> int:
    begin = time.process_time()
    try:
        load(file, threads=2)
    except PlanError as error:
        quick = time.process_time() - begin < 5
        return 0 if "\n" not in str(error) and quick else 2
    return 1


@pytest.mark.parametrize("name", HOSTILE)
def test_small_files_that_ask_for_much_are_refused_before_it_is_allocated(name, tmp_path):
    file = tmp_path / "net.dcil"
    write(HOSTILE[name], file)
    assert in_child(lambda: refused(file), 300 << 20) == 0


@pytest.mark.parametrize("value", [0, 1])
def test_layers_that_share_one_array_count_each_time(value, tmp_path):
    file = tmp_path / "net.dcil"
    arrays = {"weight": np.ones((512, 512, 2, 2), np.float32), "bias": np.zeros(512, np.float32)}
    write(Network((512, 2, 2), [Op("conv", (0,), (2, 2, 1, 1, 0, 0, 1, 1, 1, 1), arrays=arrays)]), file)
    meta, data = parts(file)
    meta["ops"] = [{**meta["ops"][0], "inputs": [i]} for i in range(1000)]
    file.write_bytes(sealed(meta, data if value else bytes(len(data))))
    assert in_child(lambda: refused(file), 100 << 20) == 0


def honest() -> Network:
    return Network((3, 32, 32), [conv(0, 8, padded(1), 60), Op("maxpool", (1,), padded(1)), Op("mean", (2,))])


def test_a_refusal_names_the_limit_what_is_asked_for_and_the_way_out(tmp_path):
    write(honest(), tmp_path / "net.dcil")
    with pytest.raises(PlanError, match=r"asks for .* GiB of memory, more than the limit of .* GiB .*max_memory"):
        load(tmp_path / "net.dcil", max_memory=100_000)
    with pytest.raises(PlanError, match=r"one image takes .* multiply-adds, more than the limit of 1e\+04 .*max_work"):
        load(tmp_path / "net.dcil", max_work=10_000)
    with pytest.raises(PlanError, match=r"bytes, more than the limit of 100 .*max_memory"):
        load(tmp_path / "net.dcil", max_memory=100)
    assert load(tmp_path / "net.dcil", max_memory=None, max_work=None)(np.zeros((1, 3, 32, 32))).shape == (1, 8, 1, 1)


def test_a_batch_whose_output_is_beyond_the_limit_is_refused():
    plan = Plan(Network((1, 64, 64), [Op("map", (0,))]), max_memory=32 << 20, tune_seconds=0)
    assert plan(np.zeros((8, 1, 64, 64), np.float32)).shape == (8, 1, 64, 64)
    with pytest.raises(PlanError, match=r"output of 4096 images .*max_memory"):
        plan(np.zeros((4096, 1, 64, 64), np.float32))


def test_larger_groups_of_images_are_left_out_where_memory_is_short():
    x = np.random.default_rng(0).standard_normal((16, 3, 64, 64), np.float32)
    net = Network((3, 64, 64), [conv(0, 32, padded(1), 800), conv(1, 32, padded(1), 900)])
    plenty = Plan(net, tune_seconds=0)
    least = 8 << 20
    tight = Plan(net, tune_seconds=0, max_memory=least)
    assert np.allclose(plenty(x), tight(x), atol=1e-4)
    assert 0 < tight.memory <= least  # of the other, it depends on the machine which groups are worth trying


@pytest.mark.parametrize("limit", [0, -1, float("nan")])
def test_limits_that_are_none(limit):
    with pytest.raises(ValueError, match="max_memory must be > 0"):
        Plan(honest(), max_memory=limit)
    with pytest.raises(ValueError, match="max_work must be > 0"):
        Plan(honest(), max_work=limit)
