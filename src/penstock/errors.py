"""Every exception that a user, a checkpoint, a client or another machine can cause.

A message names the thing, its value, what is allowed, and what to do about it.
"""

from __future__ import annotations


class PenstockError(Exception):
    """Base of all errors that Penstock raises on purpose."""


class ConfigError(PenstockError, ValueError):
    """An option, or a combination of options, is not valid."""


class UnknownOption(ConfigError):
    """An option that does not exist."""


class UnsupportedFeature(PenstockError):
    """Something that this combination of device, model and options cannot do."""


class InvalidRequest(PenstockError, ValueError):
    """A request that cannot be served; the engine goes on serving others."""


class InvalidParameter(InvalidRequest):
    """A sampling parameter outside its allowed range."""


class ContextTooLong(InvalidRequest):
    """A request that can never fit into this engine's context or KV cache."""


class ModelError(PenstockError):
    """The model folder, its configuration or its weights cannot be used."""


class ModelNotFound(ModelError):
    """No such folder, and no such repository on the hub (or no network)."""


class UnsupportedModel(ModelError):
    """A model whose architecture has no implementation here."""


class CheckpointError(ModelError):
    """A weight file is missing, truncated, or does not fit the model."""


class TokenizerError(ModelError):
    """The tokenizer's files are missing or damaged."""


class OutOfMemory(PenstockError, MemoryError):
    """The memory plan does not work out; the message shows the plan."""


class LifecycleError(PenstockError, RuntimeError):
    """A method was called before the one it depends on, or after `close()`."""


class WorkerError(PenstockError, RuntimeError):
    """A worker failed. Says in which call, at which stage, on which rank, and why.

    `cause_type` keeps the original exception's type by name, since the exception itself may not cross processes.
    """

    def __init__(self, message: str, *, method: str, rank: int, cause_type: str) -> None:
        super().__init__(message)
        self.method = method
        self.rank = rank
        self.cause_type = cause_type


class LogitsProcessorError(PenstockError, RuntimeError):
    """A custom logits processor failed for one request; the message names it."""


class GrammarError(PenstockError, RuntimeError):
    """The grammar of these requests failed; it says how."""

    def __init__(self, message: str, *, req_ids: list[str]) -> None:
        super().__init__(message)
        self.req_ids = req_ids


class WaitTimeout(PenstockError, TimeoutError):
    """A wait reached its limit. Says who waited for whom, in which call, for how long."""


class EngineDead(PenstockError, RuntimeError):
    """The engine stopped after failures that restarts could not mend; carries the root cause."""
