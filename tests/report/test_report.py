"""Reports from generated run folders: what they say, what they refuse, and that they say it the same way twice."""

from __future__ import annotations

import errno
import io
import math
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from run_folders import LAYERS, make_run

from dcil.errors import UserError
from dcil.report import build, read_run, read_runs, run_table, summarise
from dcil.report.formatting import duration
from dcil.report.page import Heading, Paragraph, Table, TableRow, html, markdown


class Page(HTMLParser):
    """The page as a browser sees it: its tags, its attributes, its text; and its tags must close in order."""

    VOID = frozenset({"meta", "br", "path", "use", "rect"})

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(file.read_text(encoding="utf-8"))
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(key, value or "") for key, value in attrs]
        if tag not in self.VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] != ["style"]:
            self.text += data


def page(folders: list[Path], out: Path) -> Page:
    build(folders, out)
    return Page(out)


def test_summarise_takes_the_last_tenth() -> None:
    top1 = [10.0] * 80 + [90.0] + [50.0] * 9 + [60.0, 70.0] * 5
    assert summarise(top1) == {"last": 70.0, "best": 90.0, "best_epoch": 81, "std": 5.0}


@pytest.mark.parametrize(("top1", "std"), [([80.0], 0.0), ([80.0, 90.0], 5.0), ([0.0] * 18 + [80.0, 90.0], 5.0)])
def test_summarise_uses_two_epochs_or_what_there_is(top1: list[float], std: float) -> None:
    assert summarise(top1)["std"] == std


def test_summarise_refuses_nothing() -> None:
    with pytest.raises(ValueError, match="at least one epoch"):
        summarise([])


def test_one_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "only", lost=LAYERS[4], notes=("the learning rate was clipped",))
    seen = page([folder], tmp_path / "new" / "report.html")
    for expected in (
        "small on digits: 1 run", "only", "90.00 %", "2 min 05 s", "2.13.0", "the learning rate was clipped",
        "Test accuracy by epoch", "Sparsity by epoch",
        "Mask flips per update", "Sparsity by layer: small", "1 note", '"granularity"',
    ):  # fmt: skip
        assert expected in seen.text
    assert "mean ±" not in seen.text.split("their seed.")[1].split("Test accuracy by epoch")[0]
    assert not [file for file in (tmp_path / "new").iterdir() if file.name != "report.html"]


def test_a_dense_run_alone_shows_only_its_accuracy(tmp_path: Path) -> None:
    seen = page([make_run(tmp_path / "dense", "dense")], tmp_path / "report.html")
    assert "Test accuracy by epoch" in seen.text
    assert "super path" not in seen.text
    for absent in ("Sparsity by epoch", "Mask flips", "Sparsity by layer"):
        assert absent not in seen.text


def test_the_page_asks_for_nothing_and_repeats_no_id(tmp_path: Path) -> None:
    seen = page([make_run(tmp_path / "a"), make_run(tmp_path / "b", "dpf")], tmp_path / "report.html")
    assert not {"script", "link", "img", "iframe"} & set(seen.tags)
    links = [value for key, value in seen.attributes if key in ("href", "xlink:href", "src")]
    assert links and all(link.startswith("#") for link in links)
    ids = [value for key, value in seen.attributes if key == "id"]
    assert len(ids) == len(set(ids))
    assert {link[1:] for link in links} <= set(ids)


def test_the_difference_to_dense_is_to_the_mean_of_the_finished_dense_runs(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "d0", "dense", 0, offset=1),
        make_run(tmp_path / "d1", "dense", 1, offset=3),
        make_run(tmp_path / "d2", "dense", 2, done=3),
        make_run(tmp_path / "pruned", "dpf", granularity="Filter"),
    ]
    rows = {row.label: row for row in run_table.rows(read_runs(folders))}
    assert rows["pruned"].to_dense == pytest.approx(-2)
    assert rows["pruned"].method == "dpf filter"
    assert rows["d0"].to_dense is None
    assert rows["mean ± std (2)"].last_spread == pytest.approx(math.sqrt(2))
    assert "\N{MINUS SIGN}2.00" in page(folders, tmp_path / "report.html").text


def test_no_difference_without_a_dense_run_of_the_same_model(tmp_path: Path) -> None:
    other = make_run(tmp_path / "dense", "dense")
    (other / "config.json").write_text((other / "config.json").read_text().replace("small", "large"))
    assert [row.to_dense for row in run_table.rows(read_runs([other, make_run(tmp_path / "a")]))] == [None, None]


def test_seeds_are_summed_up_and_nothing_else_is(tmp_path: Path) -> None:
    folders = [
        make_run(tmp_path / "s0", seed=0),
        make_run(tmp_path / "dpf", "dpf", seed=1),
        make_run(tmp_path / "s1", seed=1, offset=2),
        make_run(tmp_path / "again", seed=1, offset=9),
        make_run(tmp_path / "running", seed=2, done=3),
        make_run(tmp_path / "long", seed=3, epochs=7),
    ]
    rows = run_table.rows(read_runs(folders))
    assert [row.label for row in rows] == ["s0", "s1", "again", "running", "mean ± std (2)", "dpf", "long"]
    mean = rows[4]
    assert mean.last is not None and rows[0].last is not None
    assert mean.n == 2
    assert mean.last - rows[0].last == pytest.approx(1)
    assert f"{mean.last:.2f} ± 1.41" in page(folders, tmp_path / "report.html").text


def test_twelve_runs_each_have_their_own_look(tmp_path: Path) -> None:
    from dcil.report.theme import styles

    folders = [make_run(tmp_path / f"run{i}", ("dcil", "dpf", "gmp")[i % 3], epochs=6 + i) for i in range(12)]
    runs = read_runs(folders)
    assert len({(style.colour, style.marker or "o") for style in styles([run.label for run in runs]).values()}) == 12
    seen = page(folders, tmp_path / "report.html")
    assert "12 runs" in seen.text
    assert seen.tags.count("details") == 12
    assert seen.text.count("run11") >= 6  # the table, four keys, the details


def test_an_unfinished_run(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "half", epochs=60, done=3)
    run = read_run(folder)
    assert run.summary == summarise([epoch.top1 for epoch in run.epochs])
    assert (run.seconds, run.complete, run.kept) == (6.0, False, None)
    assert run.sparsity == pytest.approx(0.9 * 3 / 60)
    seen = page([folder, make_run(tmp_path / "whole")], tmp_path / "report.html")
    assert "unfinished: epoch 3 of 60" in seen.text
    assert "Unfinished runs are left out" in seen.text


def test_a_run_that_has_only_begun(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "new", done=0)
    assert "unfinished: epoch 0 of 6" in page([folder], tmp_path / "report.html").text
    (folder / "metrics.jsonl").unlink()
    assert read_run(folder).summary is None


def test_a_line_being_written_is_not_damage(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "half", done=3)
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"epoch": 4, "st')
    assert len(read_run(folder).epochs) == 3


def test_masks_that_never_revive_leave_one_panel_empty(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "gmp", "gmp")
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text().replace(", 30, ", ", 0, "))
    assert "Mask flips" in page([folder], tmp_path / "report.html").text


@pytest.mark.parametrize(
    ("file", "old", "new", "said"),
    [
        ("config.json", "{", "", "not valid JSON"),
        ("config.json", '"dataset"', '"data"', "field 'dataset' is missing"),
        ("config.json", '"seed": 0', '"seed": true', "field 'seed' should be a whole number, not True"),
        ("summary.json", '"top1_last"', '"top2"', "field 'top1_last' is missing"),
        ("summary.json", '"kept": 100}', '"kept": "x"}', ".kept' should be a whole number"),
        ("metrics.jsonl line 2", '"epoch": 2', '"epoch": 5', "epoch 5 stands where epoch 2 should"),
        ("metrics.jsonl line 3", '"top1_super": 7', '"top1_super": NaN, "x": 7', "should be a finite number"),
        ("metrics.jsonl line 1", "[[10, 30, 61]]", "[[10, 30]]", "should be [step, revived, dropped]"),
    ],
)
def test_damage_is_named_in_one_line(tmp_path: Path, file: str, old: str, new: str, said: str) -> None:
    path = make_run(tmp_path / "bad") / file.split()[0]
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError) as error:
        build([path.parent], tmp_path / "report.html")
    message = str(error.value)
    assert str(path.parent / file) in message and said in message and "\n" not in message
    assert not (tmp_path / "report.html").exists()


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for folder in (tmp_path / "empty", tmp_path / "nowhere"):
        with pytest.raises(UserError, match=f"{folder} is not a run folder"):
            read_run(folder)
    with pytest.raises(UserError, match="no run folder given"):
        build([], tmp_path / "report.html")
    with pytest.raises(UserError, match="is a folder"):
        build([make_run(tmp_path / "run")], tmp_path)


def test_a_summary_without_metrics_is_damage(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"metrics\.jsonl is missing"):
        read_run(folder)


def test_a_failed_write_leaves_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    run, out = make_run(tmp_path / "run"), tmp_path / "reports" / "report.html"
    out.parent.mkdir()
    out.write_text("old")
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(UserError, match=f"cannot write {out}: No space left on device"):
        build([run], out)
    assert out.read_text() == "old"
    assert list(out.parent.iterdir()) == [out]


def test_a_place_that_cannot_be_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match="cannot write"):
        build([make_run(tmp_path / "run")], tmp_path / "file" / "report.html")


def test_hostile_names_stay_text(tmp_path: Path) -> None:
    name = "_<script>alert(1)<&'\"$\\frac{[red]"
    folder = make_run(tmp_path / name, notes=("<b onclick=x>bold</b>",))
    for file in folder.iterdir():
        file.write_text(file.read_text().replace("stage0.0", "$<i>^{").replace('"small"', '"<u>small$"'))
    seen = page([folder], tmp_path / "report.html")
    assert not {"script", "i", "u"} & set(seen.tags)
    assert "onclick" not in dict(seen.attributes)
    assert seen.text.count(name) >= 6
    assert "$<i>^{.conv.weight" in seen.text and "<u>small$ on digits" in seen.text


def test_runs_of_one_name_are_told_apart_and_repeats_are_dropped(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a" / "run"), make_run(tmp_path / "b" / "run", seed=1)
    assert [run.label for run in read_runs([a, b, tmp_path / "b" / "." / "run", a])] == ["a/run", "b/run"]


def test_the_same_input_gives_the_same_bytes(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / "a"), make_run(tmp_path / "b", "dpf"), make_run(tmp_path / "c", "dense")]
    build(folders, tmp_path / "1.html")
    build(folders, tmp_path / "2.html")
    assert (tmp_path / "1.html").read_bytes() == (tmp_path / "2.html").read_bytes()


def test_the_terminal_table_has_every_cell(tmp_path: Path) -> None:
    runs = read_runs(
        [make_run(tmp_path / "[red]", seed=0), make_run(tmp_path / "b", seed=1), make_run(tmp_path / "c", done=2)]
    )
    rows = run_table.rows(runs)
    console = Console(width=200, file=io.StringIO())
    console.print(run_table.to_rich(rows))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    for row in rows:
        by_heading = zip(run_table.HEADINGS, run_table.cells(row), strict=True)
        assert all(cell in shown for heading, cell in by_heading if heading not in run_table.PAGE_ONLY)
    assert "unfinished: epoch 2 of 6" in shown


@pytest.mark.parametrize(
    ("seconds", "text"), [(8.26, "8.3 s"), (59.96, "1 min 00 s"), (245, "4 min 05 s"), (7620, "2 h 07 min")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_reading_runs_loads_no_drawing_library() -> None:
    code = "import sys, dcil.report; print([m for m in ('matplotlib', 'jinja2', 'rich') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("package", ["matplotlib", "jinja2"])
def test_without_the_extra_the_table_is_printed_and_the_extra_is_named(package: str, tmp_path: Path) -> None:
    """`dcil train` ends well without the HTML report; `dcil report`, which was asked for it, fails in one line."""
    run = make_run(tmp_path / "run")
    code = (
        f"import sys; sys.modules[{package!r}] = None\n"
        "from pathlib import Path\nfrom dcil.cli import main, report\n"
        f"report.show([Path({str(run)!r})], Path({str(tmp_path / 'report.html')!r}))\n"
        f"sys.exit(main(['report', {str(run)!r}, '--out', {str(tmp_path / 'other.html')!r}]))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    for text in (done.stdout, done.stderr):
        assert f"{package} must be installed for this: pip install 'dcil[report]'" in text
    assert "Traceback" not in done.stderr and done.stdout.count("vs dense") == 2
    assert [file.name for file in tmp_path.iterdir()] == ["run"]


def test_a_page_is_the_same_in_markdown_and_html() -> None:
    row = TableRow(("a|b", "<i>"), "missing")
    blocks = [Heading("Title & more", 1), Paragraph("Run `a<b` **now**."), Table(("X", "Y"), (row,))]
    table = "| X | Y |\n| --- | --- |\n| a\\|b | &lt;i&gt; |\n"
    assert markdown(blocks) == f"# Title & more\n\nRun `a<b` **now**.\n\n{table}"
    page = html("Title", blocks)
    assert "<h1>Title &amp; more</h1>" in page and "<p>Run <code>a&lt;b</code> <b>now</b>.</p>" in page
    assert '<tr class="missing">' in page and "<td>a|b</td>" in page and "<td>&lt;i&gt;</td>" in page


def test_a_picture_takes_the_colour_of_the_page_and_is_dark_on_white_as_a_file() -> None:
    from dcil.report.theme import INK, picture, plot_line, styles

    def draw(figure: Any) -> None:
        axes = figure.subplots()
        for x, style in enumerate(styles([f"run {i}" for i in range(8)]).values()):
            plot_line(axes, [x, x + 1], [0.0, 1.0], style, 1.0, style.label)

    drawn = picture("Lines", "Some lines.", draw, 2.0, file="lines.svg")
    assert "currentColor" in drawn.svg and INK not in drawn.svg and "<style" not in drawn.svg
    assert "currentColor" not in drawn.file_text and 'fill="#ffffff"' in drawn.file_text
    assert drawn == picture("Lines", "Some lines.", draw, 2.0, file="lines.svg")
