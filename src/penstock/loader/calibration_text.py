"""Calibration data as token ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from penstock.checkpoints.hf_tokenizer import load_hf_tokenizer
from penstock.checkpoints.json_file import check_regular_file
from penstock.errors import ConfigError, InvalidRequest
from penstock.templates.chat_template import choose_template, render_chat
from penstock.templates.files import ModelTemplates
from penstock.templates.renderer import TemplateRenderer

_MAX_BYTES = 2**30
_ALLOWED = 'an object with "messages" (a conversation) or "text"'


def read_calibration_text(path: Path, tokenizer_folder: Path) -> list[list[int]]:
    """Read a JSONL file; return the token ids of each line.

    Conversations use the chat template, texts the tokenizer's special tokens. Raises ConfigError, with the line, for
    anything else, and TokenizerError.
    """
    lines = [(number, line) for number, line in enumerate(_lines(path), start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"quantization_calibration={str(path)!r} is empty. Each line must be {_ALLOWED}.")
    tokenizer = load_hf_tokenizer(tokenizer_folder, needed_by="quantization_calibration")

    templates = ModelTemplates.of_transformers(tokenizer)

    def render(messages: Any) -> str:
        template = choose_template(templates, tokenizer_folder, None, None)
        return render_chat(renderer, template, messages, templates.special_tokens, add_generation_prompt=False)

    with closing(TemplateRenderer()) as renderer:
        return [
            _encode(tokenizer, render, line, f"quantization_calibration={str(path)!r}, line {number}")
            for number, line in lines
        ]


def _lines(path: Path) -> list[str]:
    check_regular_file(path, ConfigError, _MAX_BYTES)
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"quantization_calibration={str(path)!r} cannot be read: {error}") from error


def _encode(tokenizer: Any, render: Callable[[Any], str], line: str, where: str) -> list[int]:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{where} is not JSON: {error}. It must be {_ALLOWED}.") from error
    if not isinstance(content, dict) or ("text" in content) == ("messages" in content):
        raise ConfigError(f"{where} must be {_ALLOWED}.")
    if "text" in content:
        if not isinstance(content["text"], str):
            raise ConfigError(f"{where}: text={content['text']!r} must be a string.")
        text, has_special_tokens = content["text"], False
    else:
        text, has_special_tokens = _rendered(content["messages"], render, where), True
    ids: list[int] = tokenizer.encode(text, add_special_tokens=not has_special_tokens)
    if not ids:
        raise ConfigError(f"{where} has no tokens.")
    return ids


def _rendered(messages: Any, render: Callable[[Any], str], where: str) -> str:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise ConfigError(f"{where}: messages must be a list of objects.")
    try:
        return render(messages)
    except InvalidRequest as error:
        raise ConfigError(f"{where}: {error}") from error
