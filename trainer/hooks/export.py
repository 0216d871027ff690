"""Export: writes the trained model, so that programs without this one can load it.

    MODEL_DIR/export/model.keras        for keras.models.load_model
    MODEL_DIR/export/saved_model        for TensorFlow: the model as it predicts

Before training, `check_export` refuses a model that cannot be a SavedModel, and `export_notes` says
what cannot be done with model.keras. A model that Keras cannot describe has no model.keras.
"""

import concurrent.futures
import itertools
import json
import keyword
import logging
import re
import warnings
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field

import keras
import tensorflow as tf
from typing_extensions import override

from data.system import files, object_store
from data.system.compat.keras_layers import all_layers
from data.system.scratch import scratch_dir
from data.system.stopwatch import Stopwatch
from strategies.base import Batch
from strategies.metrics import Metrics
from strategies.tables import tables_with
from trainer.checkpoints.file_checks import STORAGE_ERRORS
from trainer.config import ConfigError, Recipe
from trainer.config_file import errors_explained, explained
from trainer.exit_codes import EXIT_USAGE, first_line
from trainer.hooks.base import Hook
from trainer.learner import Learner
from trainer.learner.variables import set_values
from trainer.models import declared_inputs, has_own_code

log = logging.getLogger(__name__)

_NAMES = ("model.keras", "saved_model")
# The name that Keras gives to an input without a name.
_UNNAMED = re.compile(r"keras_tensor(_\d+)?")


@dataclass(eq=False)
class Export(Hook):
    """Writes the model in both formats once, as soon as training is complete.

    The `end` of other hooks, which may change weights or fail, comes later. An error is the
    `failure` of this hook, and leaves nothing incomplete in the directory. If the SavedModel cannot
    be written, model.keras is, unless it would replace one.
    """

    learner: Learner
    build_model: Callable[[], keras.Model]  # Called outside a scope: the files name no strategy.
    directory: str
    _: KW_ONLY
    path: str  # Of the config file.
    is_complete: Callable[[], bool]
    input_specs: Batch = None  # Of a model that does not declare its inputs.
    stopwatch: Stopwatch = field(default_factory=Stopwatch)
    _has_exported: bool = field(default=False, init=False)

    @override
    def __call__(self, step: int, metrics: Metrics) -> None:
        self.end(step)

    @override
    def end(self, step: int) -> None:
        """Exports if a hook behind this one, or a former process, has completed training."""
        if self._has_exported or not self.is_complete():
            return
        self._has_exported = True
        what = f"The export of the model of {self.path}"
        try:
            with self.stopwatch.spend("checkpoint"), errors_explained(what):
                self._export()
        except ConfigError as error:
            self.failure = f"{error}\n{_remedy(self.path)}"
            self.failure_exit_code = EXIT_USAGE

    def _export(self) -> None:
        model = self.build_model()
        set_values(model, self.learner)
        try:
            has_former = any(files.exists(files.join(self.directory, name)) for name in _NAMES)
            if files.is_s3(self.directory):
                with scratch_dir() as local:
                    try:
                        _write(model, local, self.input_specs, has_former=has_former)
                        if not files.exists(f"{local}/model.keras"):  # There may be a former one.
                            files.remove_file(files.join(self.directory, "model.keras"))
                    finally:
                        object_store.upload_tree(local, self.directory)
            else:
                _write(model, self.directory, self.input_specs, has_former=has_former)
        except STORAGE_ERRORS as error:
            self.failure = f"{self.directory} could not be written: {first_line(error)}"


def _write(model: keras.Model, directory: str, input_specs: Batch, *, has_former: bool) -> None:
    partial = files.join(directory, "partial")
    files.remove_tree(partial)  # Of a killed process.
    files.make_dirs(partial)
    try:
        if not _why_not_described(model):
            model.save(f"{partial}/model.keras")
        signature = _signature(model, input_specs)
        try:
            model.export(f"{partial}/saved_model", verbose=False, input_signature=signature)
        except Exception:  # Also of the user's code.
            if not has_former and files.exists(f"{partial}/model.keras"):
                files.rename(f"{partial}/model.keras", files.join(directory, "model.keras"))
            raise
        for name in _NAMES:
            path = files.join(directory, name)
            if files.is_dir(path):
                files.remove_tree(path)
            elif files.exists(path):
                files.remove_file(path)
            if files.exists(f"{partial}/{name}"):
                files.rename(f"{partial}/{name}", path)
    finally:
        files.remove_tree(partial)


def check_export(recipe: Recipe, model: keras.Model, input_specs: Batch) -> None:
    """Raises ConfigError if the built `model` of `recipe` cannot be written as a SavedModel.

    It is traced, as for a SavedModel. Models of Keras' own layers can always be written.
    """
    if not recipe.config.export or not has_own_code(model):
        return
    with errors_explained(
        f"The model of {recipe.path}, traced for the export,", f"\n{_remedy(recipe.path)}"
    ):
        # As `model.export` does, without `training`.
        call = tf.function(model.__call__, autograph=False)
        call.get_concrete_function(*_signature(model, input_specs))


def export_notes(model: keras.Model, path: str) -> list[str]:
    """Says what will not be possible with model.keras of `model`, which is of the config `path`."""
    if why := _why_not_described(model):
        return [
            f"only export/saved_model will be written, not export/model.keras: {why}. "
            f"{_remedy(path)}, which writes neither."
        ]
    if why := _why_not_made_again(model):
        return [
            f"keras.models.load_model will not load export/model.keras: {why}. Change it in {path};"
            " or use export/saved_model, or trainer.load_run(MODEL_DIR).load_model()."
        ]
    return []


def _remedy(path: str) -> str:
    return f"Change it in {path}, or type --config.export=False"


def _why_not_described(model: keras.Model) -> str:
    """Why Keras cannot write `model` as JSON, as a .keras file needs it; "" if it can."""
    try:
        json.dumps(keras.saving.serialize_keras_object(model))
    except Exception as error:  # A user's get_config may raise any error.
        return explained(error).rstrip(".")
    return ""


def _why_not_made_again(model: keras.Model) -> str:
    """Why `load_model` cannot make `model` from its description, if it knows all classes; or ""."""
    classes = {type(layer).__name__: type(layer) for layer in all_layers(model)}
    description = json.dumps(keras.saving.serialize_keras_object(model))
    if not has_own_code(model) and '"__lambda__"' not in description:
        return ""  # It can, and a large model needs a second.

    def make() -> None:
        with tf.device("CPU:0"), tables_with(has_rows=False), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # As when the model was made.
            keras.saving.deserialize_keras_object(json.loads(description), custom_objects=classes)

    try:
        # A strategy's scope, and Keras' numbers of names, hold in one thread.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(make).result()
    except Exception as error:  # A user's from_config may raise any error.
        return explained(error).rstrip(".")
    return ""


def _signature(model: keras.Model, input_specs: Batch) -> list[Batch]:
    """The specs of the inputs of a SavedModel, with their names.

    They are those that the model declares, or otherwise `input_specs`: Keras would take float32 for
    all inputs of a subclassed model. Inputs in a dict have its keys as names. Other inputs without
    a name are numbered here: Keras also counts the tensors between them. See `_argument_name` for
    names that a SavedModel cannot have.
    """
    numbers = itertools.count()
    taken_names: set[str] = set()
    declared = declared_inputs(model)
    taken = input_specs if declared is None else declared

    def spec_of(tensor: tf.TensorSpec | keras.KerasTensor, key: str | None = None) -> tf.TensorSpec:
        name = key
        if isinstance(tensor, keras.KerasTensor):
            if not _UNNAMED.fullmatch(tensor.name):
                name = tensor.name
            elif key is None:
                number = next(numbers)
                name = f"keras_tensor_{number}" if number else "keras_tensor"
        if name is not None:
            name = _argument_name(name, taken_names)
        return tf.TensorSpec([None, *tensor.shape[1:]], tensor.dtype, name)

    if isinstance(taken, Mapping) and not any(map(tf.nest.is_nested, taken.values())):
        return [{key: spec_of(tensor, key) for key, tensor in taken.items()}]
    return [tf.nest.map_structure(spec_of, taken)]


def _argument_name(name: str, taken: set[str]) -> str:
    """`name` if an input of a SavedModel can have it, or a similar one; added to `taken`.

    It becomes the name of an op, in which case does not count, and of an argument in Python.
    """
    found = re.sub(r"\W", "_", name, flags=re.ASCII)
    if not found[:1].isalnum():
        found = f"arg_{found}"
    if keyword.iskeyword(found) or found == "self":
        found += "_"
    numbered = (f"{found}_{number}" for number in itertools.count(1))
    while found.lower() in taken:
        found = next(numbered)
    taken.add(found.lower())
    return found
