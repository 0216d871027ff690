"""What tests of data/system/compat say and read."""

import logging
from typing import Self


def delete(module: str) -> str:
    """What to do if a fault is gone."""
    return f"not needed with these versions any more: delete data/system/compat/{module}.py"


class Messages(logging.Handler):
    """The messages of a logger within the context."""

    def __init__(self, logger: str) -> None:
        super().__init__()
        self._logger = logging.getLogger(logger)
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())

    def __enter__(self) -> Self:
        self._logger.addHandler(self)
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._logger.removeHandler(self)
