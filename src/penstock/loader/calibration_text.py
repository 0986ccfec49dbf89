"""Texts that a model is to be rounded for, as token ids."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.loader.hf_tokenizer import load_hf_tokenizer

_ALLOWED = 'an object with "messages" (a conversation) or "text"'


def read_calibration_text(path: Path, tokenizer_folder: Path) -> list[list[int]]:
    """Read a JSONL file: of each line the token ids.

    Conversations are written with the chat template, text with the special tokens that the tokenizer puts around it.
    Raises ConfigError, which names the line, for what is neither, and TokenizerError.
    """
    lines = [(number, line) for number, line in enumerate(_lines(path), start=1) if line.strip()]
    if not lines:
        raise ConfigError(f"quantization_calibration={str(path)!r} is empty. Each line must be {_ALLOWED}.")
    tokenizer = load_hf_tokenizer(tokenizer_folder, needed_by="quantization_calibration")
    return [
        _encode(tokenizer, line, f"quantization_calibration={str(path)!r}, line {number}") for number, line in lines
    ]


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"quantization_calibration={str(path)!r} cannot be read: {error}") from error


def _encode(tokenizer: Any, line: str, where: str) -> list[int]:
    try:
        content = json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error}. It must be {_ALLOWED}.") from error
    if not isinstance(content, dict) or ("text" in content) == ("messages" in content):
        raise ConfigError(f"{where} must be {_ALLOWED}.")
    if "text" in content:
        if not isinstance(content["text"], str):
            raise ConfigError(f"{where}: text={content['text']!r} must be a string.")
        text, has_special_tokens = content["text"], False
    else:
        try:
            text, has_special_tokens = tokenizer.apply_chat_template(content["messages"], tokenize=False), True
        except Exception as error:  # whatever a template makes of what it does not know
            raise ConfigError(f"{where}: the chat template cannot render these messages: {error}") from error
    ids: list[int] = tokenizer.encode(text, add_special_tokens=not has_special_tokens)
    if not ids:
        raise ConfigError(f"{where} has no tokens.")
    return ids
