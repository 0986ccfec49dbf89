"""Penstock's log: one logger, one line per message, on standard error."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TextIO, TypeAlias

from penstock.errors import ConfigError
from penstock.observability import printable
from penstock.system import env

LOGGER_NAME = "penstock"
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_FORMAT = "%(levelname).1s %(asctime)s %(message)s"
_DEBUG_FORMAT = "%(levelname).1s %(asctime)s %(name)s:%(lineno)d %(message)s"
_TIME_FORMAT = "%H:%M:%S"
_ExcInfo: TypeAlias = "tuple[type[BaseException], BaseException, TracebackType | None] | tuple[None, None, None]"


class LineFormatter(logging.Formatter):
    """Formatter with one line per record, and indented lines for its traceback, so that no text forges a record.

    Control characters of messages, such as terminal escapes, are shown as escapes.
    """

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - of `logging.Formatter`
        return printable.one_line(super().formatMessage(record))

    def formatException(self, ei: _ExcInfo) -> str:  # noqa: N802
        return _indented(super().formatException(ei))

    def formatStack(self, stack_info: str) -> str:  # noqa: N802
        return _indented(super().formatStack(stack_info))


class StderrHandler(logging.StreamHandler[TextIO]):
    """Handler that writes to the current `sys.stderr`, which notebooks and tests replace."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self) -> TextIO:  # type: ignore[override]
        return sys.stderr

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None:
            super().emit(record)


def configure_logging(level: str | None = None) -> None:
    """Show Penstock's log, unless the application has set up logging itself.

    Programs (the command line, `LLM`) call this; importing Penstock never does. Calling it again changes the level
    and adds nothing.

    level: a name of `LEVELS`, in any case; None takes PENSTOCK_LOG_LEVEL. Raises ConfigError for another name.
    """
    level = _checked(level or env.log_level())
    logger = logging.getLogger(LOGGER_NAME)
    own = [handler for handler in logger.handlers if isinstance(handler, StderrHandler)]
    if not own:
        if logger.handlers or logging.getLogger().handlers:
            return
        own = [StderrHandler()]
        logger.addHandler(own[0])
        logger.propagate = False
    own[0].setFormatter(LineFormatter(_DEBUG_FORMAT if level == "DEBUG" else _FORMAT, _TIME_FORMAT))
    logger.setLevel(level)
    _format_last_resort()


def log_uncaught_errors() -> None:
    """Write what threads and finalizers of this process raise to the log, rather than as raw tracebacks."""
    logger = logging.getLogger(LOGGER_NAME)

    def of_thread(arguments: threading.ExceptHookArgs) -> None:
        if arguments.exc_type is not SystemExit:
            name = "unknown" if arguments.thread is None else arguments.thread.name
            error = arguments.exc_value or arguments.exc_type()
            logger.error("The thread %s ended with an error", name, exc_info=error)

    def of_finalizer(arguments: sys.UnraisableHookArgs) -> None:
        what = arguments.err_msg or "Exception ignored in"
        logger.error("%s: %r", what, arguments.object, exc_info=arguments.exc_value)

    threading.excepthook = of_thread
    sys.unraisablehook = of_finalizer


def levels() -> dict[str, int]:
    """Effective log levels by logger, for `send_log` in another process."""
    own = {
        name: logger.level
        for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith(f"{LOGGER_NAME}.") and isinstance(logger, logging.Logger) and logger.level != logging.NOTSET
    }
    return {LOGGER_NAME: logging.getLogger(LOGGER_NAME).getEffectiveLevel(), **own}


def send_log(levels: Mapping[str, int], send: Callable[[dict[str, str | int | float]], None]) -> None:
    """Send the log records of this process to another one, which writes them (`write_sent`)."""
    logger = logging.getLogger(LOGGER_NAME)
    logger.handlers = [_Sender(send)]
    logger.propagate = False
    _format_last_resort()
    for name, level in levels.items():
        logging.getLogger(name).setLevel(level)


def write_sent(fields: Mapping[str, str | int | float], who: str = "") -> None:
    """Write a log record of another process. who: prefix of its text."""
    record = logging.makeLogRecord({**fields, "msg": f"{who}{fields['msg']}"})
    logger = logging.getLogger(record.name)
    if logger.isEnabledFor(record.levelno):
        logger.handle(record)


class _Sender(logging.Handler):
    """Handler that sends records as plain data."""

    def __init__(self, send: Callable[[dict[str, str | int | float]], None]) -> None:
        super().__init__()
        self._send = send

    def emit(self, record: logging.LogRecord) -> None:
        try:
            # Arguments and traceback are formatted here, since they are not sent.
            traceback = _FORMATTER.formatException(record.exc_info) if record.exc_info else record.exc_text or ""
            fields = {name: value for name, value in vars(record).items() if isinstance(value, str | int | float)}
            self._send({**fields, "msg": record.getMessage(), "exc_text": traceback})
        except Exception:
            self.handleError(record)


def _format_last_resort() -> None:
    """Format the lines of loggers without a handler, such as asyncio's."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_FORMATTER)


def _indented(text: str) -> str:
    return "  " + printable.lines(text).replace("\n", "\n  ")


_FORMATTER = LineFormatter()


def _checked(level: str) -> str:
    if level.upper() not in LEVELS:
        allowed = ", ".join(name.lower() for name in LEVELS)
        raise ConfigError(f"PENSTOCK_LOG_LEVEL={level.lower()!r} is not valid. Allowed: {allowed}.")
    return level.upper()
