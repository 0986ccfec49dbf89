"""Exceptions that a user, a checkpoint, a client or another machine can cause.

A message names the thing, its value, what is allowed, and what to do about it.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from typing import Any, TypedDict


class PenstockError(Exception):
    """Base class of all errors of Penstock. Pickling keeps its fields and its cause."""

    def __reduce__(self) -> tuple[Any, ...]:
        return error_from_data, (error_as_data(self),)


class ConfigError(PenstockError, ValueError):
    """An option, or a combination of options, is invalid."""


class UnknownOption(ConfigError):
    """An option that does not exist."""


class UnsupportedFeature(PenstockError):
    """A feature that this combination of device, model and options does not support."""


class UnsupportedArgument(UnsupportedFeature, ConfigError):
    """An option, a value of one, or a command of a feature that Penstock does not have."""


class UnsupportedMethod(UnsupportedFeature, AttributeError):
    """A method of vLLM's of a feature that Penstock does not have; an AttributeError, so `hasattr` returns False."""


class UnsupportedName(UnsupportedFeature, ImportError):
    """A name of vLLM's package of a feature that Penstock does not have."""


class InvalidRequest(PenstockError, ValueError):
    """A request that cannot be served; other requests are not affected."""


class EngineAsleep(InvalidRequest):
    """A request or call that an engine does not take while it is paused, sleeps, or has no weights."""


class AdapterNotFound(InvalidRequest):
    """A request whose LoRA adapter is not there, or was removed before the request came."""


class InvalidParameter(InvalidRequest):
    """A sampling parameter outside its allowed range."""


class UnsupportedParameter(UnsupportedFeature, InvalidParameter):
    """An argument of a request for a feature that Penstock does not have."""


class InvalidMedia(InvalidRequest):
    """An image, a sound or a video that cannot be loaded: not allowed, not there, too large, or damaged."""


class ChatTemplateError(InvalidRequest):
    """A chat template that cannot render a request's messages: it refuses them, is wrong, or exceeds a limit."""


class RequestFailed(PenstockError):
    """A request that failed while it ran, with the reason; other requests go on."""


class ContextTooLong(InvalidRequest):
    """A request that can never fit into this engine's context or KV cache."""


class Overloaded(PenstockError, RuntimeError):
    """A request that is not admitted, since too much is queued. retry_after_s: estimated seconds until it would be."""

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class ModelError(PenstockError):
    """The model folder, its configuration or its weights cannot be used."""


class ModelNotFound(ModelError):
    """No such folder, and no such repository on the hub (or no network)."""


class UnsupportedModel(ModelError):
    """A model whose architecture is not implemented."""


class CheckpointError(ModelError):
    """A weight file is missing, truncated, or does not fit the model."""


class TokenizerError(ModelError):
    """The tokenizer's files are missing or damaged."""


class InvalidRecording(PenstockError, ValueError):
    """Recording of an engine's steps that cannot be read or replayed."""


class InvalidMessage(PenstockError, ValueError):
    """A step for the workers with an id, a position or a length that is not allowed; nothing of it was applied."""


class OutOfMemory(PenstockError, MemoryError):
    """The memory plan does not fit; the message shows the plan."""


class LifecycleError(PenstockError, RuntimeError):
    """A method was called before the one it depends on, or after `close()`."""


class RanksDisagree(PenstockError, RuntimeError):
    """Ranks that must run the same step got different ones."""


KILLED = "ProcessKilled"


class WorkerError(PenstockError, RuntimeError):
    """A worker failed. The message has the call, the rank and the cause.

    method: name of the call. cause_type: type of the original exception by name, since the exception itself may not be
    picklable; `KILLED` if the process was killed by a signal.
    """

    def __init__(self, message: str, *, method: str, rank: int, cause_type: str) -> None:
        super().__init__(message)
        self.method = method
        self.rank = rank
        self.cause_type = cause_type


class WeightTransferFailed(PenstockError, RuntimeError):
    """Weights that a trainer announced did not arrive: it is gone, or has sent others."""


class LogitsProcessorError(PenstockError, RuntimeError):
    """A custom logits processor failed for one request; the message names it."""


class GrammarError(PenstockError, RuntimeError):
    """The grammar of these requests failed; the message has the cause."""

    def __init__(self, message: str, *, req_ids: list[str]) -> None:
        super().__init__(message)
        self.req_ids = req_ids


class WaitTimeout(PenstockError, TimeoutError):
    """A wait exceeded its timeout. The message has the waiting and the awaited side, the call and the time."""


class EngineDead(PenstockError, RuntimeError):
    """The engine stopped after failures that restarts did not resolve; the message has the root cause."""


class NeedsNewProcess(EngineDead):
    """The engine stopped after a failure from which only a new process can recover."""


class ProcessLost(PenstockError, RuntimeError):
    """A process of the engine exited before it answered a call. It is replaced, and requests continue."""


class RemoteError(PenstockError, RuntimeError):
    """An exception of another process that is not an error of Penstock's; the message has its type and text."""


def is_for_the_program(error: BaseException) -> bool:
    """Whether an exception from foreign code must end the whole process: KeyboardInterrupt, or SystemExit.

    True only in the main thread, to which Python delivers signals, and in a process that handles SIGINT.
    """
    return (
        isinstance(error, (KeyboardInterrupt, SystemExit))
        and threading.current_thread() is threading.main_thread()
        and callable(signal.getsignal(signal.SIGINT))
    )


class ErrorData(TypedDict):
    """An exception as plain data, for another process.

    types: full names of its class and bases, nearest first, that are Penstock's; else of its class only.
    fields: attributes; those that are not plain data as text.
    """

    types: list[str]
    message: str
    fields: dict[str, Any]
    cause: ErrorData | None


# Longest chain of causes that is sent.
_MAX_CAUSES = 16


def error_as_data(error: BaseException, max_causes: int = _MAX_CAUSES) -> ErrorData:
    """Convert an exception to plain data, without its traceback."""
    ours: list[type] = [cls for cls in type(error).__mro__ if issubclass(cls, PenstockError)]
    cause = error.__cause__
    return ErrorData(
        types=[_full_name(cls) for cls in ours or [type(error)]],
        message=_sendable(str(error)),
        fields={name: _plain(value) for name, value in vars(error).items()} if ours else {},
        cause=None if cause is None or max_causes == 0 else error_as_data(cause, max_causes - 1),
    )


def error_from_data(data: ErrorData) -> PenstockError:
    """Restore an exception, as its own type or the nearest base that this process knows; else as a RemoteError."""
    known = {_full_name(cls): cls for cls in _with_subclasses(PenstockError)}
    cls = next((known[name] for name in data["types"] if name in known), None)
    message = data["message"] if cls else f"{data['types'][0].rpartition('.')[2]}: {data['message']}"
    cause = None if data["cause"] is None else error_from_data(data["cause"])
    return _made(cls or RemoteError, message, data["fields"], cause)


def same_error(error: PenstockError) -> PenstockError:
    """Copy an error for another caller; an exception that is raised twice would collect both tracebacks."""
    return _made(type(error), str(error), vars(error), error.__cause__)


def _made(cls: type[PenstockError], message: str, fields: dict[str, Any], cause: BaseException | None) -> PenstockError:
    """Create an error from its fields, without its constructor."""
    # With several builtin bases, `__new__` is that of the base with the object layout, not of the first one.
    layout: Any = cls
    while "__new__" not in vars(layout):
        layout = layout.__base__
    error: PenstockError = layout.__new__(cls, message)
    error.args = (message,)
    error.__dict__.update(fields)
    error.__cause__ = cause
    return error


def _full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


def _with_subclasses(cls: type[PenstockError]) -> Iterator[type[PenstockError]]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, str) or (type(value) is int and abs(value) >> 63):
        return _sendable(str(value))
    return value if value is None or type(value) in (bool, int, float) else _sendable(repr(value))


def _sendable(text: str) -> str:
    """Escape surrogates that cannot be encoded, such as bytes of a file name that is not UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
