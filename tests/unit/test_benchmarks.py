"""What benchmarks.run and others make of the values that they measure."""

import math
from pathlib import Path

import pytest

from benchmarks.deep import GRADIENT_BYTES, build_model, get_config
from benchmarks.pairs import is_met, rate_of, steady, summarise, turns
from benchmarks.table import ProgramError
from tests.unit.benchmark_modules import imported

network = imported("benchmarks.network")
gpu = imported("benchmarks.gpu")


def test_programs_take_turns_and_neither_is_always_first() -> None:
    order: list[str] = []

    def measure(name: str) -> float:
        order.append(name)
        return len(order)

    pairs = list(turns(lambda: measure("project"), lambda: measure("peer"), 3))
    assert order == ["peer", "project", "project", "peer", "peer", "project"]
    assert pairs == [(2, 1), (3, 4), (6, 5)]


def test_one_disturbed_round_does_not_move_the_median() -> None:
    summary = summarise([1.1, 0.2, 1.0, 1.2, 1.1])
    assert (summary.median, summary.least, summary.most) == (1.1, 0.2, 1.2)
    assert str(summary) == "1.10 (0.20 to 1.20)"


def test_a_bar_of_times_is_met_from_below() -> None:
    assert [is_met(value, 0.95, at_most=False) for value in (0.95, 0.94)] == [True, False]
    assert [is_met(value, 1.5, at_most=True) for value in (1.5, 1.51)] == [True, False]


def test_rate_leaves_out_the_report_that_includes_tracing() -> None:
    times = {100: 50.0, 200: 51.0, 500: 52.0}
    reports = [{"step": step, "seconds": seconds} for step, seconds in times.items()]
    assert rate_of(reports) == 200
    assert rate_of(reports, first_step=150) == 300
    with pytest.raises(ValueError, match="needs two reports"):
        rate_of(reports, first_step=300)


def test_bytes_of_a_step_need_their_time_on_the_busiest_link() -> None:
    assert 4 * build_model(get_config()).count_params() == GRADIENT_BYTES
    secs = pytest.approx(GRADIENT_BYTES / 62.5e6)
    assert network.Setting("500mbit", 1, 2).transfer_secs("program") == secs
    assert network.Setting("2gbit", 1, 2).transfer_secs("program") * 4 == secs
    # Of four hosts each sends 2 * 3 / 4 of the gradients, and all wait for the slow link.
    slow = network.Setting("2gbit", 1, 4, slow_rate="500mbit")
    assert slow.transfer_secs("program") / 1.5 == secs
    # A server sends the variables to the four workers over its own link, which is not slow.
    assert slow.transfer_secs("ps") * 4 == secs
    assert slow.transfer_secs("ps_sync") == secs


def test_hidden_part_of_a_transfer_is_all_or_nothing_at_the_ends() -> None:
    secs = {"compute": 1.0, "transfer": 0.8, "one_sum": 1.8, "program": 1.0, "ddp": 1.4}
    measured = {name: [network.Taken(value, 0.9)] for name, value in secs.items()}
    measured["ddp"] = [network.Taken(1.4, math.nan)]
    *_, one_sum, program, ddp = network.rows(network.Setting("500mbit", 512, 2), measured)
    assert one_sum.endswith("| 1.80 (1.80 to 1.80) | 0.90 | 1.00 | 1.80 | 0.00 |")
    assert program.endswith("| 1.00 (1.00 to 1.00) | 0.90 | 1.00 | 1.00 | 1.00 |")
    assert ddp.endswith("| 1.40 (1.40 to 1.40) |  | 1.00 | 1.40 | 0.50 |")


def test_compilation_is_not_in_a_steady_rate() -> None:
    assert steady([3, 90, 101, 100, 102]) == 101
    assert steady([7]) == 7


def test_flops_of_a_token_are_those_of_the_kernels_and_of_attention() -> None:
    from configs import text_lm  # Creates variables.

    config = text_lm.get_config()
    config.width, config.blocks, config.heads = 32, 3, 4
    # Biases and scales have one dimension; those of attention two, without a part for their input.
    kernels = [v for v in text_lm.build_model(config).trainable_variables if v.name == "kernel"]
    attention = 12 * config.blocks * config.width * text_lm.LENGTH
    products = 6 * sum(math.prod(kernel.shape) for kernel in kernels)
    assert gpu.flops_per_token(config.width, config.blocks) == products + attention


def test_a_program_that_fails_loses_no_figures_of_others(tmp_path: Path) -> None:
    turns_taken: list[str] = []

    def works(data: Path) -> dict[str, float]:
        turns_taken.append("works")
        return {"examples_per_sec": 50.0 * len(turns_taken)}

    def fails(data: Path) -> dict[str, float]:
        turns_taken.append("fails")
        raise ProgramError("exit code 1")

    programs = {"works": works, "fails": fails}
    rows = [gpu.Row("part", name) for name in programs]
    steps = gpu.measured(programs, rows, tmp_path, 2)
    next(steps)
    assert rows[0].figures == [{"examples_per_sec": 50.0}]
    list(steps)
    assert turns_taken == ["works", "fails", "fails", "works"]
    assert rows[0].cells(rows[0])[:4] == ["part", "works", "125", "1"]
    assert rows[1].error == "exit code 1"
    assert rows[1].cells(rows[0])[:3] == ["part", "fails", "failed"]
