"""Chat templates of a folder are those that Transformers reads."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from penstock.errors import InvalidRequest, TokenizerError
from penstock.text.tokenizer import load_tokenizer
from support.fake_engine import byte_level_tokenizer, gpt2_like, qwen2_like, write_tokenizer

END_OF_TEXT = {"bos_token": None, "eos_token": "<|endoftext|>"}
NAMED = [{"name": "default", "template": "the default"}, {"name": "tool_use", "template": "for tools"}]
# tokenizer_config.json, and files.
FOLDERS: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "none": ({}, {}),
    "a text": ({"chat_template": "a text"}, {}),
    "several": ({"chat_template": NAMED}, {}),
    "a file": ({"chat_template": "a text"}, {"chat_template.jinja": "the file\n"}),
    "two files": ({}, {"chat_template.jinja": "the file", "additional_chat_templates/tool_use.jinja": "for tools"}),
    "a file with a name only": (
        {"chat_template": "a text"},
        {"additional_chat_templates/rag.jinja": "with documents"},
    ),
    "special tokens": ({"bos_token": "<|user|>", "pad_token": "<|user|>", "chat_template": "x"}, {}),
}
CLASSES = {
    "as it is": (byte_level_tokenizer, {}, "llama"),
    "qwen2": (qwen2_like, {"tokenizer_class": "Qwen2Tokenizer", **END_OF_TEXT}, "qwen2"),
    "gpt2": (gpt2_like, {"tokenizer_class": "GPT2Tokenizer"}, "gpt2"),
}


def folder_with(path: Path, config: dict[str, Any], files: dict[str, str], kind: str = "as it is") -> Path:
    make, own, model_type = CLASSES[kind]
    folder = write_tokenizer(path, make(), **{**own, **config})
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("kind", CLASSES)
@pytest.mark.parametrize("name", FOLDERS)
def test_templates_and_special_tokens_are_those_of_transformers(name: str, kind: str, tmp_path: Path) -> None:
    config, files = FOLDERS[name]
    if kind != "as it is" and "bos_token" in config:
        pytest.skip("these tokens belong to another vocabulary")
    folder = folder_with(tmp_path, config, files, kind)
    tokenizer = load_tokenizer(folder)
    assert tokenizer._read_templates is not None
    found, theirs = tokenizer.templates, AutoTokenizer.from_pretrained(folder)
    assert found.own == theirs.chat_template
    assert found.special_tokens == theirs.special_tokens_map
    for tools in (None, [{}]):
        try:
            expected = theirs.get_chat_template(None, tools)
        except ValueError:
            # Without a default.
            if found.own is not None:
                with pytest.raises(InvalidRequest, match="rag"):
                    found.choose(folder, tools)
        else:
            assert found.choose(folder, tools) == expected


def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {}, {"chat_template.jinja": ""})
    (folder / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja cannot be read"):
        load_tokenizer(folder).apply_chat_template([{"role": "user", "content": "x"}])
