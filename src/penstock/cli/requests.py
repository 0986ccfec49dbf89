"""Requests of a command, from its arguments, standard input, or a JSONL file."""

from __future__ import annotations

import codecs
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from penstock.cli.failures import check_server_packages, read_file
from penstock.cli.results import OwnFormat
from penstock.cli.work import TEMPLATE_FIELDS, Messages, Work, take_template_fields, with_parameters
from penstock.contract import SamplingParams
from penstock.engine.inputs.input_processor import located
from penstock.engine.inputs.prompts import MEDIA_KEYS, PROMPT_KEYS
from penstock.errors import InvalidRequest
from penstock.server.batches.lines import BATCH_FIELDS
from penstock.server.options import REASONING_OPTIONS, ServerOptions

STANDARD_INPUT = "-"
_LONGEST_LINE_BYTES = 32 << 20
_CUSTOM_ID = re.compile(rb'"custom_id"\s*:\s*("(?:[^"\\]|\\.)*")')
# Files are not streamed.
_SAMPLING_FIELDS = tuple(name for name in SamplingParams.__struct_fields__ if name != "output_kind")
_ALL_FIELDS = (*PROMPT_KEYS, *MEDIA_KEYS, "messages", *TEMPLATE_FIELDS, "id", "priority", *_SAMPLING_FIELDS)


def server_options(model: str, engine: Mapping[str, Any], **given: Any) -> ServerOptions:
    """Options of a server that answers as a command with these options of the engine does."""
    reasoning = {name: engine[name] for name in REASONING_OPTIONS if name in engine}
    return ServerOptions(served_model_name=(model,), trust_request_chat_template=True, **reasoning, **given)


def read_prompt(argument: str | None) -> str:
    """Return the prompt argument, or standard input if the argument is missing or "-".

    Raises InvalidRequest if there is neither, or the input is not UTF-8.
    """
    if argument is not None and argument != STANDARD_INPUT:
        return argument
    if argument is None and sys.stdin.isatty():
        raise InvalidRequest("There is no prompt. Give one as argument, on standard input, or with --input FILE.jsonl.")
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"Standard input is no UTF-8 text: {error}.") from error


def read_jsonl(
    path: Path, defaults: SamplingParams, options: ServerOptions, chat_defaults: SamplingParams | None = None
) -> list[Work]:
    """Read one request per line, in Penstock's format or OpenAI's (`batch_requests`); empty lines are skipped.

    Penstock's format has `prompt`, `prompt_token_ids` or `messages`; optionally `cache_salt`, `id`, sampling
    parameters, and with messages template options. defaults: of sampling parameters that a line does not have.
    options: of a server that would answer OpenAI's format. chat_defaults: of its chats, None for `defaults`.

    Errors of a line are in its `Work.error`. Raises ConfigError if the file cannot be opened, or for OpenAI's format
    without the packages of the server.
    """
    is_standard_input = str(path) == STANDARD_INPUT
    name = "standard input" if is_standard_input else str(path)
    data = sys.stdin.buffer.read() if is_standard_input else read_file("--input", path)
    data = data.removeprefix(codecs.BOM_UTF8)
    numbered = [(number, line) for number, line in enumerate(data.splitlines(), start=1) if line.strip()]
    lines = [(f"{name}, line {number}", _decode(line)) for number, line in numbered]
    names = {
        where: custom_id
        for (where, fields), (_, line) in zip(lines, numbered, strict=True)
        if isinstance(fields, InvalidRequest) and (custom_id := _custom_id_in(line)) is not None
    }
    works: dict[str, Work] = {}
    if names or any(isinstance(fields, dict) and not fields.keys().isdisjoint(BATCH_FIELDS) for _, fields in lines):
        check_server_packages("A file of requests in OpenAI's batch format")
        from penstock.cli.batch_requests import read_batch_lines

        works = read_batch_lines(lines, names, defaults, chat_defaults or defaults, options)
    return [works.get(where) or _read_line(where, fields, defaults) for where, fields in lines]


def _decode(line: bytes) -> dict[str, Any] | InvalidRequest:
    if len(line) > _LONGEST_LINE_BYTES:
        return InvalidRequest(f"The line has {len(line):,} bytes. Allowed: at most {_LONGEST_LINE_BYTES:,}.")
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return InvalidRequest(f"This is no JSON: {error}.")
    if not isinstance(fields, dict):
        return InvalidRequest(f'This is a JSON {type(fields).__name__}. Allowed: an object such as {{"prompt": "Hi"}}.')
    return fields


def _custom_id_in(line: bytes) -> str | None:
    """Return the custom_id of a line of invalid JSON, such as one that was cut off."""
    found = _CUSTOM_ID.search(line)
    try:
        return msgspec.json.decode(found[1], type=str) if found else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def _read_line(where: str, fields: dict[str, Any] | InvalidRequest, defaults: SamplingParams) -> Work:
    given = {} if isinstance(fields, InvalidRequest) else dict(fields)
    name, priority = given.pop("id", None), given.pop("priority", 0)
    try:
        with located(where):
            if isinstance(fields, InvalidRequest):
                raise fields
            prompt = _take_prompt(given)
            params = with_parameters(defaults, given, _SAMPLING_FIELDS, _ALL_FIELDS)
            return Work(prompt, params, where, OwnFormat(name), priority=priority)
    except InvalidRequest as error:
        return Work(None, defaults, where, OwnFormat(name), error)


def _take_prompt(fields: dict[str, Any]) -> Any:
    prompt = {key: fields.pop(key) for key in (*PROMPT_KEYS, *MEDIA_KEYS) if key in fields}
    has_prompt = not prompt.keys().isdisjoint(("prompt", "prompt_token_ids"))
    if "messages" in fields:
        if has_prompt:
            raise InvalidRequest("There are messages and a prompt. Give one of them.")
        if "parts" in prompt:
            raise InvalidRequest("parts are not available for messages. Give a prompt, or leave them out.")
        messages = fields.pop("messages")
        return Messages(messages, take_template_fields(fields), prompt.get("cache_salt"))
    if not has_prompt:
        raise InvalidRequest("The prompt is missing. Give prompt, prompt_token_ids or messages.")
    return prompt
