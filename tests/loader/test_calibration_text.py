"""Files of texts to round weights for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.config import EngineConfig
from penstock.errors import ConfigError, TokenizerError
from penstock.loader.calibration_text import read_calibration_text
from penstock.text.tokenizer import load_tokenizer

DEMO = EngineConfig.create("demo").model.folder
MESSAGES = [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A demo."}]


def write(folder: Path, *lines: str) -> Path:
    path = folder / "texts.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


def test_texts_and_conversations_become_the_tokens_that_the_engine_makes_of_them(tmp_path: Path) -> None:
    path = write(tmp_path, json.dumps({"text": "ROMEO:\nAy."}), "", json.dumps({"messages": MESSAGES}))
    tokenizer = load_tokenizer(DEMO)
    conversation = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=False)
    assert read_calibration_text(path, DEMO) == [
        tokenizer.encode("ROMEO:\nAy."),
        tokenizer.encode(conversation, add_special_tokens=False),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"line 2 is not JSON"),
        ('"text"', r'line 2 must be an object with "messages" \(a conversation\) or "text"'),
        ('{"prompt": "a"}', r'line 2 must be an object with "messages"'),
        ('{"text": "a", "messages": []}', r'line 2 must be an object with "messages"'),
        ('{"text": 3}', r"line 2: text=3 must be a string"),
        ('{"messages": 3}', r"line 2: messages must be a list of objects"),
    ],
)
def test_what_is_neither_is_refused_with_its_line(tmp_path: Path, line: str, message: str) -> None:
    path = write(tmp_path, '{"text": "a"}', line)
    with pytest.raises(ConfigError, match=rf"quantization_calibration='.*texts\.jsonl', {message}"):
        read_calibration_text(path, DEMO)


def test_files_that_hold_nothing_or_no_text_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is empty"):
        read_calibration_text(write(tmp_path, "", " "), DEMO)
    (tmp_path / "bytes.jsonl").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_calibration_text(tmp_path / "bytes.jsonl", DEMO)
    with pytest.raises(TokenizerError, match="which quantization_calibration needs"):
        read_calibration_text(write(tmp_path, '{"text": "a"}'), tmp_path)
