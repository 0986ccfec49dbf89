"""Texts that are encoded together have the tokens that Transformers gives each by itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.text.tokenizer import TextToEncode, load_tokenizer
from support.pooling_models import random_text, tokenizer

TEXTS = [random_text(num_words, seed=num_words) for num_words in (1, 9, 40, 3, 3000, 200)]


def oracle(hf: Any, given: TextToEncode) -> list[int]:
    hf.truncation_side = given.side or "right"
    cut = {} if given.limit is None else {"truncation": "longest_first", "max_length": given.limit}
    ids: list[int] = hf(given.first, given.second, add_special_tokens=given.add_special_tokens, **cut)["input_ids"]
    return ids


@pytest.mark.parametrize("kind", ["bert", "last"])
def test_texts_encoded_together_have_the_tokens_of_each(kind: str, tmp_path: Path) -> None:
    hf = tokenizer(kind=kind)
    hf.save_pretrained(tmp_path)
    given = [TextToEncode(text) for text in TEXTS]
    given += [TextToEncode(text, limit=30) for text in TEXTS]
    given += [TextToEncode(text, limit=30, side="left", add_special_tokens=False) for text in TEXTS]
    given += [TextToEncode(first, second, limit=64) for first, second in zip(TEXTS, TEXTS[::-1], strict=True)]
    found = load_tokenizer(tmp_path).encode_texts(given)
    assert [one.token_ids for one in found] == [oracle(hf, one) for one in given]
    starts = [one.second_start for one in found]
    assert starts[:18] == [None] * 18
    if kind == "bert":
        assert all(one.token_ids[one.second_start - 1] == 3 for one in found[18:] if one.second_start is not None)
        assert None not in starts[18:]


@pytest.mark.parametrize("blank", [" ", "\n", "\u3000"])
def test_a_long_text_of_blanks_alone_is_cut(blank: str, tmp_path: Path) -> None:
    hf = tokenizer(kind="last")
    hf.save_pretrained(tmp_path)
    given = [TextToEncode(blank * 20_000, limit=3, side=side) for side in (None, "left")]
    given += [TextToEncode(f"the{blank * 20_000}quick", limit=3, side=side) for side in (None, "left")]
    found = load_tokenizer(tmp_path).encode_texts(given)
    assert [one.token_ids for one in found] == [oracle(hf, one) for one in given]


def test_many_tokens_are_decoded_as_few(tmp_path: Path) -> None:
    hf = tokenizer(kind="last")
    hf.save_pretrained(tmp_path)
    ids = hf(random_text(6000, seed=1))["input_ids"]
    assert load_tokenizer(tmp_path).decode(ids) == hf.decode(ids, skip_special_tokens=True)
