"""Loads a model that predicts: of a run, a checkpoint, a .keras file, or a SavedModel.

loaded = open_model("runs/a", "best")
outputs = loaded.call(inputs)
"""

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from data.features import Declared
from data.system.files import exists, is_dir, join
from data.system.scratch import plain_path
from strategies.base import Batch
from trainer.config import ConfigError
from trainer.exit_codes import first_line
from trainer.inputs import declared_dtypes
from trainer.models import load_keras_file
from trainer.run_files import CHECKPOINT_MARK, RunFiles
from trainer.run_record.tools import require_run, run_of
from trainer.session import model_of_run


@dataclass(frozen=True)
class Loaded:
    """A model, ready to be called.

    Attributes:
        call: inputs -> outputs, without gradients, in inference mode.
        run: The directory of the run that it belongs to, or "".
        declared: The dtype of its input; if it takes a dict, the dtype of each input by name.
        input_shapes: The shapes of its inputs without the batch dimension; empty if not known.
    """

    call: Callable[[Batch], Batch]
    run: str
    declared: Declared = None
    input_shapes: Sequence[Sequence[int | None]] = ()


def open_model(path: str, checkpoint: str | None) -> Loaded:
    """Loads the model at `path`; `checkpoint` (newest, newest_complete, best, a step) is of a run.

    Raises ConfigError if there is no model, or it cannot be loaded.
    """
    path = path.rstrip("/")
    if exists(join(path, CHECKPOINT_MARK)):
        _refuse_checkpoint(path, checkpoint)
        checkpoint = os.path.basename(path)
        if not (run := run_of(path)):
            raise ConfigError(
                f"{path} is a checkpoint, but no run has it: two directories above it there is no "
                "config.json. Give the checkpoint in the directory of its run."
            )
        path = run
    files = RunFiles(path)
    if exists(files.config) or exists(files.model):
        return _of_keras(model_of_run(path, checkpoint), path)
    _refuse_checkpoint(path, checkpoint)
    if path.endswith(".keras") and exists(path):
        return _of_keras(_loaded_file(path), run_of(path))
    if exists(join(path, "saved_model.pb")):
        return _saved_model(path)
    if is_dir(path):
        require_run(path)  # Says what is missing.
    raise ConfigError(
        f"{path} is no model. Needed is the directory of a run or of a checkpoint, a .keras file, "
        "or the directory of a SavedModel."
    )


def _of_keras(model: keras.Model, run: str) -> Loaded:
    shapes = [tuple(t.shape[1:]) for t in getattr(model, "inputs", None) or ()]
    # One graph for all batches of a size, and not an op at a time.
    call = tf.function(lambda inputs: model(inputs, training=False), reduce_retracing=True)
    return Loaded(call, run, declared_dtypes(model), shapes)


def _loaded_file(path: str) -> keras.Model:
    try:
        return load_keras_file(path)
    except Exception as error:  # A damaged file, or unknown classes, may raise any error.
        raise ConfigError(
            f"{path} cannot be loaded: {type(error).__name__}: {first_line(error)}. If the model "
            "has classes of a config file, give the directory of the run instead."
        ) from error


def _saved_model(path: str) -> Loaded:
    with plain_path(path) as plain:
        loaded: Any = tf.saved_model.load(plain)  # Any: what was saved has no type.
    if "serving_default" not in loaded.signatures:
        raise ConfigError(
            f"{path} has no signature serving_default. Export it with model.export()."
        )
    serve = loaded.signatures["serving_default"]
    specs = serve.structured_input_signature[1]
    # A signature names each input. Only the endpoint of Keras has the structure of the inputs.
    endpoints = getattr(getattr(loaded, "serve", None), "concrete_functions", ())
    taken: Sequence[Any] = endpoints[0].structured_input_signature[0] if endpoints else ()
    is_dict = len(taken) == 1 and isinstance(taken[0], Mapping)
    structure = taken[0] if len(taken) == 1 else specs
    names = [spec.name for spec in tf.nest.flatten(structure)]
    if {*names} != {*specs}:  # TensorFlow numbers tensors of nests: args_0, args_0_1.
        names = sorted(specs, key=lambda name: (len(name), name))
    if is_dict and _is_flat(structure):
        specs = structure

    def call(inputs: Batch) -> Batch:
        if _is_flat(inputs) or (structure is specs and len(specs) > 1):
            given = inputs if isinstance(inputs, Mapping) else {}
            if missing := [name for name in specs if name not in given]:
                raise ConfigError(f"{path} needs the input(s) {', '.join(missing)}.")
            values = {spec.name: _fitted(given[name], spec) for name, spec in specs.items()}
        else:
            flat = zip(names, tf.nest.flatten(structure), tf.nest.flatten(inputs), strict=True)
            values = {name: _fitted(value, spec) for name, spec, value in flat}
        outputs = serve(**values)
        return next(iter(outputs.values())) if len(outputs) == 1 else outputs

    call.saved = loaded  # type: ignore[attr-defined]  # Its variables live as long as it does.
    dtypes = {name: spec.dtype.name for name, spec in specs.items()}
    declared = dtypes if is_dict or len(specs) > 1 else next(iter(dtypes.values()))
    return Loaded(call, run_of(path), declared, [spec.shape[1:] for spec in specs.values()])


def _is_flat(inputs: Batch) -> bool:
    """Returns True if `inputs` are a dict of tensors."""
    return isinstance(inputs, Mapping) and not any(map(tf.nest.is_nested, inputs.values()))


def _fitted(value: tf.Tensor, spec: tf.TensorSpec) -> tf.Tensor:
    """Returns `value` in the dtype of an input; numbers [n] become rows [n, 1], as in Keras."""
    is_single = spec.shape.rank == value.shape.rank + 1 and spec.shape[-1] == 1
    return tf.cast(value[..., tf.newaxis] if is_single else value, spec.dtype)


def _refuse_checkpoint(path: str, checkpoint: str | None) -> None:
    if checkpoint is not None:
        raise ConfigError(
            f"--checkpoint={checkpoint} is for the directory of a run, but {path} is not one. "
            "Leave it out, or give the run."
        )
