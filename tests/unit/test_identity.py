"""What must be equal for a run to continue, and the lines that name what is not."""

from types import SimpleNamespace

import pytest

from trainer.checkpoints.identity import Identity, differences, identity_of, refusal

DENSE = ["0 float32[3, 4]", "1 float32[4]"]
NAMES = ["dense/kernel", "dense/bias"]


def identity(names: list[str] = NAMES, **values: object) -> Identity:
    """An identity whose variables have these names."""
    return Identity({"variables": DENSE, **values}, {"variables": names})


def sized(size: int, optimizer: str) -> Identity:
    """An identity whose only variable has `size` values."""
    variables = {"variables": [f"0 float32[{size}]"], "optimizer's variables": [optimizer]}
    return identity(["w"], **variables)


WITHOUT_BIAS = identity(NAMES[:1], variables=DENSE[:1])


@pytest.mark.parametrize(
    ("saved", "ours", "lines"),
    [
        (identity(), identity(), []),
        (identity(batch_size=16), identity(batch_size=8), ["batch_size: 16 there, 8 here"]),
        (identity(), identity(seed=0), ["seed: null there, 0 here"]),
        (identity(data=1, new=1), identity(data=2), ["new: 1 there, null here"]),
        # Always in one order.
        (identity(b=1, a=1), identity(a=2, b=2), ["a: 1 there, 2 here", "b: 1 there, 2 here"]),
        (
            identity(seeds="s" * 300),
            identity(seeds=""),
            [f'seeds: "{"s" * 149} ... (302 characters) there, "" here'],
        ),
        # Names may differ, as Keras numbers layers anew.
        (identity(["dense_1/kernel", "dense_1/bias"]), identity(), []),
        (
            identity(variables=["0 float32[3, 3]", "1 float32[3]"]),
            identity(),
            [
                "variables: dense/kernel float32[3, 3] there, dense/kernel float32[3, 4] here",
                "variables: dense/bias float32[3] there, dense/bias float32[4] here",
            ],
        ),
        # Earlier versions recorded no names.
        (
            identity([], variables=["0 float32[3, 3]", "1 float32[4]"]),
            identity(),
            ["variables: variable 0 float32[3, 3] there, dense/kernel float32[3, 4] here"],
        ),
        (WITHOUT_BIAS, identity(), ["variables: dense/bias float32[4] only here"]),
        (identity(), WITHOUT_BIAS, ["variables: dense/bias float32[4] only there"]),
        # The optimizer's variables follow from those of the model.
        (sized(9, "a"), sized(8, "b"), ["variables: w float32[9] there, w float32[8] here"]),
        (
            identity(**{"optimizer's variables": ["0 int64[]"]}),
            identity(**{"optimizer's variables": ["0 int64[]", "1 float32[4]"]}),
            ["optimizer's variables: variable 1 float32[4] only here"],
        ),
    ],
)
def test_differences(saved: Identity, ours: Identity, lines: list[str]) -> None:
    assert differences(saved, ours, ignored={"data"}) == lines


def test_identity_is_as_json_holds_it_and_names_a_variable_by_its_path() -> None:
    kernel = SimpleNamespace(dtype="float32", shape=(3, 4), path="dense/kernel", name="kernel")
    slots = SimpleNamespace(dtype="float32", shape=(9,), name="table", slot_names=("a", "b"))
    assert identity_of({"files": (1, 2)}, {"variables": [kernel], "tables": [slots]}) == Identity(
        {"files": [1, 2], "variables": ["0 float32[3, 4]"], "tables": ["0 float32[9] a b"]},
        {"variables": ["dense/kernel"], "tables": ["table"]},
    )


def test_slots_are_left_out_of_the_given_tables_alone() -> None:
    tables = {"variables": ["0 float32[None, 4] a", "1 float32[None, 4] a b", "2 float32[3]"]}
    here = {"variables": ["0 float32[None, 4]", "1 float32[None, 4] a"]}
    saved, ours = identity(["x_1", "y_1", "z"], **tables), identity(["x", "y"], **here)
    assert saved.without_slots(["x"], ours).values == {
        "variables": ["0 float32[None, 4]", "1 float32[None, 4] a b", "2 float32[3]"]
    }


def test_refusal_names_the_checkpoint_and_says_what_to_do() -> None:
    first, *lines, last = refusal("runs/a/step-1", ["seed: 1 there, 2 here", "b"]).splitlines()
    assert first == "runs/a/step-1 is of another run, which this one cannot continue:"
    assert lines == ["  seed: 1 there, 2 here", "  b"]
    assert "--model_dir" in last
