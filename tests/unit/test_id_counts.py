"""`python -m data.inspect --ids`: how many ids the columns of a data set have."""

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from data import id_counts, inspect
from data.id_counts import Counts, count_ids
from data.prepare.preparing import prepare
from data.prepare.sources import Options
from data.system.files import DataError
from data.tfrecord.split import open_split
from tests.unit.test_split import contents


def counted(data_dir: Path) -> dict[str, Counts]:
    split = open_split(str(data_dir), "train")
    return {counts.name: counts for counts in count_ids(str(data_dir), split)}


@pytest.mark.parametrize("most_pending", [1, 50, 1 << 20])
def test_merges_count_each_id(most_pending: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(id_counts, "_MOST_PENDING", most_pending)
    random, expected = np.random.default_rng(1), Counter[int]()
    counter, of_list = Counts("x"), Counts("y", is_list=True)
    for _ in range(30):
        ids = random.zipf(1.3, (7, 5)).astype(np.int64)
        counter.add(ids)
        expected.update(ids.ravel().tolist())
    for each in (counter, of_list):
        each.add(np.array([-1, -1, -5]))
        each.merge()
    expected.update([-1, -1, -5])
    assert dict(zip(counter.ids.tolist(), counter.times.tolist(), strict=True)) == expected
    assert counter.num_ids == 30 * 35 + 3
    assert of_list.ids.tolist() == [-5], "-1 fills up lists"
    assert counter.num_used(2) == sum(times > 1 for times in expected.values())
    most = sum(times for _, times in expected.most_common(3))
    assert counter.share_of_most_frequent(3) == pytest.approx(most / (30 * 35 + 3))


def test_columns_of_clicks_are_counted(tmp_path: Path) -> None:
    prepare("clicks", str(tmp_path), options=Options(num_clicks=5000, id_scale=0.001))
    expected = Counter[int]()
    for record in contents(open_split(str(tmp_path), "train")):
        feature = tf.train.Example.FromString(record).features.feature["categorical"]
        ids = np.frombuffer(feature.bytes_list.value[0], "<i4")
        expected.update([int(ids[3])])
    found = counted(tmp_path)
    assert len(found) == 26 + 1
    column = found["categorical[3]"]
    assert dict(zip(column.ids.tolist(), column.times.tolist(), strict=True)) == expected
    assert found["categorical, all"].num_ids == 26 * 5000
    lines = list(inspect.table_sizes(str(tmp_path), ["train"]))
    assert lines[0] == "train: 5,000 examples"
    (line,) = [line for line in lines if line.startswith("  categorical[3] ")]
    assert line.split()[1:4] == [
        f"{len(expected):,}",
        f"{sum(times == 1 for times in expected.values()):,}",
        f"{max(expected):,}",
    ]


def test_lists_are_counted_without_what_fills_them_up(tmp_path: Path) -> None:
    source = tmp_path / "films.csv"
    rows = ["3|17|5,Drama|Comedy,0", "-2,Drama,1", "17,,1"] * 20
    source.write_text("\n".join(["tags,genres,clicked", *rows]))
    out = tmp_path / "out"
    prepare("csv:films", str(out), str(source), Options(label="clicked", lists="tags,genres"))
    found = counted(out)
    assert found["tags, all"].ids.tolist() == [-2, 3, 5, 17]
    assert found["genres, all"].num_different == 2
    assert found["genres[1]"].num_different == 1


def test_data_without_ids_is_refused(digits: Path) -> None:
    with pytest.raises(DataError, match="no feature of integers or text"):
        counted(digits)
