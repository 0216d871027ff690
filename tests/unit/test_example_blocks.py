"""Records of many examples at once are those that are made one by one."""

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from data.tfrecord.examples import Value, example_bytes, fixed, records

INTEGERS = st.integers(-(2**63), 2**63 - 1) | st.sampled_from([0, 127, 128, 2**14, 2**56 - 1])


@settings(max_examples=60, deadline=None)
@given(st.data(), st.integers(1, 9))
def test_records_are_equal_to_those_made_one_by_one(data: st.DataObject, num_rows: int) -> None:
    def column(values: st.SearchStrategy[Any]) -> list[Any]:
        return data.draw(st.lists(values, min_size=num_rows, max_size=num_rows))

    numbers = column(INTEGERS)
    floats = column(st.floats(width=32))
    words = column(st.binary(max_size=300))
    lists = column(st.lists(st.binary(max_size=5), min_size=3, max_size=3))
    doubles = np.array(column(st.floats()))
    found = records(
        {
            "number": np.array(numbers, np.int64),
            "float": np.array(floats, np.float32),
            "word" * 50: np.array(words, object),
            "列": np.array(lists, object),
            "double": fixed(doubles),
        }
    )
    for row, record in enumerate(found):
        values: dict[str, Value] = {
            "number": numbers[row],
            "float": floats[row],
            "word" * 50: words[row],
            "列": lists[row],
            "double": doubles[row].tobytes(),
        }
        assert record == example_bytes(values)
    assert row == num_rows - 1
