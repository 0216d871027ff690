"""House numbers: four convolutions on SVHN's cropped digits.

    python -m data.prepare svhn --source=DIRECTORY_WITH_THE_MAT_FILES
    python -m trainer --strategy=mirrored --config=configs/svhn_cnn.py

73,257 images of 32 x 32 pixels train, 26,032 test. A step takes about 0.3 s on 2 cores, 10 epochs
about half an hour. The accuracy was not measured, because the files must be downloaded from their
authors' site; this file was tested on generated images in the same format.
"""

from typing import TYPE_CHECKING

from trainer.config import Config

if TYPE_CHECKING:
    import keras


def get_config() -> Config:
    """5,720 steps of 128 examples: 10 epochs."""
    return Config(
        dataset="svhn",
        batch_size=128,
        eval_batch_size=256,
        optimizer="adam",
        learning_rate=0.001,
        train_steps=5720,
        log_every_steps=100,
        eval_every_steps=572,
        checkpoint_every_steps=572,
        best_metric="accuracy",
    )


def build_model(config: Config) -> "keras.Model":
    """Images float32 [B, 32, 32, 3] in [0, 1] -> logits [B, 10]."""
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input((32, 32, 3)),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.Conv2D(64, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(4),
            layers.Conv2D(128, 3, padding="same", activation="relu"),
            layers.Conv2D(256, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(4),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )
