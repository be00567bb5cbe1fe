"""dcil report --watch: rebuilt when there is news, refreshed by browsers only while it is watched."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from run_folders import make_run

from dcil.cli import main
from dcil.errors import UserError
from dcil.report.watch import watch

REFRESH = '<meta http-equiv="refresh" content="7">'


def script(out: Path, steps: list[Callable[[], object]], pages: list[str]) -> Callable[[float], None]:
    """A sleep that keeps the page as it is and does the next step."""

    def sleep(seconds: float) -> None:
        assert seconds == 7
        pages.append(out.read_text(encoding="utf-8"))
        steps.pop(0)()

    return sleep


def go_on(run: Path, done: int | None) -> None:
    if run.exists():
        shutil.rmtree(run)
    make_run(run, done=done)


def test_a_run_is_followed_from_before_it_exists_to_its_end(tmp_path: Path) -> None:
    run, out, pages = tmp_path / "run", tmp_path / "report.html", []
    steps = [
        lambda: run.mkdir(),
        lambda: (run / ".lock").touch(),
        lambda: go_on(run, 0),
        lambda: go_on(run, 2),
        lambda: go_on(run, None),
    ]
    (done,) = watch([run], out, 7, script(out, steps, pages))
    assert done.complete and not steps
    assert all(REFRESH in page for page in pages)
    assert [f"Waiting for {run}" in page for page in pages] == [True, True, True, False, False]
    assert "epoch 0 of 6" in pages[3] and "epoch 2 of 6" in pages[4]
    last = out.read_text(encoding="utf-8")
    assert "refresh" not in last and "unfinished" not in last and "Test accuracy by epoch" in last


def test_nothing_is_drawn_without_news(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, out, pages = make_run(tmp_path / "run", done=2), tmp_path / "report.html", []
    written: list[Path] = []
    from dcil.report import run_report

    real = run_report.write

    def counted(*args: object) -> None:
        written.append(out)
        real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(run_report, "write", counted)
    watch([run], out, 7, script(out, [lambda: None, lambda: None, lambda: go_on(run, None)], pages))
    assert len(pages) == 3 and len(written) == 2


def test_an_interrupt_leaves_a_page_that_is_not_refreshed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(seconds: float) -> None:
        assert seconds == 7 and REFRESH in out.read_text()
        raise KeyboardInterrupt

    run, out = make_run(tmp_path / "run", done=2), tmp_path / "report.html"
    monkeypatch.setattr("dcil.cli.report.watch", partial(watch, sleep=interrupt))
    assert main(["report", str(run), str(tmp_path / "later"), "--out", str(out), "--watch", "7"]) == 130
    text = out.read_text()
    assert "refresh" not in text and "epoch 2 of 6" in text and f"Waiting for {tmp_path / 'later'}" in text


def test_complete_runs_end_it_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = make_run(tmp_path / "run"), tmp_path / "report.html"
    assert main(["report", str(run), "--out", str(out), "--watch"]) == 0
    assert "refresh" not in out.read_text() and f"report: {out}" in capsys.readouterr().out


def test_damage_ends_it_in_one_line(tmp_path: Path) -> None:
    run, out, pages = make_run(tmp_path / "run", done=2), tmp_path / "report.html", []
    with pytest.raises(UserError, match=r"config\.json"):
        watch([run], out, 7, script(out, [lambda: (run / "config.json").write_text("{")], pages))
    assert "refresh" not in out.read_text()


@pytest.mark.parametrize("given", ["0", "x", "-1", "1e9"])
def test_wrong_seconds_are_refused(given: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = make_run(tmp_path / "run")
    assert main(["report", str(run), "--out", str(tmp_path / "r.html"), "--watch", given]) == 2
    assert capsys.readouterr().err.count("\n") == 1 and not (tmp_path / "r.html").exists()
