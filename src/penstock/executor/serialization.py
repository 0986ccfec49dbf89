"""Serialisation of functions, classes and data that the caller sends to the engine's processes."""

from __future__ import annotations

import pickle
import sys
from typing import Any

import cloudpickle

from penstock.errors import ConfigError

# Name of the main module in a process that multiprocessing has spawned.
_SPAWNED_MAIN = "__mp_main__"


def dumps(name: str, value: Any) -> bytes:
    """Serialise a value. Functions and classes of the main module, which no other process can import, go by value.

    name: what the error calls the value. Raises ConfigError for a value that cannot be serialised.
    """
    if _SPAWNED_MAIN in sys.modules:
        cloudpickle.register_pickle_by_value(sys.modules[_SPAWNED_MAIN])
    try:
        data: bytes = cloudpickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"{name} cannot be sent to another process: {error}. Functions must not refer to locks, files, connections "
            "or an engine, and arguments and answers must be plain data or tensors; or let everything run in one "
            "process: enable_multiprocessing=False, and one worker."
        ) from error
    return data


def loads(data: bytes) -> Any:
    """Return the value that `dumps` serialised."""
    return pickle.loads(data)
