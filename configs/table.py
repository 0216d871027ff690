"""A table with numbers and text: UCI's Adult, who earns more than 50,000 dollars a year.

    python -m data.prepare csv:adult --source=adult.csv --label=income
    python -m trainer --config=configs/table.py

adult.csv has a first line with the names of the columns. The model takes a dict, so the default
`parse` gives it the columns with these names, and leaves the others out. Numbers are normalised;
text is hashed, which needs no vocabulary, and embedded. For another table, change the two dicts.
"""

from typing import TYPE_CHECKING

from trainer.config import Config

if TYPE_CHECKING:
    import keras

# Column -> mean and variance.
NUMBERS = {
    "age": (38.6, 188.0),
    "education-num": (10.1, 6.6),
    "capital-gain": (1079.0, 5.55e7),
    "capital-loss": (87.5, 1.62e5),
    "hours-per-week": (40.4, 153.5),
}
# Column -> number of bins for the hashes of its texts.
TEXTS = {
    "workclass": 32,
    "education": 64,
    "marital-status": 32,
    "occupation": 64,
    "relationship": 32,
    "sex": 8,
}


def get_config() -> Config:
    """2,000 steps of 128 examples: about 6 epochs of Adult."""
    return Config(
        dataset="adult",
        batch_size=128,
        learning_rate=0.002,
        train_steps=2000,
        log_every_steps=200,
        eval_every_steps=1000,
        best_metric="accuracy",
    )


def build_model(config: Config) -> "keras.Model":
    """A dict of columns, each [B, 1] -> logits of two classes, [B, 2]."""
    from keras import Input, Model, layers

    inputs, parts = {}, []
    for name, (mean, variance) in NUMBERS.items():
        inputs[name] = Input((1,), name=name)
        parts.append(layers.Normalization(mean=mean, variance=variance)(inputs[name]))
    for name, num_bins in TEXTS.items():
        inputs[name] = Input((1,), name=name, dtype="string")
        bins = layers.Hashing(num_bins)(inputs[name])
        parts.append(layers.Flatten()(layers.Embedding(num_bins, 4)(bins)))
    hidden = layers.Dense(32, activation="relu")(layers.Concatenate()(parts))
    return Model(inputs, layers.Dense(2)(hidden))
