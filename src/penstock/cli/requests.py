"""What a command is asked to do: prompts from the command line, standard input, or a JSONL file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from penstock.cli.failures import file_named
from penstock.contract import SamplingParams
from penstock.errors import InvalidParameter, InvalidRequest

STANDARD_INPUT = "-"
_PROMPT_FIELDS = ("prompt", "prompt_token_ids", "cache_salt")
_SAMPLING_FIELDS = SamplingParams.__struct_fields__


class Work(NamedTuple):
    """One request. where: what errors call it. id: the line's own name for it, for the output."""

    prompt: Any
    sampling_params: SamplingParams
    where: str = ""
    id: Any = None


def read_prompt(argument: str | None) -> str:
    """The prompt given as argument, or read from standard input where the argument is missing or "-".

    Raises InvalidRequest when there is neither, or when the input is no UTF-8.
    """
    if argument is not None and argument != STANDARD_INPUT:
        return argument
    if argument is None and sys.stdin.isatty():
        raise InvalidRequest("There is no prompt. Give one as argument, on standard input, or with --input FILE.jsonl.")
    try:
        return sys.stdin.buffer.read().decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"Standard input is no UTF-8 text: {error}.") from error


def read_jsonl(path: Path, defaults: SamplingParams) -> list[Work]:
    """One request per line: `prompt` or `prompt_token_ids`, perhaps `cache_salt`, `id`, and sampling parameters.

    Parameters that a line does not name are the defaults. Empty lines are skipped.
    Raises InvalidRequest or InvalidParameter that names the line; ConfigError when the file cannot be opened.
    """
    is_standard_input = str(path) == STANDARD_INPUT
    name = "standard input" if is_standard_input else str(path)
    with file_named("--input", path):
        data = sys.stdin.buffer.read() if is_standard_input else path.read_bytes()
    return list(_parse(data, name, defaults))


def _parse(data: bytes, name: str, defaults: SamplingParams) -> Iterator[Work]:
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            yield _parse_line(line, where, defaults)
        except InvalidRequest as error:
            raise type(error)(f"{where}: {error}") from error


def _parse_line(line: bytes, where: str, defaults: SamplingParams) -> Work:
    try:
        fields = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"This is no JSON: {error}.") from error
    if not isinstance(fields, dict):
        raise InvalidRequest(f'This is a JSON {type(fields).__name__}. Allowed: an object such as {{"prompt": "Hi"}}.')
    prompt = {key: fields.pop(key) for key in _PROMPT_FIELDS if key in fields}
    if not prompt.keys() & {"prompt", "prompt_token_ids"}:
        raise InvalidRequest("The prompt is missing. Give prompt or prompt_token_ids.")
    name = fields.pop("id", None)
    for key, value in fields.items():
        if key not in _SAMPLING_FIELDS:
            allowed = ", ".join((*_PROMPT_FIELDS, "id", *_SAMPLING_FIELDS))
            raise InvalidParameter(f"There is no field {key} (given: {value!r}). Allowed: {allowed}.")
    return Work(prompt, msgspec.structs.replace(defaults, **fields), where, name)
