"""The fields of a config that TensorBoard's HParams page shows.

    TensorBoard(path, hparams={**hparams_of(config), "strategy": "mirrored"})

The page compares the metrics of runs by these fields.
"""

from trainer.config import Config, flatten

_ALWAYS_SHOWN = ("batch_size", "learning_rate", "optimizer", "precision", "seed", "train_steps")


def hparams_of(config: Config) -> dict[str, bool | float | str]:
    """Some fields of all runs, and the fields that differ from the default."""
    values, defaults = flatten(config), flatten(Config())
    shown = [n for n in values if n in _ALWAYS_SHOWN or values[n] != defaults.get(n)]
    kinds = (bool, int, float, str)
    return {n: v if isinstance(v := values[n], kinds) else str(v) for n in shown if n != "data_dir"}
