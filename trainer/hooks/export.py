"""Export: the trained model as export/model.keras and export/saved_model."""

from collections.abc import Callable
from dataclasses import dataclass

import keras
import tensorflow as tf
from typing_extensions import override

from trainer.checkpoints.file_checks import STORAGE_ERRORS
from trainer.exit_codes import first_line
from trainer.hooks.base import PeriodicHook
from trainer.learner import Learner


@dataclass(eq=False)
class Export(PeriodicHook):
    """Writes the model in both formats when training is complete."""

    learner: Learner
    build_model: Callable[[], keras.Model]  # Called outside a scope: the files name no strategy.
    directory: str

    @override
    def act(self, step: int) -> None:
        model = self.build_model()
        for variable, value in zip(model.variables, self.learner.weights(), strict=True):
            variable.assign(value)
        try:
            tf.io.gfile.makedirs(self.directory)
            model.save(f"{self.directory}/model.keras")
            model.export(f"{self.directory}/saved_model", verbose=False)
        except STORAGE_ERRORS as error:
            self.failure = f"{self.directory} could not be written: {first_line(error)}"
