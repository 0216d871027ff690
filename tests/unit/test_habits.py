"""What Keras users write first works, or ends before training with one message."""

import re
from pathlib import Path

import numpy as np
import pytest

from data.prepare.preparing import prepare
from data.prepare.sources import Options
from data.system.files import DataError
from strategies.metrics import means
from strategies.mirrored import MirroredExecutor
from strategies.position import Position
from tests.unit.test_config_file import Mistake, checked, with_source, written
from trainer.batch_checks import check_batches
from trainer.config import ConfigError, load_recipe
from trainer.inputs import open_inputs
from trainer.session import build_session

DOCS = Path(__file__).resolve().parents[2] / "docs"
# Behind a class `Own`, derived from Learner or from keras.Model, its function of a config file.
OWN_LEARNER = """
        def build_learner(config, **parts):
            return Own(**parts)
"""
OWN_MODEL = """
        def build_model(config):
            image = keras.Input((8, 8, 1))
            return Own(image, keras.layers.Dense(10)(keras.layers.Flatten()(image)))
"""


def started(path: str, data: Path) -> MirroredExecutor:
    """An executor of one replica that can train."""
    recipe = load_recipe(path)
    recipe.config.data_dir = str(data)
    executor = MirroredExecutor.on(["CPU:0"])
    inputs, _, learner = build_session(recipe, open_inputs(recipe), executor.build)
    check_batches(inputs, learner, recipe)
    executor.start(learner, inputs.train, inputs.evaluation, Position())
    return executor


MISTAKES = {
    "layer that fails in training only": Mistake(
        """
        def build_model(config):
            class Own(keras.layers.Layer):
                def call(self, x, training=False):
                    return x @ x if training else x
            layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), Own(), keras.layers.Dense(10)]
            return keras.Sequential(layers)
        """,
        ("called with training=True", "Dimensions must be equal", "in call: return x @ x"),
    ),
    "layer that only compute_loss uses": Mistake(
        """
        def build_model(config):
            class Own(keras.Model):
                def __init__(self):
                    super().__init__()
                    self.flat, self.head = keras.layers.Flatten(), keras.layers.Dense(10)
                    self.late = keras.layers.Dense(1)
                def call(self, x):
                    return self.head(self.flat(x))
                def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None,
                                 training=True):
                    return keras.ops.mean(self.late(y_pred) ** 2)
            return Own()
        """,
        ("makes new variables, which would not be trained: ", "`build(shape)` in build_model"),
    ),
    "measure that returns a total too many": Mistake(
        """
        class Own(Learner):
            def measure(self, *args, **kwargs):
                totals = super().measure(*args, **kwargs)
                return tf.concat([totals, totals[:1]], axis=0)
        """
        + OWN_LEARNER,
        ("gradients(batch) of Own of", "float64(4,), a total and a count", "Received: float64(5,)"),
    ),
    "measure that fails in an evaluation only": Mistake(
        """
        class Own(Learner):
            def measure(self, labels, outputs, losses, counts=None, *, weights=None):
                losses = losses if counts is None else losses @ outputs
                return super().measure(labels, outputs, losses, counts, weights=weights)
        """
        + OWN_LEARNER,
        ("evaluate(batch) of Own of", "in measure: losses = losses if"),
    ),
    "gradients of some variables only": Mistake(
        """
        class Own(Learner):
            def gradients(self, batch, *, training=True):
                gradients, totals = super().gradients(batch, training=training)
                return gradients[:1], totals
        """
        + OWN_LEARNER,
        ("gradients(batch) of Own of", "each of the 2 `variables`. Received: 1."),
    ),
    "change_variable of another shape": Mistake(
        """
        class Own(Learner):
            def change_variable(self, index, variable, gradient, rate):
                variable.assign_sub(rate * gradient[:1])
        """
        + OWN_LEARNER,
        ("apply(gradients) of Own of", "in change_variable: variable.assign_sub("),
    ),
    "state of what is not there": Mistake(
        """
        class Own(Learner):
            @property
            def state(self):
                return {"other": self.other.variables}
        """
        + OWN_LEARNER,
        ("The property `state` of the Learner of", "in state: return {"),
    ),
    "regularizer that fails": Mistake(
        """
        def build_model(config):
            head = keras.layers.Dense(10, kernel_regularizer=lambda w: w @ w)
            return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), head])
        """,
        ("gradients(batch) of Learner of", "in <lambda>: head = keras.layers.Dense("),
    ),
    "callback that watches a metric that is not there": Mistake(
        """
        def build_callbacks(config):
            return [keras.callbacks.EarlyStopping(monitor="val_auc")]
        """,
        ("EarlyStopping(monitor='val_auc')", "Known: loss, accuracy, val_loss, val_accuracy"),
    ),
    "forgotten Flatten": Mistake(
        """
        def build_model(config):
            return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Dense(10)])
        """,
        ("outputs: float32(8, 8, 8, 10)", "is layers.Flatten()"),
    ),
    "forgotten Flatten before a loss of Keras": Mistake(
        """
        def build_model(config):
            return keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Dense(10)])
        loss = "sparse_categorical_crossentropy"
        """,
        ("(None, 8, 8, 10)", "is layers.Flatten()"),
    ),
    "mistyped metric": Mistake(
        'loss = "sparse_categorical_crossentropy"\nmetrics = ["acuracy"]',
        ("metric 'acuracy'", "Did you mean 'accuracy'?"),
    ),
    "loss weights of several outputs for one": Mistake(
        'loss = "sparse_categorical_crossentropy"\nloss_weights = [1.0, 2.0]',
        ("loss_weights has 2 entries, but the model has 1 output",),
    ),
    "compute_loss that returns a value for each example": Mistake(
        """
        class Own(keras.Model):
            def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
                return keras.losses.sparse_categorical_crossentropy(y, y_pred)
        """
        + OWN_MODEL,
        ("compute_loss() of Own returned shape (8,)", "keras.ops.mean("),
    ),
    "compute_loss and another loss": Mistake(
        """
        loss = "mse"
        class Own(keras.Model):
            def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
                return keras.ops.mean(y_pred)
        """
        + OWN_MODEL,
        ("Own of", "overrides compute_loss(), which is the loss, and loss would be ignored"),
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_one_early_message(mistake: Mistake, digits: Path, tmp_path: Path) -> None:
    path = written(tmp_path, with_source(mistake.source))
    with pytest.raises(ConfigError) as raised:
        checked(path, digits, tmp_path)
    for part in mistake.said:
        assert part in str(raised.value)
    for noise in ("in user code", "function_node", "Traceback", "Error encountered"):
        assert noise not in str(raised.value)


TWO_INPUTS_AND_OUTPUTS = """
        def parse(serialized):
            spec = {"label": tf.io.FixedLenFeature([], tf.int64)}
            label = tf.io.parse_example(serialized, spec)["label"]
            return batch_of(tf.one_hot(label, 10), label, tf.cast(label, tf.float32))
        def build_model(config):
            a, b = keras.Input((10,), name="a"), keras.Input((10,), name="b")
            sums = keras.layers.Add()([a, b])
            digit = keras.layers.Dense(10, activation="softmax", name="digit")(sums)
            return model_of(a, b, digit, keras.layers.Dense(1, name="size")(sums))
"""
HABITS = {
    "several outputs as a dict, with losses, factors and metrics of each": TWO_INPUTS_AND_OUTPUTS
    + """
        loss = {"digit": "sparse_categorical_crossentropy", "size": "mse"}
        loss_weights = {"size": 0.3}
        metrics = {"digit": ["accuracy"], "size": ["mae"]}
        def batch_of(x, digit, size):
            return {"a": x, "b": x}, {"digit": digit, "size": size}
        def model_of(a, b, digit, size):
            return keras.Model({"a": a, "b": b}, {"digit": digit, "size": size})
    """,
    "inputs and outputs as lists, with weights of examples": TWO_INPUTS_AND_OUTPUTS
    + """
        loss = ["sparse_categorical_crossentropy", "mse"]
        metrics = [["accuracy"], ["mae"]]
        def batch_of(x, digit, size):
            return [x, x], [digit, size], [size + 1, size + 1]
        def model_of(a, b, digit, size):
            return keras.Model([a, b], [digit, size])
    """,
    "metrics of Keras that a layer updates, and a layer that counts": """
        def build_model(config):
            class Own(keras.layers.Layer):
                def __init__(self):
                    super().__init__()
                    self.size = keras.metrics.Mean(name="size")
                    self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)
                def call(self, x, training=False):
                    self.size.update_state(keras.ops.mean(x))
                    if training:
                        self.count.assign_add(1.0)
                    return x
            layers = [keras.Input((8, 8, 1)), keras.layers.Flatten(), Own(), keras.layers.Dense(10)]
            return keras.Sequential(layers)
    """,
    "Normalization that is adapted in build_model": """
        def build_model(config):
            import numpy as np
            scale = keras.layers.Normalization(axis=None)
            scale.adapt(np.random.default_rng(0).random((9, 8, 8, 1)).astype("float32"))
            layers = [keras.Input((8, 8, 1)), scale, keras.layers.Flatten(), keras.layers.Dense(10)]
            return keras.Sequential(layers)
    """,
    "compute_loss that calls that of keras.Model with what compile got": """
        def build_model(config):
            class Own(keras.Model):
                def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None):
                    return 2 * super().compute_loss(x, y, y_pred, sample_weight)
            image = keras.Input((8, 8, 1))
            digit = keras.layers.Dense(10, activation="softmax")(keras.layers.Flatten()(image))
            model = Own(image, digit)
            model.compile(loss="sparse_categorical_crossentropy")
            return model
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("source", HABITS.values(), ids=HABITS)
def test_habit_trains(source: str, digits: Path, tmp_path: Path) -> None:
    executor = started(written(tmp_path, with_source(source)), digits)
    executor.run(2)
    assert np.isfinite(list(means(executor.evaluate()).values())).all()


@pytest.mark.slow
def test_example_of_the_documentation_trains(digits: Path, tmp_path: Path) -> None:
    text = (DOCS / "keras.md").read_text()
    (example,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    executor = started(written(tmp_path, example), digits)
    executor.run(1)
    first = means(executor.evaluate())
    executor.run(60)
    last = means(executor.evaluate())
    assert last.keys() == {"loss"}
    assert last["loss"] < 0.7 * first["loss"]


TABLE = """
    from trainer.config import Config, DataConfig

    def get_config():
        data = DataConfig(inputs=("id",), label="bought")
        return Config(batch_size=100, train_steps=60, learning_rate=0.05, data=data)

    def build_model(config):
        import keras
        id = keras.Input((1,), {declared})
        x = {layer}
        return keras.Model({inputs}, keras.layers.Dense(2)(x))
"""
IDS = "keras.layers.Flatten()(keras.layers.Embedding(400, 8)(keras.layers.Hashing(400)(id)))"


@pytest.mark.slow
def test_ids_of_a_column_are_those_of_the_file_or_are_refused(tmp_path: Path) -> None:
    ids = [2**24 + number for number in range(40)]
    lines = [f"{id},{number % 2},0.5" for number, id in enumerate(ids)]
    (tmp_path / "clicks.csv").write_text("\n".join(["id,bought,price", *lines * 10]))
    data, options = tmp_path / "data", Options(label="bought")
    prepare("csv:clicks", str(data), str(tmp_path / "clicks.csv"), options)
    parts = {"declared": "name='id'", "layer": "keras.layers.Dense(8)(id)", "inputs": "id"}
    float_path = written(tmp_path, TABLE.format(**parts), "floats.py")
    said = "Feature 'id' has a value that float32 does not hold"
    with pytest.raises(DataError, match=f"{said}.*Of ids, make a dict.*dtype='float64'") as caught:
        checked(float_path, data, tmp_path)
    _, record = str(caught.value).splitlines()
    assert "record 1 is the first that cannot be parsed" in record
    # As it says.
    for advised in (
        {"declared": "name='id', dtype='int64'", "layer": IDS, "inputs": "{'id': id}"},
        {"declared": "name='id', dtype='int64'", "layer": IDS},
        {"declared": "name='id', dtype='float64'"},
    ):
        path = written(tmp_path, TABLE.format(**{**parts, **advised}), "advised.py")
        executor = started(path, data)
        executor.run(60 if "int64" in advised["declared"] else 1)
        if "int64" in advised["declared"]:
            assert means(executor.evaluate())["accuracy"] > 0.9


def test_array_that_a_record_stores_as_bytes_is_explained(tmp_path: Path) -> None:
    arrays = {"x": np.zeros([40, 2, 4], np.float32), "y": np.arange(40)}
    np.savez(tmp_path / "mine.npz", **arrays)  # type: ignore[arg-type]
    data = tmp_path / "data"
    prepare("npz:mine", str(data), str(tmp_path / "mine.npz"), Options())
    source = """
        def parse(serialized):
            import tensorflow as tf
            spec = {"x": tf.io.FixedLenFeature([8], tf.float32)}
            x = tf.io.parse_example(serialized, spec)["x"]
            return x, tf.zeros([tf.shape(x)[0]], tf.int64)
        def build_model(config):
            import keras
            return keras.Sequential([keras.Input((8,)), keras.layers.Dense(10)])
    """
    said = r"feature 'x' as 1 value\(s\) of string: .*\[\], tf.string\).*32 bytes.*decode_raw"
    with pytest.raises(ValueError, match=said):
        checked(written(tmp_path, with_source(source)), data, tmp_path)
