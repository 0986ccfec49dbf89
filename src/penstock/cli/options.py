"""Options that several commands share, and their conversion to engine options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.command import ENGINE, MODEL_WORD, flags_of
from penstock.cli.failures import readable_errors
from penstock.cli.fetch import fetch_if_published
from penstock.cli.sections import Section, Sections, parse_value
from penstock.config.engine import sections
from penstock.config.flags import listed
from penstock.errors import ConfigError
from penstock.observability.logging import configure_logging, log_uncaught_errors

if TYPE_CHECKING:
    from penstock.config import ModelConfig

# A command's function gets the model; the command takes it as a word too (`engine_command`).
Model = Annotated[
    str, typer.Option("--model", "-m", help="demo, smollm2, a folder, GGUF file or hub id  [default: demo]")
]
_DEFAULT_MODEL = "demo"
_ModelWord = Annotated[str | None, typer.Argument(metavar="MODEL", help="The model; also: --model")]
TopP = Annotated[float | None, typer.Option(help="Nucleus sampling  [default: 1.0]")]
TopK = Annotated[int | None, typer.Option(help="Top-k sampling; 0: all  [default: 0]")]
MinP = Annotated[float | None, typer.Option(help="Min-p sampling  [default: 0.0]")]
Images = Annotated[list[str] | None, typer.Option(metavar="FILE", help="Image, a file or URL; repeatable")]
Audios = Annotated[list[str] | None, typer.Option(metavar="FILE", help="Audio, a file or URL; repeatable")]
Videos = Annotated[list[str] | None, typer.Option(metavar="FILE", help="Video, a file or URL; repeatable")]
_COMMON = ("option", "yes", "debug", "config")


def media_parts(image: list[str] | None, audio: list[str] | None, video: list[str] | None) -> list[dict[str, Any]]:
    """Parts of a message with the items that the options name. Raises ConfigError for a file that cannot be read."""
    from penstock.cli.media import media_part

    given = {"image": image, "audio": audio, "video": video}
    return [media_part(name, place, f"--{name}") for name, places in given.items() for place in places or ()]


@dataclass(frozen=True)
class _CommonOptions:
    """Options of every command with an engine, beside those of the engine's sections."""

    revision: str | None = field(default=None, metadata=listed("Branch, tag or commit of a hub id"))
    tokenizer: str | None = field(default=None, metadata=listed("Folder or hub id of another tokenizer"))
    speculative_config: Mapping[str, Any] | None = field(
        default=None, metadata=listed('Speculative decoding, such as {"method": "ngram"}')
    )
    option: tuple[str, ...] = field(
        default=(), metadata=listed("Any engine option of docs/options.md; repeatable", metavar="NAME=VALUE")
    )
    yes: bool = field(default=False, metadata=listed("Fetch a published model without a question", flag="--yes"))
    debug: bool = field(default=False, metadata=listed("Verbose log, and tracebacks", flag="--debug"))
    config: Path | None = field(default=None, metadata={"hidden": True})


def engine_command(
    *,
    without: tuple[str, ...],
    shows_log: bool = True,
    lists: tuple[type, ...] = (),
    model_of_words: Callable[[dict[str, Any]], str | None] | None = None,
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorator that makes a command of a function.

    The command has flags for the sections among the function's parameters (`Sections`), and for the engine's options:
    those that are listed (`penstock.config.flags`) except `without`, and all of the sections `lists`. The function gets
    the engine's in the parameter `engine`, as `EngineConfig.create` takes them, and the model in `model`. Exceptions
    become a message and an exit code.

    model_of_words: takes the model out of the command's arguments without `--model`, if it is there; None for commands
        that have it as their last word.
    """
    whole = (*lists, _CommonOptions)
    of_engine = [Section(one, ENGINE, only_listed=one not in whole) for one in (*sections(), _CommonOptions)]
    shown = [
        one for section in of_engine for one in section.parameters() if one.name.removeprefix(ENGINE) not in without
    ]

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        own = Sections(function)

        @functools.wraps(function)
        def command(ctx: typer.Context, **given: Any) -> None:
            debug = given[f"{ENGINE}debug"]
            with readable_errors(debug=debug, flags=flags_of(ctx)):
                if shows_log:
                    configure_logging("debug" if debug else None)
                    log_uncaught_errors()
                engine = {name: value for section in of_engine for name, value in section.take(given).items()}
                common = {name: engine.pop(name, None) for name in _COMMON}
                flag = given.pop("model")
                if model_of_words is not None and flag is None:
                    flag = model_of_words(given)
                model = _one_model(given.pop(MODEL_WORD, None), flag)
                fetch_if_published(model, yes=bool(common["yes"]))
                engine |= parse_options(common["option"])
                function(model=model, engine=engine, **own.take(given), **given)

        context = inspect.Parameter("ctx", inspect.Parameter.KEYWORD_ONLY, annotation=typer.Context)
        parameters = [
            one.replace(default=None) if one.name == "model" else one for one in own.parameters if one.name != "engine"
        ]
        if model_of_words is None:
            word = inspect.Parameter(MODEL_WORD, inspect.Parameter.KEYWORD_ONLY, annotation=_ModelWord, default=None)
            parameters.append(word)
        command.__signature__ = inspect.Signature([context, *parameters, *shown])  # type: ignore[attr-defined]
        return command

    return decorate


def _one_model(word: str | None, flag: str | None) -> str:
    if word is not None and flag is not None:
        raise ConfigError(f"The model is given twice: {word!r} and --model {flag!r}. Leave one of them out.")
    return word or flag or _DEFAULT_MODEL


def command_with_sections(function: Callable[..., None]) -> Callable[..., None]:
    """Make a command without an engine of a function, with flags for its sections (`Sections`), and readable errors."""
    own = Sections(function)

    @functools.wraps(function)
    def command(*, debug: bool, **given: Any) -> None:
        with readable_errors(debug=debug):
            function(**own.take(given), **given)

    debug = inspect.Parameter(
        "debug",
        inspect.Parameter.KEYWORD_ONLY,
        annotation=Annotated[bool, typer.Option("--debug", help="Tracebacks")],
        default=False,
    )
    command.__signature__ = inspect.Signature([*own.parameters, debug])  # type: ignore[attr-defined]
    return command


def parse_options(options: list[str] | None) -> dict[str, Any]:
    """Parse `NAME=VALUE` pairs as engine options. Values are JSON if possible, else text.

    Dictionaries of one name are one. Raises ConfigError for a pair without an equals sign.
    """
    parsed: dict[str, Any] = {}
    for option in options or []:
        name, equals, value = option.partition("=")
        if not equals or not name:
            raise ConfigError(f"--option {option!r} is not valid. Allowed: NAME=VALUE, such as block_size=32.")
        name = name.strip().replace("-", "_")
        if name == "model":
            raise ConfigError(f"--option {option!r} is not valid. The model has an option of its own: --model.")
        given, before = parse_value(value.strip()), parsed.get(name)
        parsed[name] = _merged(before, given) if isinstance(before, dict) and isinstance(given, dict) else given
    return parsed


def _merged(before: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Entries of a dictionary that comes in parts, as `--speculative-config.method ngram` gives them."""
    both = {
        name: _merged(before[name], value)
        for name, value in given.items()
        if isinstance(value, dict) and isinstance(before.get(name), dict)
    }
    return {**before, **given, **both}


def with_defaults(flags: Mapping[str, Any], model: str, engine: Mapping[str, Any], **defaults: Any) -> dict[str, Any]:
    """Return the sampling parameters of a command's requests: of flags, else of the model, else defaults.

    flags: values by parameter, None if not given. engine: engine options. defaults: the command's own. Only the
    configuration of a hub id is downloaded.

    Raises InvalidParameter for an invalid flag before the model is resolved, and the errors of its configuration.
    """
    from penstock.contract import SamplingParams
    from penstock.engine.inputs.default_sampling import read_default_sampling

    given = {name: value for name, value in flags.items() if value is not None}
    SamplingParams(**{**defaults, **given})
    return {**defaults, **read_default_sampling(_described(model, engine)).fields, **given}


def with_reasoning_parser(model: str, engine: Mapping[str, Any]) -> dict[str, Any]:
    """Engine options with the reasoning parser of a model whose every answer is in that form, unless one is given."""
    from penstock.config.reasoning import PARSERS_OF_MODELS

    if "reasoning_parser" in engine:
        return dict(engine)
    parser = PARSERS_OF_MODELS.get(str(_described(model, engine).hf_config.get("model_type")))
    return {**engine, **({} if parser is None else {"reasoning_parser": parser})}


def _described(model: str, engine: Mapping[str, Any]) -> ModelConfig:
    """The model by its configuration alone."""
    from penstock.checkpoints.resolve import resolve_metadata_folder
    from penstock.config import ModelConfig

    folder, _ = resolve_metadata_folder(model, engine.get("revision"))
    names = ("generation_config", "override_generation_config", "hf_config_path", "hf_overrides")
    return ModelConfig.load(folder, **{name: engine[name] for name in names if name in engine})
