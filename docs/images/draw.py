"""Draws the images of the documentation, in English and in Chinese.

    python docs/images/draw.py          # writes docs/images/*.svg

Each file has its own colours for light and dark screens. The numbers in order.svg come from
`data.order`, so the image shows the real order of a small data set. overlap.svg is for measured.md,
and shows what `python -m benchmarks.trace docs/images/overlap.json` has measured; so does
rounding.svg with benchmarks.rounding and rounding.json.
"""

import html
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from data.order import Order

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

Words = Callable[[str, str], str]  # (English, Chinese) -> the one that is drawn.


class Drawing:
    """An SVG file in the making. Coordinates are in pixels, from the upper left corner."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self._parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
            f'width="{width}" height="{height}" role="img">',
            f"<title>{html.escape(title)}</title><style>{_STYLE}</style><defs>{_HEAD}</defs>",
            f'<rect class="back" width="{width}" height="{height}" rx="8"/>',
        ]

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> None:
        """Writes `words` with their baseline at `y`."""
        escaped = html.escape(words)
        self._parts.append(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escaped}</text>'
        )

    def box(
        self, x: float, y: float, width: float, height: float, lines: Sequence[str], kind: str
    ) -> None:
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
    drawing = Drawing(words("The training loop", "训练循环"), 780, 400)
    left, width = 30, 330
    drawing.box(
        left, 20, width, 40, [words("hook.begin(step), each hook", "每个 hook: begin(step)")], "box"
    )
    drawing.box(
        left,
        90,
        width,
        58,
        [
            words("choose the next stop", "确定下一个停点"),
            "min(train_steps, hook.next_step(step), ...)",
        ],
        "box",
    )
    drawing.box(
        left,
        178,
        width,
        58,
        [
            "executor.run(stop - step)",
            words("then no step is in flight anywhere", "返回后没有任何 step 在途"),
        ],
        "a",
    )
    drawing.box(
        left,
        266,
        width,
        58,
        [
            "hook(step, metrics)",
            words("check, report, evaluate, ..., save", "检查、报告、评估……保存"),
        ],
        "c",
    )
    drawing.box(
        left, 350, width, 36, [words("hook.end(step), each hook", "每个 hook: end(step)")], "box"
    )
    middle = left + width / 2
    for top, bottom in ((60, 90), (148, 178), (236, 266), (324, 350)):
        drawing.arrow((middle, top), (middle, bottom))
    drawing.arrow((left, 295), (12, 295), (12, 119), (left, 119))
    right = 420
    for y, kind, lines in (
        (
            60,
            "a",
            [
                "mirrored, multiworker",
                words("one graph runs all n steps:", "一张图执行全部 n 个 step："),
                "gradients → all-reduce → apply",
            ],
        ),
        (
            165,
            "b",
            [
                "ps --sync_replicas",
                words(
                    "the aggregator on a server decides n rounds;",
                    "服务器上的 aggregator 决定 n 轮；",
                ),
                words("worker loops take assignments", "worker loop 领取任务"),
            ],
        ),
        (
            270,
            "d",
            [
                "ps",
                words(
                    "tickets of up to 16 batches go to idle workers;",
                    "每张 ticket 至多 16 个 batch，交给空闲 worker；",
                ),
                words("run waits until all are done", "run 等待全部完成"),
            ],
        ),
    ):
        drawing.box(right, y, 335, 78, lines, kind)
        drawing.arrow((left + width, 207), (390, 207), (390, y + 39), (right, y + 39), dashed=True)
    return drawing


def order(words: Words) -> Drawing:
    """Sixteen records on their way to four batches."""
    drawing = Drawing(words("The order of the data", "数据顺序"), 780, 500)
    small = Order((10, 6), 2, batch_size=4, lanes=4, window_batches=2, seed=0, shuffle=True)
    # With a window of one batch, rows are not permuted: column v is lane v of the sequence.
    unpermuted = Order((10, 6), 2, batch_size=4, lanes=4, window_batches=1, seed=0, shuffle=True)
    cell = 40

    def kind(record: int) -> str:
        return _CHUNK_KINDS[record // small.chunk_examples % len(_CHUNK_KINDS)]

    def row(x: float, y: float, records: Sequence[int]) -> None:
        for index, record in enumerate(records):
            drawing.box(x + index * cell, y, cell - 4, 30, [str(record)], kind(record))

    drawing.text(
        30,
        34,
        words(
            "1. Records in two shards. Two neighbours of one colour are a chunk.",
            "1. 两个分片中的记录；相邻的两条同色记录是一个 chunk。",
        ),
        anchor="start",
    )
    row(30, 46, range(10))
    row(50 + 10 * cell, 46, range(10, 16))
    drawing.text(
        30,
        116,
        words(
            "2. An epoch permutes the chunks, and cuts the sequence into lanes.",
            "2. 每个 epoch 重排 chunk，再把序列切成若干 lane。",
        ),
        anchor="start",
    )
    lanes = unpermuted.records(0, 4).T.tolist()
    for index, lane in enumerate(lanes):
        row(30 + index * (4 * cell + 16), 128, lane)
        drawing.text(30 + index * (4 * cell + 16) + 2 * cell - 2, 176, f"lane {index}", "soft")
    top = 200
    drawing.text(
        30,
        top + 6,
        words(
            "3. Each lane permutes the rows of a window (here two batches).",
            "3. 每条 lane 在一个窗口（此处 2 个 batch）内重排各行。",
        ),
        anchor="start",
    )
    drawing.text(
        30,
        top + 28,
        words(
            "A batch takes one row: here one record from each lane.",
            "一个 batch 取一行：此处每条 lane 各一条记录。",
        ),
        anchor="start",
    )
    for index in range(4):
        drawing.text(165 + (index + 0.5) * cell - 2, top + 56, str(index), "soft")
    drawing.text(150, top + 56, "lane", "soft", "end")
    for batch, records in enumerate(small.records(0, 4).tolist()):
        y = top + 66 + batch * 40 + (batch >= 2) * 16
        drawing.text(150, y + 20, f"batch {batch}", anchor="end")
        row(165, y, records)
    for y, number in ((top + 101, 0), (top + 197, 1)):
        drawing.text(345, y + 5, words(f"window {number}", f"窗口 {number}"), "soft", "start")
    drawing.text(165 + cell - 2, top + 266, words("replica 0", "副本 0"), "soft")
    drawing.text(165 + 3 * cell - 2, top + 266, words("replica 1", "副本 1"), "soft")
    drawing.line(165 + 2 * cell - 2, top + 48, 165 + 2 * cell - 2, top + 256)
    x = 440
    drawing.box(
        x,
        top + 60,
        310,
        40,
        [words("position = batch × 4 + place in it", "position = batch × 4 + batch 内位置")],
        "box",
    )
    drawing.box(
        x,
        top + 124,
        310,
        58,
        [
            words("Order: a pure function", "Order：纯函数"),
            words("(seed, position) → record", "(seed, position) → 记录"),
        ],
        "a",
    )
    drawing.box(
        x,
        top + 206,
        310,
        58,
        [
            words("ticket, for a worker of ps", "ticket，交给 ps 的 worker"),
            words("file, byte offset, skip, take; gather", "文件、字节偏移、skip、take；gather"),
        ],
        "d",
    )
    drawing.arrow((x + 155, top + 100), (x + 155, top + 124))
    drawing.arrow((x + 155, top + 182), (x + 155, top + 206))
    return drawing


def sync_round(words: Words) -> Drawing:
    """Two of three gradients make a step; the third is late."""
    drawing = Drawing(
        words("A round of synchronous parameter servers", "同步参数服务器的一轮"), 780, 540
    )
    workers = (90, 230, 370)
    server = 610
    for index, x in enumerate(workers):
        drawing.box(x - 60, 16, 120, 44, [f"worker {index}", "worker loop"], "a")
        drawing.line(x, 60, x, 525)
    drawing.box(
        server - 140,
        16,
        280,
        44,
        ["ps", words("queues, gradient buffers, aggregator", "队列、梯度缓冲区、aggregator")],
        "b",
    )
    drawing.line(server, 60, server, 525)

    def assign(y: float, worker: int, what: str) -> None:
        drawing.arrow((server, y), (workers[worker], y))
        drawing.text(server - 10, y - 5, what, "soft", "end")

    def send(y: float, worker: int, what: str) -> None:
        drawing.arrow((workers[worker], y), (server, y))
        drawing.text(server - 10, y - 5, what, "soft", "end")

    assign(92, 0, "sub-batch 0, step 7")
    assign(116, 1, "sub-batch 1, step 7")
    assign(140, 2, "sub-batch 2, step 7")
    compute = words("compute", "计算")
    drawing.box(workers[0] - 50, 106, 100, 68, [compute], "c")
    drawing.box(workers[1] - 50, 130, 100, 84, [compute], "c")
    drawing.box(workers[2] - 50, 154, 100, 216, [compute, words("(slow)", "（慢）")], "c")
    send(192, 0, words("gradient, DONE step 7", "梯度，DONE step 7"))
    send(232, 1, words("gradient, DONE step 7", "梯度，DONE step 7"))
    drawing.box(
        server - 105,
        246,
        210,
        58,
        [words("2 of 2: sum, apply", "凑齐 2 个：求和、apply"), "step 7 → step 8"],
        "b",
    )
    assign(326, 0, "sub-batch 3, step 8")
    assign(350, 1, "sub-batch 4, step 8")
    drawing.box(workers[0] - 50, 340, 100, 150, [compute], "c")
    drawing.box(workers[1] - 50, 364, 100, 140, [compute], "c")
    send(394, 2, words("gradient, DONE step 7", "梯度，DONE step 7"))
    drawing.box(
        server - 125,
        408,
        250,
        58,
        [
            words("late: dropped", "迟到：丢弃"),
            words("sub-batch 2 will be assigned again", "sub-batch 2 将重新分配"),
        ],
        "d",
    )
    assign(490, 2, "sub-batch 5, step 8")
    drawing.text(
        30,
        532,
        words("n = 2 of 3 workers: one backup worker", "n = 2，共 3 个 worker：一个备用 worker"),
        "soft",
        "start",
    )
    return drawing


def buckets(words: Words) -> Drawing:
    """Buckets of the all-reduce while the backward pass continues."""
    drawing = Drawing(
        words("The all-reduce overlaps with the backward pass", "全归约与反向传播重叠"), 780, 330
    )
    start = 130

    def lane(y: float, name: str, items: Sequence[tuple[int, int, str, str]]) -> None:
        drawing.text(start - 12, y + 23, name, anchor="end")
        for x, width, what, kind in items:
            drawing.box(start + x, y, width - 3, 36, [what], kind)

    compute, network = words("compute", "计算"), words("network", "网络")
    forward, backward, update = (
        words("forward", "前向"),
        words("back.", "反向"),
        words("update", "更新"),
    )
    drawing.text(30, 30, words("In buckets", "分桶"), "bold", "start")
    layers = [(130 + 75 * i, 75, f"{backward} {4 - i}", kind) for i, kind in enumerate("aabc")]
    lane(44, compute, [(0, 130, forward, "box"), *layers, (550, 75, update, "box")])
    lane(
        96,
        network,
        [
            (280, 110, words("sum A: 4, 3", "桶 A: 4, 3"), "a"),
            (390, 80, words("sum B: 2", "桶 B: 2"), "b"),
            (470, 80, words("sum C: 1", "桶 C: 1"), "c"),
        ],
    )
    for top, arrived in ((80, 280), (80, 355), (80, 430)):
        drawing.arrow((start + arrived - 2, top), (start + arrived + 4, 96))
    drawing.text(30, 180, words("One sum", "一次求和"), "bold", "start")
    layers = [(130 + 75 * i, 75, f"{backward} {4 - i}", "box") for i in range(4)]
    lane(194, compute, [(0, 130, forward, "box"), *layers, (570, 75, update, "box")])
    lane(246, network, [(430, 140, words("sum of all", "全部求和"), "d")])
    drawing.arrow((start + 428, 230), (start + 436, 246))
    drawing.text(
        30,
        314,
        words(
            "A bucket is sent when its last gradient exists. No sum waits for another sum.",
            "桶内最后一个梯度算出后即发送；各桶的求和互不等待。",
        ),
        "soft",
        "start",
    )
    return drawing


def overlap(words: Words) -> Drawing:
    """Steps that benchmarks/trace.py has measured, as it wrote them in overlap.json."""
    found = json.loads((Path(__file__).parent / "overlap.json").read_text(encoding="utf-8"))
    steps = found["steps"]
    num_sums = [sum(bar["kind"] == "sum" for bar in step["bars"]) for step in steps]
    thin, left, width = 12, 120, 630
    height = sum(120 + thin * number for number in num_sums) + 70
    drawing = Drawing(words("Measured steps", "实测的训练步"), 780, height)
    longest = max(bar["end"] for step in steps for bar in step["bars"])
    kinds = {"forward": "c", "backward": "a", "update": "d", "sum": "b"}
    titles = {
        "one_sum": words("One sum after the backward pass", "反向传播之后一次求和"),
        "program": words("Buckets", "分桶"),
    }
    top = 30

    def bar(found: Mapping[str, Any], y: float, bar_height: float) -> None:
        begin, end = (left + width * found[key] / longest for key in ("begin", "end"))
        drawing.box(begin, y, max(1.0, end - begin), bar_height, [], kinds[found["kind"]])

    for step, number in zip(steps, num_sums, strict=True):
        ended = max(bar["end"] for bar in step["bars"]) / 1e3
        drawing.text(left, top, f"{titles[step['way']]}: {ended:.2f} s", "bold", "start")
        drawing.text(left - 12, top + 31, words("computation", "计算"), anchor="end")
        drawing.text(left - 12, top + 66, words("sums", "求和"), anchor="end")
        sums = (each for each in step["bars"] if each["kind"] == "sum")
        for row, each in enumerate(sums):
            bar(each, top + 54 + thin * row, thin - 2)
        for each in step["bars"]:
            if each["kind"] != "sum":
                bar(each, top + 12, 30)
        top += 120 + thin * number
    legend = (
        ("forward", words("forward pass", "前向传播")),
        ("backward", words("backward pass", "反向传播")),
        ("sum", words("sum of a bucket", "一个桶的求和")),
        ("update", words("update of variables", "变量更新")),
    )
    for index, (kind, name) in enumerate(legend):
        drawing.box(left + 160 * index, top - 20, 14, 14, [], kinds[kind])
        drawing.text(left + 160 * index + 20, top - 8, name, "soft", "start")
    link = {"mbit": " Mbit/s", "gbit": " Gbit/s"}[found["link"][-4:]]
    drawing.text(
        left,
        top + 18,
        words(
            f"2 hosts, {found['link'][:-4]}{link}, {found['examples']:,} examples each. "
            f"Time runs to the right, 0 to {longest / 1e3:.2f} s.",
            f"2 台主机，{found['link'][:-4]}{link}，每台 {found['examples']:,} 个样本。"
            f"时间向右，0 到 {longest / 1e3:.2f} 秒。",
        ),
        "soft",
        "start",
    )
    return drawing


def rounding(words: Words) -> Drawing:
    """Differences over steps that benchmarks/rounding.py has measured, in rounding.json."""
    curves = json.loads((Path(__file__).parent / "rounding.json").read_text(encoding="utf-8"))
    width, height, left, top, right, bottom = 780, 400, 80, 50, 560, 340
    drawing = Drawing(words("How rounding grows", "舍入误差的增长"), width, height)
    drawing.text(
        left,
        28,
        words(
            "Largest difference of a weight from mirrored with one replica",
            "与单副本 mirrored 相比，权重的最大差值",
        ),
        "bold",
        "start",
    )
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
    drawing.text((left + right) / 2, bottom + 45, words("steps", "步数"), "soft")
    kinds = ("a", "b", "c", "d")
    # Modes whose weights are the same, bit for bit, have the same curve.
    groups: dict[tuple[float, tuple[tuple[int, float], ...]], list[str]] = {}
    for curve in curves:
        points = tuple((step, value) for step, value in curve["points"])
        groups.setdefault((curve["rate"], points), []).append(curve["mode"])
    y = top + 14
    assert len(groups) <= len(kinds), "there are more curves than colours"
    for kind, ((rate, points), modes) in zip(kinds, groups.items(), strict=False):
        drawing.box(right + 20, y - 11, 12, 12, [], kind)
        drawing.text(
            right + 42, y, words("learning rate", "学习率") + f" {rate:g}", "bold", "start"
        )
        for row, mode in enumerate(modes, 1):
            drawing.text(right + 42, y + 20 * row, mode, "", "start")
        y += 20 * len(modes) + 40
        for step, value in points:
            if value > 0:
                x, y_of_point = at(step, math.log10(value))
                drawing.box(x - 4, y_of_point - 4, 8, 8, [], kind)
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
    english: Words = lambda text, _: text  # noqa: E731
    chinese: Words = lambda _, text: text  # noqa: E731
    drawn = {f"{name}.svg": draw(english).svg() for name, draw in IMAGES.items()}
    return drawn | {f"{name}.zh.svg": draw(chinese).svg() for name, draw in IMAGES.items()}


if __name__ == "__main__":
    for name, contents in files().items():
        (Path(__file__).parent / name).write_text(contents, encoding="utf-8")
