"""Sources -> TFRecord shards.

    python -m data.prepare digits
    python -m data.prepare mnist --source=DIR            # any set of IDX files, by any name
    python -m data.prepare cifar10 --source=DIR          # cifar100 and svhn too
    python -m data.prepare folder:NAME --source=DIR      # DIR/CLASS/IMAGE.png, .jpg or TEXT.txt
    python -m data.prepare csv:NAME --source=FILE --label=COLUMN
    python -m data.prepare npz:NAME --source=FILE --label=COLUMN
    python -m data.prepare parquet:NAME --source=FILE_OR_DIR --label=COLUMN   # --columns
    python -m data.prepare python:NAME --source=FILE.py:FUNCTION --label=COLUMN
    python -m data.prepare text:NAME --source=DIR        # all files below DIR
    python -m data.prepare tfds:cifar10
    python -m data.prepare clicks                        # generated; --num_clicks, --id_scale
    python -m data.prepare rewrite --source=DIR --data_dir=OTHER_DIR    # --splits

Writes to datasets/NAME (or to --data_dir=DIR, which may be a URL): shards with their index, and
the metadata with which `tfds.builder_from_directory` reads them too. Equal sources give equal
bytes. A local directory with its final name is complete, because everything is written under
another name and renamed at the end. A directory at a URL is complete when it has its
dataset_info.json. A second call, at the same moment or later, finds the directory done. It is
refused if the files of the source have other sizes or times than when they were read (source.json
keeps both), or if the options differ. --overwrite writes the data set again.

Examples are read as they are written, so memory does not grow with their number. Exceptions: 8
bytes of each example for the index, some bytes of each row of a table, the paths of images in
folders and of text files, and the images of IDX, CIFAR and SVHN. What a function of Python returns
is first written to TMPDIR.
"""

import os
import signal
import sys
from collections.abc import Sequence

from absl import app, flags

from data.prepare.catalog import bare_name
from data.prepare.preparing import prepare
from data.prepare.sources import LAYOUTS, TEST_FRACTION, Options
from data.prepare.sources.clicks import EXAMPLES, SCALE
from data.prepare.sources.text import LENGTH
from data.system.compat.quiet import quiet_tensorflow
from data.system.errors import UsageError
from data.system.flags import parse_flags
from data.system.pipes import ends_with_reader

_SOURCE = flags.DEFINE_string("source", None, "Directory or file to read.")
_DATA_DIR = flags.DEFINE_string(
    "data_dir", None, "Directory with TFRecord files, to write; datasets/NAME by default."
)
_OPTIONS = {  # Of a source, as `Options` has them; the default of each is None.
    "label": "Tables: the column that is the label.",
    "columns": "parquet, python: the columns to take, separated by commas; all by default. The "
    "label is taken in any case.",
    "split_column": "parquet, python: the column that has the split of each row: train, test, "
    "val, ...",
    "missing": "csv, parquet, python: what becomes of missing values (null, NaN; in CSV also "
    "empty, NA and ?) in columns of numbers: `drop` leaves out their rows, and rows where a list "
    "is null; a number replaces them. By default they are refused.",
    "lists": "csv: columns, separated by commas, whose values are lists of any length, such as "
    "3|17|5 or Drama|Science Fiction. Items are separated by |, or by spaces if the column has no "
    "|. All are integers, but not -1, or all are text. An empty value is a list without items; "
    "--missing is for other columns.",
    "text": "csv, parquet, python: columns, separated by commas, that are text, also where their "
    "values are numbers. Such a label is names; the items of such a column of lists are text.",
    "integer": "csv, parquet, python: columns, separated by commas, whose values are integers, "
    "also if they are written 1.0 or 007. Another value is refused.",
    "float": "csv, parquet, python: columns, separated by commas, whose values are numbers with a "
    "fraction, stored as float32 where this is exact enough, also if all are integers. Another is "
    "refused.",
    "delimiter": "csv: the character between values, tab or space; by default it is found in the "
    "first lines.",
    "encoding": "csv: how the text is encoded, such as latin-1, cp1252 or gb18030; UTF-8 by "
    "default, and what the mark at the beginning of the file says.",
    "splits": "rewrite, parquet: which files are which split, if their names do not tell: "
    "SPLIT=PATTERN, separated by commas, as 'train=part-*,test=more/part-*'. A file belongs to "
    "the first pattern that it fits.",
    "processes": "python: how many processes call the function; 1 by default. More need a "
    "function with the parameters shard and num_shards. The result does not depend on their "
    "number.",
    "seed": "Seed that chooses the test examples; 0 by default.",
    "length": f"text: the number of bytes of a sequence; {LENGTH} by default.",
    "num_clicks": f"clicks: the number of training examples; {EXAMPLES:,} by default.",
    "test_fraction": "Part of the examples that becomes the test split, for a source that has no "
    f"test split; {TEST_FRACTION} by default.",
    "id_scale": f"clicks: the part of Criteo's numbers of ids; {SCALE} by default. 1 is 33.8 "
    "million ids.",
    "header": "csv: --noheader if the first line is data; the columns are then column_0, "
    "column_1, ...",
    "allow_partial": "cifar10, cifar100: take the files that are there, if some are missing or "
    "cut off.",
}
_DEFINE = {
    str | None: flags.DEFINE_string,
    int | None: flags.DEFINE_integer,
    float | None: flags.DEFINE_float,
    bool | None: flags.DEFINE_bool,
}
for _option, _help in _OPTIONS.items():
    _DEFINE[Options.__annotations__[_option]](_option, None, _help)
flags.DEFINE_enum(
    "layout",
    None,
    LAYOUTS,
    "How a record holds an image: `image`, or `image_raw` with sizes, as TensorFlow 1's MNIST "
    "programs wrote it; tfds by default.",
)
_OVERWRITE = flags.DEFINE_bool(
    "overwrite", False, "Write a data set again that --data_dir already holds."
)


def _main(argv: Sequence[str]) -> int:
    quiet_tensorflow()
    if len(argv) != 2:
        got = " ".join(argv[1:]) or "nothing"
        print(f"One NAME is needed. Received: {got}.\n\n{__doc__}", file=sys.stderr)
        return 2
    name = argv[1]
    data_dir = _DATA_DIR.value or os.path.join("datasets", bare_name(name))
    options = Options(**{option: flags.FLAGS[option].value for option in Options._fields})
    try:
        prepare(name, data_dir, _SOURCE.value, options, overwrite=_OVERWRITE.value)
    except (UsageError, OSError) as error:
        nothing = ". Nothing was written." if isinstance(error, OSError) else ""
        print(f"data.prepare: {error}{nothing}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        said = f"interrupted before {name} was complete. The same command begins it again."
        print(f"\ndata.prepare: {said}", file=sys.stderr)
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    with ends_with_reader():
        app.run(_main, flags_parser=parse_flags("data.prepare", {"out": "data_dir"}))
