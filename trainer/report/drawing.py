"""Plots and bars as SVG, for a page without scripts.

    plot("loss", [Curve(np.array([[0, 2.3], [100, 0.4]]), "s0 train")], is_time=False)
    bars([("compute", 0.9), ("dead", 0.1)])
    strip(task.pieces, begin, end)

Colours are classes of the page's style sheet, so a plot is light or dark like its page. A curve
with many points for each pixel is a band from the least to the largest value, and the means.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from data.system.stopwatch import CAUSES
from trainer.run_files import clock, is_logarithmic
from trainer.run_record.goodput import Piece

_WIDTH, _HEIGHT = 400, 230
# The margins around the axes. Half of the label "100:00:00" fits into the right one.
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 30, 8, 24
_NUM_TICKS = 5
_BAND_FROM = 1000  # Points.
_DOTS_UP_TO = 40  # Points that are drawn as dots, too.
_BAR_WIDTH = 1000
_NUM_PARTS = 500  # Of a strip.
_TIME_STEPS = (1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200)
_DAYS = (1, 2, 5, 10, 20, 50, 100)

Points: TypeAlias = npt.NDArray[np.float64]  # Rows of (x, y).


class Curve(NamedTuple):
    """Points in the order of x, and CSS classes: a line s0 to s23, and train or eval."""

    points: Points
    style: str


def plot(title: str, curves: Sequence[Curve], *, is_time: bool = False) -> str:
    """Draws curves over a step, or a time in seconds. Returns "" if no curve has a point."""
    finite = [Curve(points[np.isfinite(points[:, 1])], style) for points, style in curves]
    shown = [curve for curve in finite if len(curve.points)]
    if not shown:
        return ""
    xs = np.concatenate([points[[0, -1], 0] for points, _ in shown])
    ys = np.concatenate([points[:, 1] for points, _ in shown])
    is_log = is_logarithmic(title, float(ys.min()), float(ys.max()))
    scale: Callable[[npt.ArrayLike], Points] = np.log10 if is_log else np.asarray
    x_low, x_high = _widened(min(0.0, float(xs.min())), float(xs.max()))
    y_low, y_high = _widened(float(scale(ys.min())), float(scale(ys.max())))

    def place_x(x: npt.ArrayLike) -> Points:
        across = (np.asarray(x) - x_low) / (x_high - x_low)
        return _LEFT + across * (_WIDTH - _LEFT - _RIGHT)

    def place_y(y: npt.ArrayLike) -> Points:
        up = (scale(y) - y_low) / (y_high - y_low)
        return _HEIGHT - _BOTTOM - up * (_HEIGHT - _TOP - _BOTTOM)

    parts = [
        f'<svg class="plot" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(title)}">'
    ]
    y_ticks = _powers(y_low, y_high) if is_log else _ticks(y_low, y_high)
    for tick in y_ticks:
        y = float(place_y(tick))
        parts.append(
            f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
            f'<text class="y" x="{_LEFT - 5}" y="{y + 3.5:.1f}">{_number(tick)}</text>'
        )
    for tick in _ticks(x_low, x_high, is_time=is_time):
        text = clock(tick) if is_time else _number(tick)
        parts.append(f'<text class="x" x="{place_x(tick):.1f}" y="{_HEIGHT - 7}">{text}</text>')
    for points, style in shown:
        placed = np.stack([place_x(points[:, 0]), place_y(points[:, 1])], axis=1)
        if len(placed) > _BAND_FROM:
            # The last point is often alone in its pixel, and not a mean of many as the others are.
            pixels = np.minimum(placed[:, 0].astype(int), int(placed[-1, 0]) - 1)
            columns = np.split(placed, np.flatnonzero(np.diff(pixels)) + 1)
            parts.append(_path(f"{style} band", np.concatenate(list(map(_extremes, columns)))))
            placed = np.array([(column[0, 0], column[:, 1].mean()) for column in columns])
        parts.append(_path(style, placed))
        if len(placed) <= _DOTS_UP_TO:
            dots = "".join(f"M{x:.1f} {y:.1f}h.01" for x, y in placed.tolist())
            parts.append(f'<path class="{style} dots" d="{dots}"/>')
    parts.append("</svg>")
    return "".join(parts)


def bars(shares: Iterable[tuple[str, float]], marks: Iterable[tuple[str, float]] = ()) -> str:
    """Draws one bar of parts: (CSS class, share of the whole). A part without a class is a gap.

    `marks` are lines across it: (CSS class, place from 0 to 1).
    """
    parts, x = [], 0.0
    for style, share in shares:
        width = share * _BAR_WIDTH
        if style and width > 0:
            parts.append(f'<rect class="{style}" x="{x:.1f}" width="{width:.1f}" height="10"/>')
        x += width
    parts += [f'<path class="{style}" d="M{at * _BAR_WIDTH:.1f} 0V10"/>' for style, at in marks]
    opening = (
        f'<svg class="strip" viewBox="0 0 {_BAR_WIDTH} 10" preserveAspectRatio="none" '
        'aria-hidden="true">'
    )
    return "".join([opening, *parts, "</svg>"])


def strip(
    pieces: Sequence[Piece], begin: float, end: float, marks: Sequence[tuple[str, float]] = ()
) -> str:
    """Draws the causes of a task's time from `begin` to `end`; each part has its main cause.

    `marks` are lines at some times: (CSS class, time).
    """
    length = max(end - begin, 1e-9)
    edges = begin + length * np.linspace(0, 1, _NUM_PARTS + 1)
    times = [time for piece in pieces for time in (piece.begin, piece.end)]
    seconds = np.zeros([len(CAUSES), _NUM_PARTS])  # Of each cause in each part.
    for row, cause in zip(seconds, CAUSES, strict=True):
        added = [value for piece in pieces for value in (0.0, piece.seconds.get(cause, 0.0))]
        row += np.diff(np.interp(edges, times, np.cumsum(added)))
    styles = np.where(
        seconds.any(axis=0), [cause_class(CAUSES[i]) for i in seconds.argmax(axis=0)], ""
    )
    shares = [(name, len(list(group)) / _NUM_PARTS) for name, group in itertools.groupby(styles)]
    return bars(shares, [(style, (time - begin) / length) for style, time in marks])


def cause_class(cause: str) -> str:
    """The CSS class of a cause."""
    return "c-" + cause.replace(" ", "-")


def _path(style: str, points: Points) -> str:
    places = [f"{x:.1f} {y:.1f}" for x, y in points.tolist()]
    return f'<path class="{style}" d="M{"L".join(places)}"/>'


def _extremes(column: Points) -> Points:
    """The points with the least and the largest value, in their order."""
    rows = sorted({int(column[:, 1].argmin()), int(column[:, 1].argmax())})
    return column[rows]


def _widened(low: float, high: float) -> tuple[float, float]:
    if high > low:
        return low, high
    margin = abs(low) / 2 or 0.5
    return low - margin, high + margin


def _ticks(low: float, high: float, *, is_time: bool = False) -> list[float]:
    """A few round numbers, or times in seconds, from `low` to `high`."""
    least = (high - low) / _NUM_TICKS
    power = 10.0 ** math.floor(math.log10(least))
    sizes = [size * power for size in (1, 2, 2.5, 5, 10)]
    if is_time:
        sizes = [*_TIME_STEPS, *(86400 * days for days in _DAYS)]
    step = next((size for size in sizes if size >= least), sizes[-1])
    return [index * step for index in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _powers(low: float, high: float) -> list[float]:
    sizes = (1, 2, 5) if high - low < 2.5 else (1,)
    found = [
        size * 10.0**power
        for power in range(math.floor(low), math.ceil(high) + 1)
        for size in sizes
    ]
    inside = [tick for tick in found if low <= math.log10(tick) <= high]
    return inside[:: max(1, len(inside) // _NUM_TICKS)]


def _number(value: float) -> str:
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= size:
            return f"{value / size:.4g}{unit}"
    return f"{value:.4g}"
