"""Train, export in each format, load in a new process that has only what the format asks for: no image differs."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dcil import data
from dcil.cli import main
from dcil.export import FORMATS, PROGRAMS
from dcil.train import RunFolder
from dcil.train.restore import load_net
from dcil_runtime import NativeMissing, instruction_set

pytestmark = pytest.mark.filterwarnings("ignore:these layers lost")
RUNS = {"filter": "0.5", "weight": "0.95", "2:4": "0.5"}
DCIL = ["dcil"]
TORCH = ["torch", "torchvision"]
#: What dcil as a whole uses, and reading a file does not.
REST = ["rich", "matplotlib", "sklearn", "jinja2", "pooch", "PIL", "onnx", "onnxscript", "onnxruntime"]

#: The network as somebody else would have it in a file of their own: torch and nothing of dcil.
NETWORK = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self, a, b, stride):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b)
        self.conv2, self.bn2 = nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b)
        if a != b:
            self.downsample = nn.Sequential(nn.Conv2d(a, b, 1, stride, bias=False), nn.BatchNorm2d(b))

    def forward(self, x):
        out = self.bn2(self.conv2(self.bn1(self.conv1(x)).relu()))
        return (out + (self.downsample(x) if hasattr(self, 'downsample') else x)).relu()

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 12, 3, 1, 1, bias=False), nn.BatchNorm2d(12)
        blocks = Block(12, 12, 1), Block(12, 24, 2), Block(24, 48, 2)
        self.layer1, self.layer2, self.layer3 = (nn.Sequential(block) for block in blocks)
        self.fc = nn.Linear(48, 10)

    def forward(self, x):
        return self.fc(self.layer3(self.layer2(self.layer1(self.bn1(self.conv1(x)).relu()))).mean((2, 3)))

net = Net().eval()
def run(net):
    with torch.no_grad():
        return net(torch.from_numpy(images)).numpy()
"""


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run of each granularity, the test images, and what the masked networks say of them in this process."""
    folder = tmp_path_factory.mktemp("roundtrip")
    images = torch.cat([x for x, _ in held_out(folder)])
    np.save(folder / "images.npy", images.numpy())
    for name, sparsity in RUNS.items():
        words = ["train", "--epochs", "3", "--batch", "64", "--granularity", name, "--sparsity", sparsity]
        words += ["--set", "scope=uniform"] if name == "filter" else []  # dead filters in every layer
        assert main([*words, "--method", "dcil", "--out", str(folder / name)]) == 0
        np.save(folder / f"{name}.npy", answers(folder, name))
    return folder


def held_out(folder):
    return data.load("digits", folder).loader(256, torch.device("cpu"), 0).test()


def masked(runs, name):
    return load_net(RunFolder(runs / name)).finalize()


@torch.no_grad()
def answers(runs, name):
    return masked(runs, name)(torch.from_numpy(np.load(runs / "images.npy"))).numpy()


def exported(runs, name, to, file, *words):
    assert main(["export", str(runs / name), "--to", to, "--out", str(runs / file), *words]) == 0


def elsewhere(runs, blocked, script):
    """What ``script`` leaves in ``out``, in a new process that cannot import ``blocked``."""
    before = f"""
        import sys
        sys.modules |= dict.fromkeys({blocked!r})
        import numpy as np
        images = np.load('images.npy')
    """
    after = f"""
        assert all(sys.modules.get(name) is None for name in {blocked!r})
        np.save('out.npy', np.asarray(out))
    """
    code = "\n".join(map(textwrap.dedent, (before, script, after)))
    done = subprocess.run([sys.executable, "-c", code], cwd=runs, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return np.load(runs / "out.npy")


def assert_same(found, want, tolerance):
    assert found.shape == want.shape == (360, 10)
    assert (found.argmax(1) == want.argmax(1)).all()  # to the last image
    assert np.abs(found - want).max() <= tolerance


@pytest.mark.parametrize("name", RUNS)
def test_the_networks_have_learned_something_to_compare(runs, name):
    labels = torch.cat([y for _, y in held_out(runs)]).numpy()
    predicted = np.load(runs / f"{name}.npy").argmax(1)
    assert len(set(predicted)) == 10
    assert (predicted == labels).mean() > 0.6


def test_torch_needs_torch_alone(runs):
    exported(runs, "filter", "torch", "m.pt")
    script = NETWORK + "net.load_state_dict(torch.load('m.pt', weights_only=True))\nout = run(net)"
    assert_same(elsewhere(runs, [*DCIL, *REST, "safetensors"], script), np.load(runs / "filter.npy"), 1e-5)


def test_safetensors_needs_torch_and_safetensors_alone(runs):
    exported(runs, "weight", "safetensors", "m.safetensors")
    script = (
        NETWORK
        + "from safetensors.torch import load_file\nnet.load_state_dict(load_file('m.safetensors'))\nout = run(net)"
    )
    assert_same(elsewhere(runs, [*DCIL, *REST], script), np.load(runs / "weight.npy"), 1e-5)
    # This comparison can fail: another network is noticed.
    state = load_file(runs / "m.safetensors")
    state["bn1.bias"][0] += 3
    save_file(state, runs / "m.safetensors")
    with pytest.raises(AssertionError):
        assert_same(elsewhere(runs, DCIL, script), np.load(runs / "weight.npy"), 1e-5)


def test_compact_needs_torch_alone(runs):
    exported(runs, "filter", "compact", "m.pt2")
    script = """
        import torch
        net = torch.export.load('m.pt2').module()
        out = torch.cat([net(torch.from_numpy(part)) for part in np.array_split(images, 7)]).detach()
        assert sum(p.numel() for p in net.parameters()) < 22_000  # of 44,150
        assert 'aten.pad' in str(net.graph)  # there are constants that end at a padded edge
    """
    assert_same(elsewhere(runs, [*DCIL, *REST, "safetensors"], script), np.load(runs / "filter.npy"), 1e-5)


def test_sparse_needs_one_call_in_every_precision(runs):
    kinds = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
    for kind in kinds:
        exported(runs, "weight", "sparse", f"m.{kind}", "--dtype", kind)
    load = "from dcil.export import load_sparse\n"
    script = NETWORK + load + f"out = [run(load_sparse(f'm.{{kind}}', Net()).eval()) for kind in {list(kinds)}]"
    found = elsewhere(runs, REST, script)
    images = torch.from_numpy(np.load(runs / "images.npy"))
    for out, (kind, dtype) in zip(found, kinds.items(), strict=True):
        rounded = masked(runs, "weight")
        for parameter in rounded.parameters():
            if parameter.ndim > 1:
                parameter.data = parameter.data.to(dtype).float()
        with torch.no_grad():
            assert_same(out, rounded(images).numpy(), 1e-5)
        if kind == "fp32":
            assert_same(out, np.load(runs / "weight.npy"), 1e-5)


def test_semi_structured_needs_one_call(runs):
    exported(runs, "2:4", "semi-structured", "m.24")
    load = "from dcil.export import load_semi\n"
    found = elsewhere(runs, REST, NETWORK + load + "out = run(load_semi('m.24', net))")
    assert_same(found, np.load(runs / "2:4.npy"), 1e-5)


@pytest.mark.parametrize("name", ["filter", "weight"])
def test_cpu_needs_numpy_alone(runs, name):
    """Batches of several sizes, and one image at a time."""
    try:
        instruction_set()
    except NativeMissing as error:
        pytest.skip(str(error))
    exported(runs, name, "cpu", "m.cpu")
    script = """
        import dcil_runtime
        net = dcil_runtime.load('m.cpu')
        parts = [*np.array_split(images[:300], 7), *np.array_split(images[300:], 60)]
        out = np.concatenate([np.array(net(part)) for part in parts])
    """
    blocked = [*DCIL, *REST, *TORCH, "safetensors"]
    assert_same(elsewhere(runs, blocked, script), np.load(runs / f"{name}.npy"), 1e-4)


def test_onnx_needs_onnxruntime_alone(runs):
    pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    exported(runs, "filter", "onnx", "masked.onnx")
    exported(runs, "filter", "onnx", "small.onnx", "--compact")
    assert (runs / "small.onnx").stat().st_size < 0.7 * (runs / "masked.onnx").stat().st_size
    script = """
        import onnxruntime
        out = []
        for file in ('masked.onnx', 'small.onnx'):
            session = onnxruntime.InferenceSession(file)
            notes = session.get_modelmeta().custom_metadata_map
            assert notes['method'] == 'dcil' and 0.2 < float(notes['sparsity']) < 1 and notes['run'] == 'filter', notes
            parts = np.array_split(images, 7)
            out.append(np.concatenate([session.run(None, {'input': part})[0] for part in parts]))
    """
    blocked = [*DCIL, *TORCH, "safetensors", "onnxscript"]
    for out in elsewhere(runs, blocked, script):
        assert_same(out, np.load(runs / "filter.npy"), 1e-4)


def test_no_format_was_forgotten():
    """A new format needs a test here."""
    assert {*FORMATS, *PROGRAMS} == {"torch", "safetensors", "sparse", "semi-structured", "compact", "onnx", "cpu"}
