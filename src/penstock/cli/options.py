"""Options that several commands share, and their conversion to engine options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import typer
from typer.models import OptionInfo

from penstock.checkpoints.json_file import parse_json_text, shown
from penstock.cli.dataclass_flags import parameters_of
from penstock.cli.failures import readable_errors
from penstock.cli.fetch import fetch_if_published
from penstock.cli.flags import Flags, with_dashes
from penstock.errors import ConfigError
from penstock.observability.logging import configure_logging, log_uncaught_errors

Model = Annotated[str, typer.Option("--model", "-m", help="demo, smollm2, a folder, GGUF file or hub id")]
TopP = Annotated[float | None, typer.Option(help="Nucleus sampling  [default: 1.0]")]
TopK = Annotated[int | None, typer.Option(help="Top-k sampling; 0: all  [default: 0]")]
MinP = Annotated[float | None, typer.Option(help="Min-p sampling  [default: 0.0]")]
# Engine options of commands, by parameter: type, default, and declaration.
_ENGINE_OPTIONS: dict[str, tuple[Any, Any, Any]] = {
    "revision": (str | None, None, typer.Option(help="Branch, tag or commit of a hub id")),
    "tokenizer": (str | None, None, typer.Option(help="Folder or hub id of another tokenizer")),
    "device": (str, "auto", typer.Option(help="auto, cpu, cuda")),
    "dtype": (str, "auto", typer.Option(help="auto, float32, bfloat16, float16")),
    "quantization": (str | None, None, typer.Option(help="int8, int4: quantize the weights; none: GGUF as floats")),
    "num_threads": (int | None, None, typer.Option("--threads", help="CPU threads  [default: one per physical core]")),
    "load_format": (str, "auto", typer.Option(help="safetensors, pt, gguf, sharded_state, dummy")),
    "max_model_len": (str | None, None, typer.Option(metavar="N|auto", help="Context length  [default: the model's]")),
    "block_size": (int, 16, typer.Option(help="Tokens per block of the KV cache")),
    "max_num_seqs": (int, 256, typer.Option(help="Running requests")),
    "max_num_batched_tokens": (
        int | None,
        None,
        typer.Option(help="Token budget of a step  [default: 2048, PP: 512]"),
    ),
    "memory_fraction": (
        float | None,
        None,
        typer.Option(help="Share of the device's memory (also: --gpu-memory-utilization)"),
    ),
    "kv_cache_memory_bytes": (str | None, None, typer.Option(metavar="SIZE", help="KV cache size, such as 1GiB")),
    "kv_cache_dtype": (str, "auto", typer.Option(help="auto, float32, bfloat16, int8, fp8")),
    "speculative_config": (
        str | None,
        None,
        typer.Option(metavar="JSON", help='Speculative decoding, such as {"method": "ngram"}'),
    ),
    "engine_seed": (int, 0, typer.Option(help="Base of request seeds")),
    "option": (
        list[str] | None,
        None,
        typer.Option("--option", metavar="NAME=VALUE", help="Any engine option of docs/options.md; repeatable"),
    ),
    "yes": (bool, False, typer.Option("--yes", help="Fetch a published model without a question")),
    "debug": (bool, False, typer.Option("--debug", help="Verbose log, and tracebacks")),
}


def engine_command(
    *,
    without: tuple[str, ...],
    shows_log: bool = True,
    groups: Mapping[str, type] | None = None,
    group_flags: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that makes a command of a function.

    The command has the options above, except `without`, in place of the parameter `engine`, in which the function gets
    them as `EngineConfig.create` takes them. Exceptions become a message and an exit code.

    groups: options classes, by parameters in whose place the command has a flag per field (`parameters_of`). The
    function gets the fields that were given as a dictionary. group_flags: flags of fields with another name.
    """
    groups, group_flags = groups or {}, group_flags or {}
    expanded = {name: parameters_of(one, group_flags) for name, one in groups.items()}
    names = [name for name in _ENGINE_OPTIONS if name not in without]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(function)
        def command(*, debug: bool, yes: bool, **given: Any) -> None:
            with readable_errors(debug=debug, flags=flags):
                if shows_log:
                    configure_logging("debug" if debug else None)
                    log_uncaught_errors()
                fetch_if_published(given.get("model"), yes=yes)
                engine = {name: given.pop(name) for name in names if name in given}
                for group, fields in expanded.items():
                    given[group] = {field.name: given.pop(field.name) for field in fields}
                function(engine=_as_created(**engine), **given)

        parameters = inspect.signature(function, eval_str=True).parameters
        own = [parameter for name, parameter in parameters.items() if name != "engine" and name not in expanded]
        own += [parameter for fields in expanded.values() for parameter in fields]
        flags = Flags(engine=_engine_flags(names), own=_own_flags(own))
        command.__signature__ = inspect.Signature([*own, *map(_parameter, names)])  # type: ignore[attr-defined]
        return command

    return decorate


def _parameter(name: str) -> inspect.Parameter:
    kind, default, option = _ENGINE_OPTIONS[name]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=Annotated[kind, option], default=default)


def _engine_flags(names: list[str]) -> dict[str, str]:
    flags = {name: _flag(name, _ENGINE_OPTIONS[name][2]) for name in names if name not in ("option", "yes", "debug")}
    if "engine_seed" in flags:
        flags["seed"] = flags.pop("engine_seed")
    return flags


def _own_flags(parameters: list[inspect.Parameter]) -> dict[str, str]:
    return {
        parameter.name: _flag(parameter.name, option)
        for parameter in parameters
        for option in getattr(parameter.annotation, "__metadata__", ())
        if isinstance(option, OptionInfo)
    }


def _flag(name: str, option: OptionInfo) -> str:
    # typer stores the first declaration in `default`.
    declared = [str(one) for one in (option.default, *(option.param_decls or ())) if str(one).startswith("--")]
    return declared[0] if declared else f"--{with_dashes(name)}"


def _as_created(*, option: list[str] | None, **engine: Any) -> dict[str, Any]:
    """Convert to the names of engine options."""
    if "engine_seed" in engine:
        engine["seed"] = engine.pop("engine_seed")
    engine["max_model_len"] = parse_max_model_len(engine["max_model_len"])
    if engine.get("speculative_config") is not None:
        engine["speculative_config"] = parse_json("--speculative-config", engine["speculative_config"])
    return {**engine, **parse_options(option)}


def parse_max_model_len(value: str | None) -> int | str | None:
    """Convert digits to a number; the configuration checks other values."""
    return int(value) if value is not None and value.isdecimal() else value


def parse_json(name: str, text: str) -> Any:
    """Parse JSON. name: of the flag. Raises ConfigError for invalid JSON."""
    try:
        return parse_json_text(text)
    except ValueError as error:
        raise ConfigError(
            f'{name} {shown(text)} is not valid: {error}. Allowed: JSON, such as {{"key": 1}}.'
        ) from error


def parse_options(options: list[str] | None) -> dict[str, Any]:
    """Parse `NAME=VALUE` pairs as engine options. Values are JSON if possible, else text.

    Raises ConfigError for a pair without an equals sign.
    """
    parsed = {}
    for option in options or []:
        name, equals, value = option.partition("=")
        if not equals or not name:
            raise ConfigError(f"--option {option!r} is not valid. Allowed: NAME=VALUE, such as block_size=32.")
        name = name.strip().replace("-", "_")
        if name == "model":
            raise ConfigError(f"--option {option!r} is not valid. The model has an option of its own: --model.")
        parsed[name] = parse_value(value.strip())
    return parsed


def parse_value(value: str) -> Any:
    """Parse a value: JSON or a constant of Python if possible, else text."""
    python_constants = {"True": True, "False": False, "None": None}
    if value in python_constants:
        return python_constants[value]
    try:
        return parse_json_text(value)
    except ValueError:
        return value


def with_defaults(flags: Mapping[str, Any], model: str, engine: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """Return the sampling parameters of a command's requests: of flags, else of the model, else defaults.

    flags: values by parameter, None if not given. engine: engine options. defaults: the command's own. Only the
    configuration of a hub id is downloaded.

    Raises InvalidParameter for an invalid flag before the model is resolved, and the errors of its configuration.
    """
    from penstock.checkpoints.resolve import resolve_metadata_folder
    from penstock.config import ModelConfig
    from penstock.contract import SamplingParams
    from penstock.engine.inputs.default_sampling import read_default_sampling

    given = {name: value for name, value in flags.items() if value is not None}
    SamplingParams(**{**defaults, **given})
    folder, _ = resolve_metadata_folder(model, engine.get("revision"))
    names = ("generation_config", "override_generation_config", "hf_config_path")
    options = {name: engine[name] for name in names if name in engine}
    return {**defaults, **read_default_sampling(ModelConfig.load(folder, **options)).fields, **given}
