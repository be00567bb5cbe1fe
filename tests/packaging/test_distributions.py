"""The wheels as a stranger gets them: built from the tree, installed into empty environments, used there."""

from __future__ import annotations

import tarfile
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from environments import TREE, Environment, build

from dcil import cli, models
from dcil.runtime import NativeMissing, export_plan, instruction_set

RUNTIME = TREE / "packages" / "dcil-runtime"
BASE = ("torch", "numpy", "safetensors", "rich")

FIVE_LINES = """
import torch, dcil

model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(288, 5))
net = dcil.SparseNet(model, dcil.DCIL(sparsity=0.5, steps=4))
opt = torch.optim.SGD(net.parameters(), lr=0.1)
for _ in range(8):
    x, y = torch.randn(4, 3, 8, 8), torch.randint(5, (4,))
    loss = net.loss(net(x), y)
    opt.zero_grad(); loss.backward(); opt.step()
    net.step(opt)
sparse = net.finalize()
print(type(sparse).__name__, net.sparsity, int((sparse[0].weight == 0).sum()))
"""

#: CIFAR-10 replaced by noise: the real one would be downloaded, which needs an extra; reading and training do not.
TRAIN = """
import sys, torch
from dcil import cli, data
from dcil.data import Dataset, Split

def noise(data_dir, fetch):
    splits = [Split(torch.randint(256, (n, 3, 32, 32), dtype=torch.uint8), torch.arange(n) % 10) for n in (32, 16)]
    return Dataset("cifar10", *splits, 10, (0.5,) * 3, (0.25,) * 3, pad=4, flip=True)

data.DATASETS["cifar10"] = noise
sys.exit(cli.main(["train", "--dataset", "cifar10", "--epochs", "1", "--batch", "16", "--out", "noise"]))
"""

#: Runs net.dcil on x.npy and compares with y.npy, where neither torch nor dcil can be imported.
RUN_PLAN = """
import importlib.util
import numpy as np, dcil_runtime

assert not any(importlib.util.find_spec(name) for name in ("torch", "dcil", "safetensors", "rich"))
plan = dcil_runtime.load("net.dcil", threads=2, tune_seconds=0.05)
print(np.abs(plan(np.load("x.npy")) - np.load("y.npy")).max())
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A finished run, made by the full install."""
    folder = tmp_path_factory.mktemp("full") / "run"
    words = ["--recipe", "digits", "--epochs", "1", "--out", str(folder)]
    assert cli.main(["train", *words]) == 0
    return folder


def plan_and_outputs(folder: Path) -> None:
    """Write a CPU plan, inputs, and what torch computes from them."""
    torch.manual_seed(0)
    model = models.build("resnet20").eval()
    with torch.no_grad():
        for weight in (p for p in model.parameters() if p.ndim == 4):
            weight *= torch.rand_like(weight) < 0.2
        x = torch.randn(5, 3, 32, 32)
        np.save(folder / "y.npy", model(x).numpy())
    np.save(folder / "x.npy", x.numpy())
    export_plan(model, x[:1], folder / "net.dcil")


def names(wheel: Path) -> set[str]:
    return set(zipfile.ZipFile(wheel).namelist())


def use_base(env: Environment, run: Path, folder: Path) -> None:
    """Use dcil as far as its base install goes, and meet every extra that it asks for."""
    done = env.run("python", "-c", FIVE_LINES, cwd=folder)
    assert done.stdout.split() == ["Sequential", "0.5", "108"], done.stderr
    for words in (["list"], ["--help"]):
        assert env.run("dcil", *words).returncode == 0
    trained = env.run("python", "-c", TRAIN, cwd=folder)
    assert trained.returncode == 0, trained.stderr
    assert (folder / "noise" / "model.safetensors").exists() and not (folder / "noise" / "report.html").exists()
    assert "dcil[report]" in trained.stdout + trained.stderr
    for to in ("safetensors", "compact"):
        assert env.run("dcil", "export", run, "--to", to, "--out", folder / to).returncode == 0
    for extra, words in {
        "data": ["train", "--recipe", "digits", "--epochs", "1", "--out", folder / "digits"],
        "cpu": ["export", run, "--to", "cpu", "--out", folder / "net.dcil"],
        "onnx": ["export", run, "--to", "onnx", "--out", folder / "net.onnx"],
        "report": ["report", run, "--out", folder / "report.html"],
    }.items():
        asked = env.run("dcil", *words)
        assert asked.returncode == 2, asked.stderr
        assert f"pip install 'dcil[{extra}]'" in asked.stderr and asked.stderr.strip().count("\n") == 0, asked.stderr


def use_runtime(env: Environment, folder: Path) -> None:
    plan_and_outputs(folder)
    done = env.run("python", "-c", RUN_PLAN, cwd=folder)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 1e-4


def test_dcil_in_an_environment_with_its_base_dependencies_only(tmp_path, run):
    (wheel,) = build(TREE, tmp_path / "dist", "--wheel")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert {"dcil/py.typed", "dcil/net.py"} <= names(wheel)
    assert not any(name.startswith(("dcil_runtime", "tests")) for name in names(wheel))
    env = Environment(tmp_path / "env")
    env.borrow(*BASE)
    env.install("--no-index", wheel)  # fails if it depends on anything else
    use_base(env, run, tmp_path)


def test_dcil_runtime_in_an_environment_with_numpy_only(tmp_path):
    try:
        instruction_set()
    except NativeMissing as error:
        pytest.skip(str(error))
    (wheel,) = build(RUNTIME, tmp_path / "dist", "--wheel")
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    assert {"dcil_runtime/py.typed", "dcil_runtime/libdcil_runtime.so"} <= names(wheel)
    env = Environment(tmp_path / "env")
    env.borrow("numpy")
    env.install("--no-index", wheel)
    use_runtime(env, tmp_path)


def test_both_carry_the_same_licence():
    assert (RUNTIME / "LICENSE").read_bytes() == (TREE / "LICENSE").read_bytes()


@pytest.mark.slow
def test_source_distributions_and_a_real_install_of_the_wheels_built_from_them(tmp_path, run):
    """What make dist does, then pip with all its downloads: takes minutes and a network."""
    dist = tmp_path / "dist"
    build(RUNTIME, dist)  # without options: a source distribution, and a wheel from it
    build(TREE, dist)
    ours, theirs = sorted(dist.glob("*.tar.gz"))
    assert {"LICENSE", "native/kernels.cpp", "native/build.py", "src/dcil_runtime/plan.py"} <= contents(theirs)
    assert {"LICENSE", "README.md", "src/dcil/net.py", "src/dcil/py.typed"} <= contents(ours)
    for package, use in (("dcil", lambda env, folder: use_base(env, run, folder)), ("dcil-runtime", use_runtime)):
        folder = tmp_path / package
        folder.mkdir()
        env = Environment(folder / "env")
        env.install("--find-links", dist, "--constraint", "constraints.txt", package)
        use(env, folder)
    env = Environment(tmp_path / "all")
    env.install("--find-links", dist, "--constraint", "constraints.txt", "dcil[all]")
    assert env.run("dcil", "train", "--recipe", "digits", "--epochs", "1", "--out", tmp_path / "digits").returncode == 0
    for to in ("cpu", "onnx"):
        assert env.run("dcil", "export", run, "--to", to, "--out", tmp_path / to).returncode == 0


def contents(sdist: Path) -> set[str]:
    with tarfile.open(sdist) as tar:
        return {name.partition("/")[2] for name in tar.getnames()}
