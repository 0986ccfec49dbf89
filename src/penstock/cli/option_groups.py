"""Groups of options of a command, each a dataclass with an option per field."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any


def with_option_groups(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command of a function: parameters that are dataclasses become the options that their fields declare."""
    parameters = inspect.signature(function, eval_str=True).parameters
    groups: dict[str, type[Any]] = {
        name: parameter.annotation
        for name, parameter in parameters.items()
        if isinstance(parameter.annotation, type) and dataclasses.is_dataclass(parameter.annotation)
    }

    @functools.wraps(function)
    def command(**given: Any) -> None:
        values = {
            name: group(**{field.name: given.pop(field.name) for field in dataclasses.fields(group)})
            for name, group in groups.items()
        }
        function(**values, **given)

    options: list[inspect.Parameter] = []
    for name, parameter in parameters.items():
        is_group = name in groups
        options += inspect.signature(groups[name], eval_str=True).parameters.values() if is_group else [parameter]
    keyword_only = [option.replace(kind=inspect.Parameter.KEYWORD_ONLY) for option in options]
    command.__signature__ = inspect.Signature(keyword_only)  # type: ignore[attr-defined]
    return command
