"""The placement of variables by bytes, with their slots. tests/cluster tests that it is used."""

import re

import keras
import pytest

from strategies.ps.placement import Group, dry_run, place
from trainer.learner import Learner
from trainer.step.losses import sparse_categorical_crossentropy


def groups_of(sizes: list[int]) -> list[Group]:
    return [Group(f"v{i}", (size,), size) for i, size in enumerate(sizes)]


def make_learner(optimizer: keras.Optimizer | None = None) -> Learner:
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(5), keras.layers.Dense(3)])
    optimizer = optimizer or keras.optimizers.Adam(0.1)
    return Learner(model, optimizer, sparse_categorical_crossentropy, {}, batch_size=4)


def test_variable_counts_with_its_slots_and_its_gradient_buffers() -> None:
    learner, groups = dry_run(make_learner)
    kernel = next(i for i, group in enumerate(groups) if group.shape == (6, 5))
    assert groups[kernel].num_variables == 3, "Adam has two slots a variable"
    assert groups[kernel].num_bytes == 3 * 6 * 5 * 4
    everything = [*learner.model.variables, *learner.optimizer.variables]
    assert sum(group.num_variables for group in groups) == len(everything)
    num_bytes = sum(variable.value.numpy().nbytes for variable in everything)
    assert sum(place(groups, 3).num_bytes) == num_bytes
    buffered = place(groups, 2, num_gradient_buffers=3).groups
    assert buffered[kernel].num_bytes == (3 + 3) * 6 * 5 * 4
    untrained = next(i for i, group in enumerate(groups) if not group.gradient_bytes)
    assert buffered[untrained].num_bytes == groups[untrained].num_bytes


@pytest.mark.parametrize(
    ("optimizer", "num_buffers", "said"),
    [
        ("SGD", 0, ""),
        ("SGD", 2, " with 2 gradients"),
        ("Adam", 0, " with its slots"),
        ("Adam", 2, " with its slots and 2 gradients"),
    ],
)
def test_table_says_what_the_bytes_of_a_variable_include(
    optimizer: str, num_buffers: int, said: str
) -> None:
    _, groups = dry_run(lambda: make_learner(getattr(keras.optimizers, optimizer)(0.1)))
    table = place(groups, 1, num_gradient_buffers=num_buffers).table()
    assert re.search(rf"the largest .*kernel:0 \[6, 5\]{said}: ", table)


def test_largest_is_placed_first_and_on_the_emptiest_ps() -> None:
    placement = place(groups_of([1, 2, 3, 10, 4]), num_ps=2)
    assert [group.ps for group in placement.groups] == [1, 1, 1, 0, 1]
    assert placement.num_bytes == [10, 10]
    table = placement.table().splitlines()
    assert table[0].startswith("ps 0: 10 bytes, 1 variables, the largest v3 [10]")
    assert table[1].startswith("ps 1: 10 bytes, 4 variables, the largest v4 [4]")
    assert place(groups_of([5]), num_ps=2).table().splitlines()[1] == "ps 1: 0 bytes, 0 variables"
