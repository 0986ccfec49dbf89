"""Options in messages, renamed to the flags of the command line."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from penstock.cli.sections import with_dashes

# A list, a dictionary, a string, or a word.
_VALUE = r"""\[[^\]]*\]|\{[^}]*\}|'[^']*'|"[^"]*"|[^\s()]*[^\s().,;:]"""
# Option names after it stay as they are.
_LIST = "Known options:"
_REFUSED = re.compile(r"^(?P<name>\w+)=(?P<value>.+?)(?= asks for )")
_IN_A_FILE = re.compile(r"^[^\n]+, line \d+: ")


@dataclass(frozen=True, slots=True)
class Flags:
    """Flags of a command, by option name. engine: options of the engine; own: other parameters.

    Every other option of the engine is a flag of the same name (`EngineCommand`).
    file: that of `--config`. from_file: flags whose values it gave.
    """

    engine: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None
    from_file: frozenset[str] = frozenset()

    def of_engine(self, message: str) -> str:
        """Rename options in a message about the engine, or about a refused option of vLLM's."""
        return self._with_file(_REFUSED.sub(_refused_flag, _in_flags(message, self._engine_flags())))

    def of_request(self, message: str) -> str:
        """Rename parameters in a message about a request, unless they come from a file."""
        engine = {name: flag for name, flag in self._engine_flags().items() if name not in self.own}
        return self._with_file(_in_flags(message, engine if _IN_A_FILE.match(message) else {**engine, **self.own}))

    def _with_file(self, message: str) -> str:
        """Name the file in a message that begins with a flag of it."""
        flag = message.split(" ", 1)[0].replace("--no-", "--", 1)
        return f"--config {self.file}: {message}" if flag in self.from_file else message

    def _engine_flags(self) -> dict[str, str]:
        from penstock.config.engine import option_names

        model = {name: flag for name, flag in self.own.items() if name == "model"}
        return {name: f"--{with_dashes(name)}" for name in option_names()} | model | {**self.engine}


def _in_flags(message: str, flags: Mapping[str, str]) -> str:
    if message.startswith("--"):  # the command line's own message
        return message

    def flag(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        # None has no flag; and an ordinary word without a value is not an option.
        if value == "None" or (value is None and "_" not in name and not match["said"]):
            return match[0]
        if value is None or value == "True":
            return flags[name]
        return f"--no-{flags[name][2:]}" if value == "False" else f"{flags[name]} {shlex.quote(_plain(value))}"

    names = "|".join(flags)
    pattern = rf"""(?<![\w'"./-])(?P<said>the option )?(?P<name>{names})(?:=(?P<value>{_VALUE}))?(?![\w/=]|\.\w)"""
    told, heading, names_to_choose = message.partition(_LIST)
    # Lines of a table keep their width.
    lines = [line if line.startswith("  ") else re.sub(pattern, flag, line) for line in told.split("\n")]
    return "\n".join(lines) + heading + names_to_choose


def _refused_flag(match: re.Match[str]) -> str:
    flag, value = with_dashes(match["name"]), match["value"]
    if value == "False":
        return f"--no-{flag}"
    # A dictionary in Python differs from what was typed.
    if value == "True" or value[0] in "{[":
        return f"--{flag}"
    return f"--{flag} {shlex.quote(_plain(value))}"


def _plain(value: str) -> str:
    """Write a Python value as the command line takes it."""
    if value[0] in "[{":
        try:
            return json.dumps(ast.literal_eval(value))
        except (ValueError, SyntaxError):
            return value
    if value[0] in "'\"":
        return value[1:-1]
    return value.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+", value) else value
