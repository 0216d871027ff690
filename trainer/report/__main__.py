"""`python -m trainer.report RUN [RUN ...]`: writes one HTML file that shows runs.

    python -m trainer.report runs/latest                    # RUN/report.html
    python -m trainer.report runs/a runs/b --output=compared.html

Curves over steps and over time, where the time of each task went, what each worker did, restarts,
data accounting, predictions, and the differences of configs and versions.
"""

from collections.abc import Sequence

from absl import flags

from data.system.files import check_writable, join, replace_file, shown
from trainer.config import ConfigError
from trainer.exit_codes import EXIT_DONE
from trainer.report.examples import Classified, classified_or_reason
from trainer.report.page import render
from trainer.report.series import RunSeries
from trainer.run_record.tools import require_run, run_tool
from trainer.run_record.trust import define_trust, doubt

_NAME = "report.html"


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
    define_trust()


def main(argv: Sequence[str]) -> int:
    """Writes the page and prints its path; returns the exit code.

    Raises ConfigError if a directory has no run or the file cannot be written, RunFileError if a
    file is damaged.
    """
    if len(argv) < 2:
        raise ConfigError(
            "trainer.report needs the directory of a run, or of several. Type, for example, "
            "python -m trainer.report runs/latest"
        )
    given, model_dirs = flags.FLAGS, argv[1:]
    for model_dir in model_dirs:
        require_run(model_dir)
    path = given.output or join(model_dirs[0], _NAME)
    check_writable(path, "output")
    # First: a damaged run is named before a model runs.
    runs = [RunSeries(model_dir) for model_dir in model_dirs]
    text = render(runs, {model_dir: _classifier(model_dir) for model_dir in model_dirs})
    try:
        replace_file(path, text.encode())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error}. Give a file that can be written: "
            f"--output={_NAME}, for example."
        ) from None
    print(shown(path))
    return EXIT_DONE


def _classifier(model_dir: str) -> Classified | str:
    if flags.FLAGS.no_examples:
        return "--no_examples was given"
    reason = "" if flags.FLAGS.trust else doubt(model_dir)
    return reason or classified_or_reason(model_dir)


if __name__ == "__main__":
    run_tool(main, define_flags)
