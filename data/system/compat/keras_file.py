"""The path of keras.json, and the errors of TensorFlow and Keras that come from its values.

Both read the file when they are imported, and refuse a wrong value without the name of the file.
Keras 3.15 (`keras/src/backend/config.py`) has no public name for the path. Can be deleted when
`keras.config` has one and the errors name the file.
"""

import os
import re
import traceback

_READS_SETTINGS = re.compile(r"keras/(src/backend/config|backend|backend_config)\.py$")


def keras_file() -> str:
    """The path of keras.json, which Keras reads when it is imported."""
    from keras.src.backend import config  # Here: this module is imported before Keras.

    return str(config._config_path)


def refused_file(error: Exception) -> str | None:
    """The path of keras.json if a value in it has caused `error`, of an import; otherwise None."""
    directory = os.environ.get("KERAS_HOME", os.path.join("~", ".keras"))
    path = os.path.expanduser(os.path.join(directory, "keras.json"))
    raised_in = traceback.extract_tb(error.__traceback__)[-1].filename
    return path if os.path.exists(path) and _READS_SETTINGS.search(raised_in) else None
