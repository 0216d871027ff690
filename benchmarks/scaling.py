"""`python -m benchmarks.scaling`: gradients a second from 1 to 1,024 workers, by a cost model.

    python -m benchmarks.run --rows=workers --out=workers.json
    python -m benchmarks.scaling --measured=workers.json --plot=scaling.png

Prints two Markdown tables. The first compares the model (benchmarks/cost_model.py) with each step
time that benchmarks.run measured on this machine; the model is fitted to all other step times. The
second predicts rates with one host for each worker, from the flags below: measure --compute_ms on
such a host with one worker. Without --message_us the time of a message comes from the fit.
"""

import dataclasses
import importlib.util
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from absl import app, flags

from benchmarks import cost_model
from benchmarks.cost_model import Costs, Hosts, Point
from data.system.extras import missing
from data.system.flags import parse_flags
from trainer.tf_setup import set_environment

_MEASURED = flags.DEFINE_string(
    "measured", "benchmarks.json", "JSON file that benchmarks.run --rows=workers has written."
)
_PLOT = flags.DEFINE_string("plot", "", "PNG file to write; empty: none.")
_COMPUTE_MS = flags.DEFINE_float(
    "compute_ms", 200.0, "Milliseconds of a gradient on one worker.", lower_bound=1e-6
)
_GRADIENT_MB = flags.DEFINE_float(
    "gradient_mb", 100.0, "Millions of bytes of all variables.", lower_bound=0
)
_APPLY_MS = flags.DEFINE_float(
    "apply_ms", 20.0, "Milliseconds to update all variables on one host.", lower_bound=0
)
_GBITS = flags.DEFINE_float(
    "gbits", 10.0, "Rate of a host's link in each direction, Gbit/s.", lower_bound=1e-6
)
_MESSAGE_US = flags.DEFINE_float(
    "message_us", None, "Microseconds of a message without content.", lower_bound=0
)
_STRAGGLE = flags.DEFINE_float(
    "straggle",
    0.1,
    "Mean disturbance of a gradient, relative to its time: (mean - least) / least.",
    lower_bound=0,
)
_TICKET_MS = flags.DEFINE_float(
    "ticket_ms", 1.0, "Milliseconds of the chief for an asynchronous gradient.", lower_bound=0
)
_LOCAL_STEPS = flags.DEFINE_integer(
    "local_steps", 100, "Steps from one average to the next.", lower_bound=1
)
_NUM_PS = flags.DEFINE_integer("num_ps", 4, "Parameter servers.", lower_bound=1)

_WORKERS = tuple(2**i for i in range(11))
# Simulated gradients: in total, and at least for each worker.
_DRAWN, _DRAWN_EACH = 4000, 20
_SEED = 0


def fitted_table(points: Sequence[Point], num_cores: int) -> list[str]:
    """Each measurement, the prediction from a fit to all others, and its relative error."""
    rows = [
        "| strategy | workers | ms a step | model | off by |",
        "| --- | --- | --- | --- | --- |",
    ]
    for point, secs in zip(points, cost_model.predicted_unseen(points, num_cores), strict=True):
        rows.append(
            f"| `{point.strategy}` | {point.workers} | {1000 * point.secs:.1f} | "
            f"{1000 * secs:.1f} | {100 * (secs / point.secs - 1):+.0f}% |"
        )
    return rows


def predictions(hosts: Hosts, local_steps: int) -> list[dict[str, Any]]:
    """Gradients a second of each strategy by the number of workers, computed and simulated."""
    found = []
    for workers in _WORKERS:
        backups = hosts.best_backups(workers)
        found.append(
            {
                "workers": workers,
                "ring": hosts.ring(workers),
                "local": hosts.local_steps(workers, local_steps),
                "async": hosts.ps_async(workers),
                "sync": hosts.ps_sync(workers),
                "backed": hosts.ps_sync(workers, backups),
                "backups": backups,
                "simulated_async": cost_model.simulated_async(
                    hosts, workers, gradients=max(_DRAWN, _DRAWN_EACH * workers), seed=_SEED
                ),
                "simulated_backed": cost_model.simulated_sync(
                    hosts, workers, backups, steps=max(_DRAWN // workers, _DRAWN_EACH), seed=_SEED
                ),
            }
        )
    return found


def predicted_table(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """`predictions` as Markdown."""
    rows = [
        "| workers | ring | local steps | ps, asynchronous (simulated) | ps, synchronous | "
        "with backups (simulated) | of them |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found:
        rows.append(
            f"| {row['workers']:,} | {row['ring']:,.4g} | {row['local']:,.4g} "
            f"| {row['async']:,.4g} ({row['simulated_async']:,.4g}) | {row['sync']:,.4g} "
            f"| {row['backed']:,.4g} ({row['simulated_backed']:,.4g}) | {row['backups']} |"
        )
    return rows


def draw(found: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Writes a picture of `predictions`."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    counts = [row["workers"] for row in found]
    for name, label, simulated in (
        ("ring", "ring", None),
        ("local", "ring, local steps", None),
        ("async", "ps, asynchronous", "simulated_async"),
        ("sync", "ps, synchronous", None),
        ("backed", "ps, synchronous, best backups", "simulated_backed"),
    ):
        (line,) = axes.plot(counts, [row[name] for row in found], label=label)
        if simulated:
            axes.plot(counts, [row[simulated] for row in found], "o", color=line.get_color())
    ideal = [count * found[0]["ring"] for count in counts]
    axes.plot(counts, ideal, ":", color="grey", label="linear")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("workers (points: simulated)")
    axes.set_ylabel("gradients a second")
    axes.legend()
    figure.savefig(path, dpi=150)
    plt.close(figure)


def _hosts(costs: Costs) -> Hosts:
    message = costs.message if _MESSAGE_US.value is None else _MESSAGE_US.value * 1e-6
    return Hosts(
        compute_secs=_COMPUTE_MS.value / 1e3,
        gradient_bytes=_GRADIENT_MB.value * 1e6,
        bytes_per_sec=_GBITS.value * 1e9 / 8,
        message_secs=message,
        apply_secs=_APPLY_MS.value / 1e3,
        straggle=_STRAGGLE.value,
        num_ps=_NUM_PS.value,
        ticket_secs=_TICKET_MS.value / 1e3,
    )


def _end_with(message: str) -> NoReturn:
    print(f"benchmarks.scaling: {message}", file=sys.stderr)
    sys.exit(2)


def _measured() -> tuple[list[Point], int, str]:
    """The measured points, the number of cores, and the machine."""
    path = Path(_MEASURED.value)
    try:
        report = json.loads(path.read_text())
        points = cost_model.points_of(report)
        machine = str(report["machine"])
        num_cores = int(machine.split()[0])
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        _end_with(f"--measured={path}: {error!r}. benchmarks.run --rows=workers writes it.")
    try:
        for left_out in range(len(points)):
            cost_model.fit([*points[:left_out], *points[left_out + 1 :]], num_cores)
    except ValueError as error:
        _end_with(
            f"--measured={path}: {error}. Each strategy is needed with three numbers of workers."
        )
    return points, num_cores, machine


def main(argv: Sequence[str]) -> None:
    """Prints the tables."""
    set_environment()
    if len(argv) > 1:
        _end_with(f"Received {argv[1]!r}, which is not a flag. --help lists the flags.")
    if _PLOT.value and not importlib.util.find_spec("matplotlib"):
        needed = missing("The plot", "matplotlib", "benchmarks")
        _end_with(f"{needed}, or give --plot= for no picture.")
    if _PLOT.value and not os.path.isdir(os.path.dirname(os.path.abspath(_PLOT.value))):
        _end_with(f"--plot={_PLOT.value}: there is no such directory.")
    points, num_cores, machine = _measured()
    costs = cost_model.fit(points, num_cores)
    print(f"{machine}; each step predicted from a fit to the others:\n")
    print("\n".join(fitted_table(points, num_cores)))
    print("\nAll steps together, milliseconds of CPU:\n")
    for name, secs in dataclasses.asdict(costs).items():
        print(f"* {name}: {1000 * secs:.2f}")
    hosts = _hosts(costs)
    found = predictions(hosts, _LOCAL_STEPS.value)
    print(f"\nGradients a second with one host for each worker, {hosts}:\n")
    print("\n".join(predicted_table(found)))
    if _PLOT.value:
        draw(found, Path(_PLOT.value))


if __name__ == "__main__":
    app.run(main, flags_parser=parse_flags("benchmarks.scaling"))
