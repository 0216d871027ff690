"""Warm start: weights of another run, or of a saved model, as the initial ones; the step stays 0.

    said = warm_start(model, config.warm_start)     # in the strategy's scope, before the optimizer

| path | what it is |
| --- | --- |
| MODEL_DIR/checkpoints/step-00001000 | a checkpoint; the weights, not their averages |
| MODEL_DIR | the newest whole one of its checkpoints |
| FILE.keras | a model that Keras saved, as MODEL_DIR/export/model.keras |

Variables are matched by their order in the model: the names that Keras gives to layers depend on
what was made before them.
"""

import concurrent.futures
import re
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.core.protobuf.trackable_object_graph_pb2 import TrackableObjectGraph

from trainer.exits import first_line
from trainer.options import ConfigError, WarmStartConfig, matching

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VALUE = "VARIABLE_VALUE"


def warm_start(model: keras.Model, options: WarmStartConfig) -> str:
    """Assigns to the variables of `model` what `options.path` has; returns a line that says so.

    Raises:
        ConfigError: there is nothing at the path, or its variables are others.
    """
    path = options.path
    variables = model.variables
    excluded = [False] * len(variables)
    if options.exclude:
        paths = [variable.path for variable in variables]
        excluded = matching("warm_start.exclude", options.exclude, paths)
    values: Sequence[npt.NDArray[Any] | None]
    if path.endswith(".keras"):
        values = _of_keras_file(path, len(variables))
    else:
        values = _of_checkpoint(path, model)
    wanted = [index for index, left_out in enumerate(excluded) if not left_out]
    different = [
        f"{variables[i].path}: {_shape(values[i])} there, {list(variables[i].shape)} here"
        for i in wanted
        if _shape(values[i]) != list(variables[i].shape)
    ]
    if different:
        raise ConfigError(
            f"config.warm_start.path={path} is of another model:\n  "
            + "\n  ".join(different)
            + "\nGive one of this model, or leave out what differs, by the pattern of its path: "
            f"--config.warm_start.exclude='{variables[wanted[-1]].path}', for example."
        )
    for i in wanted:
        variables[i].assign(values[i])
    said = f"warm start from {path}: {', '.join(variables[i].path for i in wanted)}"
    left = [v.path for v, left_out in zip(variables, excluded, strict=True) if left_out]
    return said + (f"; as initialised: {', '.join(left)}" if left else "")


def _of_keras_file(path: str, num_variables: int) -> Sequence[npt.NDArray[Any]]:
    """The values of a saved model's variables, in their order."""
    try:
        # A strategy's scope is one thread's. In another, these variables are plain ones.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            model = pool.submit(keras.models.load_model, path, compile=False).result()
    except Exception as error:  # Of Keras, or of a layer's class, which may fail in any way.
        raise ConfigError(
            f"config.warm_start.path={path} cannot be loaded as a Keras model: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    if len(model.variables) != num_variables:
        raise ConfigError(
            f"config.warm_start.path={path} is of another model: it has {len(model.variables)} "
            f"variables, and this one {num_variables}. Give one of as many."
        )
    return [np.asarray(variable.value.numpy()) for variable in model.variables]


def _of_checkpoint(path: str, model: keras.Model) -> Sequence[npt.NDArray[Any] | None]:
    """The values of the variables of `model`, None for those that the checkpoint does not have.

    A checkpoint has the graph of objects that it was made of. What is at the same place there as a
    variable is in `model` is its value.
    """
    directory = _newest(path)
    try:
        reader = tf.train.load_checkpoint(f"{directory}/variables")
        nodes = TrackableObjectGraph.FromString(reader.get_tensor(_GRAPH)).nodes
        root = {child.local_name: child.node_id for child in nodes[0].children}
        keys = _keys(nodes, model, root["model"])
        for child in nodes[root["missed"]].children if "missed" in root else ():
            variable = model.variables[int(child.local_name)]
            keys |= _keys(nodes, variable, child.node_id)
        found = [keys.get(id(v), keys.get(id(v.value))) for v in model.variables]
        return [None if key is None else reader.get_tensor(key) for key in found]
    except (tf.errors.OpError, ValueError, KeyError, IndexError) as error:
        raise ConfigError(
            f"config.warm_start.path={path}: {directory} is no checkpoint of this program, or is "
            f"damaged: {first_line(error)}"
        ) from error


def _keys(nodes: Any, trackable: Any, node_id: int) -> dict[int, str]:
    """By id, the names of the values of `trackable`, which is `node_id`, and all that it holds."""
    keys: dict[int, str] = {}
    todo, seen = [(trackable, node_id)], {id(trackable)}
    while todo:
        trackable, node_id = todo.pop()
        for attribute in nodes[node_id].attributes:
            if attribute.name == _VALUE:
                keys[id(trackable)] = attribute.checkpoint_key
        children = tf.train.TrackableView.children(trackable)
        for child in nodes[node_id].children:
            held = children.get(child.local_name)
            if held is not None and id(held) not in seen:
                seen.add(id(held))
                todo.append((held, child.node_id))
    return keys


def _newest(path: str) -> str:
    """The directory of the checkpoint that `path` is, or the newest of a MODEL_DIR's."""

    def is_whole(directory: str) -> bool:
        return bool(tf.io.gfile.exists(f"{directory}/checkpoint.json"))

    if is_whole(path):
        return path
    names = []
    if tf.io.gfile.isdir(f"{path}/checkpoints"):
        names = [name.rstrip("/") for name in tf.io.gfile.listdir(f"{path}/checkpoints")]
    steps = sorted(f"{path}/checkpoints/{n}" for n in names if re.fullmatch(r"step-\d+", n))
    whole = [directory for directory in steps if is_whole(directory)]
    if not whole:
        raise ConfigError(
            f"config.warm_start.path={path} is neither a checkpoint, nor a directory with "
            "checkpoints/step-*, nor a .keras file. Give the --model_dir of a run, for example."
        )
    return whole[-1]


def _shape(value: npt.NDArray[Any] | None) -> list[int] | None:
    return None if value is None else list(value.shape)
