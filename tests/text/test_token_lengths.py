"""Lower bound on the tokens of a text: a prompt refused before tokenisation really is too long."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers

import penstock
from penstock.text.tokenizer import LONG_TEXT, load_tokenizer
from penstock.text.tokenizer_files import longest_token
from support.fake_engine import byte_level_tokenizer

DEMO = Path(penstock.__file__).parent / "assets" / "demo"
_BYTES = {f"<0x{byte:02X}>": byte for byte in range(256)}
_WORDS = [
    "the",
    "fox",
    "\u2581",
    "\u2581the",
    "\u2581\u2581",
    "\u2581\u2581\u2581\u2581",
    "o",
    "x",
    "f",
    "th",
    "t",
    "h",
    "e",
]


def sentencepiece_tokenizer(**options: Any) -> tokenizers.Tokenizer:
    """Tokenizer without byte-level pre-tokenisation, as Llama 2's."""
    vocabulary = _BYTES | {word: 256 + index for index, word in enumerate(_WORDS)}
    merges = [("t", "h"), ("th", "e"), ("\u2581", "the"), ("\u2581", "\u2581"), ("\u2581\u2581", "\u2581\u2581")]
    model = models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, **options)
    fast = tokenizers.Tokenizer(model)
    fast.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    fast.decoder = decoders.ByteFallback()
    return fast


def composing_tokenizer() -> tokenizers.Tokenizer:
    fast = byte_level_tokenizer()
    fast.normalizer = normalizers.NFKC()
    return fast


TOKENIZERS = {
    "demo": lambda: tokenizers.Tokenizer.from_file(str(DEMO / "tokenizer.json")),
    "byte level": byte_level_tokenizer,
    "normalized": composing_tokenizer,
    "byte fallback": sentencepiece_tokenizer,
}
TEXTS = st.text(
    st.one_of(
        st.characters(exclude_categories=["Cs"]), st.sampled_from(" the fox\n\u0301\u0300\u0345\u1100\u1161\u11a8")
    )
)


@pytest.mark.parametrize("name", TOKENIZERS)
@settings(max_examples=200, deadline=None)
@given(text=TEXTS, repeats=st.sampled_from([1, 1, 40]))
def test_no_text_has_fewer_tokens_than_it_is_taken_to_have(name: str, text: str, repeats: int) -> None:
    fast = TOKENIZERS[name]()
    longest = longest_token(fast)
    assert longest is not None
    whole = text * repeats
    assert len(fast.encode(whole, add_special_tokens=False)) * longest >= len(whole)


@pytest.mark.parametrize("normalizer", [normalizers.NFC(), normalizers.NFKC()])
def test_letters_that_are_composed_of_several_characters_count_as_fewer(normalizer: Any) -> None:
    """An omega with three marks is four characters, which NFC composes into one."""
    assert len(normalizer.normalize_str("\u03c9\u0314\u0342\u0345")) == 1
    fast = byte_level_tokenizer()
    of_one = longest_token(fast)
    fast.normalizer = normalizer
    assert of_one is not None
    assert longest_token(fast) == 4 * of_one


def without_a_byte() -> tokenizers.Tokenizer:
    vocabulary = {name: index for name, index in _BYTES.items() if name != "<0x00>"}
    return tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))


def of_words() -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer(models.WordPiece(vocab={"[UNK]": 0}, unk_token="[UNK]"))


def that_strips() -> tokenizers.Tokenizer:
    fast = sentencepiece_tokenizer()
    fast.add_special_tokens([AddedToken("<|end|>", rstrip=True)])
    return fast


def that_normalizes_to_less() -> tokenizers.Tokenizer:
    fast = sentencepiece_tokenizer()
    fast.normalizer = normalizers.Strip()
    return fast


def that_drops_spaces() -> tokenizers.Tokenizer:
    fast = sentencepiece_tokenizer()
    fast.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return fast


def that_replaces_a_word() -> tokenizers.Tokenizer:
    fast = sentencepiece_tokenizer()
    fast.normalizer = normalizers.Replace("    ", " ")
    return fast


@pytest.mark.parametrize(
    "make", [without_a_byte, of_words, that_strips, that_normalizes_to_less, that_drops_spaces, that_replaces_a_word]
)
def test_where_one_token_may_stand_for_any_text_there_is_no_limit(make: Any) -> None:
    assert longest_token(make()) is None


def test_long_texts_have_the_tokens_that_short_ones_have() -> None:
    tokenizer = load_tokenizer(DEMO)
    text = "To be, or not to be: 1234 \u65e5\u672c\u8a9e na\u00efve\n" * (LONG_TEXT // 20)
    oracle: Any = tokenizer.for_callers()
    for special in (True, False):
        expected = oracle.encode(text, add_special_tokens=special)
        assert tokenizer.encode(text, special) == expected
        assert tokenizer.encode_up_to(text, special, len(expected)) == expected
        assert tokenizer.encode_up_to(text, special, len(expected) - 1) == len(expected)
