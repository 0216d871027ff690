"""Warm start: initial weights from another run or a saved model; the step stays 0.

    origin = warm_start(model, config.warm_start)   # in the strategy's scope, before the optimizer

| path | what it is |
| --- | --- |
| MODEL_DIR/checkpoints/step-00001000 | a checkpoint; its weights, not their averages |
| MODEL_DIR | its newest complete checkpoint |
| FILE.keras | a model that Keras saved, for example MODEL_DIR/export/model.keras |

Variables are matched by order, not by name: Keras numbers layers over all models of a process. A
.keras file has all variables of this model, or all that config.warm_start.exclude does not match.
"""

import concurrent.futures
from collections.abc import Sequence
from typing import TypeAlias

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from data.system.compat.checkpoint_graph import Node, nodes_of
from data.system.files import exists, expanded
from data.system.scratch import plain_path
from trainer.checkpoints.file_checks import STORAGE_ERRORS
from trainer.checkpoints.marks import DamagedError
from trainer.exit_codes import first_line
from trainer.learner.variables import refresh_constants, saved_arrays, tables_of
from trainer.models import load_keras_file
from trainer.run_files import CHECKPOINT_MARK, finished_checkpoints
from trainer.step.options import ConfigError, WarmStartConfig, matching

_GRAPH = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VALUE = "VARIABLE_VALUE"

# The value of each variable of a model; None if a checkpoint does not have it.
Values: TypeAlias = Sequence[npt.NDArray[np.generic] | None]


def warm_start(model: keras.Model, options: WarmStartConfig) -> str:
    """Assigns the values of `options.path` to the variables of `model`; returns a line for the log.

    Raises ConfigError if nothing is found at the path, or its variables have other shapes.
    """
    path = expanded(options.path)
    # Of tables of dynamic ids, values are not taken over.
    variables = saved_arrays(model)
    excluded = [False] * len(variables)
    if options.exclude:
        excluded = matching("warm_start.exclude", options.exclude, [v.path for v in variables])
    values = _of_keras_file(path) if path.endswith(".keras") else _of_checkpoint(path, model)
    wanted = [i for i, is_excluded in enumerate(excluded) if not is_excluded]
    if len(values) == len(wanted):  # Of a part of this model, for example without its last layer.
        parts = iter(values)
        values = [None if is_excluded else next(parts) for is_excluded in excluded]
    if len(values) != len(variables):
        more = f", {len(wanted)} without those of config.warm_start.exclude" * any(excluded)
        raise ConfigError(
            f"config.warm_start.path={path} is of another model: it has {len(values)} variables, "
            f"but this one has {len(variables)}{more}. Give one with equally many."
        )
    different = [
        f"{variables[i].path}: {_shape(values[i])} there, {list(variables[i].shape)} here"
        for i in wanted
        if _shape(values[i]) != list(variables[i].shape)
    ]
    if different:
        raise ConfigError(
            f"config.warm_start.path={path} is of another model:\n  "
            + "\n  ".join(different)
            + "\nGive a path of this model, or exclude different variables by a pattern: "
            f"--config.warm_start.exclude='{variables[wanted[-1]].path}', for example."
        )
    for i in wanted:
        variables[i].assign(values[i])
    refresh_constants(model)
    origin = f"warm start from {path}: {', '.join(variables[i].path for i in wanted)}"
    initialised = [variables[i].path for i in range(len(variables)) if excluded[i]]
    return origin + (f"; as initialised: {', '.join(initialised)}" if initialised else "")


def _of_keras_file(path: str) -> Values:
    try:
        # A strategy's scope holds in one thread. In another, ordinary variables are created.
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            model = pool.submit(load_keras_file, path).result()
    except Exception as error:  # A user's layer class may raise any error.
        raise ConfigError(
            f"config.warm_start.path={path} cannot be loaded as a Keras model: "
            f"{type(error).__name__}: {first_line(error)}"
        ) from error
    return [np.asarray(entry.numpy()) for entry in saved_arrays(model)]


def _of_checkpoint(path: str, model: keras.Model) -> Values:
    # A checkpoint contains its object graph: a value has the same place there as in `model`.
    directory = _newest(path)
    variables = saved_arrays(model)
    tables = tables_of(model)
    try:
        rows = tables.rows_in(directory) if tables else {}
        with plain_path(directory) as plain:
            reader = tf.train.load_checkpoint(f"{plain}/variables")
            nodes = nodes_of(reader.get_tensor(_GRAPH))
            root = {child.local_name: child.node_id for child in nodes[0].children}
            keys = _keys(nodes, model, root["model"])
            for child in nodes[root["missed"]].children if "missed" in root else ():
                keys |= _keys(nodes, variables[int(child.local_name)], child.node_id)
            values: list[npt.NDArray[np.generic] | None] = []
            for variable in variables:
                key = keys.get(id(variable), keys.get(id(getattr(variable, "value", variable))))
                if id(variable) in rows:
                    values.append(rows[id(variable)])
                else:
                    values.append(reader.get_tensor(key) if key else None)
            return values
    except (DamagedError, *STORAGE_ERRORS, ValueError, LookupError) as error:
        raise ConfigError(
            f"config.warm_start.path={path}: {directory} is not a checkpoint of this program, or "
            f"is damaged: {first_line(error)}"
        ) from error


def _keys(nodes: Sequence[Node], trackable: object, node_id: int) -> dict[int, str]:
    """Returns checkpoint keys by object id, of `trackable` (node `node_id`) and all below it."""
    keys: dict[int, str] = {}
    todo, seen = [(trackable, node_id)], {id(trackable)}
    while todo:
        trackable, node_id = todo.pop()
        for attribute in nodes[node_id].attributes:
            if attribute.name == _VALUE:
                keys[id(trackable)] = attribute.checkpoint_key
        children = tf.train.TrackableView.children(trackable)
        for child in nodes[node_id].children:
            found = children.get(child.local_name)
            if found is not None and id(found) not in seen:
                seen.add(id(found))
                todo.append((found, child.node_id))
    return keys


def _newest(path: str) -> str:
    if exists(f"{path}/{CHECKPOINT_MARK}"):
        return path
    names = finished_checkpoints(f"{path}/checkpoints")
    if steps := [name for name in names if name.startswith("step-")]:
        return f"{path}/checkpoints/{steps[-1]}"
    raise ConfigError(
        f"config.warm_start.path={path} is neither a checkpoint, nor a directory with "
        "checkpoints/step-*, nor a .keras file. Give the --model_dir of a run, for example."
    )


def _shape(value: npt.NDArray[np.generic] | None) -> list[int] | None:
    return None if value is None else list(value.shape)
