"""Flags of engine options that a command has not itself, and commands that have another name elsewhere."""

from __future__ import annotations

import itertools
import json
from typing import Any

from typer.core import TyperCommand, TyperGroup

from penstock.cli.failures import readable_errors
from penstock.cli.flags import with_dashes

# Of commands whose outputs may have a form.
_FLAGS_OF_FORMS = ("--json-schema", "--regex", "--choice", "--grammar")


class EngineCommand(TyperCommand):
    """A command that takes any engine option as a flag: what it does not have itself becomes `--option NAME=VALUE`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own: dict[str, bool] = {}
        for parameter in self.params:
            is_option = parameter.param_type_name == "option"
            takes_value = is_option and not getattr(parameter, "is_flag", False)
            own |= dict.fromkeys([*parameter.opts, *parameter.secondary_opts] if is_option else [], takes_value)
        own |= dict.fromkeys(ctx.help_option_names, False)
        return super().parse_args(ctx, read_engine_flags(ctx, args, own))


class CommandGroup(TyperGroup):
    """Commands, of which those that vLLM has and Penstock has not are refused by feature."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and self.get_command(ctx, args[0]) is None:
            with readable_errors():
                from penstock.config import vllm

                args = [vllm.command_as_ours(with_dashes(args[0])), *args[1:]]
        return super().resolve_command(ctx, args)


def read_engine_flags(ctx: Any, args: list[str], own: dict[str, bool]) -> list[str]:
    """Arguments in which flags of engine options have become `--option NAME=VALUE`.

    own: the command's own options, and whether each takes a value; they stay, and so does what they take.
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
                _refuse(ctx, flag, own)
            rewritten.append(arg)
        else:
            name, implied = option
            rewritten.extend(_as_option(name, value if equals else implied or next(rest, None)) or [arg])
    return rewritten


def _engine_option(flag: str) -> tuple[str, str | None] | None:
    """The engine option that a flag means, and the value that it has by itself; None if it means none."""
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


def _refuse(ctx: Any, flag: str, own: dict[str, bool]) -> None:
    from penstock.config import vllm
    from penstock.config.checks import did_you_mean
    from penstock.config.engine import option_names

    parameter = vllm.table().other_names["parameters"].get(flag.removeprefix("--").replace("-", "_"))
    if parameter is None:
        hint = did_you_mean(flag, [*own, *(f"--{with_dashes(name)}" for name in option_names())])
    else:
        flags = [name for name in _FLAGS_OF_FORMS if name in own] or ["`penstock generate --help`"]
        hint = f" It is the parameter {parameter} of a request: see {', '.join(flags)}."
    ctx.fail(f"No such option: {flag}.{hint} docs/options.md explains all options.")


def _as_option(name: str, value: str | None) -> list[str]:
    """Empty without a value. `--name.key value` is how vLLM's command line gives one entry of a dictionary."""
    name, _, key = name.partition(".")
    if value is None:
        return []
    return ["--option", f"{name}={json.dumps({key: value}) if key else value}"]
