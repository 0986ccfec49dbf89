"""A tokenizer whose pattern backtracks without end fails a text, and neither its caller nor an event loop."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

from penstock.errors import InvalidRequest
from penstock.text.tokenizer import TextToEncode, load_tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("([a-z]+)+!"), "isolated")
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_a_text_that_exceeds_the_limit_of_a_pattern_is_refused(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    assert tokenizer.encode("a") == [0]
    with pytest.raises(InvalidRequest, match="cannot encode this text"):
        tokenizer.encode("a" * 40)
    with pytest.raises(InvalidRequest, match="cannot encode this text"):
        tokenizer.encode_texts([TextToEncode("a"), TextToEncode("a" * 40)])


def test_texts_leave_the_event_loop_once_a_short_one_took_long(folder: Path) -> None:
    tokenizer = load_tokenizer(folder)
    tokenizer.encode("a")
    assert tokenizer.quick_characters > 0
    with pytest.raises(InvalidRequest):
        tokenizer.encode("a" * 40)
    assert tokenizer.quick_characters == 0
    assert tokenizer.encode("a") == [0]
