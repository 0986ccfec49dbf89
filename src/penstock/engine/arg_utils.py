"""Options of an engine as a script takes them, by vLLM's names: `EngineArgs`, and flags of its argument parser."""

from __future__ import annotations

import argparse
import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from penstock.config import EngineConfig, vllm
from penstock.config.engine import option_is_flag, option_names

_Parser = TypeVar("_Parser", bound=argparse._ActionsContainer)


class EngineArgs:
    """vLLM's name of an engine's options: `EngineArgs(model="demo")` is an `EngineConfig`, for `from_engine_args`."""

    def __new__(cls, model: str | Path = "demo", **options: Any) -> EngineConfig:  # type: ignore[misc]
        return EngineConfig.create(model, **options)

    @staticmethod
    def add_cli_args(parser: _Parser) -> _Parser:
        """Add a flag for the model and for each option, of Penstock's or of vLLM's, that the parser does not have.

        parser: an `argparse` parser, or a group of one. Flags that are not given are None.
        """
        for name in ("model", *_option_names()):
            flag, is_flag = f"--{name.replace('_', '-')}", option_is_flag(name)
            if flag not in parser._option_string_actions and f"--{name}" not in parser._option_string_actions:
                kind: dict[str, Any] = {"action": argparse.BooleanOptionalAction} if is_flag else {"type": _value}
                parser.add_argument(flag, **kind)
        return parser

    @staticmethod
    def from_cli_args(args: Namespace) -> EngineConfig:
        """Configuration of the flags of `add_cli_args`."""
        given = {name: getattr(args, name, None) for name in ("model", *_option_names())}
        return EngineConfig.create(
            **{"model": "demo"} | {name: value for name, value in given.items() if value is not None}
        )


AsyncEngineArgs = EngineArgs


class FlexibleArgumentParser(argparse.ArgumentParser):
    """Argument parser whose flags can be written with dashes or underscores; a later flag replaces one of its name."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{"conflict_handler": "resolve", **kwargs})

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Namespace | None = None
    ) -> tuple[Namespace, list[str]]:
        given = sys.argv[1:] if args is None else args
        return super().parse_known_args([self._as_declared(one) for one in given], namespace)

    def _as_declared(self, arg: str) -> str:
        if not arg.startswith("--"):
            return arg
        flag, equals, value = arg[2:].partition("=")
        spellings = (f"--{one}" for one in (flag, flag.replace("_", "-"), flag.replace("-", "_")))
        declared = next((one for one in spellings if one in self._option_string_actions), f"--{flag}")
        return declared + equals + value


def _option_names() -> list[str]:
    """Options of engines, by Penstock's names and by vLLM's."""
    table = vllm.table()
    refused = [name for name, entry in table.entries["options"].items() if not entry.feature.of_commands]
    others = [*table.other_names["options"], *table.ignored["options"], *table.ignored["flags"]]
    return [*option_names(), *others, *refused]


def _value(text: str) -> Any:
    """Value of a flag: JSON if possible, else text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
