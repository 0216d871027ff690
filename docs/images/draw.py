"""Draws the images of the documentation, in English and in Chinese.

    python docs/images/draw.py          # writes docs/images/*.svg

Each file has its own colours for light and dark screens. The functions have the English texts, and
chinese.json their translations. The numbers in order.svg come from `data.order`, so the image shows
the real order of a small data set. overlap.svg is for measured.md, and shows what
`python -m benchmarks.trace docs/images/overlap.json` has measured; so does rounding.svg with
benchmarks.rounding and rounding.json.
"""

import html
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from data.order import Order

_FOLDER = Path(__file__).parent
_STYLE = """
svg { --back: #ffffff; --ink: #1f2328; --soft: #57606a; --line: #8c959f; --box: #f3f5f8;
  --a: #cfe4ff; --b: #ffe3b8; --c: #d3f0d6; --d: #f6d3e3; }
@media (prefers-color-scheme: dark) {
  svg { --back: #0d1117; --ink: #e6edf3; --soft: #9aa4af; --line: #6e7781; --box: #1c2330;
    --a: #1c3d66; --b: #5a3d10; --c: #1d4a27; --d: #5a2440; } }
text { font: 14px system-ui, "Noto Sans CJK SC", "PingFang SC", "Microsoft YaHei", sans-serif;
  fill: var(--ink); }
.soft { fill: var(--soft); font-size: 13px; }
.bold { font-weight: 600; }
.back { fill: var(--back); }
.box { fill: var(--box); stroke: var(--line); }
.a { fill: var(--a); stroke: var(--line); }
.b { fill: var(--b); stroke: var(--line); }
.c { fill: var(--c); stroke: var(--line); }
.d { fill: var(--d); stroke: var(--line); }
.line { stroke: var(--line); stroke-width: 1.5; fill: none; }
.dashed { stroke-dasharray: 5 4; }
"""
_HEAD = (
    '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
    'orient="auto-start-reverse"><path d="M0 0L8 4L0 8z" fill="var(--line)"/></marker>'
)
_CHUNK_KINDS = ("a", "b", "c", "d", "box")

Words = Callable[[str], str]  # Translates a text; returns a text without a translation as it is.


class Drawing:
    """An SVG file in the making. Coordinates are in pixels, from the upper left corner."""

    def __init__(self, words: Words, title: str, width: int, height: int) -> None:
        """`words` translates all texts."""
        self._words = words
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<title>{html.escape(words(title))}</title><style>{_STYLE}</style>"
            f"<defs>{_HEAD}</defs>",
            f'<rect class="back" width="{width}" height="{height}" rx="8"/>',
        ]

    def text(self, x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> None:
        """Writes `text` with its baseline at `y`."""
        escaped = html.escape(self._words(text))
        self._parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escaped}</text>'
        )

    def box(self, x: float, y: float, width: float, height: float, kind: str, *lines: str) -> None:
        """Draws a box with centred lines; the first is bold if there are several."""
        self._parts.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            'rx="4"/>'
        )
        first = y + height / 2 + 5 - 9 * (len(lines) - 1)
        for index, line in enumerate(lines):
            bold = "bold" if index == 0 and len(lines) > 1 else ""
            self.text(x + width / 2, first + 18 * index, line, bold)

    def arrow(self, *points: tuple[float, float], dashed: bool = False) -> None:
        """Draws an arrow along `points`."""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        kind = "line dashed" if dashed else "line"
        self._parts.append(f'<polyline class="{kind}" points="{path}" marker-end="url(#head)"/>')

    def line(self, x: float, y: float, x_end: float, y_end: float) -> None:
        """Draws a dashed line."""
        self._parts.append(
            f'<line class="line dashed" x1="{x:g}" y1="{y:g}" x2="{x_end:g}" y2="{y_end:g}"/>'
        )

    def svg(self) -> str:
        """Returns the contents of the file."""
        return "\n".join([*self._parts, "</svg>", ""])


def loop(words: Words) -> Drawing:
    """The training loop, and what `run` is under each strategy."""
    drawing = Drawing(words, "The training loop", 780, 400)
    left, width = 30, 330

    def part(y: int, height: int, kind: str, *lines: str) -> None:
        drawing.box(left, y, width, height, kind, *lines)

    part(20, 40, "box", "hook.begin(step), each hook")
    part(90, 58, "box", "choose the next stop", "min(train_steps, hook.next_step(step), ...)")
    part(178, 58, "a", "executor.run(stop - step)", "then no step is in flight anywhere")
    part(266, 58, "c", "hook(step, metrics)", "check, report, evaluate, ..., save")
    part(350, 36, "box", "hook.end(step), each hook")
    middle = left + width / 2
    for top, bottom in ((60, 90), (148, 178), (236, 266), (324, 350)):
        drawing.arrow((middle, top), (middle, bottom))
    drawing.arrow((left, 295), (12, 295), (12, 119), (left, 119))

    def strategy(y: int, kind: str, name: str, *lines: str) -> None:
        right = 420
        drawing.box(right, y, 335, 78, kind, name, *lines)
        drawing.arrow((left + width, 207), (390, 207), (390, y + 39), (right, y + 39), dashed=True)

    steps = "one graph runs all n steps:", "gradients → all-reduce → apply"
    rounds = "the aggregator on a server decides n rounds;", "worker loops take assignments"
    tickets = "tickets of up to 16 batches go to idle workers;", "run waits until all are done"
    strategy(60, "a", "mirrored, multiworker", *steps)
    strategy(165, "b", "ps --sync_replicas", *rounds)
    strategy(270, "d", "ps", *tickets)
    return drawing


def order(words: Words) -> Drawing:
    """Sixteen records on their way to four batches."""
    drawing = Drawing(words, "The order of the data", 780, 500)
    small = Order((10, 6), 2, batch_size=4, lanes=4, window_batches=2, seed=0, shuffle=True)
    # With a window of one batch, rows are not permuted: column v is lane v of the sequence.
    unpermuted = Order((10, 6), 2, batch_size=4, lanes=4, window_batches=1, seed=0, shuffle=True)
    cell = 40

    def explain(y: float, text: str) -> None:
        drawing.text(30, y, text, anchor="start")

    def row(x: float, y: float, records: Sequence[int]) -> None:
        for index, record in enumerate(records):
            kind = _CHUNK_KINDS[record // small.chunk_examples % len(_CHUNK_KINDS)]
            drawing.box(x + index * cell, y, cell - 4, 30, kind, str(record))

    explain(34, "1. Records in two shards. Two neighbours of one colour are a chunk.")
    row(30, 46, range(10))
    row(50 + 10 * cell, 46, range(10, 16))
    explain(116, "2. An epoch permutes the chunks, and cuts the sequence into lanes.")
    for index, lane in enumerate(unpermuted.records(0, 4).T.tolist()):
        x = 30 + index * (4 * cell + 16)
        row(x, 128, lane)
        drawing.text(x + 2 * cell - 2, 176, f"lane {index}", "soft")
    top, left = 200, 165
    explain(top + 6, "3. Each lane permutes the rows of a window (here two batches).")
    explain(top + 28, "A batch takes one row: here one record from each lane.")
    for index in range(4):
        drawing.text(left + (index + 0.5) * cell - 2, top + 56, str(index), "soft")
    drawing.text(left - 15, top + 56, "lane", "soft", "end")
    for batch, records in enumerate(small.records(0, 4).tolist()):
        y = top + 66 + batch * 40 + (batch >= 2) * 16
        drawing.text(left - 15, y + 20, f"batch {batch}", anchor="end")
        row(left, y, records)
    drawing.text(345, top + 106, "window 0", "soft", "start")
    drawing.text(345, top + 202, "window 1", "soft", "start")
    drawing.text(left + cell - 2, top + 266, "replica 0", "soft")
    drawing.text(left + 3 * cell - 2, top + 266, "replica 1", "soft")
    drawing.line(left + 2 * cell - 2, top + 48, left + 2 * cell - 2, top + 256)

    def part(y: float, height: float, kind: str, *lines: str) -> None:
        drawing.box(440, top + y, 310, height, kind, *lines)

    part(60, 40, "box", "position = batch × 4 + place in it")
    part(124, 58, "a", "Order: a pure function", "(seed, position) → record")
    part(206, 58, "d", "ticket, for a worker of ps", "file, byte offset, skip, take; gather")
    drawing.arrow((595, top + 100), (595, top + 124))
    drawing.arrow((595, top + 182), (595, top + 206))
    return drawing


def sync_round(words: Words) -> Drawing:
    """Two of three gradients make a step; the third is late."""
    drawing = Drawing(words, "A round of synchronous parameter servers", 780, 540)
    workers, server = (90, 230, 370), 610
    for index, x in enumerate(workers):
        drawing.box(x - 60, 16, 120, 44, "a", f"worker {index}", "worker loop")
        drawing.line(x, 60, x, 525)
    drawing.box(server - 140, 16, 280, 44, "b", "ps", "queues, gradient buffers, aggregator")
    drawing.line(server, 60, server, 525)

    def assign(y: float, worker: int, what: str) -> None:
        drawing.arrow((server, y), (workers[worker], y))
        drawing.text(server - 10, y - 5, what, "soft", "end")

    def compute(y: float, worker: int, height: float, *more: str) -> None:
        drawing.box(workers[worker] - 50, y, 100, height, "c", "compute", *more)

    def send(y: float, worker: int) -> None:
        drawing.arrow((workers[worker], y), (server, y))
        drawing.text(server - 10, y - 5, "gradient, DONE step 7", "soft", "end")

    assign(92, 0, "sub-batch 0, step 7")
    assign(116, 1, "sub-batch 1, step 7")
    assign(140, 2, "sub-batch 2, step 7")
    compute(106, 0, 68)
    compute(130, 1, 84)
    compute(154, 2, 216, "(slow)")
    send(192, 0)
    send(232, 1)
    drawing.box(server - 105, 246, 210, 58, "b", "2 of 2: sum, apply", "step 7 → step 8")
    assign(326, 0, "sub-batch 3, step 8")
    assign(350, 1, "sub-batch 4, step 8")
    compute(340, 0, 150)
    compute(364, 1, 140)
    send(394, 2)
    late = "late: dropped", "sub-batch 2 will be assigned again"
    drawing.box(server - 125, 408, 250, 58, "d", *late)
    assign(490, 2, "sub-batch 5, step 8")
    drawing.text(30, 532, "n = 2 of 3 workers: one backup worker", "soft", "start")
    return drawing


def buckets(words: Words) -> Drawing:
    """Buckets of the all-reduce while the backward pass continues."""
    drawing = Drawing(words, "The all-reduce overlaps with the backward pass", 780, 330)
    start = 130

    def lane(y: float, name: str, *items: tuple[int, int, str, str]) -> None:
        drawing.text(start - 12, y + 23, name, anchor="end")
        for x, width, what, kind in items:
            drawing.box(start + x, y, width - 3, 36, kind, what)

    forward = (0, 130, "forward", "box")
    drawing.text(30, 30, "In buckets", "bold", "start")
    layers = [(130 + 75 * i, 75, f"back. {4 - i}", kind) for i, kind in enumerate("aabc")]
    lane(44, "compute", forward, *layers, (550, 75, "update", "box"))
    sums = (280, 110, "sum A: 4, 3", "a"), (390, 80, "sum B: 2", "b"), (470, 80, "sum C: 1", "c")
    lane(96, "network", *sums)
    for arrived in (280, 355, 430):
        drawing.arrow((start + arrived - 2, 80), (start + arrived + 4, 96))
    drawing.text(30, 180, "One sum", "bold", "start")
    layers = [(130 + 75 * i, 75, f"back. {4 - i}", "box") for i in range(4)]
    lane(194, "compute", forward, *layers, (570, 75, "update", "box"))
    lane(246, "network", (430, 140, "sum of all", "d"))
    drawing.arrow((start + 428, 230), (start + 436, 246))
    note = "A bucket is sent when its last gradient exists. No sum waits for another sum."
    drawing.text(30, 314, note, "soft", "start")
    return drawing


def overlap(words: Words) -> Drawing:
    """Steps that benchmarks/trace.py has measured, as it wrote them in overlap.json."""
    found = json.loads((_FOLDER / "overlap.json").read_text(encoding="utf-8"))
    steps: list[dict[str, Any]] = found["steps"]
    sums_of_steps = [[bar for bar in step["bars"] if bar["kind"] == "sum"] for step in steps]
    thin, left, width = 12, 120, 630
    height = sum(120 + thin * len(sums) for sums in sums_of_steps) + 70
    drawing = Drawing(words, "Measured steps", 780, height)
    longest = max(bar["end"] for step in steps for bar in step["bars"])
    kinds = {"forward": "c", "backward": "a", "update": "d", "sum": "b"}
    titles = {
        "one_sum": "One sum after the backward pass: {:.2f} s",
        "program": "Buckets: {:.2f} s",
    }
    top = 30

    def draw_bar(bar: dict[str, Any], y: float, bar_height: float) -> None:
        begin, end = (left + width * bar[key] / longest for key in ("begin", "end"))
        drawing.box(begin, y, max(1.0, end - begin), bar_height, kinds[bar["kind"]])

    for step, sums in zip(steps, sums_of_steps, strict=True):
        ended = max(bar["end"] for bar in step["bars"]) / 1e3
        drawing.text(left, top, words(titles[step["way"]]).format(ended), "bold", "start")
        drawing.text(left - 12, top + 31, "computation", anchor="end")
        drawing.text(left - 12, top + 66, "sums", anchor="end")
        for row, bar in enumerate(sums):
            draw_bar(bar, top + 54 + thin * row, thin - 2)
        for bar in step["bars"]:
            if bar["kind"] != "sum":
                draw_bar(bar, top + 12, 30)
        top += 120 + thin * len(sums)
    legend = {
        "forward": "forward pass",
        "backward": "backward pass",
        "sum": "sum of a bucket",
        "update": "update of variables",
    }
    for index, (kind, name) in enumerate(legend.items()):
        drawing.box(left + 160 * index, top - 20, 14, 14, kinds[kind])
        drawing.text(left + 160 * index + 20, top - 8, name, "soft", "start")
    link = found["link"].replace("mbit", " Mbit/s").replace("gbit", " Gbit/s")
    note = "2 hosts, {link}, {examples:,} examples each. Time runs to the right, 0 to {secs:.2f} s."
    numbers = {"link": link, "examples": found["examples"], "secs": longest / 1e3}
    drawing.text(left, top + 18, words(note).format(**numbers), "soft", "start")
    return drawing


def rounding(words: Words) -> Drawing:
    """Differences over steps that benchmarks/rounding.py has measured, in rounding.json."""
    curves = json.loads((_FOLDER / "rounding.json").read_text(encoding="utf-8"))
    width, height, left, top, right, bottom = 780, 400, 80, 50, 560, 340
    drawing = Drawing(words, "How rounding grows", width, height)
    title = "Largest difference of a weight from mirrored with one replica"
    drawing.text(left, 28, title, "bold", "start")
    values = [value for curve in curves for _, value in curve["points"] if value > 0]
    least, most = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    last = max(step for curve in curves for step, _ in curve["points"])

    def at(step: float, exponent: float) -> tuple[float, float]:
        return (
            left + (right - left) * step / last,
            bottom - (bottom - top) * (exponent - least) / (most - least),
        )

    for exponent in range(least, most + 1):
        x, y = at(0, exponent)
        drawing.line(x, y, right, y)
        drawing.text(left - 8, y + 5, f"1e{exponent}", "soft", "end")
    for quarter in range(5):
        x, y = at(last * quarter / 4, least)
        drawing.text(x, y + 20, f"{last * quarter // 4:,}", "soft")
    drawing.text((left + right) / 2, bottom + 45, "steps", "soft")
    kinds = ("a", "b", "c", "d")
    # Modes whose weights are the same, bit for bit, have the same curve.
    groups: dict[tuple[float, tuple[tuple[int, float], ...]], list[str]] = {}
    for curve in curves:
        points = tuple((step, value) for step, value in curve["points"])
        groups.setdefault((curve["rate"], points), []).append(curve["mode"])
    y = top + 14
    assert len(groups) <= len(kinds), "there are more curves than colours"
    for kind, ((rate, points), modes) in zip(kinds, groups.items(), strict=False):
        drawing.box(right + 20, y - 11, 12, 12, kind)
        drawing.text(right + 42, y, words("learning rate {:g}").format(rate), "bold", "start")
        for row, mode in enumerate(modes, 1):
            drawing.text(right + 42, y + 20 * row, mode, "", "start")
        y += 20 * len(modes) + 40
        for step, value in points:
            if value > 0:
                x, y_of_point = at(step, math.log10(value))
                drawing.box(x - 4, y_of_point - 4, 8, 8, kind)
    return drawing


IMAGES = {
    "loop": loop,
    "order": order,
    "round": sync_round,
    "buckets": buckets,
    "overlap": overlap,
    "rounding": rounding,
}


def files() -> dict[str, str]:
    """Returns the contents of each file, by its name."""
    chinese = json.loads((_FOLDER / "chinese.json").read_text(encoding="utf-8"))
    drawn = {f"{name}.svg": draw(lambda text: text).svg() for name, draw in IMAGES.items()}
    translated = {
        f"{name}.zh.svg": draw(lambda text: chinese.get(text, text)).svg()
        for name, draw in IMAGES.items()
    }
    return drawn | translated


if __name__ == "__main__":
    for name, contents in files().items():
        (_FOLDER / name).write_text(contents, encoding="utf-8")
