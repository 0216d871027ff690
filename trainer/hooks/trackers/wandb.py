"""Weights & Biases: each run of this program is a run there, in the project of its environment.

WANDB_PROJECT, WANDB_ENTITY and WANDB_API_KEY say where. With WANDB_MODE=offline the run is written
to MODEL_DIR/wandb, for `wandb sync`.
"""

import os
import uuid
from typing import Any

from typing_extensions import override

from trainer.exit_codes import EXIT_DONE, EXIT_RESTART
from trainer.hooks.tracking import PROJECT, Tracker, numbers, remember, remembered
from trainer.hooks.writers import Values
from trainer.run_files import local_dir


class WandB(Tracker):
    """Reports as train/loss, eval/accuracy, ... over `step`; a repeated step replaces none."""

    _run: Any = None  # Any: a run of wandb has no types here.

    @override
    def begin(self, step: int) -> None:
        self._open()

    @override
    def write(self, step: int, split: str, values: Values) -> None:
        # Not log(step=...): wandb drops steps that are lower than the last, as after a resume.
        self._open().log({"step": step, **dict(numbers(split, values))})

    @override
    def end(self, step: int) -> None:
        self._open().finish(exit_code=EXIT_DONE if self._is_complete() else EXIT_RESTART)
        self._run = None

    def _open(self) -> Any:
        if self._run is not None:
            return self._run
        import wandb

        run_id = remembered(self._model_dir).get("wandb") or uuid.uuid4().hex[:8]
        run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=run_id,
            resume="allow",
            # A run that the user's own code has begun goes on.
            reinit="create_new",
            name=os.path.basename(self._model_dir.rstrip("/")),
            config={"strategy": self._document["strategy"], **self._document["config"]},
            dir=os.environ.get("WANDB_DIR", local_dir(self._model_dir)),
            settings=wandb.Settings(silent=True, console="off"),
        )
        run.define_metric("step")
        run.define_metric("*", step_metric="step")
        remember(self._model_dir, "wandb", run_id)
        self._run = run
        return run
