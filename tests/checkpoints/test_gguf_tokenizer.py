"""Tokenizers from GGUF metadata encode as those that they were written from."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from penstock.checkpoints.gguf.container import Header
from penstock.checkpoints.gguf.fields import Metadata
from penstock.checkpoints.gguf.tokenizer import end_tokens_of, tokenizer_files_of
from penstock.checkpoints.resolve import resolve_model_folder

_TEXTS = ["ROMEO: What's 12345?", " two  spaces\n\n and lines\r\n", "naïve 你好 €", "", "It'll DON'T can't"]


def _converted(values: dict[str, Any]) -> Tokenizer:
    metadata = Metadata("test.gguf", Header({"general.architecture": "llama", **values}, ()))
    return Tokenizer.from_str(json.dumps(tokenizer_files_of(metadata)["tokenizer.json"]))


def _of_demo(pre: str) -> tuple[Tokenizer, dict[str, Any]]:
    """The demo's vocabulary under another pre-tokenizer, and its metadata."""
    content = json.loads((Path(resolve_model_folder("demo")) / "tokenizer.json").read_text())
    tokens = [text for text, _ in sorted(content["model"]["vocab"].items(), key=lambda item: item[1])]
    added = {token["content"] for token in content["added_tokens"]}
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in content["model"]["merges"]]
    return Tokenizer.from_str(json.dumps(content)), {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if text in added else 1 for text in tokens],
        "tokenizer.ggml.merges": merges,
    }


@pytest.mark.parametrize("text", _TEXTS)
def test_byte_level_bpe_encodes_as_the_original(text):
    original, values = _of_demo("gpt-2")
    from tokenizers.pre_tokenizers import ByteLevel

    original.pre_tokenizer = ByteLevel(add_prefix_space=False)
    assert _converted(values).encode(text, add_special_tokens=False).ids == (
        original.encode(text, add_special_tokens=False).ids
    )


@pytest.mark.parametrize(("pre", "num_pieces"), [("gpt-2", 1), ("llama-bpe", 2), ("qwen2", 5), ("smollm", 5)])
def test_digits_are_split_as_the_pre_tokenizer_says(pre, num_pieces):
    _, values = _of_demo(pre)
    pieces = _converted(values).pre_tokenizer.pre_tokenize_str("12345")
    assert len(pieces) == num_pieces


_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "c", "ab", "▁ab", "abc"]
_SENTENCE_PIECE = {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": _PIECES,
    "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *[1] * 7],
    "tokenizer.ggml.scores": [0.0] * 259 + [-6.0, -7.0, -8.0, -9.0, -1.0, -2.0, -3.0],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.ggml.unknown_token_id": 0,
}


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("ab", ["<s>", "▁ab"]),
        # The pair with the best score first: "ab", then "▁ab", which leaves "c".
        ("abc", ["<s>", "▁ab", "c"]),
        ("cab é", ["<s>", "▁", "c", "ab", "▁", "<0xC3>", "<0xA9>"]),
        ("a</s>b", ["<s>", "▁", "a", "</s>", "▁", "b"]),
    ],
)
def test_sentence_piece_merges_by_score_and_falls_back_to_bytes(text, pieces):
    tokenizer = _converted(_SENTENCE_PIECE)
    encoding = tokenizer.encode(text)
    assert encoding.tokens == pieces
    if "<" not in text:
        assert tokenizer.decode(encoding.ids) == text


def test_all_tokens_that_end_a_turn_are_end_tokens():
    tokens = ["a", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|start_header_id|>"]
    values = {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1, 3, 3, 3, 3],
        "tokenizer.ggml.eos_token_id": 2,
    }
    assert end_tokens_of(Metadata("test.gguf", Header({"general.architecture": "llama", **values}, ()))) == [1, 2, 3]
