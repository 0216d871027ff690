"""`python -m benchmarks.plot JSON PNG`: a picture of the results of benchmarks.run.

python -m benchmarks.plot benchmarks.json benchmarks.png
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.system.extras import missing

NEEDED = missing("The plot", "matplotlib", "benchmarks")


def draw(report: Mapping[str, Any], path: Path) -> None:
    """Writes a picture of `report`: ratios with range and bar, and step time by workers."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    rows = [row for row in report["rows"] if row["ratio"]]
    sides = [bool(rows), bool(report["workers"])]
    if not any(sides):
        return
    height = max(4.0, 1.5 + 0.45 * len(rows))
    figure, axes = plt.subplots(
        1, sum(sides), figsize=(8.0 * sum(sides), height), squeeze=False, layout="constrained"
    )
    panels = iter(axes[0])
    if rows:
        _draw_ratios(next(panels), rows)
    if report["workers"]:
        _draw_workers(next(panels), report["workers"])
    figure.suptitle(f"{report['machine']}; {report['versions']}", fontsize=9)
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _draw_ratios(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    places = range(len(rows))
    medians = [row["ratio"]["median"] for row in rows]
    below = [row["ratio"]["median"] - row["ratio"]["least"] for row in rows]
    above = [row["ratio"]["most"] - row["ratio"]["median"] for row in rows]
    axes.errorbar(medians, places, xerr=[below, above], fmt="o", capsize=3, label="median, range")
    barred = [(row["bar"], place) for place, row in enumerate(rows) if row["bar"]]
    if barred:
        axes.scatter(*zip(*barred, strict=True), marker="|", s=200, color="black", label="bar")
    axes.axvline(1, linewidth=0.5, color="grey")
    axes.set_yticks(places, [row["name"] for row in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xticks(ticks := [0.25, 0.5, 1, 2, 4], [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("project / peer (of times: less is better)")
    axes.legend()


def _draw_workers(axes: Any, workers: Sequence[Mapping[str, Any]]) -> None:
    for strategy in dict.fromkeys(row["strategy"] for row in workers):
        own = [row for row in workers if row["strategy"] == strategy and row["ms"]]
        medians = [row["ms"]["median"] for row in own]
        below = [row["ms"]["median"] - row["ms"]["least"] for row in own]
        above = [row["ms"]["most"] - row["ms"]["median"] for row in own]
        counts = [row["workers"] for row in own]
        axes.errorbar(counts, medians, yerr=[below, above], marker="o", capsize=3, label=strategy)
    axes.set_xlabel("workers")
    axes.set_ylabel("ms a step")
    axes.set_ylim(bottom=0)
    axes.legend()


def main(argv: Sequence[str]) -> int:
    """Draws; returns the exit code."""
    if len(argv) != 2:
        print("benchmarks.plot: needs two paths, JSON and PNG.", file=sys.stderr)
        return 2
    source, target = map(Path, argv)
    try:
        draw(json.loads(source.read_text()), target)
    except ImportError:
        print(f"benchmarks.plot: {NEEDED}", file=sys.stderr)
        return 2
    except (OSError, ValueError, KeyError) as error:
        print(f"benchmarks.plot: {source} to {target}: {error!r}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
