"""Values of CSV files are stored as they are, or as the options say; wrong ones are explained."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.example_features import read_features
from data.prepare.preparing import prepare
from data.prepare.sources import Options, csv
from data.system.files import DataError
from tests.unit.test_prepare import parsed, read_all

ROWS = """sepal,petal,count,species
5.1,1.4,3,setosa
7,4.7,-2,versicolor
6.3,6e0,9223372036854775807,"virginica, or so"

4.9,1.5,1,setosa
"""


def test_csv_types_hold_over_the_whole_file(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "train.csv").write_text("\ufeff" + ROWS)
    (source / "test.csv").write_text("sepal,petal,count,species\r\n1,2,3,setosa\r\n")
    out = tmp_path / "out"
    prepare("csv:iris", str(out), str(source), Options(label="species"))
    known = read_features(str(out))
    dtypes = {"sepal": "float32", "petal": "float32", "count": "int64", "species": "int64"}
    assert {name: known[name].dtype for name in known} == dtypes
    sepal, count, species = parsed(out, "train", "sepal", "count", "species")
    assert sepal.tolist() == pytest.approx([5.1, 7, 6.3, 4.9])
    assert count.tolist() == [3, -2, 2**63 - 1, 1]
    assert species.tolist() == [0, 1, 2, 0]
    assert (out / "species.labels.txt").read_text() == "setosa\nversicolor\nvirginica, or so\n"
    inputs, labels = read_all(out, "test")
    assert inputs.tolist() == [[1, 2, 3]], "columns of numbers side by side are the input"
    assert labels.tolist() == [0]


def prepared_csv(tmp_path: Path, values: list[str], **options: Any) -> tuple[Path, list[str]]:
    """A data set of column x with these values, in the split train; and the notes."""
    source = tmp_path / "source"
    source.mkdir(exist_ok=True)
    for split in ("train", "test"):
        lines = [f"{number};{value}" for number, value in enumerate(values)]
        (source / f"{split}.csv").write_text("\n".join(["n;x", *lines]) + "\n")
    notes = csv.source("x", str(source), Options(**options)).notes
    out = tmp_path / f"out-{len(list(tmp_path.iterdir()))}"
    prepare("csv:x", str(out), str(source), Options(**options))
    return out, list(notes)


AVAZU = [str(10000009418151094273 + number) for number in range(60)]


@pytest.mark.parametrize(
    ("values", "dtype", "stored", "changed"),
    [
        (
            ["0", "-0", "+5", "16777217", "-9223372036854775808"],
            "int64",
            [0, 0, 5, 2**24 + 1, -(2**63)],
            "",
        ),
        (["1.", ".5", "2e-3", "-0"], "float32", [1, 0.5, np.float32(2e-3), -0.0], ""),
        (["0.1", "33554432", "NA"], "float32", [np.float32(0.1), 2**25, 0], ""),
        (["1700000000.123", "2"], "float64", [1700000000.123, 2], ""),
        (["16777217", "0.5"], "float64", [2**24 + 1, 0.5], ""),
        (["1e39", "3"], "float64", [1e39, 3], ""),
        (["2e-60", "1e-42", "0e-99"], "float64", [2e-60, 1e-42, 0], ""),
        (AVAZU, "string", AVAZU, AVAZU[0]),
        (["9223372036854775807", "9223372036854775808"], "string", None, "9223372036854775808"),
        (["9007199254740993", "0.5"], "string", None, "9007199254740993"),
        (["10115", "01067", "NA"], "string", None, "01067"),
        (["01e1", "02e2"], "string", None, "01e1"),
        (["7", "007", "A7"], "string", None, "A7"),
        (["05db9164", "12345678", "1e234567"], "string", None, "05db9164"),
        (["0x10", "1e"], "string", None, ""),
        (["inf", "nan", "infinity"], "string", None, ""),
        (["3,5", "a lot", "none"], "string", None, ""),
        (["1.2.3", "10.0.0.1", "12:30", "2024-01-02", "030 123"], "string", None, ""),
        (["20_29", "2024_01_15", "1_0000"], "string", None, ""),
        (["555 123 456", "+49 123 456"], "string", None, "555 123 456"),
        (["192.168.100.200", "1.100.200"], "string", None, "192.168.100.200"),
        (["1_000", "2_000"], "string", None, "1_000"),
    ],
)
def test_csv_values_are_stored_as_they_are(
    tmp_path: Path, values: list[str], dtype: str, stored: list[Any] | None, changed: str
) -> None:
    out, notes = prepared_csv(tmp_path, values, missing="0")
    found = [note for note in notes if "is text" in note]
    assert len(found) == bool(changed)
    assert not changed or re.search(
        f"x is text, because (a number (would|has).*|it has) '{re.escape(changed)}'", found[0]
    )
    assert read_features(str(out))["x"].dtype == dtype
    (read,) = parsed(out, "train", "x")
    if dtype == "string":
        assert [value.decode() for value in read] == values
    else:
        assert read.tolist() == stored
    if dtype == "float32":
        assert np.array_equal(np.signbit(read), np.signbit(np.array(stored)))


@pytest.mark.parametrize(
    ("values", "options", "stored"),
    [
        ([str(2**63 + 2048), "007"], {"float": "x"}, [2**63 + 2048, 7]),
        (["1", "NA"], {"missing": "2.0"}, [1, 2]),
        (["1", ""], {"missing": "0.5"}, [1, 0.5]),
        (["1", "NA"], {"missing": "1e39"}, [1, 1e39]),
        (["1", "NA"], {"missing": "1e16"}, [1, 10**16]),
        (["0.5", "NA"], {"missing": "1e16"}, [0.5, 1e16]),
    ],
)
def test_numbers_become_what_the_options_say(
    tmp_path: Path, values: list[str], options: dict[str, str], stored: list[float]
) -> None:
    out, _ = prepared_csv(tmp_path, values, **options)
    assert parsed(out, "train", "x")[0].tolist() == stored


@pytest.mark.parametrize(
    ("values", "rewritten"),
    [
        (["3,5", "2,25", "-1"], ["3.5", "2.25", "-1"]),
        (["37,697", "25"], ["37697", "25"]),
        (["1.234,5", "1.234.567"], ["1234.5", "1234567"]),
        (["1'000", "1_000", "1\u00a0000"], ["1000", "1000", "1000"]),
        (["1 234 567", "25"], ["1234567", "25"]),
        (["1_000.5", "1_000"], ["1000.5", "1000"]),
        (["\uff11\uff12", "3"], ["12", "3"]),
        (["\u22125", "3"], ["-5", "3"]),
        (["1e400", "3"], ["1e300", "3"]),
        (["1e-400", "3"], ["1e-300", "3"]),
    ],
)
def test_numbers_in_another_notation_are_refused_and_the_advice_works(
    tmp_path: Path, values: list[str], rewritten: list[str]
) -> None:
    first = re.escape(repr(values[0]))
    said = rf"train\.csv, line 2: column x has {first}: .*another notation.*--text=x"
    for label in (None, "x"):
        with pytest.raises(DataError, match=said):
            prepared_csv(tmp_path, values, label=label)
    out, _ = prepared_csv(tmp_path, rewritten)
    assert parsed(out, "train", "x")[0].tolist() == list(map(float, rewritten))
    out, notes = prepared_csv(tmp_path, values, text="x")
    assert [value.decode() for value in parsed(out, "train", "x")[0]] == values
    assert not notes


@pytest.mark.parametrize(
    ("values", "names", "note"),
    [
        (["0", "2", "5"], None, "x has 3 different values from 0 to 5. So the label has 6 classes"),
        (["0", "1"], None, ""),
        (["true", "False"], ["False", "true"], ""),
        (["20_29", "30_39"], ["20_29", "30_39"], ""),
        (["1", "10", "x"], ["1", "10", "x"], "the label x has 'x', so all its values are names"),
        (["01", "1"], ["01", "1"], "column x is text, because a number would change '01'"),
    ],
)
def test_values_of_a_label_are_never_changed_unsaid(
    tmp_path: Path, values: list[str], names: list[str] | None, note: str
) -> None:
    out, notes = prepared_csv(tmp_path, values, label="x")
    assert len(notes) == bool(note)
    assert note in "".join(notes)
    (labels,) = parsed(out, "train", "x")
    if names is None:
        assert labels.tolist() == list(map(int, values))
    else:
        assert [names[number] for number in labels] == values
        assert (out / "x.labels.txt").read_text().splitlines() == names


def test_csv_lists_of_any_length_are_filled_up(tmp_path: Path) -> None:
    lines = [
        "tags,genres,words,n,clicked",
        "3|17|5,Drama|Science Fiction,a b,1.5,0",
        "-2,Drama,,2,1",
        ",,c,3,0",
    ]
    source = tmp_path / "source"
    source.mkdir()
    for split in ("train", "test"):
        (source / f"{split}.csv").write_text("\n".join(lines))
    out = tmp_path / "out"
    options = Options(label="clicked", lists="tags, genres,words")
    prepare("csv:films", str(out), str(source), options)
    tags, genres, words = parsed(out, "train", "tags", "genres", "words")
    assert tags.tolist() == [[3, 17, 5], [-2, -1, -1], [-1, -1, -1]]
    assert genres.tolist() == [[b"Drama", b"Science Fiction"], [b"Drama", b""], [b"", b""]]
    assert words.tolist() == [[b"a", b"b"], [b"", b""], [b"c", b""]]
    wrong = Options(label="clicked", lists="clicked")
    with pytest.raises(DataError, match="--lists has 'clicked'"):
        prepare("csv:films", str(tmp_path / "other"), str(source), wrong)


def test_the_longest_list_is_named_and_counts_as_space(tmp_path: Path) -> None:
    source = tmp_path / "x.csv"
    source.write_text("n,tags\n" + "1,\n" * 50 + "2," + "3|" * 4999 + "3\n")
    found = csv.source("x", str(source), Options(lists="tags"))
    assert found.notes == [f"{source}: the longest list of tags has 5,000 items"]
    for split in found.splits.values():
        examples = split.examples(0, split.num_examples)
        needed = sum(map(len, examples))
        assert needed <= split.num_bytes <= 1.5 * needed + 20_000


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (["3|17", "4|x"], r"line 3: column tags has the item 'x', but '3' in .*x\.csv, line 2\."),
        (["Drama", "NA|12"], r"line 2: column tags has the item 'Drama', but '12' in .*, line 3\."),
        (["1.5", "12"], r"line 2: column tags has the item '1.5', but '12' in .*, line 3\."),
        (["3 5", "2 -1"], r"line 3: column tags has the item -1, with which shorter lists"),
    ],
)
def test_wrong_lists_are_explained_by_line(tmp_path: Path, values: list[str], message: str) -> None:
    (tmp_path / "x.csv").write_text("\n".join(["n,tags", *(f"1,{value}" for value in values)]))
    with pytest.raises(DataError, match=message + ".*add --text=tags"):
        prepare("csv:x", str(tmp_path / "out"), str(tmp_path / "x.csv"), Options(lists="tags"))
    out, _ = prepared_csv(tmp_path, values, lists="x", text="x")
    (items,) = parsed(out, "train", "x")
    assert [b"|".join(filter(None, row)).decode() for row in items] == [
        value.replace(" ", "|") for value in values
    ]


def test_items_that_a_number_would_change_are_text(tmp_path: Path) -> None:
    out, notes = prepared_csv(tmp_path, ["007|12", AVAZU[0]], lists="x")
    assert parsed(out, "train", "x")[0].tolist() == [[b"007", b"12"], [AVAZU[0].encode(), b""]]
    assert "the items of x are text, because a number would change '007'" in notes[1]
