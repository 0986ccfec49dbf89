"""Checks of the server's options that need the model, before the first request."""

from __future__ import annotations

from pathlib import Path

from penstock.config import EngineConfig
from penstock.errors import ConfigError, InvalidRequest
from penstock.media.loader import MediaLoader
from penstock.server.answers.tool_parsers import load_tool_parser_plugin, tool_call_format
from penstock.server.batches.store import BatchStore
from penstock.server.options import ServerOptions
from penstock.server.requests.formats import choose_format
from penstock.server.responses.store import ResponseStore
from penstock.templates.chat_template import choose_template
from penstock.templates.program import syntax_error
from penstock.text.tokenizer import Tokenizer, load_tokenizer


def check_start(options: ServerOptions, config: EngineConfig) -> None:
    """Check the options of a server that is being started, while its cores load the model. Raises ConfigError."""
    options.check_engine(config)
    if options.prefill_url is not None and config.kv_tiers.folder is None:
        raise ConfigError(
            "prefill_url needs kv_offload_dir, the folder to which blocks of that server come. Give it, and kv_peers "
            "unless both servers have the same folder."
        )
    MediaLoader.of(config.multimodal)
    tokenizer = load_tokenizer(config.model.tokenizer_folder)
    check_parsers(options, tokenizer)
    template_source(options, tokenizer)
    ResponseStore(options)
    BatchStore(options)


def check_parsers(options: ServerOptions, tokenizer: Tokenizer) -> None:
    """Load the plug-in of tool parsers, and check that there are the parsers of the options. Raises ConfigError."""
    if options.tool_parser_plugin is not None:
        load_tool_parser_plugin(options.tool_parser_plugin)
    try:
        tool_call_format(options.tool_call_parser, tokenizer)
        choose_format(
            tools=None,
            tool_choice=None,
            parallel_tool_calls=True,
            structured_outputs=None,
            options=options,
            tokenizer=tokenizer,
        )
    except InvalidRequest as error:
        raise ConfigError(str(error)) from error


def template_source(options: ServerOptions, tokenizer: Tokenizer) -> str | None:
    """Jinja text of the option chat_template; None if it is not given. Raises ConfigError."""
    given = options.chat_template
    if given is None:
        return None
    is_path = "{" not in given and Path(given).is_file()
    try:
        template = choose_template(tokenizer.templates, tokenizer.folder, Path(given) if is_path else given, None)
    except InvalidRequest as error:
        raise ConfigError(str(error)) from error
    if (why := syntax_error(template.source)) is not None:
        raise ConfigError(f"chat_template is no valid Jinja template: {why}. Correct it, or leave the option out.")
    return template.source
