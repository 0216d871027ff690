"""`python -m trainer.predict`: runs a model on examples; one JSON object, or CSV row, per example.

    python -m trainer.predict --model_dir=runs/a --num_examples=3
    python -m trainer.predict runs/a --checkpoint=best --input=photos/ --output=found.csv
    python -m trainer.predict runs/a/export/saved_model --input=table.csv
    {"example": 0, "label": 7, "predicted": 7, "output": [-8.1, ...]}

The model is a run (its export, or a checkpoint), the directory of a checkpoint, a .keras file, or
the directory of a SavedModel. The examples are those of a split of the run's data, or of --input: a
TFRecord, CSV or NPZ file, or a folder of images. They are parsed as in training.
"""

import contextlib
import csv
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TextIO

from absl import flags

from data.system.files import DataError, check_writable, is_url, partial_name, rename
from trainer.config import ConfigError
from trainer.exit_codes import EXIT_DONE
from trainer.run_files import json_text
from trainer.run_record.tools import prepare_tensorflow, run_of, run_tool
from trainer.run_record.trust import check_trust, define_trust

_SHOWN = 10


def define_flags() -> None:
    """Declares the flags of the command."""
    flags.DEFINE_string("model_dir", None, "The directory of the run; or give it without a flag.")
    flags.DEFINE_string(
        "checkpoint",
        None,
        "The checkpoint that predicts: newest, newest_complete (if the newest is damaged), best, "
        "or a step; by default what was exported.",
    )
    flags.DEFINE_string(
        "input", None, "A TFRecord, CSV or NPZ file, or a folder of PNG or JPEG files."
    )
    flags.DEFINE_string(
        "output", None, "The file to write, .jsonl or .csv; by default JSON on standard output."
    )
    flags.DEFINE_string("split", None, "Split to read; by default the evaluation split.")
    flags.DEFINE_string(
        "data_dir", None, "Directory with TFRecord files; by default that of the run."
    )
    flags.DEFINE_integer(
        "num_examples",
        None,
        f"Examples to show, from the first; 0 for all. By default all of --input, else {_SHOWN}.",
        lower_bound=0,
    )
    define_trust()


def main(argv: Sequence[str]) -> int:
    """Writes the predictions; returns the exit code."""
    given = flags.FLAGS
    models = [*argv[1:], *filter(None, [given.model_dir])]
    if len(models) != 1:
        raise ConfigError(
            f"trainer.predict needs one model. Received: {' '.join(models) or 'none'}. Type, for "
            "example, python -m trainer.predict runs/latest"
        )
    output = given.output or ""
    if output:
        if not output.endswith((".jsonl", ".csv")):
            raise ConfigError(
                f"--output={output} must end with .jsonl or .csv. Type --output=predictions.jsonl."
            )
        if is_url(output):
            raise ConfigError(f"--output={output} must be a local file. Copy it afterwards.")
        check_writable(output, "output")
        if given.input and os.path.realpath(output) == os.path.realpath(given.input):
            raise ConfigError(
                f"--output={output} is the file of --input, which would be lost. Type "
                "--output=predictions.jsonl."
            )
    num_examples = given.num_examples
    if num_examples is None:
        num_examples = 0 if given.input else _SHOWN
    if run := run_of(models[0]):
        check_trust(run)
    prepare_tensorflow()
    from trainer.predict.predicting import predict

    source = (given.input, given.checkpoint, given.split, given.data_dir)
    lines = predict(models[0], *source, num_examples=num_examples)
    with _opened(output) if output else contextlib.nullcontext(sys.stdout) as file:
        if output.endswith(".csv"):
            _write_csv(lines, file)
        else:
            for line in lines:
                print(json_text(line), file=file)
    return EXIT_DONE


@contextlib.contextmanager
def _opened(path: str) -> Iterator[TextIO]:
    """A new file, which becomes `path` at the end; after an error `path` is what it was."""
    path = os.path.realpath(path)  # A link stays one.
    partial = partial_name(path)
    try:
        with open(partial, "w", newline="", encoding="utf-8") as file:
            yield file
        rename(partial, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(partial)


def _write_csv(lines: Iterable[Mapping[str, Any]], file: TextIO) -> None:
    writer: csv.DictWriter[str] | None = None
    for row in map(_flat, lines):
        if writer is None:
            writer = csv.DictWriter(file, list(row))
            writer.writeheader()
        if different := [name for name in row if name not in writer.fieldnames]:
            raise DataError(
                f"The prediction of example {row['example']} has a column {different[0]}, which "
                "the first one has not: CSV needs equal columns. Type --output=predictions.jsonl."
            )
        writer.writerow(row)


def _flat(line: Mapping[str, Any]) -> dict[str, object]:
    """Returns `line` as a row of a table, with columns such as output_0, output_1."""
    row: dict[str, object] = {}
    for name, value in line.items():
        if isinstance(value, Mapping):
            row |= _flat({f"{name}_{key}": item for key, item in value.items()})
        elif isinstance(value, (list, tuple)):
            row |= _flat({f"{name}_{index}": item for index, item in enumerate(value)})
        else:
            row[name] = value
    return row


if __name__ == "__main__":
    run_tool(main, define_flags)
