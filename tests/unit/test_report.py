"""`python -m trainer.report`: one page that needs nothing else, also of a long run."""

import json
import os
import re
import shutil
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jinja2
import numpy as np
import pytest

from data.system.files import open_file
from data.system.stopwatch import SERVING
from tests.commands import ROOT, run_python
from tests.unit.test_goodput import BEGAN, steps, write_process
from trainer import run_files
from trainer.report import page as report_page
from trainer.report.drawing import Curve, bars, plot, strip
from trainer.report.page import render
from trainer.report.series import RunSeries
from trainer.run_files import read_reports
from trainer.run_record.goodput import Piece

WORKERS = [f"worker {index}" for index in range(6)]
BEGAN_THERE = time.localtime(BEGAN)
VOID = {"meta", "link", "br", "img", "rect"}


class Page(HTMLParser):
    """Checks that each tag is closed in order; has the cells, and whatever the page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.cells: list[str] = []
        self.loaded: list[str] = []
        self.tags: set[str] = set()
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attributes: Sequence[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.loaded += [v for name, v in attributes if name in ("src", "href") and v]
        if tag not in VOID:
            self.open.append(tag)
        if tag in ("td", "th"):
            self.cells.append("")

    def handle_startendtag(self, tag: str, attributes: Sequence[tuple[str, str | None]]) -> None:
        self.tags.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in ("td", "th"):
            self.cells[-1] += data


def write_run(directory: Path, *, num_steps: int, every_steps: int, rate: float = 0.1) -> Path:
    """The files of a run of a chief, six workers and a ps; a worker died once."""
    (directory / "tasks").mkdir(parents=True)
    config: dict[str, Any] = {
        "best_metric": "accuracy",
        "train_steps": num_steps,
        "batch_size": 10,
        "learning_rate": rate,
        "data": {"eval_split": "test"},
    }
    document = {
        "strategy": "ps",
        "recipe": "<b>&gone.py",
        "data_dir": "data",
        "config": config,
        "train_examples": 1000,
        "eval_examples": 100,
        "versions": {"tensorflow": "2.21.0"},
        "host": "host-a",
    }
    (directory / "config.json").write_text(json.dumps(document))
    lines = []
    for step in range(every_steps, num_steps + 1, every_steps):
        own = dict.fromkeys(WORKERS, step // 6)
        lines.append(
            {
                "step": step,
                "split": "train",
                "loss": 2.0 / (1 + step / 1000) + (step % 7) / 50,
                "accuracy": 1 - 1 / (1 + step / 1000),
                "learning_rate": rate,
                "examples": 10 * step,
                "examples_per_sec": 1000.0 + step % 90,
                "seconds": step / 100,
                "gpu_peak_bytes": 3 << 29,
                "worker_steps": own,
                "staleness": {worker: {"0": step // 9, "1": step // 18} for worker in WORKERS},
            }
        )
        if step % (100 * every_steps) == 0:
            eval_values = {"loss": 0.5, "accuracy": 0.9, "examples": 100, "seconds": 1.0}
            lines.append({"step": step, "split": "eval", **eval_values})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (directory / "metrics.jsonl").write_text(text + '{"step": 1')
    result = {
        "step": num_steps,
        "eval": {"loss": 0.5, "accuracy": 0.9},
        "examples": 10 * num_steps,
        "exit_code": 0,
        "why": "done",
        "worker_steps": dict.fromkeys(WORKERS, num_steps // 6),
        "worker_share": dict.fromkeys(WORKERS, 1 / 6),
    }
    (directory / "result.json").write_text(json.dumps(result))
    parts = 400
    chief = [
        steps(0, num_steps * i // parts, start=5.0, compute=num_steps / 100 * i / parts)
        for i in range(1, parts + 1)
    ]
    write_process(directory, 1, 0.0, chief, task="chief-0", ended=True)
    for index, name in enumerate([*(w.replace(" ", "-") for w in WORKERS), "ps-0"]):
        served = [
            {"seconds": {"start": 4.0, SERVING: num_steps / 200 * i / parts}, "begins": 1}
            for i in range(1, parts + 1)
        ]
        write_process(directory, 10 + index, 0.0, served, task=name)
        after = 20 + num_steps / 200
        write_process(directory, 20 + index, after, served, task=name, ended=True)
    restart = {"time": "now", "started_again": ["worker 1"], "task": "worker 1", "process": 11}
    more = {"seconds": 10.0, "why": "signal 9 <Killed>"}
    (directory / "tasks" / "restarts.jsonl").write_text(json.dumps({**restart, **more}) + "\n")
    resize = {"time": "later", "workers": 6, "workers_before": 2, "why": "host-c joined"}
    lines_of_failures = [json.dumps({"time": "now", "host": "host-a"}), json.dumps(resize)]
    (directory / "failures.jsonl").write_text("\n".join(lines_of_failures) + "\n")
    return directory


def report(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = run_python("-X", "importtime", "-m", "trainer.report", *words)
    assert done.returncode == 0 or not check, done.stderr
    return done


def test_reports_of_a_long_run_are_read_once_and_make_a_small_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []

    def opening(path: str) -> Any:
        opened.append(os.path.basename(path))
        return open_file(path)

    monkeypatch.setattr(run_files, "open_file", opening)
    run = RunSeries(str(write_run(tmp_path / "run", num_steps=30_000, every_steps=10)))
    assert len(render([run], {run.model_dir: "no"})) < 500_000
    assert opened.count("metrics.jsonl") == 1


@pytest.mark.parametrize("wait", [0.5, 0.04])
def test_page_says_if_the_input_limits_the_run(tmp_path: Path, wait: float) -> None:
    path = write_run(tmp_path / "run", num_steps=100, every_steps=10) / "metrics.jsonl"
    shutil.rmtree(path.parent / "tasks")
    rate = {"steps_per_sec": 80.0, "examples_per_sec": 800.0, "input_wait": wait}
    rate |= {"learning_rate": 0.1, "examples": 800, "seconds": 1.0}
    reports = [{"step": step, "split": "train", "loss": 1.0, **rate} for step in (50, 100)]
    path.write_text("".join(json.dumps(report) + "\n" for report in reports))
    run = RunSeries(str(path.parent))
    text = render([run], {run.model_dir: "no"})
    said = "It gives 800 examples/s; the model would take about 1,600."
    assert (said in text) == (wait > 0.05)
    assert "input_wait over steps" not in text, "it is no metric"


def test_long_run_keeps_no_more_values_by_worker_than_a_plot_shows(tmp_path: Path) -> None:
    path = write_run(tmp_path / "run", num_steps=30_000, every_steps=10) / "metrics.jsonl"
    every, some = read_reports(str(path)), read_reports(str(path), num_with_workers=300)
    assert len(every) == len(some) == 3030
    with_workers = [report for report in some if "worker_steps" in report]
    assert 270 <= len(with_workers) <= 305
    assert all(report in every for report in with_workers)
    last = [report for report in every if report["split"] == "train"][-1]
    assert with_workers[-1] == last
    names = ("step", "split", "loss", "accuracy")
    assert [[r[n] for n in names] for r in some] == [[r[n] for n in names] for r in every]


@pytest.mark.slow
def test_page_of_a_long_run_is_small_and_complete_and_made_without_tensorflow(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path / "long", num_steps=100_000, every_steps=1)
    done = report(str(run), "--no_examples")
    path = run / "report.html"
    assert os.path.realpath(ROOT / done.stdout.strip()) == str(path)
    assert path.stat().st_size < 2_000_000
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "tensorflow" not in imported
    assert "jinja2" in imported

    page = Page(path.read_text())
    assert "script" not in page.tags
    assert all(link.startswith("data:") for link in page.loaded), page.loaded
    text = path.read_text()
    assert not re.search(r"url\(|@import|https?://", text)
    cells = [cell.strip() for cell in page.cells]
    tasks = ["chief-0", "ps-0", *(w.replace(" ", "-") for w in WORKERS), *WORKERS]
    examples = ["100,000 of 100,000", "each example 1,000 times", "100, each once"]
    began = ["host-a", "tensorflow 2.21.0", time.strftime("%Y-%m-%d %H:%M", BEGAN_THERE)]
    ended = ["signal 9 <Killed>", "host-c joined", "0 (done)"]
    most_gpu_memory = "1.5 GiB"
    assert {*tasks, *examples, *began, *ended, most_gpu_memory} - set(cells) == set()
    assert "gpu_peak_bytes over steps" not in text, "it is no metric"
    assert "Not shown: --no_examples was given" in text
    for title in ("loss over steps", "loss over time", "accuracy over time", "mean staleness"):
        assert title in text
    for svg in re.findall(r"<svg.*?</svg>", text):
        ElementTree.fromstring(svg)


def test_time_of_each_task_adds_up_in_the_table(tmp_path: Path) -> None:
    run = RunSeries(str(write_run(tmp_path / "run", num_steps=2000, every_steps=10)))
    text = render([run], {run.model_dir: "no"})
    rows = re.findall(r"<tr><td>(?:chief|worker|ps)-\d.*?</tr>", text, re.DOTALL)
    assert len(rows) == 8
    for row in rows:
        shares = [float(share) for share in re.findall(r"<td>([\d.]+)%<small>", row)]
        assert sum(shares) == pytest.approx(100, abs=1)
    dead = [task.seconds["dead"] for task in run.tasks if task.name == "worker-1"]
    assert dead[0] > 5


@pytest.mark.parametrize("has_result", [True, False])
def test_examples_skipped_after_a_nan_are_not_counted_as_trained_on(
    has_result: bool, tmp_path: Path
) -> None:
    """Of 1,000 training examples; the run has consumed 2,000 positions of its order."""
    run = write_run(tmp_path / "a", num_steps=199, every_steps=199)
    skips = {"examples": 1990, "examples_skipped": 10}
    for name in ("metrics.jsonl", "result.json")[: 1 + has_result]:
        path = run / name
        content = json.loads(path.read_text().partition("\n")[0])
        path.write_text(json.dumps({**content, **skips}) + "\n")
    if not has_result:
        (run / "result.json").unlink()
    rows = dict(RunSeries(str(run)).accounting())
    assert (
        rows["in the order of the run"] == "each example 2 times, without the 10 that were skipped"
    )
    assert rows["examples skipped after a NaN"] == "10"


def test_several_runs_share_their_plots_and_differ_in_a_table(tmp_path: Path) -> None:
    first = write_run(tmp_path / "a", num_steps=2000, every_steps=10)
    second = write_run(tmp_path / "b", num_steps=2000, every_steps=10, rate=0.7)
    output = tmp_path / "both.html"
    report(str(first), str(second), "--no_examples", f"--output={output}")
    text = output.read_text()
    page = Page(text)
    assert page.cells.count("learning_rate") == 1
    assert {"0.1", "0.7"} <= set(page.cells)
    assert "train_steps" not in page.cells
    assert text.count("Goodput is the share of compute.") == 1
    assert text.count("Not shown: ") == 1
    loss = text.partition("loss over steps</figcaption>")[2].partition("</svg>")[0]
    assert re.findall(r'class="(s\d \w+)"', loss) == ["s0 train", "s0 eval", "s1 train", "s1 eval"]


def test_run_without_reports_or_times_has_a_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=2000, every_steps=10)
    shutil.rmtree(run / "tasks")
    (run / "metrics.jsonl").unlink()
    (run / "result.json").unlink()
    report(str(run), "--no_examples")
    text = (run / "report.html").read_text()
    Page(text)
    assert "There is no report yet." in text
    assert "has no record of its time" in text


@pytest.mark.slow
def test_missing_config_file_is_said_in_the_page(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=200, every_steps=10)
    report(str(run))
    found = re.search(r"<p>Not shown: (.*)</p>", (run / "report.html").read_text())
    assert found
    assert "gone.py" in found[1]
    assert "<b>" not in found[1]


def test_damaged_run_is_named_before_a_model_runs(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name, num_steps=200, every_steps=10) for name in "ab"]
    (runs[1] / "config.json").write_text("{")
    done = report(*map(str, runs), check=False)
    assert done.returncode == 2
    assert f"{runs[1]}/config.json" in done.stderr
    assert "| tensorflow\n" not in done.stderr


def test_page_that_cannot_be_written_is_refused_before_a_model_runs(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", num_steps=200, every_steps=10)
    done = report(str(run), f"--output={tmp_path}/missing/x.html", check=False)
    assert done.returncode == 2
    assert "missing/x.html cannot be written: No such file" in done.stderr
    assert "--output=FILE.html" in done.stderr
    assert "| tensorflow\n" not in done.stderr


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ((), ["needs the directory of a run", "python -m trainer.report runs/latest"]),
        (("nowhere",), ["nowhere does not exist"]),
        (("--no_example", "nowhere"), ["no_example"]),
    ],
)
def test_mistakes_are_one_message(words: tuple[str, ...], parts: list[str]) -> None:
    done = report(*words, check=False)
    assert done.returncode == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert all(part in errors[0] for part in parts), errors
    assert "Traceback" not in done.stderr


def test_plot_keeps_the_least_and_the_largest_value_of_each_pixel() -> None:
    points = np.stack([np.arange(100_000.0), np.ones(100_000)], axis=1)
    points[5_000, 1] = 9.0
    points[7_000, 1] = np.nan
    svg = plot("a < b", [Curve(points, "s0 train")], is_time=False)
    assert len(svg) < 20_000
    ElementTree.fromstring(svg)
    path = svg.partition('class="s0 train band" d="M')[2].partition('"')[0]
    ys = {float(point.split()[1]) for point in path.split("L")}
    assert len(ys) == 2, "9.0 is still there, and NaN is not"
    assert plot("nothing", [Curve(np.empty([0, 2]), "s0 train")], is_time=True) == ""
    ElementTree.fromstring(plot("one", [Curve(np.array([[3.0, 0.0]]), "s0 eval")], is_time=True))


def test_label_of_a_time_at_the_right_edge_is_not_cut_off() -> None:
    hours = np.array([[0, 1.0], [120 * 3600, 2.0]])
    text = plot("one", [Curve(hours, "s0 eval")], is_time=True)
    [x] = re.findall(r'class="x" x="([\d.]+)" y="\d+">120:00:00<', text)
    half = (7 * 0.64 + 2 * 0.34) * 11 / 2  # Widths of DejaVu Sans, a wide font; the size is 11.
    assert float(x) + half <= int(re.findall(r'viewBox="0 0 (\d+)', text)[0])


def test_few_points_are_dots_and_equal_curves_have_different_lines() -> None:
    one, many = np.array([[3.0, 0.5]]), np.stack([np.arange(99.0), np.ones(99)], axis=1)
    assert re.search(r'class="s0 eval dots" d="M[\d. ]+h.01"', plot("one", [Curve(one, "s0 eval")]))
    assert "dots" not in plot("many", [Curve(many, "s0 eval")])
    source = (ROOT / "trainer/report/page.html").read_text()
    style = jinja2.Template(source.partition("<style>")[2].partition("{% for name")[0])
    text = style.render(num_lines=report_page._NUM_LINES, num_colours=report_page._NUM_COLOURS)
    lines = re.findall(r"^\.plot \.s\d+ \{ (.*) \}$", text, re.MULTILINE)
    assert len(lines) == len(set(lines)) == report_page._NUM_LINES


def test_strips_show_the_cause_with_the_most_time() -> None:
    pieces = [
        Piece(0.0, 50.0, {"compute": 40.0, "input wait": 10.0}),
        Piece(50.0, 100.0, {"dead": 50.0}),
    ]
    svg = strip(pieces, 0.0, 100.0, [("mark-start", 100.0)])
    assert re.findall(r'class="(.*?)"', svg) == ["strip", "c-compute", "c-dead", "mark-start"]
    svg = bars([("c-compute", 0.75), ("c-start", 0.0), ("c-dead", 0.25)])
    assert re.findall(r'width="(.*?)"', svg) == ["750.0", "250.0"]
