"""The screen of the live view: lines of text for a given size. Pure functions of the status.

    for line in lines_of(status, width=80, height=24):
        console.print(line)

On a small terminal the parts that matter least are left out: first old messages and blank lines,
then healthy tasks, then curves and columns, and last all but the progress and the loss.
"""

import itertools
import math
import os
from collections import Counter
from collections.abc import Callable, Sequence

from rich.text import Text

from data.system.files import shown
from trainer.live.status import DEAD, RESTARTING, TRAINING, Status, TaskStatus, is_warning
from trainer.run_files import clock, four_digits, is_logarithmic, two_digits

BLOCKS, ASCII_BLOCKS = "▁▂▃▄▅▆▇█", "_.-:=+*#"
_BAR, _ASCII_BAR = "━", "="
_NAME_WIDTH = 12
_MAX_CURVE = 48
_MIN_CURVE = 8
_MIN_BAR = 8
# The columns of the table of tasks that are left out on a narrow terminal, the first one first.
_LEFT_OUT = ("staleness", "share", "restarts", "CPU", "memory", "step")
_STYLES = {TRAINING: "green", DEAD: "bold red", RESTARTING: "bold yellow"}
_MIB = 1 << 20


def lines_of(status: Status, width: int, height: int, *, is_ascii: bool = False) -> list[Text]:
    """Returns at most `height` lines of at most `width` characters."""
    head = [_progress(status, width, is_ascii)]
    if height >= 6:
        head.insert(0, _title(status))
    left = height - len(head)
    metrics = _metrics(status, width, is_ascii)[: max(1, left // 3)]
    left -= len(metrics)
    tasks = _tasks(status, width, left - min(3, left // 4))
    left -= len(tasks)
    blocks = [head, metrics, tasks]
    num_blank = sum(map(bool, blocks))
    has_blanks = left >= num_blank + 2
    blocks.append(_messages(status, left - num_blank * has_blanks))
    lines: list[Text] = []
    for block in blocks:
        if block and lines and has_blanks:
            lines.append(Text())
        lines += block
    for line in lines:
        line.truncate(width, overflow="crop")
    return lines[:height]


def sparkline(values: Sequence[float], width: int, blocks: str = BLOCKS, *, name: str = "") -> str:
    """Returns the values as characters of eight heights; means if there are more than `width`.

    NaN and infinities are left out. The heights are logarithmic where `trainer.report` draws a
    logarithmic axis, which depends on the `name` of the metric.
    """
    finite = [value for value in values if math.isfinite(value)]
    count = min(width, len(finite))
    if count < 2:
        return ""
    ends = [index * len(finite) // count for index in range(count + 1)]
    means = [sum(finite[first:end]) / (end - first) for first, end in itertools.pairwise(ends)]
    if is_logarithmic(name, min(finite), max(finite)):
        means = list(map(math.log, means))
    least, most = min(means), max(means)
    scale = (len(blocks) - 1) / ((most - least) or 1)
    return "".join(blocks[round((mean - least) * scale)] for mean in means)


def _title(status: Status) -> Text:
    line = Text(no_wrap=True)
    if config := status.config:
        name = os.path.basename(str(config.get("recipe", "")))
        batch = config["config"].get("batch_size", 0)
        line.append(f"{name}  {config.get('strategy', '')}  batch {batch:,}", "bold")
    line.append(f"{'  ' if line else ''}{shown(status.model_dir)}", "dim" if line else "bold")
    return line


def _progress(status: Status, width: int, is_ascii: bool) -> Text:
    """`step 400/1,000 ━━━━━━ 40%  0:01:30 left  epoch 17.8`; the last words are left out first."""
    if status.last_step is None:
        return Text("step -  starting", "bold")
    begin = f"step {status.step:,}/{status.last_step:,}"
    fraction = min(1.0, status.step / max(1, status.last_step))
    words = [f"{fraction:.0%}"]
    if status.secs_left is not None:
        words.append(f"{clock(status.secs_left)} left")
    if status.goodput is not None:
        words.append(f"goodput {status.goodput:.0%}")
    if "epoch" in status.report:
        words.append(f"epoch {status.report['epoch']:.1f}")
    if seconds := status.report.get("seconds"):
        words.append(f"after {clock(seconds)}")
    if peak := status.report.get("gpu_peak_bytes"):
        words.append(f"GPU {peak / 2**30:.1f} GiB at most")
    while len(words) > 1 and width - len("  ".join([begin, *words])) - 2 < _MIN_BAR:
        words.pop()
    end = "  ".join(words)
    line = Text(begin, "bold", no_wrap=True)
    room = min(40, width - len(begin) - len(end) - 4)
    if room >= _MIN_BAR:
        bar = _ASCII_BAR if is_ascii else _BAR
        num_full = round(fraction * room)
        line.append("  ")
        line.append(bar * num_full, "green")
        line.append((" " if is_ascii else bar) * (room - num_full), "grey30")
    return line.append(f"  {end}")


def _metrics(status: Status, width: int, is_ascii: bool) -> list[Text]:
    """A line for each metric: its name, its last values, and its curve if there is room."""
    metrics: list[tuple[str, list[float], list[float], Callable[[float], str]]] = [
        (name, status.curve("train", name), status.curve("eval", name), four_digits)
        for name in status.metrics()
    ]
    if rates := status.curve("train", "examples_per_sec"):
        # Small screens cut the end.
        metrics.insert(2, ("examples/s", rates, [], two_digits))
    shows_evaluations = width >= 44 and any(evaluated for _, _, evaluated, _ in metrics)
    lines = []
    for name, train, evaluated, form in metrics:
        line = Text(f"{name[:_NAME_WIDTH]:{_NAME_WIDTH}}", no_wrap=True)
        line.append(f"{form(train[-1]) if train else '':>10}", "bold")
        if shows_evaluations:
            line.append(f"  {f'eval {form(evaluated[-1])}' if evaluated else '':14}", "cyan")
        room = min(_MAX_CURVE, width - len(line) - 2)
        if room >= _MIN_CURVE:
            blocks = ASCII_BLOCKS if is_ascii else BLOCKS
            line.append(f"  {sparkline(train or evaluated, room, blocks, name=name)}", "blue")
        lines.append(line)
    return lines


def _tasks(status: Status, width: int, height: int) -> list[Text]:
    """A table of tasks. If there is no room for all of them, healthy ones become one line."""
    tasks = status.tasks
    if not tasks or height < 1:
        return []
    more: list[Text] = []
    if len(tasks) + 1 > height:
        if height < 4:
            return [_summary(tasks)]
        tasks = sorted(tasks, key=lambda task: task.state not in (DEAD, RESTARTING))
        tasks, hidden = tasks[: height - 2], tasks[height - 2 :]
        more = [_summary(hidden, "and ")]
    columns = _columns(status, tasks)
    for title in _LEFT_OUT:
        if len(columns) <= 2 or sum(len(cells[0]) + 2 for cells in columns.values()) - 2 <= width:
            break
        columns.pop(title, None)
    rows = [
        Text("  ".join(row).rstrip(), no_wrap=True) for row in zip(*columns.values(), strict=True)
    ]
    rows[0].stylize("dim")
    for row, task in zip(rows[1:], tasks, strict=True):
        row.highlight_words([task.state], _STYLES.get(task.state, ""))
    return rows + more


def _columns(status: Status, tasks: Sequence[TaskStatus]) -> dict[str, list[str]]:
    """The columns that have a value, by title; their cells, the title first, have one width."""

    def step(task: TaskStatus) -> str:
        number = status.step if task.step is None else task.step
        return "" if task.is_ps else f"{number:,}"

    def number(form: str, value: Callable[[TaskStatus], float]) -> Callable[[TaskStatus], str]:
        return lambda task: "" if math.isnan(value(task)) else form.format(value(task))

    values: dict[str, Callable[[TaskStatus], str]] = {
        "task": lambda task: task.name,
        "state": lambda task: task.state if task.pid or task.state != TRAINING else "",
        "step": step,
        "share": number("{:.0%}", lambda task: task.share),
        "staleness": number("{:.1f}", lambda task: task.staleness),
        "restarts": lambda task: "" if task.pid is None else str(task.restarts),
        "memory": number("{:,.0f} MiB", lambda task: task.num_bytes / _MIB),
        "CPU": number("{:.0f}%", lambda task: task.cpu),
    }
    columns = {}
    for title, value in values.items():
        cells = [title, *map(value, tasks)]
        if any(cells[1:]):
            width = max(map(len, cells))
            pad = str.ljust if title in ("task", "state") else str.rjust
            columns[title] = [pad(cell, width) for cell in cells]
    return columns


def _summary(tasks: Sequence[TaskStatus], begin: str = "") -> Text:
    counts = Counter(task.state for task in tasks)
    states = ", ".join(f"{count} {state}" for state, count in counts.items())
    return Text(f"{begin}{len(tasks)} task(s): {states}", no_wrap=True)


def _messages(status: Status, height: int) -> list[Text]:
    if height < 1:
        return []
    shown = list(status.messages)[-height:]
    if status.last_warning and status.last_warning not in shown:
        shown = [status.last_warning, *shown[1:]]
    lines = []
    for message in shown:
        line = Text.from_ansi(message.rstrip("\n").rpartition("\r")[2], no_wrap=True)
        if is_warning(message):
            line.stylize("yellow")
        lines.append(line)
    return lines
