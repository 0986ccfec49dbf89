"""Write docs/options.md: every option of an engine, every sampling parameter, every environment variable.

    python tools/options_page.py

Names, types and defaults are those of the configuration's dataclasses, meanings those of their docstrings ("name:
meaning" lines), flags those of the command line, and allowed values those of the message that refuses an invalid value.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import typer

from penstock.cli.app import app
from penstock.cli.command import ENGINE
from penstock.cli.docstrings import meanings_in
from penstock.config import EngineConfig, ModelConfig
from penstock.config.engine import option_names
from penstock.config.model import MODEL_OPTIONS
from penstock.config.queue import QueueLimits
from penstock.contract import SamplingParams
from penstock.errors import PenstockError
from penstock.server.options import ServerOptions
from penstock.server.processes.network import NetworkOptions
from penstock.system import env

PAGE = Path(__file__).resolve().parents[1] / "docs" / "options.md"
# In this order, by the name that `EngineConfig` has for each concern.
TITLES = {
    "model": "The model",
    "load": "Loading weights",
    "device": "Device, threads, attention",
    "cache": "KV cache and memory",
    "scheduler": "Scheduler",
    "sampling": "Sampling",
    "limits": "Limits of requests",
    "parallel": "Parallelism and workers",
    "structured": "Structured outputs",
    "speculative": "Speculative decoding: keys of `speculative_config`",
    "graphs": "CUDA graphs",
    "profiler": "Profiler",
    "live_view": "Live view",
    "expert_stats": "Routing statistics",
    "weight_transfer": "Weight transfer",
}
# What has no flag of its own is in a dictionary.
KEY_OF = "--speculative-config JSON"
HEAD = """# Options

Written by `make docs` from the code: change the docstrings there, not this page.

An option of an engine has one name everywhere: `LLM("demo", max_num_seqs=32)`, `AsyncEngine("demo",
max_num_seqs=32)`. On the command line it is a flag, `--max-num-seqs 32`, of every command with an engine, listed in
its `--help` or not. Booleans take no value: `--use-tqdm-on-load`, `--no-enable-prefix-caching`. `--option name=value`
is equivalent; the value is JSON if possible, else text. `model`, the last word of a command or `--model`, is `demo`
(the model that ships), a folder, or a hub id. Sizes in bytes may be texts such as `1GiB`. vLLM's names are in
[vllm.md](vllm.md).
"""


class Option(NamedTuple):
    """One line of a table."""

    name: str
    type: str
    default: str
    allowed: str
    meaning: str


class _Nothing:
    """A value that no option allows."""

    def __repr__(self) -> str:
        return "nothing"


def page() -> str:
    """Render the page."""
    flags = _engine_flags()
    tables = [
        f"## {TITLES.get(concern, concern.capitalize())}\n\n"
        + _table("command line", [(option, f"`{flags.get(option.name, KEY_OF)}`") for option in options])
        for concern, options in engine_options().items()
    ]
    return "\n".join([HEAD, *tables, _server_section(), _sampling_section(), _environment_section()])


def engine_options() -> dict[str, list[Option]]:
    """All options by their concern, as `EngineConfig` composes it."""
    config = EngineConfig.create("demo")
    fields = [field.name for field in dataclasses.fields(config)]
    concerns = [name for name in fields if dataclasses.is_dataclass(getattr(config, name))]
    order = [*(name for name in TITLES if name in concerns), *(name for name in concerns if name not in TITLES)]
    return {name: _options_of(getattr(config, name)) for name in order}


def sampling_parameters() -> list[Option]:
    fields = msgspec.structs.fields(SamplingParams)
    meanings = meanings_in(SamplingParams.__doc__, [field.name for field in fields])
    types = SamplingParams.__annotations__
    return [
        Option(
            name=field.name,
            type=_plain_type(types[field.name]),
            default=_shown(_default(field)),
            allowed=_allowed(lambda bad: SamplingParams(**bad), field.name),
            meaning=meanings.get(field.name, ""),
        )
        for field in fields
    ]


def _options_of(config: Any) -> list[Option]:
    """Options of one config class."""
    is_model = isinstance(config, ModelConfig)
    fields = {field.name: field for field in dataclasses.fields(config) if not is_model or field.name in MODEL_OPTIONS}
    names = [*(name for name in MODEL_OPTIONS if is_model and name not in fields), *fields]
    meanings = meanings_in(type(config).__doc__, names)
    if is_model:
        meanings |= meanings_in(ModelConfig.load.__doc__, names)
    return [
        Option(
            name=name,
            type=_plain_type(str(fields[name].type)) if name in fields else "str or None",
            default=_shown(_default(fields[name])) if name in fields else _shown(None),
            allowed=_allowed(lambda bad: dataclasses.replace(config, **bad), name) if name in fields else "",
            meaning=meanings.get(name, ""),
        )
        for name in names
    ]


def _default(field: Any) -> Any:
    missing = (dataclasses.MISSING, msgspec.NODEFAULT)
    if field.default not in missing:
        return field.default
    return None if field.default_factory in missing else field.default_factory()


def _allowed(make: Callable[[dict[str, Any]], object], name: str) -> str:
    """Return the allowed values, from the message that refuses a value of an invalid type."""
    try:
        make({name: _Nothing()})
    except PenstockError as error:
        said = str(error).partition("Allowed: ")[2]
        return re.split(r"\.(?:\s|$)", said)[0]
    except TypeError:
        pass
    return ""


def _engine_flags() -> dict[str, str]:
    """Return the flag of each option: of a command that lists it, else the general one."""
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    with_engine = [command for command in commands.values() if _flag(command, f"{ENGINE}option") is not None]
    flags = {}
    for option in option_names():
        listed = [_flag(command, ENGINE + option) for command in with_engine]
        flags[option] = next(filter(None, listed), None) or f"--{option.replace('_', '-')}"
    return flags


def _flag(command: Any, parameter: str) -> str | None:
    """The flag of a command for a parameter, the longest one."""
    found = [one for one in command.params if one.name == parameter and isinstance(one.opts, list)]
    return max(found[0].opts, key=len) if found and found[0].opts[0].startswith("-") else None


def server_options() -> list[Option]:
    """Options of the server."""
    configs = (NetworkOptions(), ServerOptions(served_model_name=("demo",)), QueueLimits())
    return [option for config in configs for option in _options_of(config)]


def _server_section() -> str:
    serve = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    text = """## The server

Flags of `penstock serve`, beside those of the engine. A tuple is a flag that can be given several times.
[operations.md](operations.md) says how to choose them.

"""
    return text + _table("`serve`", [(option, f"`{_flag(serve, option.name)}`") for option in server_options()])


def _sampling_section() -> str:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    text = """## Sampling parameters

Fields of `SamplingParams`, and of the lines of `penstock generate --input`
([requests.md](requests.md)). Those with a flag can be given to `penstock generate` for all requests; its `max_tokens`
is 128 unless you say more. [sampling.md](sampling.md) explains how they interact.

"""
    rows = []
    for option in sampling_parameters():
        flag = _flag(commands["generate"], option.name)
        rows.append((option, f"`{flag}`" if flag else ""))
    return text + _table("`generate`", rows)


def _environment_section() -> str:
    rows = [line for line in (env.__doc__ or "").splitlines() if line.startswith("|")]
    return "## Environment variables\n\n" + "\n".join(rows) + "\n"


def _table(flags: str, rows: list[tuple[Option, str]]) -> str:
    lines = [f"| name | {flags} | type | default | allowed | meaning |", "| --- | --- | --- | --- | --- | --- |"]
    for option, flag in rows:
        cells = (f"`{option.name}`", flag, option.type, option.default, option.allowed, option.meaning)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _plain_type(annotation: str) -> str:
    return annotation.replace(" | ", " or ")


def _shown(value: Any) -> str:
    return f"`{value!r}`"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
