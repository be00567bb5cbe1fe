"""Wrong words on the command line: one line and exit code 2, and nothing is written."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from dcil import METHODS
from dcil.cli import main

TRAIN = ["train", "--epochs", "1", "--device", "cpu"]


def refused(words, capsys):
    assert main(words) == 2
    err = capsys.readouterr().err
    assert err.startswith("dcil: ") and err.count("\n") == 1
    return err


@pytest.mark.parametrize("option", ["--out", "--set", "--seed", "--model", "--data-dir", "--device", "--milestones"])
def test_two_dashes_are_no_value(option, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert "must have a value" in refused([*TRAIN, f"{option}=--"], capsys)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("text", ["1_000", "１", "٣", " 5 ", "5\n", "0x10", "1e3", "", "²", "1" * 5000])
@pytest.mark.parametrize("words", [[*TRAIN, "--seed"], ["bench", "step", "--rounds"], ["reproduce", "--seeds"]])
def test_whole_numbers_are_plain_digits(words, text, capsys):
    refused([*words, text], capsys)


@pytest.mark.parametrize("text", ["1_0.5", "．5", "0x1p3", " .5", "1e", "."])
def test_numbers_are_plain_digits(text, capsys):
    refused([*TRAIN, "--lr", text], capsys)


@pytest.mark.parametrize("words", [["report"], ["eval"], ["bench", "infer"], [*TRAIN, "--out"], ["sweep", "--list"]])
@pytest.mark.parametrize("path", ["", "a\0b"])
def test_an_empty_path_is_none(words, path, capsys):
    assert "must be a path" in refused([*words, path], capsys)


def test_links_in_a_circle_are_no_run(tmp_path, capsys):
    (tmp_path / "loop").symlink_to("loop")
    for words in (["report"], ["eval"], ["bench", "infer"], [*TRAIN, "--resume", "--out"]):
        refused([*words, str(tmp_path / "loop")], capsys)


@pytest.mark.parametrize("name", [".git", ".bashrc", "thesis.tex"])
def test_a_folder_with_anything_in_it_is_not_empty(name, tmp_path, capsys):
    (tmp_path / name).write_text("mine")
    assert name in refused([*TRAIN, "--out", str(tmp_path)], capsys)
    assert os.listdir(tmp_path) == [name]


def test_what_a_kill_has_left_is_nothing(tmp_path, capsys):
    (tmp_path / ".lock").touch()
    (tmp_path / ".config.json.1.part").touch()
    assert main([*TRAIN, "--batch", "400", "--out", str(tmp_path)]) == 0
    assert not [name for name in os.listdir(tmp_path) if name.startswith(".")]


@pytest.mark.parametrize("words", [["train", "--method", "dcil,dpf"], ["sweep", "--seeds", "0"]])
def test_the_report_of_runs_replaces_no_file_of_others(words, tmp_path, capsys):
    (tmp_path / "report.html").write_text("mine")
    assert "report.html is not of these runs" in refused([*words, "--epochs", "1", "--out", str(tmp_path)], capsys)


@pytest.mark.parametrize(
    ("one", "value"), [("seed", "0"), ("model", "resnet20"), ("method", "dpf"), ("sparsity", "0.5")]
)
def test_an_option_and_the_list_of_its_values_are_refused(one, value, tmp_path, capsys):
    several = "sparsities" if one == "sparsity" else f"{one}s"
    words = ["sweep", f"--{one}", value, f"--{several}", value, "--out", str(tmp_path / "out")]
    assert "give one of the two" in refused(words, capsys)


def test_a_benchmark_of_nothing_is_refused(capsys):
    refused(["bench", "infer", "--model", "none", "--no-forms"], capsys)


def test_rewinding_takes_whole_epochs():
    for to, epochs, steps in ((0.46, 10, 23), (0.05, 10, 391), (0.33, 7, 12)):
        rewind = METHODS["rewind"](sparsity=0.9, steps=epochs * steps, epoch_steps=steps, to=to, rounds=20)
        in_epochs = METHODS["rewind"](sparsity=0.9, steps=epochs, to=to, rounds=20)
        assert [phase.steps * steps for phase in in_epochs.phases()] == [phase.steps for phase in rewind.phases()]
        assert rewind.prunings[-1] < sum(phase.steps for phase in rewind.phases())


@pytest.mark.parametrize("program", [["-m", "dcil"], ["-c", "import sys; sys.argv = ['/bin/dcil']; import dcil"]])
def test_ctrl_c_while_importing_is_no_traceback(program, tmp_path):
    (tmp_path / "torch.py").write_text("import os, time; os.write(1, b'x'); time.sleep(60)")
    path = os.pathsep.join([str(tmp_path), *sys.path])
    process = subprocess.Popen(
        [sys.executable, *program, "list"],
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout.read(1) == b"x"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (-signal.SIGINT, b"")


def test_a_library_leaves_ctrl_c_alone():
    code = "import signal, dcil; assert signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    )


def test_the_second_ctrl_c_ends_the_process():
    code = (
        "import os, signal, sys, atexit; from dcil import cli; sys.argv = ['dcil', 'list']\n"
        "def run(words): os.kill(os.getpid(), signal.SIGINT)\n"
        "cli.run = run; atexit.register(lambda: os.kill(os.getpid(), signal.SIGINT)); sys.exit(cli.main())"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (-signal.SIGINT, b"dcil: interrupted\n")


def test_nothing_is_made_below_the_name_of_a_file_of_a_run(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").touch()
    for name in (".lock", "summary.json", "at3.safetensors"):
        for words in ([*TRAIN, "--out"], ["sweep", "--seeds", "0", "--epochs", "1", "--out"]):
            main([*words, str(tmp_path / name)])
            assert "file of the run itself" in capsys.readouterr().err
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
