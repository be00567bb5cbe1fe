"""Plans in forked children: they run to the same bits, are freed, and nobody waits for a thread that is not there."""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch

from dcil import models
from dcil.runtime.lower import lower
from dcil_runtime import Network, Plan
from dcil_runtime.native import LIBRARY

pytestmark = [
    pytest.mark.skipif(not LIBRARY.exists(), reason="the native module is not built: make native"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork.*:DeprecationWarning"),
]
SECONDS = 30
X = np.random.default_rng(0).standard_normal((17, 3, 16, 16), np.float32)


@functools.cache
def network() -> Network:
    torch.manual_seed(0)
    return lower(models.build("resnet8-digits").eval(), torch.randn(1, 3, 16, 16))


def make_plan(tune_seconds: float = 0.1) -> Plan:
    return Plan(network(), 2, tune_seconds=tune_seconds)


@pytest.fixture
def plan() -> Iterator[tuple[Plan, dict[int, np.ndarray]]]:
    """A plan with two threads that was called, and what it returned by batch size."""
    made = make_plan()
    yield made, {n: made(X[:n]) for n in (1, 5, 17)}


def passes_in_child(body: Callable[[], bool]) -> bool:
    """Fork, and return whether ``body`` returned True there in time; the kernel ends a child that hangs."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(SECONDS)
        try:
            os._exit(0 if body() else 1)
        finally:
            os._exit(2)
    return os.waitpid(pid, 0)[1] == 0


def same(plan: Plan, want: dict[int, np.ndarray]) -> bool:
    return all(np.array_equal(plan(X[:n]), want[n]) for n in want)


def test_a_child_computes_the_same_bits_and_so_does_the_parent_afterwards(plan):
    for _ in range(5):
        assert passes_in_child(lambda: same(*plan) and same(*plan))
        assert same(*plan)


def test_a_fork_of_a_fork(plan):
    assert passes_in_child(lambda: same(*plan) and passes_in_child(lambda: same(*plan)) and same(*plan))
    assert passes_in_child(lambda: passes_in_child(lambda: same(*plan)))


def test_a_child_frees_the_plan_before_or_after_a_call():
    plan = [make_plan()]
    want = plan[0](X)

    def free() -> bool:
        plan.clear()
        gc.collect()
        return True

    assert passes_in_child(free)
    assert passes_in_child(lambda: np.array_equal(plan[0](X), want) and free())
    assert np.array_equal(plan[0](X), want)


def test_a_child_prepares_what_the_parent_has_not():
    plan = make_plan(0.02)
    plan(X[:1])
    assert passes_in_child(lambda: plan(X).shape == (17, 10) and "conv" in plan.describe(17) and plan.memory > 0)


def test_forks_while_other_threads_are_in_calls(plan):
    done, wrong = threading.Event(), []

    def caller(n: int) -> None:
        while not done.is_set():
            if not np.array_equal(plan[0](X[:n]), plan[1][n]):
                wrong.append(n)

    callers = [threading.Thread(target=caller, args=(n,)) for n in (1, 5, 17)]
    for thread in callers:
        thread.start()
    try:
        results = [passes_in_child(lambda: same(*plan)) for _ in range(12)]
    finally:
        done.set()
        for thread in callers:
            thread.join()
    assert all(results) and not wrong


def test_a_fork_during_the_first_call_waits_for_its_tuning_and_gets_the_same_bits():
    plan, found = make_plan(0.3), []
    first = threading.Thread(target=lambda: found.append(plan(X)))
    read, write = os.pipe()
    first.start()
    time.sleep(0.1)  # somewhere in its tuning
    assert passes_in_child(lambda: os.write(write, plan(X).tobytes()) > 0)
    first.join(SECONDS)
    assert os.read(read, 1 << 16) == found[0].tobytes()


def test_other_threads_may_make_and_free_plans_meanwhile():
    network()
    done = threading.Event()

    def busy() -> None:
        while not done.is_set():
            make_plan(0)(X[:1])

    thread = threading.Thread(target=busy)
    thread.start()
    try:
        assert all(passes_in_child(lambda: make_plan(0)(X[:1]).shape == (1, 10)) for _ in range(4))
    finally:
        done.set()
        thread.join()


class Calls(torch.utils.data.Dataset):
    """A data set whose items a plan computes: loaders fork with it."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.from_numpy(self.plan(X[i : i + 1])[0])


def test_workers_of_a_data_loader_call_the_parents_plan(plan):
    loader = torch.utils.data.DataLoader(
        Calls(plan[0]), batch_size=4, num_workers=2, multiprocessing_context="fork", timeout=SECONDS
    )
    want = np.concatenate([plan[0](X[i : i + 1]) for i in range(len(X))])
    for _ in range(2):
        assert np.array_equal(torch.cat(list(loader)).numpy(), want)


def test_a_pool_of_forked_processes(plan):
    with multiprocessing.get_context("fork").Pool(2, same_in_pool, plan) as pool:
        assert pool.map_async(same_in_pool, [None] * 4).get(SECONDS) == [True] * 4


def same_in_pool(*given: object) -> bool:
    if len(given) == 2:
        same_in_pool.plan = given
    return same(*same_in_pool.plan)


@pytest.mark.parametrize(
    "ending", ["sys.exit(0)", "del plan; sys.exit(0)", "threading.Thread(target=plan, args=(x,)).start()"]
)
def test_a_child_exits_like_any_process(ending):
    """With Python's finalisation, atexit and static destructors; the parent goes on and exits too."""
    script = f"""
        import os, signal, sys, threading
        import numpy as np
        from dcil_runtime import Network, Op, Plan
        rng = np.random.default_rng(0)
        arrays = {{"weight": rng.standard_normal((8, 3, 3, 3), np.float32), "bias": np.zeros(8, np.float32)}}
        plan = Plan(Network((3, 9, 9), [Op("conv", (0,), arrays=arrays, window=(3, 3, 1, 1, 1, 1, 1, 1, 1, 1))]), 2)
        x = rng.standard_normal((16, 3, 9, 9), np.float32)
        want = plan(x)
        pid = os.fork()
        if pid == 0:
            signal.alarm({SECONDS})
            assert np.array_equal(plan(x), want)
            {ending}
        else:
            status = os.waitpid(pid, 0)[1]
            assert np.array_equal(plan(x), want)
            sys.exit(status != 0)
    """
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(LIBRARY.parents[1]), *sys.path])}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(script)]
    assert subprocess.run(command, env=environment, timeout=2 * SECONDS, check=False).returncode == 0
