"""`python -m trainer.predict`: runs the exported model on examples; one JSON object per line.

    python -m trainer.predict --model_dir=runs/a --num_examples=3
    {"example": 0, "label": 7, "predicted": 7, "output": [-8.1, ...]}

Reads the weights in `export/model.keras`, and the run's config.json: its config file builds the
model, and parses examples as in training. For a classifier, `predicted` is the class with the
largest output.
"""

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from absl import flags

from data.system import object_store
from data.system.files import is_s3
from data.system.scratch import scratch_dir
from trainer.cli.tools import prepare_tensorflow, run_tool
from trainer.config import ConfigError, recipe_of_run
from trainer.exit_codes import EXIT_DONE, first_line
from trainer.run_files import RunFiles

if TYPE_CHECKING:
    import keras

    from strategies.base import Batch
    from trainer.config import Recipe


def predict(
    model_dir: str, split: str | None, data_dir: str | None, num_examples: int
) -> Iterator[dict[str, object]]:
    """Yields an object for each example, in the order of the files.

    Raises:
        ConfigError, DataError: the export or the data is missing, or the model has several outputs.
        RunFileError: config.json is missing or damaged.
    """
    import tensorflow as tf

    from data.system.files import exists
    from data.tfrecord.damage import readable
    from data.tfrecord.split import batched_records, open_split
    from trainer.inputs import parse_of

    files = RunFiles(model_dir)
    path = files.model
    if not exists(path):
        raise ConfigError(
            f"{path} does not exist. A run exports when it is complete, unless it has "
            "--config.export=false. Give the --model_dir of a run that exported."
        )
    run = files.read_config()
    recipe = recipe_of_run(run)
    data_dir = data_dir or run["data_dir"]
    records = open_split(data_dir, split or run["config"]["data"]["eval_split"])
    parse, model = parse_of(recipe, data_dir), None
    wanted = num_examples or records.num_examples
    example = 0
    for batch in readable(batched_records(records, 256)):
        serialized = tf.constant(batch[: wanted - example])
        if model is None:
            model = _load_model(model_dir, recipe, parse(serialized)[0])
            parse = parse_of(recipe, data_dir, model)
        inputs, labels, *_ = parse(serialized)
        outputs = model(inputs, training=False)
        if not isinstance(outputs, tf.Tensor):
            raise ConfigError(
                f"The model of {model_dir} has several outputs, and this program prints one. Load "
                f"{path} with keras.models.load_model instead."
            )
        for label, output in zip(labels.numpy(), outputs.numpy(), strict=True):
            line = {"example": example, "label": label.tolist()}
            if (
                output.ndim == 1
                and output.size > 1
                and label.ndim == 0
                and label.dtype.kind in "iu"
            ):
                line["predicted"] = int(output.argmax())
            yield {**line, "output": [round(float(value), 4) for value in output.ravel()]}
            example += 1
        if example == wanted:
            return


def _load_model(model_dir: str, recipe: "Recipe", inputs: "Batch") -> "keras.Model":
    """The model that the config file builds, with the exported weights.

    Not `keras.models.load_model`, which does not know the classes of a config file.
    """
    import tensorflow as tf

    from trainer.build import build_model

    path = RunFiles(model_dir).model
    specs = tf.nest.map_structure(tf.type_spec_from_value, inputs)
    model = build_model(recipe, specs)
    try:
        with contextlib.ExitStack() as stack:
            local = path
            if is_s3(path):
                local = f"{stack.enter_context(scratch_dir())}/model.keras"
                object_store.download(path, local)
            model.load_weights(local)
    except (ValueError, KeyError) as error:
        raise ConfigError(
            f"The weights in {path} do not fit the model that {recipe.path} builds: "
            f"{first_line(error)} Put the config file back as it was in the run."
        ) from error
    except Exception as error:  # A damaged file may raise any error.
        raise ConfigError(
            f"{path} cannot be loaded: {type(error).__name__}: {first_line(error)}. If the file is "
            f"damaged, remove {RunFiles(model_dir).result}, and start the training command of this "
            "run again with the same --model_dir: it exports anew."
        ) from error
    return model


def define_flags() -> None:
    """Declares the flags of the command."""
    flags.DEFINE_string(
        "model_dir", None, "The directory of the run, which must be complete.", required=True
    )
    flags.DEFINE_string("split", None, "Split to read; by default the evaluation split.")
    flags.DEFINE_string(
        "data_dir", None, "Directory with TFRecord files; by default that of the run."
    )
    flags.DEFINE_integer(
        "num_examples", 10, "Examples to show, from the first; 0 for all.", lower_bound=0
    )


def main(argv: Sequence[str]) -> int:
    """Prints the lines; returns the exit code."""
    given = flags.FLAGS
    prepare_tensorflow()
    for line in predict(given.model_dir, given.split, given.data_dir, given.num_examples):
        print(json.dumps(line))
    return EXIT_DONE


if __name__ == "__main__":
    run_tool(main, define_flags)
