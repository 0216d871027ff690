"""Result: the end, the reports and the files of a run, read from its directory.

    result = load_run("runs/a")
    result.metrics["accuracy"], result.step, result.exit_code
    model = result.load_model()
    lines = result.predict("photos/", checkpoint="best")

Everything is read when the Result is made, except what methods load.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.system.errors import RunFailed, TrainerError, UsageError
from data.system.extras import of_satellite
from trainer.config import PYTHON_CONFIG, Config
from trainer.exit_codes import EXIT_DONE, EXIT_RESTART, EXIT_USAGE
from trainer.run_files import Document, RunFiles, local_dir, metric_words
from trainer.run_record.summary import latest_evaluation
from trainer.run_record.tools import prepare_tensorflow, require_run

if TYPE_CHECKING:
    import keras


class Result:
    """A run: its results, its reports and its files.

    Attributes:
        model_dir: The directory of the run.
        step: The last step that was reported; 0 if there is none.
        exit_code: 0 if the run is complete, 75 if it can be continued, 1 after a failure; None if
            it is still running, or was killed.
        why: Why it ended, in words.
        metrics: The last evaluation, for example {"loss": 0.04, "accuracy": 0.99}.
        history: The reports in order: step, split ("train" or "eval"), loss, metrics, rates.
        config: The config of the run, as in config.json.
        paths: Name -> path of what the run writes: config, metrics, checkpoints, tensorboard, ...
    """

    def __init__(
        self,
        model_dir: str,
        functions: Mapping[str, object] | None = None,
        config: Config | None = None,
    ) -> None:
        """`functions` and `config` are for a run that was started with a Config object.

        Raises UsageError if there is no run in `model_dir`.
        """
        files = require_run(model_dir)
        self.model_dir = model_dir
        self._functions, self._config = dict(functions or {}), config
        document = files.read_config()
        self.config: Mapping[str, Any] = document["config"]  # Any: JSON values.
        self._recipe: str = document["recipe"]
        result: Document = files.read_result() or {}
        reports = RunFiles(local_dir(model_dir)).read_reports()
        self.history: Sequence[Mapping[str, Any]] = reports
        self.metrics: Mapping[str, float] = result.get("eval") or latest_evaluation(reports)
        last = max((report["step"] for report in reports), default=0)
        self.step = int(result.get("step") or last)
        self.exit_code: int | None = result.get("exit_code")
        self.why: str = result.get("why") or ""
        self.paths: Mapping[str, Path] = {
            name: Path(path) for name, path in vars(files).items() if name != "model_dir"
        }

    def __repr__(self) -> str:
        values = "  ".join(metric_words(self.metrics))
        return f"Result({self.model_dir!r}: step {self.step:,}  {values}  {self.why})"

    def load_model(self, checkpoint: str | int | None = None) -> "keras.Model":
        """The model of the run: as exported, or with the weights of a checkpoint.

        `checkpoint` is newest, newest_complete, best or a step. Without it, a run that has not
        exported gives the newest checkpoint. The config file builds the model, so classes that it
        defines are known.
        """
        prepare_tensorflow()
        from trainer.session import model_of_run

        with self._known():
            return model_of_run(self.model_dir, None if checkpoint is None else str(checkpoint))

    def evaluate(
        self,
        checkpoint: str | int = "newest",
        split: str | None = None,
        data_dir: str | None = None,
    ) -> Mapping[str, Any]:
        """The metrics of a checkpoint, as of `trainer.evaluate`.

        `checkpoint` is newest, newest_complete, best or a step.
        """
        prepare_tensorflow()
        from trainer.session import evaluate

        with self._known():
            return evaluate(self.model_dir, str(checkpoint), split, data_dir)

    def predict(
        self,
        input: str | Path | None = None,  # As the flag.
        *,
        checkpoint: str | int | None = None,
        split: str | None = None,
        data_dir: str | None = None,
        num_examples: int = 0,
    ) -> list[dict[str, Any]]:
        """A dict for each example, as the lines of `trainer.predict`: output, predicted, label.

        `input` is a TFRecord, CSV or NPZ file, or a folder of images; by default the examples of
        `split` in the data of the run. `num_examples` 0 is all.
        """
        prepare_tensorflow()
        predict = of_satellite("trainer.predict.predicting", "predict")
        chosen = None if checkpoint is None else str(checkpoint)
        path = None if input is None else str(input)
        with self._known():
            source = (path, chosen, split, data_dir)
            return list(predict(self.model_dir, *source, num_examples=num_examples))

    @contextlib.contextmanager
    def _known(self) -> Iterator[None]:
        """While it is open, the functions of a run without a config file can be imported."""
        if self._recipe != PYTHON_CONFIG or not self._functions:
            yield
            return
        from trainer.api.arguments import recipe_named

        with recipe_named(self._config or Config(), self._functions):
            yield


def result_of(model_dir: str, exit_code: int, result: Result | None, message: str = "") -> Result:
    """Returns `result`, unless its run has failed or stopped: then raises its error.

    `message` is the error that the run has printed, if any.
    """
    if exit_code == EXIT_DONE:
        assert result is not None
        return result
    if not message:
        step = f" at step {result.step:,}: {result.why}" if result and result.why else ""
        message = f"The run in {model_dir} ended with exit code {exit_code}{step}."
        if exit_code == EXIT_RESTART:
            message += f" What is saved is complete: the same call with {model_dir=} continues it."
    error: TrainerError = (UsageError if exit_code == EXIT_USAGE else RunFailed)(message)
    error.exit_code, error.result = exit_code, result
    raise error


def load_run(model_dir: str | Path, config: Config | None = None, **functions: object) -> Result:
    """The Result of a run that exists, also one that is running or was interrupted.

    If the run was started with a Config object, `functions` are its functions again, and `config`
    the object, if its class has more fields: load_run(RUN, build_model=build_model).

    Raises UsageError if there is no run, or an argument is no function of a config.
    """
    from trainer.api.arguments import FUNCTIONS

    if unknown := [name for name in functions if name not in FUNCTIONS]:
        raise UsageError(
            f"load_run() got {unknown[0]!r}, which is no function of a config. Known: "
            f"{', '.join(FUNCTIONS)}."
        )
    return Result(str(model_dir).rstrip("/") or "/", functions, config)
