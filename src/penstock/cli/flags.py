"""Messages call options by their names in Python; on the command line they are read as flags."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field

# A list, a dictionary, a text, or what there is up to the next space or the end of a sentence.
_VALUE = r"""\[[^\]]*\]|\{[^}]*\}|'[^']*'|"[^"]*"|[^\s()]*[^\s().,;:]"""
# Names after it are to choose from, and not advice.
_LIST = "Known options:"
_REFUSED = re.compile(r"^(?P<name>\w+)=(?P<value>.+?)(?= asks for )")
_IN_A_FILE = re.compile(r"^[^\n]+, line \d+: ")


def with_dashes(name: str) -> str:
    """How options are spelled here, which people also write with underscores."""
    return name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Flags:
    """A command's flags by what they are in Python. engine: options of the engine; own: everything else.

    Every other option of the engine is a flag of the same name (`EngineCommand`).
    """

    engine: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, str] = field(default_factory=dict)

    def of_engine(self, message: str) -> str:
        """A message about the engine and its options, or about one of vLLM's that it has not."""
        return _REFUSED.sub(_refused_flag, _in_flags(message, self._engine_flags()))

    def of_request(self, message: str) -> str:
        """A message about a request, whose parameters are flags unless a file has them."""
        engine = {name: flag for name, flag in self._engine_flags().items() if name not in self.own}
        return _in_flags(message, engine if _IN_A_FILE.match(message) else {**engine, **self.own})

    def _engine_flags(self) -> dict[str, str]:
        from penstock.config.engine import option_names

        model = {name: flag for name, flag in self.own.items() if name == "model"}
        return {name: f"--{with_dashes(name)}" for name in option_names()} | model | {**self.engine}


def _in_flags(message: str, flags: Mapping[str, str]) -> str:
    if message.startswith("--"):  # it is the command line's own
        return message

    def flag(match: re.Match[str]) -> str:
        name, value = match["name"], match["value"]
        # What is not given has no flag; and without a value, an ordinary word is no option.
        if value == "None" or (value is None and "_" not in name and not match["said"]):
            return match[0]
        if value is None or value == "True":
            return flags[name]
        return f"--no-{flags[name][2:]}" if value == "False" else f"{flags[name]} {shlex.quote(_plain(value))}"

    names = "|".join(flags)
    pattern = rf"""(?<![\w'"./-])(?P<said>the option )?(?P<name>{names})(?:=(?P<value>{_VALUE}))?(?![\w/=]|\.\w)"""
    told, heading, names_to_choose = message.partition(_LIST)
    # Lines of a table stay as wide as they are.
    lines = [line if line.startswith("  ") else re.sub(pattern, flag, line) for line in told.split("\n")]
    return "\n".join(lines) + heading + names_to_choose


def _refused_flag(match: re.Match[str]) -> str:
    flag, value = with_dashes(match["name"]), match["value"]
    if value == "False":
        return f"--no-{flag}"
    # A dictionary reads otherwise in Python than what was typed.
    if value == "True" or value[0] in "{[":
        return f"--{flag}"
    return f"--{flag} {shlex.quote(_plain(value))}"


def _plain(value: str) -> str:
    """A value of Python as the command line takes it."""
    if value[0] in "[{":
        try:
            return json.dumps(ast.literal_eval(value))
        except (ValueError, SyntaxError):
            return value
    if value[0] in "'\"":
        return value[1:-1]
    return value.replace(",", "") if re.fullmatch(r"\d{1,3}(,\d{3})+", value) else value
