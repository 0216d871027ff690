"""Export: the trained model as export/model.keras and export/saved_model."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field

import keras
import tensorflow as tf
from typing_extensions import override

from data.system import object_store
from data.system.files import is_s3
from data.system.scratch import scratch_dir
from data.system.stopwatch import Stopwatch
from trainer.checkpoints.file_checks import STORAGE_ERRORS
from trainer.embeddings.table import set_values
from trainer.exit_codes import first_line
from trainer.hooks.base import PeriodicHook
from trainer.learner import Learner


@dataclass(eq=False)
class Export(PeriodicHook):
    """Writes the model in both formats when training is complete."""

    learner: Learner
    build_model: Callable[[], keras.Model]  # Called outside a scope: the files name no strategy.
    directory: str
    _: KW_ONLY
    stopwatch: Stopwatch = field(default_factory=Stopwatch)

    @override
    def act(self, step: int) -> None:
        with self.stopwatch.spend("checkpoint"):
            self._export()

    def _export(self) -> None:
        model = self.build_model()
        set_values(model, self.learner)
        try:
            if is_s3(self.directory):
                with scratch_dir() as local:
                    _write(model, local)
                    object_store.upload_tree(local, self.directory)
            else:
                _write(model, self.directory)
        except STORAGE_ERRORS as error:
            self.failure = f"{self.directory} could not be written: {first_line(error)}"


def _write(model: keras.Model, directory: str) -> None:
    tf.io.gfile.makedirs(directory)
    model.save(f"{directory}/model.keras")
    model.export(f"{directory}/saved_model", verbose=False)
