"""Commands with an engine: they take every option of the engine as a flag, and flags from a file."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand

from penstock.cli.config_file import read_config_file
from penstock.cli.failures import readable_errors
from penstock.cli.flags import Flags
from penstock.cli.sections import parse_value, with_dashes

# Begin of the names of parameters for the engine's options, beside which a command may have its own of the same names.
ENGINE = "engine_"
# Parameter of the model as a word, beside `--model`.
MODEL_WORD = "model_tag"
_OPTION, _YES, _CONFIG = (f"{ENGINE}{name}" for name in ("option", "yes", "config"))
# Engine options that the file of `--config` gives by flags that the command does not declare; in `Context.meta`.
_FROM_FILE = "penstock.from_file"
# Value of an option such as `--lora-modules NAME=PATH`.
_PAIR = re.compile(r"\w[\w.-]*=\S+")
# Flags of commands whose outputs may be constrained.
_CONSTRAINT_FLAGS = ("--json-schema", "--regex", "--choice", "--grammar")


class EngineCommand(TyperCommand):
    """Command that takes any engine option as a flag, in its help or not, and `--config FILE.yaml` with flags by name.

    A flag that the command does not declare is one of `--option NAME=VALUE`. Values of a file are defaults.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        self._check_second_values(ctx, args)
        unlisted = self._add_unlisted(args)
        path, options = None, list[str]()
        try:
            given = self.make_parser(ctx).parse_args(list(args))[0]
            if (path := given.get(_CONFIG)) is not None:
                options = self._take_file(ctx, Path(path), given)
            rest: list[str] = super().parse_args(ctx, args)
        except Exception as error:  # Click's, or those of Typer's copy of Click
            self._explain(ctx, error, path)
            raise
        options += ctx.params[_OPTION] or ()
        for flag, (name, implied) in unlisted.items():
            value = ctx.params.pop(flag)
            if implied is None and value and len(value) > 1 and _takes_list(flag):
                options.append(_as_option(name, json.dumps(list(map(parse_value, value)))))
                continue
            options += [_as_option(name, one) for one in (value or () if implied is None else [implied] * bool(value))]
        ctx.params[_OPTION] = options
        return rest

    def _add_unlisted(self, args: Sequence[str]) -> dict[str, tuple[str, str | None]]:
        """Add a hidden parameter for each flag of an engine option that the command does not declare.

        Returns options by flag, each with the value that the flag implies; None for a flag with a value.
        """
        unlisted: dict[str, tuple[str, str | None]] = {}
        like: dict[str | None, Any] = {one.name: one for one in self.params}
        for arg in args:
            flag, equals, _ = arg.partition("=")
            if flag.startswith("--"):
                flag = with_dashes(flag)
            elif arg[1:2].isupper() and arg[2:3] != ".":
                # One letter may have its value behind it: -O3.
                flag = arg[:2]
            if self._parameter(flag) is None and (option := _engine_option(flag)) is not None:
                unlisted[flag] = option[0], None if equals else option[1]
                parameter = copy.copy(like[_OPTION if unlisted[flag][1] is None else _YES])
                parameter.name, parameter.opts, parameter.hidden = flag, [flag], True
                self.params = [*self.params, parameter]
        return unlisted

    def _check_second_values(self, ctx: Any, args: Sequence[str]) -> None:
        """Refuse a word that is one more value of the option before it, and would be the prompt or the model."""
        for before, last, word in zip(["", "", *args], ["", *args], args, strict=False):
            flag = last.partition("=")[0] if last.startswith("--") and "=" in last else before
            parameter = self._parameter(flag)
            if getattr(parameter, "multiple", False) and "=" in (parameter.metavar or "") and _PAIR.fullmatch(word):
                ctx.fail(
                    f"{flag} takes one value, and {word} behind it is another. Write {flag} {word} for it; a prompt or "
                    "a model of this form comes before the option."
                )

    def _parameter(self, flag: str) -> Any:
        """Parameter of a flag; None for a flag that the command does not declare."""
        return next((one for one in self.params if flag in (*one.opts, *one.secondary_opts)), None)

    def _take_file(self, ctx: Any, path: Path, given: Mapping[str, Any]) -> list[str]:
        """Make a file's entries defaults of the command's flags. Returns the others as `--option` takes them.

        given: arguments of the command line, by parameter.
        """
        from penstock.config import vllm

        with readable_errors():
            entries = read_config_file(path)
        options = []
        by_name = {one.name: one for one in self.params}
        defaults: dict[str, Any] = {}
        for entry, value in entries.items():
            flag = f"--{with_dashes(entry).removeprefix('--')}"
            parameter = by_name["model"] if entry == "model" else self._parameter(flag)
            if parameter is not None:
                # The model may be given as a word too.
                if entry != "model" or given.get(MODEL_WORD) is None:
                    defaults[parameter.name] = _as_default(
                        parameter, value, is_negative=flag in parameter.secondary_opts
                    )
            elif (option := _engine_option(flag)) is not None:
                name, implied = option
                value = not value if implied == "false" and isinstance(value, bool) else value
                options.append(_as_option(name, _text(value)))
                own_name = vllm.table().other_names["options"].get(name, name).partition(".")[0]
                ctx.meta.setdefault(_FROM_FILE, set()).add(own_name)
            else:
                self._refuse(ctx, flag, f"--config {path}: ")
        ctx.default_map = defaults
        return options

    def _explain(self, ctx: Any, error: Any, path: str | None) -> None:
        """End the command with a message that says more than the error, if there is one."""
        if type(error).__name__ == "NoSuchOption" and error.option_name.startswith("--"):
            self._refuse(ctx, error.option_name)
        parameter = getattr(error, "param", None)
        if path is not None and parameter is not None and _is_from_file(ctx, parameter):
            ctx.fail(f"--config {path}: {error.format_message()}")

    def _refuse(self, ctx: Any, flag: str, where: str = "") -> None:
        from penstock.config import vllm
        from penstock.config.checks import did_you_mean
        from penstock.config.engine import option_names

        own = [flag for one in self.params if one.param_type_name == "option" for flag in one.opts]
        parameter = vllm.table().other_names["parameters"].get(flag.removeprefix("--").replace("-", "_"))
        if parameter is None:
            hint = did_you_mean(flag, [*own, *(f"--{with_dashes(name)}" for name in option_names())])
        else:
            flags = [name for name in _CONSTRAINT_FLAGS if name in own] or ["`penstock generate --help`"]
            hint = f" It is the parameter {parameter} of a request: see {', '.join(flags)}."
        ctx.fail(f"{where}No such option: {flag}.{hint} docs/options.md explains all options.")


class ManyValues(TyperCommand):
    """Command whose repeatable options take several values at once: `--goodput ttft:200 tpot:50`.

    Options of vLLM's that ask for what Penstock does not have are refused by feature.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        normalize = ctx.token_normalize_func or str
        many = {flag for one in self.params if getattr(one, "multiple", False) for flag in one.opts}
        declared = {flag for one in self.params for flag in (*one.opts, *one.secondary_opts)}
        many.update(filter(_takes_list, {normalize(arg) for arg in args} - declared))
        repeated: list[str] = []
        flag, has_value = None, False
        for arg in args:
            if arg.startswith("-"):
                name, equals, _ = normalize(arg).partition("=")
                has_value = bool(equals)
                flag = name if name in many else None
            elif flag is not None and has_value:
                repeated.append(flag)
            else:
                has_value = True
            repeated.append(arg)
        try:
            return super().parse_args(ctx, repeated)
        except Exception as error:  # Click's, or that of Typer's copy of Click
            from penstock.config import vllm

            flag = getattr(error, "option_name", None) or ""
            entry = vllm.table().entries["options"].get(flag.removeprefix("--").replace("-", "_"))
            if type(error).__name__ == "NoSuchOption" and entry is not None:
                ctx.fail(entry.feature.refusal(flag))
            raise


class ServeCommand(ManyValues, EngineCommand):
    """Engine command whose options take several values, if the model comes before them: a word may be the model."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        has_model = (
            not args[:1] or not args[0].startswith("-") or any(arg.startswith(("--model", "-m")) for arg in args)
        )
        return super().parse_args(ctx, args) if has_model else EngineCommand.parse_args(self, ctx, args)


def flags_of(ctx: typer.Context) -> Flags:
    """Flags of a command's parameters, and which of them a file gave."""
    command: Any = ctx.command
    declared = [one for one in command.params if one.param_type_name == "option" and not one.hidden]
    flags = {one.name: next(flag for flag in one.opts if flag.startswith("--")) for one in declared}
    names = [ENGINE + name for name in ctx.meta.get(_FROM_FILE, ())]
    names += [one.name for one in declared if _is_from_file(ctx, one)]
    return Flags(
        engine={name.removeprefix(ENGINE): flag for name, flag in flags.items() if name.startswith(ENGINE)},
        own={name: flag for name, flag in flags.items() if not name.startswith(ENGINE)},
        file=ctx.params.get(_CONFIG),
        from_file=frozenset(flags.get(name) or f"--{with_dashes(name.removeprefix(ENGINE))}" for name in names),
    )


def _is_from_file(ctx: Any, parameter: Any) -> bool:
    source = ctx.get_parameter_source(parameter.name)
    return source is not None and source.name == "DEFAULT_MAP"


def _engine_option(flag: str) -> tuple[str, str | None] | None:
    """Return the engine option of a flag, and its implied value; None for another flag."""
    if not flag.startswith("-") or flag == "-":
        return None
    from penstock.config import vllm
    from penstock.config.engine import option_is_flag

    short, dot, key = flag[1:].partition(".")
    long = vllm.table().other_names["flags"].get(short)
    name = flag.removeprefix("--").replace("-", "_") if long is None else long + dot + key
    is_flag = option_is_flag(name.partition(".")[0])
    if is_flag is None:
        name = name.removeprefix("no_")
        return (name, "false") if option_is_flag(name) else None
    return name, "true" if is_flag else None


def _takes_list(flag: str) -> bool:
    """Whether an engine option takes several values, here or in vLLM."""
    if not flag.startswith("--"):
        return False
    from penstock.config.engine import option_is_list

    return option_is_list(flag.removeprefix("--").replace("-", "_"))


def _as_option(name: str, value: str) -> str:
    """NAME=VALUE of `--option`; `name.key.key` is an entry of a dictionary."""
    name, *keys = name.split(".")
    if not keys:
        return f"{name}={value}"
    entry = parse_value(value)
    for key in reversed(keys):
        entry = {key: entry}
    return f"{name}={json.dumps(entry)}"


def _as_default(parameter: Any, value: Any, *, is_negative: bool) -> Any:
    """Default of a parameter for a file's value: the texts that the command line would have, but for booleans."""
    if getattr(parameter, "is_flag", False) and isinstance(value, bool):
        return value != is_negative
    if getattr(parameter, "multiple", False):
        return list(map(_text, value if isinstance(value, list) else [value]))
    return _text(value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
