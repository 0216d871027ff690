"""Habits of Keras users in one file: tables of words, dicts, a late-built model, callbacks."""

from typing import Any

from trainer.config import Config


def get_config() -> Config:
    return Config(batch_size=18, optimizer="sgd", learning_rate=0.5, train_steps=60)


def build_model(config: Config) -> Any:
    """A dict of a word, a number and a list -> logits of three classes."""
    import keras
    from keras import layers

    class Words(keras.Model):
        """Is built by its first call, and is not registered with Keras."""

        def __init__(self) -> None:
            super().__init__()
            self.word = layers.StringLookup(vocabulary=["a", "b", "c"], output_mode="one_hot")
            self.number = layers.IntegerLookup(vocabulary=[3, 5, 7], output_mode="one_hot")
            self.text = layers.TextVectorization(vocabulary=["a", "b"], output_mode="multi_hot")
            self.hashed = layers.Hashing(4, output_mode="one_hot")
            self.scaled = layers.Normalization(mean=[0.1, 0.2], variance=[1.0, 2.0])
            self.scaled.build((None, 2))  # Keras would build it in a graph, with its constants.
            self.out = layers.Dense(3)

        def call(self, inputs: Any) -> Any:
            word, number = inputs["word"][:, None], inputs["number"][:, None]
            parts = [self.word(word), self.number(number), self.text(word), self.hashed(word)]
            parts = [keras.ops.cast(part, "float32") for part in parts]
            return self.out(keras.ops.concatenate([*parts, self.scaled(inputs["x"])], axis=-1))

    return Words()


def build_callbacks(config: Config) -> Any:
    """Halves the rate after each epoch of 10 steps, and stops after four."""
    import keras

    class Stop(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            print("epoch", epoch, "val_accuracy", logs["val_accuracy"], flush=True)
            self.model.stop_training = epoch == 3

    return [keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2), Stop()]
