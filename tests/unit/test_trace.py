"""benchmarks/trace.py reads the times of a step from TensorFlow's log."""

import pytest

from tests.unit.benchmark_modules import imported

trace = imported("benchmarks.trace")


def lines(op: str, begin: float, end: float, *, is_async: bool = False) -> list[str]:
    what = "Async" if is_async else "Synchronous"
    node = f"40 step -7 {{{{node while/{op}}}}} = {op}[T=DT_FLOAT](a, b) device: CPU:0"
    return [
        f"I0000 00:00:{begin:.6f}   31610 executor.cc:879] Process node: {node}",
        f"I0000 00:00:{end:.6f}   31610 executor.cc:936] {what} kernel done: {node}",
    ]


def log_of(*starts: float) -> list[str]:
    """Steps of 1 s, in which a sum begins before the backward pass ends."""
    log = []
    for start in starts:
        log += lines("_MklNativeFusedMatMul", start, start + 0.2)
        log += lines("SparseSoftmaxCrossEntropyWithLogits", start + 0.2, start + 0.201)
        log += lines("_MklMatMul", start + 0.21, start + 0.4)
        log += lines("CollectiveReduceV2", start + 0.4, start + 0.8, is_async=True)
        log += lines("_MklMatMul", start + 0.401, start + 0.6)
        log += lines("ResourceApplyGradientDescent", start + 0.8, start + 0.9)
        # The loop has ended: ops are passed over.
        log += lines("CollectiveReduceV2", start + 0.95, start + 0.95)
        log.append("a line of another kind")
    return log


def test_bars_of_a_step_are_the_times_of_its_ops() -> None:
    log = log_of(100.0, 101.0)
    log += lines("_MklNativeFusedMatMul", 102.0, 102.1)  # An evaluation: no sum.
    log += lines("SparseSoftmaxCrossEntropyWithLogits", 102.1, 102.2)
    log += log_of(103.0)
    bars = list(trace.bars_of(log))
    step = trace.merged(trace.step_of(bars, 1))
    found = [(bar.kind, round(bar.begin, 3), round(bar.end, 3)) for bar in step]
    assert found == [
        ("forward", 0.0, 0.2),
        ("backward", 0.21, 0.6),
        ("sum", 0.4, 0.8),
        ("update", 0.8, 0.9),
    ]


def test_a_step_whose_end_is_not_in_the_log_is_refused() -> None:
    bars = list(trace.bars_of(log_of(100.0, 101.0)))
    assert trace.step_of(bars, 0)
    with pytest.raises(ValueError, match="the log has 1 complete steps, and step 1 is needed"):
        trace.step_of(bars, 1)
