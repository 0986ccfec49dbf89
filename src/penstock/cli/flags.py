"""Flags of the command line and the options that they mean, in both directions.

`Flags` renames options in messages to flags; `EngineCommand` takes any option of the engine as a flag.
"""

from __future__ import annotations

import ast
import itertools
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typer.core import TyperCommand

# A list, a dictionary, a string, or a word.
_VALUE = r"""\[[^\]]*\]|\{[^}]*\}|'[^']*'|"[^"]*"|[^\s()]*[^\s().,;:]"""
# Option names after it stay as they are.
_LIST = "Known options:"
_REFUSED = re.compile(r"^(?P<name>\w+)=(?P<value>.+?)(?= asks for )")
# Flags of commands whose outputs may be constrained.
_CONSTRAINT_FLAGS = ("--json-schema", "--regex", "--choice", "--grammar")
_IN_A_FILE = re.compile(r"^[^\n]+, line \d+: ")


def with_dashes(name: str) -> str:
    """Spell an option with dashes."""
    return name.replace("_", "-")


@dataclass(frozen=True, slots=True)
class Flags:
    """Flags of a command, by option name. engine: options of the engine; own: other parameters.

    Every other option of the engine is a flag of the same name (`EngineCommand`).
    """

    engine: Mapping[str, str] = field(default_factory=dict)
    own: Mapping[str, str] = field(default_factory=dict)

    def of_engine(self, message: str) -> str:
        """Rename options in a message about the engine, or about a refused option of vLLM's."""
        return _REFUSED.sub(_refused_flag, _in_flags(message, self._engine_flags()))

    def of_request(self, message: str) -> str:
        """Rename parameters in a message about a request, unless they come from a file."""
        engine = {name: flag for name, flag in self._engine_flags().items() if name not in self.own}
        return _in_flags(message, engine if _IN_A_FILE.match(message) else {**engine, **self.own})

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


class EngineCommand(TyperCommand):
    """Command that takes any engine option as a flag: unlisted ones become `--option NAME=VALUE`.

    `--config FILE.yaml` has flags by name.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        from penstock.cli.config_file import read_config_file

        file = read_config_file(args)
        own: dict[str, bool] = {}
        for parameter in self.params:
            is_option = parameter.param_type_name == "option"
            takes_value = is_option and not getattr(parameter, "is_flag", False)
            own |= dict.fromkeys([*parameter.opts, *parameter.secondary_opts] if is_option else [], takes_value)
        own |= dict.fromkeys(ctx.help_option_names, False)
        given = read_engine_flags(ctx, file.flags, own, where=f"--config {file.path}: ")
        others = read_engine_flags(ctx, file.others, own)
        if file.model is not None:
            given += self._model_of_file(file.model, others, own)
        return super().parse_args(ctx, given + others)

    def _model_of_file(self, model: str, others: list[str], own: Mapping[str, bool]) -> list[str]:
        """Arguments that give the model of a file, as this command takes it; none where the others give another one."""
        flags, words = _flags_and_words(others, own)
        by_name = {parameter.name: parameter for parameter in self.params}
        names = getattr(by_name.get("model"), "opts", ())
        arguments = [parameter.name for parameter in self.params if parameter.param_type_name == "argument"]
        takes_word = bool(arguments) and arguments[0] in ("model", "model_tag")
        if (takes_word and words) or any(flag in names or flag[:2] in names for flag in flags):
            return []
        return ["--model", model] if "--model" in own else [model]


def _flags_and_words(args: Sequence[str], own: Mapping[str, bool]) -> tuple[list[str], list[str]]:
    """Flags of arguments, and words that are neither a flag nor a value of one."""
    flags: list[str] = []
    words: list[str] = []
    rest = iter(args)
    for arg in rest:
        flag, equals, _ = arg.partition("=")
        if arg == "--":
            words.extend(rest)
        elif arg.startswith("-") and arg != "-":
            flags.append(flag)
            if own.get(flag) and not equals:
                next(rest, None)
        else:
            words.append(arg)
    return flags, words


def read_engine_flags(ctx: Any, args: list[str], own: dict[str, bool], where: str = "") -> list[str]:
    """Rewrite flags of engine options to `--option NAME=VALUE`.

    own: the command's own options, and whether each takes a value; they are kept with their values. where: begin of the
    error about an unknown flag.
    """
    rewritten = []
    rest = iter(args)
    for arg in rest:
        flag, equals, value = arg.partition("=")
        flag = with_dashes(flag) if flag.startswith("--") else flag
        if flag in own:
            rewritten.append(arg)
            rewritten.extend(itertools.islice(rest, 1) if own[flag] and not equals else [])
        elif arg == "--":
            rewritten.extend([arg, *rest])
        elif (option := _engine_option(flag)) is None:
            if flag.startswith("--"):
                _refuse(ctx, flag, own, where)
            rewritten.append(arg)
        else:
            name, implied = option
            rewritten.extend(_as_option(name, value if equals else implied or next(rest, None)) or [arg])
    return rewritten


def _engine_option(flag: str) -> tuple[str, str | None] | None:
    """Return the engine option of a flag, and its implied value; None for another flag."""
    if not flag.startswith("-") or flag == "-":
        return None
    from penstock.config import vllm
    from penstock.config.engine import option_is_flag

    name = vllm.table().other_names["flags"].get(flag[1:]) or flag.removeprefix("--").replace("-", "_")
    is_flag = option_is_flag(name.partition(".")[0])
    if is_flag is None:
        name = name.removeprefix("no_")
        return (name, "false") if option_is_flag(name) else None
    return name, "true" if is_flag else None


def _refuse(ctx: Any, flag: str, own: dict[str, bool], where: str) -> None:
    from penstock.config import vllm
    from penstock.config.checks import did_you_mean
    from penstock.config.engine import option_names

    parameter = vllm.table().other_names["parameters"].get(flag.removeprefix("--").replace("-", "_"))
    if parameter is None:
        hint = did_you_mean(flag, [*own, *(f"--{with_dashes(name)}" for name in option_names())])
    else:
        flags = [name for name in _CONSTRAINT_FLAGS if name in own] or ["`penstock generate --help`"]
        hint = f" It is the parameter {parameter} of a request: see {', '.join(flags)}."
    ctx.fail(f"{where}No such option: {flag}.{hint} docs/options.md explains all options.")


def _as_option(name: str, value: str | None) -> list[str]:
    """Write an option as arguments; none without a value. `--name.key value` sets an entry of a dictionary."""
    name, _, key = name.partition(".")
    if value is None:
        return []
    return ["--option", f"{name}={json.dumps({key: value}) if key else value}"]
