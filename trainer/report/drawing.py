"""Plots and bars as SVG, for a page without scripts.

    plot("loss", [Curve(np.array([[0, 2.3], [100, 0.4]]), "s0 train")], is_time=False)
    bars([("compute", 0.9), ("dead", 0.1)])
    strip(task.pieces, begin, end)

Colours are classes of the page's style sheet, so a plot is light or dark like its page. A curve
with many points for each pixel is a band from the least to the largest value, and the means.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from trainer.run_files import clock, is_logarithmic
from trainer.run_record.goodput import Piece

_WIDTH, _HEIGHT = 400, 230
# The margins around the axes. Half of the label "100:00:00" fits into the right one.
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 30, 8, 24
_NUM_TICKS = 5
_BAND_FROM = 1000  # Points.
_DOTS_UP_TO = 40  # Points that are drawn as dots, too.
_STRIP_WIDTH = 1000
_STRIP_PARTS = 500

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
    for tick in _time_ticks(x_low, x_high) if is_time else _ticks(x_low, x_high):
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


def bars(shares: Iterable[tuple[str, float]]) -> str:
    """Draws one bar of parts: (CSS class, share of the whole)."""
    parts, x = [], 0.0
    for style, share in shares:
        width = share * _STRIP_WIDTH
        if width > 0:
            parts.append(f'<rect class="{style}" x="{x:.1f}" width="{width:.1f}" height="10"/>')
        x += width
    return _strip(parts)


def strip(
    pieces: Sequence[Piece], begin: float, end: float, marks: Sequence[tuple[str, float]] = ()
) -> str:
    """Draws the causes of a task's time from `begin` to `end`; each part has its main cause.

    `marks` are lines at some times: (CSS class, time).
    """
    secs = max((end - begin) / _STRIP_PARTS, 1e-9)
    found: list[dict[str, float]] = [defaultdict(float) for _ in range(_STRIP_PARTS)]
    for piece in pieces:
        first = max(0, int((piece.begin - begin) / secs))
        last = min(_STRIP_PARTS - 1, int((piece.end - begin) / secs))
        for index in range(first, last + 1):
            lower = max(piece.begin, begin + index * secs)
            overlap = min(piece.end, begin + (index + 1) * secs) - lower
            if overlap > 0:
                for cause, value in piece.seconds.items():
                    found[index][cause] += value * overlap / (piece.end - piece.begin)
    names = [max(part, key=part.__getitem__) if part else "" for part in found]
    width, x, parts = _STRIP_WIDTH // _STRIP_PARTS, 0, []
    for name, group in itertools.groupby(names):
        length = width * len(list(group))
        if name:
            style = cause_class(name)
            parts.append(f'<rect class="{style}" x="{x}" width="{length}" height="10"/>')
        x += length
    for style, time in marks:
        at = (time - begin) / max(end - begin, 1e-9) * _STRIP_WIDTH
        parts.append(f'<path class="{style}" d="M{at:.1f} 0V10"/>')
    return _strip(parts)


def cause_class(cause: str) -> str:
    """The CSS class of a cause."""
    return "c-" + cause.replace(" ", "-")


def _strip(parts: Sequence[str]) -> str:
    opening = (
        f'<svg class="strip" viewBox="0 0 {_STRIP_WIDTH} 10" preserveAspectRatio="none" '
        'aria-hidden="true">'
    )
    return "".join([opening, *parts, "</svg>"])


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


def _ticks(low: float, high: float) -> list[float]:
    raw = (high - low) / _NUM_TICKS
    power = 10 ** math.floor(math.log10(raw))
    step = next(size * power for size in (1, 2, 2.5, 5, 10) if size * power >= raw)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [index * step for index in range(first, last + 1)]


def _time_ticks(low: float, high: float) -> list[float]:
    sizes = [1, 2, 5, 10, 20, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 14400, 43200]
    sizes += [86400 * days for days in (1, 2, 5, 10, 20, 50, 100)]
    step = next((size for size in sizes if (high - low) / size <= _NUM_TICKS), sizes[-1])
    return [float(index * step) for index in range(math.ceil(low / step), int(high // step) + 1)]


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
