"""The library's log: logger ``LLM_DATADIST``, written to standard output.

Nothing happens at import. The handler is installed, and the level read from ``ASCEND_GLOBAL_LOG_LEVEL``, at the first
record or the first :func:`get_logger`. A program that gave the logger a handler or a level before that keeps its own.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import time
from typing import TYPE_CHECKING

from llm_datadist.utils import environment

if TYPE_CHECKING:
    from collections.abc import Mapping
    from types import TracebackType
    from typing import TextIO, TypeAlias

    _ExcInfo: TypeAlias = bool | BaseException | tuple[type[BaseException], BaseException, TracebackType | None] | None
    _StreamHandler: TypeAlias = logging.StreamHandler[TextIO]
else:
    _StreamHandler = logging.StreamHandler  # takes no type argument at run time before Python 3.11

LOGGER_NAME = "LLM_DATADIST"
LOG_FORMAT = (
    "[%(levelname)s] %(name)s(%(process)d,%(processName)s):%(asctime)s.%(msecs)03d "
    "[%(filename)s:%(lineno)d]%(thread)d %(funcName)s: %(message)s"
)
_DATE_FORMAT = "%Y-%m-%d-%H:%M:%S"
_LEVELS: Mapping[str | None, int] = {
    "0": logging.DEBUG,
    "1": logging.INFO,
    "2": logging.WARNING,
    "3": logging.ERROR,
}
_RARELY_S = 60.0
_MAX_TOPICS = 1024
_last: dict[str, float] = {}
"""When each topic of ``warn_rarely`` was last logged, the latest last."""
_lock = threading.Lock()


class _StdoutHandler(_StreamHandler):
    """Writes to whatever ``sys.stdout`` is at the moment, so a replaced or captured stdout is followed."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stdout


_handler = _StdoutHandler()  # not installed yet; one object, so that threads that race for the first use add it once


@functools.cache
def get_logger() -> logging.Logger:
    """The logger of the library, set up at the first call.

    Level: ``ASCEND_GLOBAL_LOG_LEVEL`` as read at that moment; ERROR when it is unset or not one of "0" to "3".
    """
    logger = logging.getLogger(LOGGER_NAME)
    if logger.level == logging.NOTSET:
        logger.setLevel(_LEVELS.get(environment.log_level(), logging.ERROR))
    if not logger.handlers:
        _handler.setFormatter(logging.Formatter(LOG_FORMAT, _DATE_FORMAT))
        logger.addHandler(_handler)
        logger.propagate = False
    return logger


def debug(message: str, *args: object) -> None:
    """Log ``message % args`` at DEBUG; the record names the caller of this function."""
    get_logger().debug(message, *args, stacklevel=2)


def info(message: str, *args: object) -> None:
    """Log ``message % args`` at INFO; the record names the caller of this function."""
    get_logger().info(message, *args, stacklevel=2)


def warn(message: str, *args: object) -> None:
    """Log ``message % args`` at WARNING; the record names the caller of this function."""
    get_logger().warning(message, *args, stacklevel=2)


def warn_rarely(topic: str, message: str, *args: object) -> None:
    """Log ``message % args`` at WARNING, but not again within a minute of one of the same ``topic``.

    For what strangers can cause as often as they like: it must not fill the log.
    """
    now = time.monotonic()
    with _lock:
        if now - _last.get(topic, -_RARELY_S) < _RARELY_S:
            return
        _last.pop(topic, None)
        _last[topic] = now
        if len(_last) > _MAX_TOPICS:
            del _last[next(iter(_last))]
    get_logger().warning(message, *args, stacklevel=2)


def error(message: str, *args: object, exc_info: _ExcInfo = None) -> None:
    """Log ``message % args`` at ERROR, with a traceback if ``exc_info`` says so; the record names the caller."""
    get_logger().error(message, *args, exc_info=exc_info, stacklevel=2)
