"""`python -m trainer.report RUN [RUN ...]`: writes one HTML file that shows runs.

    python -m trainer.report runs/latest                    # RUN/report.html
    python -m trainer.report runs/a runs/b --output=compared.html

Curves over steps and over time, where the time of each task went, what each worker did, restarts,
data accounting, predictions, and the differences of configs and versions.
"""

import os
from collections.abc import Sequence

from absl import flags

from data.system.files import DataError, is_url, join, replace_file
from trainer.cli.tools import prepare_tensorflow, run_tool
from trainer.config import ConfigError
from trainer.exit_codes import EXIT_DONE
from trainer.report.examples import Classified, classified
from trainer.report.page import explained, render
from trainer.report.series import RunSeries

_NAME = "report.html"


def write_report(model_dirs: Sequence[str], output: str, *, with_examples: bool) -> str:
    """Writes the page of runs; returns its path. Without `output` it is in the first run.

    Raises ConfigError if one of them is no run or `output` cannot be written, RunFileError if a
    file is damaged.
    """
    runs = [RunSeries(model_dir) for model_dir in model_dirs]
    classifiers: dict[str, Classified | str] = {}
    for model_dir in model_dirs:
        classifiers[model_dir] = (
            _classified(model_dir) if with_examples else "--no_examples was given"
        )
    path = output or join(model_dirs[0], _NAME)
    try:
        replace_file(path, render(runs, classifiers).encode())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error}. Give a file that can be written: "
            f"--output={_NAME}, for example."
        ) from None
    return path if is_url(path) else os.path.relpath(path)


def _classified(model_dir: str) -> Classified | str:
    """The predictions of a run; a page without them says why."""
    prepare_tensorflow()
    from trainer.checkpoints.checkpointer import ModelDirError

    try:
        return classified(model_dir)
    except (ConfigError, DataError, ModelDirError) as error:
        return explained(error)


def define_flags() -> None:
    """Declares the flags of the command."""
    flags.DEFINE_string(
        "output", "", f"The file to write; by default {_NAME} in the directory of the first run."
    )
    flags.DEFINE_boolean(
        "no_examples",
        False,
        "Do not run the model: leave out the confusion matrix and the worst examples.",
    )


def main(argv: Sequence[str]) -> int:
    """Writes the page and prints its path; returns the exit code."""
    if len(argv) < 2:
        raise ConfigError(
            "trainer.report needs the directory of a run, or of several. Type, for example, "
            "python -m trainer.report runs/latest"
        )
    given = flags.FLAGS
    print(write_report(argv[1:], given.output, with_examples=not given.no_examples))
    return EXIT_DONE


if __name__ == "__main__":
    run_tool(main, define_flags)
