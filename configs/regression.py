"""A number as label: how diabetes progresses in a year, from ten measurements of 442 patients.

    python -m trainer --config=configs/regression.py

The data comes with scikit-learn, of the extra `samples`. `config.data.label` names the column that
is the label; the other columns are the inputs. Labels that are numbers need a `loss` of Keras. The
mean squared error of a test is about 2,900 to 3,400; that of the mean label is about 5,900.
"""

from typing import TYPE_CHECKING

from trainer.config import Config, DataConfig

if TYPE_CHECKING:
    import keras


def get_config() -> Config:
    """1,000 steps of 32 examples."""
    return Config(
        dataset="diabetes",
        batch_size=32,
        learning_rate=0.01,
        train_steps=1000,
        log_every_steps=200,
        eval_every_steps=500,
        data=DataConfig(label="target"),
    )


def build_model(config: Config) -> "keras.Model":
    """Columns float32 [B, 10] -> the label, [B, 1]."""
    from keras import Input, Sequential, initializers, layers

    return Sequential(
        [
            Input((10,)),
            layers.Rescaling(442**0.5),  # To a variance of 1.
            layers.Dense(16, activation="relu"),
            layers.Dense(1, bias_initializer=initializers.Constant(150.0)),
        ]
    )


loss = "mse"
metrics = ["mae"]
