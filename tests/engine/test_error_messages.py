"""Every error of Penstock's crosses to another process with its type, its fields and its cause."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import pytest

# For the errors that are defined outside of penstock.errors.
import penstock.contract  # noqa: F401
from penstock.errors import (
    ConfigError,
    ErrorData,
    PenstockError,
    RemoteError,
    WorkerError,
    error_as_data,
    error_from_data,
    same_error,
)

FIELDS: dict[str, Any] = {
    "method": "execute_model",
    "rank": 3,
    "cause_type": "RuntimeError",
    "req_ids": ["a", "b"],
    "breaks_device": True,
    "pointers": ["/properties/a"],
    "keywords": ["not"],
    "can_be_dropped": True,
    "retry_after_s": 2.5,
}


def hierarchy(cls: type[PenstockError] = PenstockError) -> Iterator[type[PenstockError]]:
    if cls.__module__.startswith("penstock."):
        yield cls
    for subclass in cls.__subclasses__():
        yield from hierarchy(subclass)


def make(cls: type[PenstockError]) -> PenstockError:
    """Create an error of this type with all fields of its constructor."""
    parameters = inspect.signature(cls.__init__).parameters.values()
    named = [parameter.name for parameter in parameters if parameter.kind is inspect.Parameter.KEYWORD_ONLY]
    return cls("what went wrong: 日本語", **{name: FIELDS[name] for name in named})


def over_the_wire(error: Any) -> PenstockError:
    data = msgspec.msgpack.encode(error_as_data(error))
    return error_from_data(msgspec.msgpack.decode(data, type=ErrorData))


def pickled(error: Any) -> PenstockError:
    again: PenstockError = pickle.loads(pickle.dumps(error))
    return again


CROSSINGS = [over_the_wire, pickled, copy.copy, same_error]
ALL = sorted(set(hierarchy()), key=lambda cls: cls.__qualname__)


@pytest.mark.parametrize("cross", CROSSINGS)
@pytest.mark.parametrize("cls", ALL)
def test_type_message_and_fields_survive(cls: type[PenstockError], cross: Callable[[Any], PenstockError]) -> None:
    error = make(cls)
    error.__cause__ = make(WorkerError)
    again = cross(error)
    assert type(again) is cls
    assert again is not error
    assert (str(again), vars(again), again.args) == (str(error), vars(error), error.args)
    cause = again.__cause__
    assert isinstance(cause, WorkerError)
    assert (cause.method, cause.rank, str(cause)) == ("execute_model", 3, str(error))


def test_the_whole_hierarchy_is_tried() -> None:
    names = {cls.__name__ for cls in ALL}
    assert {"PenstockError", "ContextTooLong", "ContractVersionError", "WaitTimeout", "OutOfMemory"} <= names
    assert len(names) == len(ALL) > 20


@pytest.mark.parametrize("cross", CROSSINGS)
def test_a_note_survives(cross: Callable[[Any], PenstockError]) -> None:
    error = ConfigError("no")
    error.add_note("said twice")
    assert cross(error).__notes__ == ["said twice"]


def test_an_error_that_is_not_ours_becomes_a_general_one_with_its_type_and_text() -> None:
    again = over_the_wire(KeyError("key"))
    assert type(again) is RemoteError
    assert str(again) == "KeyError: 'key'"


def test_a_cause_that_is_not_ours_keeps_its_text_and_its_own_cause() -> None:
    error, cause = ConfigError("the option is bad"), ZeroDivisionError("by zero")
    error.__cause__ = cause
    cause.__cause__ = ConfigError("the root")
    again = pickled(error)
    assert str(again.__cause__) == "ZeroDivisionError: by zero"
    assert again.__cause__ is not None
    assert type(again.__cause__.__cause__) is ConfigError


def test_an_extensions_error_is_at_least_its_nearest_base() -> None:
    class NotThere(ConfigError):
        pass

    data = error_as_data(NotThere("of an extension"))
    del NotThere
    data["types"][0] = "somewhere.else.NotThere"
    again = error_from_data(data)
    assert type(again) is ConfigError
    assert str(again) == "of an extension"


def test_fields_that_are_no_plain_data_are_written_as_text() -> None:
    error = PenstockError("odd")
    error.what = {1, 2}  # type: ignore[attr-defined]
    assert vars(over_the_wire(error)) == {"what": "{1, 2}"}


def test_an_error_that_is_its_own_cause_ends() -> None:
    error = PenstockError("round and round")
    error.__cause__ = error
    assert str(over_the_wire(error)) == "round and round"
