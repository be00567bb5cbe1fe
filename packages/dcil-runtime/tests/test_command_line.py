"""The command line: what is in a plan, how fast it is, and wrong input in one line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from make_files import FILES

from dcil_runtime import __version__, cli, instruction_set
from dcil_runtime.native import LIBRARY

pytestmark = pytest.mark.skipif(not LIBRARY.exists(), reason="the native module is not built: make native")
PLAN = str(FILES / "v1" / "classifier.dcil")
COMMAND = [sys.executable, "-m", "dcil_runtime"]


def test_info_says_what_is_in_the_file(capsys):
    assert cli.main(["info", PLAN]) == 0
    text = capsys.readouterr().out
    for line in (
        "a plan of format version 1, 7,413 bytes",
        "input     float32 n x 3 x 12 x 12",
        "output    float32 n x 10",
        f"runs with {instruction_set()}",
        'note      run: a "quoted" Ünïcode name',
        "operators 3 conv, 1 maxpool, 1 flatten, 1 linear",
    ):
        assert line in text
    assert " of 5,112 kept, 8" in text  # 3*8*9 + 8*16*9 + 16*16*9 + 144*10 weights


def test_several_inputs_and_outputs_are_shown_and_timed(capsys):
    tokens = str(FILES / "v2" / "text.dcil")
    assert cli.main(["info", tokens]) == cli.main(["bench", tokens, "--seconds", "0.01", "--tune-seconds", "0"]) == 0
    text = capsys.readouterr().out
    for line in ("input     int64 n x 9", "input     float32 n x 9", "output    float32 n x 9 x 12", "images/s"):
        assert line in text
    assert " -> 12 x 1 x 9" in text and "0 x 0" not in text


def test_info_as_json_is_that_of_the_plan(capsys):
    assert cli.main(["info", PLAN, "--json", "--isa", "portable"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["isa"] == "portable" and found["version"] == 1
    assert [op["kind"] for op in found["operators"]] == ["conv"] * 3 + ["maxpool", "flatten", "linear"]


def test_bench_measures_each_batch_size(capsys):
    words = ["bench", PLAN, "--batch", "1,3", "--seconds", "0.02", "--tune-seconds", "0"]
    assert cli.main([*words, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["batch"] for row in found["batches"]] == [1, 3]
    for row in found["batches"]:
        assert 0 < row["least_ms"] <= row["median_ms"] and row["calls"] >= 5
        assert row["images_per_second"] == pytest.approx(1000 * row["batch"] / row["median_ms"])
    assert cli.main([*words, "--steps", "--threads", "2"]) == 0
    text = capsys.readouterr().out
    assert "2 threads" in text and "batch 3:\n" in text and "linear" in text


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ([], "a command must be given"),
        (["explain"], "invalid choice: 'explain'"),
        (["info", "nowhere.dcil"], "nowhere.dcil: No such file"),
        (["info", __file__], "is not a usable plan: it does not begin like one"),
        (["info", PLAN, "--isa", "mmx"], "does not run 'mmx'"),
        (["bench", PLAN, "--batch", "0"], "numbers from 1 on"),
        (["bench", PLAN, "--batch", "1,"], "numbers from 1 on"),
        (["bench", PLAN, "--threads", "0"], "threads must be >= 1"),
        (["bench", PLAN, "--seconds", "nan"], "--seconds must be > 0"),
        (["bench", PLAN, "--tune-seconds", "-1"], "--tune-seconds must be >= 0"),
    ],
)
def test_wrong_input_is_refused_in_one_line(words, why, capsys):
    assert cli.main(words) == 2
    error = capsys.readouterr().err
    assert why in error and error.startswith("dcil-runtime: ") and error.count("\n") == 1


def test_it_runs_as_a_module_and_ends_with_the_reader():
    shown = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, check=True)
    assert shown.stdout == f"dcil-runtime {__version__}\n"
    piped = subprocess.run(
        f"'{sys.executable}' -m dcil_runtime info '{PLAN}' | true", shell=True, capture_output=True, text=True
    )
    assert piped.stderr == ""


def test_an_interrupt_ends_it_without_a_traceback():
    process = subprocess.Popen([*COMMAND, "bench", PLAN, "--seconds", "60"], stderr=subprocess.PIPE, text=True)
    time.sleep(1.5)
    os.kill(process.pid, signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130 and error == "dcil-runtime: interrupted\n"
