"""Detokenisers: pieces of text per token add up to the decoded whole, in every tokenizer's own way."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from penstock.text.detokenizer import (
    ByteFallbackFactory,
    ByteLevelFactory,
    DetokenizerFactory,
    SpecialTokens,
    WindowFactory,
    detokenizer_factory,
    window_decode,
)
from support.fake_engine import byte_fallback_tokenizer, byte_level_tokenizer


def byte_level_with_added_tokens() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    # The first reads as two bytes of the byte-level alphabet, the second has characters outside of it.
    tokenizer.add_tokens([AddedToken("éa", normalized=False), AddedToken("中文", normalized=False)])
    return tokenizer


TOKENIZERS = {
    "byte-level": byte_level_with_added_tokens(),
    "byte-fallback, strips": byte_fallback_tokenizer(),
    "byte-fallback, keeps": byte_fallback_tokenizer(strips_leading_space=False),
}
FACTORIES: dict[str, DetokenizerFactory] = {name: detokenizer_factory(t) for name, t in TOKENIZERS.items()}
MORE_IDS_THAN_TOKENS = 450

every_tokenizer = pytest.mark.parametrize("name", TOKENIZERS)
random_ids = st.lists(st.integers(0, MORE_IDS_THAN_TOKENS), max_size=60)
byte_ids = st.lists(st.sampled_from([1, *range(3, 259)]), max_size=30)


HIDDEN = SpecialTokens(are_shown=False, are_spaced=True)


def pieces_of(
    factory: DetokenizerFactory, ids: list[int], prompt: list[int] | None = None, special: SpecialTokens = HIDDEN
) -> list[str]:
    detokenizer = factory.start(prompt or [], special)
    pieces = [detokenizer.push(token_id) for token_id in ids]
    return [*pieces, detokenizer.flush()]


def whole_text(name: str, ids: list[int], *, skip_special_tokens: bool = True) -> str:
    """Text of all ids, by the tokenizer itself; of byte-fallback, with complete characters beside wrong bytes."""
    tokenizer = TOKENIZERS[name]
    if name != "byte-level":
        first_shown = 3 if skip_special_tokens else 0
        ids = readable([id for id in ids if id >= first_shown and tokenizer.id_to_token(id) is not None])
    return str(tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))


def readable(ids: list[int]) -> list[int]:
    """Ids with the three byte tokens of a replacement character in place of each wrong one."""
    first, *_ = byte_ids_of = range(3, 259)
    result, position = [], 0
    while position < len(ids):
        character = next(
            (ids[position : position + length] for length in range(1, 5) if is_text(ids[position:], length)), None
        )
        if ids[position] not in byte_ids_of or character is not None:
            result += character or [ids[position]]
            position += len(character or [0])
        else:
            result += [first + byte for byte in "\ufffd".encode()]
            position += 1
    return result


def is_text(ids: list[int], length: int) -> bool:
    raw = [token_id - 3 for token_id in ids[:length]]
    try:
        return len(raw) == length and len(bytes(raw).decode()) == 1
    except ValueError:
        return False


def test_each_kind_of_decoder_gets_its_exact_way() -> None:
    assert isinstance(FACTORIES["byte-level"], ByteLevelFactory)
    strips, keeps = FACTORIES["byte-fallback, strips"], FACTORIES["byte-fallback, keeps"]
    assert isinstance(strips, ByteFallbackFactory)
    assert isinstance(keeps, ByteFallbackFactory)
    assert (strips.num_stripped_spaces, keeps.num_stripped_spaces) == (1, 0)


@every_tokenizer
@given(ids=random_ids)
@settings(deadline=None, max_examples=200)
def test_pieces_add_up_to_what_decoding_all_ids_gives(name: str, ids: list[int]) -> None:
    assert "".join(pieces_of(FACTORIES[name], ids)) == whole_text(name, ids)


@every_tokenizer
@given(ids=random_ids, spaced=st.booleans())
@settings(deadline=None, max_examples=200)
def test_special_tokens_are_shown_when_asked(name: str, ids: list[int], spaced: bool) -> None:
    special = SpecialTokens(are_shown=True, are_spaced=spaced)
    expected = whole_text(name, ids, skip_special_tokens=False)
    assert "".join(pieces_of(FACTORIES[name], ids, special=special)) == expected


@every_tokenizer
@given(ids=byte_ids)
@settings(deadline=None, max_examples=200)
def test_runs_of_bytes_add_up_too(name: str, ids: list[int]) -> None:
    assert "".join(pieces_of(FACTORIES[name], ids)) == whole_text(name, ids)


@every_tokenizer
@given(text=st.text(max_size=40))
@settings(deadline=None, max_examples=200)
def test_no_piece_of_encoded_text_has_half_a_character(name: str, text: str) -> None:
    ids = TOKENIZERS[name].encode(text.replace("\ufffd", ""), add_special_tokens=False).ids
    # The added token that reads as two bytes is no whole character where the library decodes it, either.
    assert "\ufffd" in TOKENIZERS[name].decode(ids) or all(
        "\ufffd" not in piece for piece in pieces_of(FACTORIES[name], ids)
    )


@every_tokenizer
@given(text=st.text(max_size=30), cut=st.integers(0, 100))
@settings(deadline=None, max_examples=200)
def test_output_after_a_prompt_is_what_it_adds_to_the_prompt(name: str, text: str, cut: int) -> None:
    tokenizer = TOKENIZERS[name]
    ids = tokenizer.encode(text.replace("\ufffd", "")).ids
    prompt, output = ids[: cut % (len(ids) + 1)], ids[cut % (len(ids) + 1) :]
    # Of a character within which the prompt ends, nothing has been written yet.
    before = whole_text(name, prompt).rstrip("\ufffd")
    assert before + "".join(pieces_of(FACTORIES[name], output, prompt)) == tokenizer.decode(ids)


@every_tokenizer
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_a_prompt_may_end_anywhere_within_a_character(name: str, cut: int) -> None:
    text = "\U00020000"
    ids = TOKENIZERS[name].encode(text, add_special_tokens=False).ids[-4:]
    assert [FACTORIES[name].token_text(token_id) for token_id in ids] == ["\ufffd"] * 4  # a token for each byte
    assert "".join(pieces_of(FACTORIES[name], ids[cut:], ids[:cut])) == text


def test_a_character_that_the_prompt_began_appears_whole() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    first, second, *_ = tokenizer.encode("Ж", add_special_tokens=False).ids
    assert pieces_of(FACTORIES["byte-level"], [second], prompt=[first]) == ["Ж", ""]


def test_a_character_that_the_prompt_left_broken_is_not_written_again() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    first, _ = tokenizer.encode("Ж", add_special_tokens=False).ids
    letter = tokenizer.token_to_id("a")
    assert pieces_of(FACTORIES["byte-level"], [letter], prompt=[first]) == ["a", ""]


def test_text_is_given_with_its_own_token() -> None:
    tokenizer = TOKENIZERS["byte-level"]
    ids = tokenizer.encode("the quick fox", add_special_tokens=False).ids
    assert pieces_of(FACTORIES["byte-level"], ids)[:-1] == [tokenizer.decode([token_id]) for token_id in ids]


@every_tokenizer
def test_a_character_is_given_with_its_last_byte(name: str) -> None:
    text = "ሰላም"  # Amharic: three bytes per character
    ids = TOKENIZERS[name].encode(text, add_special_tokens=False).ids[-9:]
    assert pieces_of(FACTORIES[name], ids, prompt=[3 + ord("a")]) == ["", "", "ሰ", "", "", "ላ", "", "", "ም", ""]


def test_a_wrong_byte_does_not_hide_the_characters_beside_it() -> None:
    factory = FACTORIES["byte-fallback, keeps"]
    ids = [3 + byte for byte in (*"ሰ".encode(), 0xE1, 0x41, *"ም".encode(), 0xE1, 0x88)]
    assert "".join(pieces_of(factory, ids)) == "ሰ\ufffdAም\ufffd\ufffd"


def test_output_that_continues_a_text_keeps_its_leading_space() -> None:
    tokenizer = TOKENIZERS["byte-fallback, strips"]
    the = tokenizer.token_to_id("▁the")
    factory = FACTORIES["byte-fallback, strips"]
    assert pieces_of(factory, [the], prompt=[1, the]) == [" the", ""]
    assert pieces_of(factory, [the], prompt=[1]) == ["the", ""]


def test_special_tokens_are_left_out_but_read_on_their_own() -> None:
    assert pieces_of(FACTORIES["byte-level"], [0, 1, 2]) == ["", "", "", ""]
    assert FACTORIES["byte-level"].token_text(1) == "</s>"


def test_a_token_on_its_own_keeps_its_space_and_marks_half_characters() -> None:
    tokenizer = TOKENIZERS["byte-fallback, strips"]
    factory = FACTORIES["byte-fallback, strips"]
    assert factory.token_text(tokenizer.token_to_id("▁the")) == " the"
    assert factory.token_text(tokenizer.token_to_id("<0xE6>")) == "\ufffd"
    assert factory.token_text(tokenizer.token_to_id("<0x41>")) == "A"
    assert factory.token_text(100_000) == ""


def word_piece_tokenizer() -> Tokenizer:
    vocab = {"[UNK]": 0, "un": 1, "##believ": 2, "##able": 3, "story": 4, ".": 5}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece(cleanup=False)
    return tokenizer


@given(ids=st.lists(st.integers(0, 5), max_size=30))
@settings(deadline=None)
def test_other_decoders_go_through_a_window(ids: list[int]) -> None:
    tokenizer = word_piece_tokenizer()
    factory = detokenizer_factory(tokenizer)
    assert isinstance(factory, WindowFactory)
    assert "".join(pieces_of(factory, ids)) == tokenizer.decode(ids)


@given(ids=st.lists(st.integers(0, 6), max_size=30), spaced=st.booleans())
@settings(deadline=None)
def test_a_window_shows_special_tokens_with_spaces_or_without(ids: list[int], spaced: bool) -> None:
    tokenizer = word_piece_tokenizer()
    tokenizer.add_special_tokens(["[SEP]"])
    (separator,) = tokenizer.encode("[SEP]", add_special_tokens=False).ids
    ids = [separator if token_id == 6 else token_id for token_id in ids]
    special = SpecialTokens(are_shown=True, are_spaced=spaced)
    text = "".join(pieces_of(detokenizer_factory(tokenizer), ids, special=special))
    runs = [tokenizer.decode(list(run)) for run in _split(ids, separator)]
    assert text == (tokenizer.decode(ids, skip_special_tokens=False) if spaced else "[SEP]".join(runs))


def _split(ids: list[int], separator: int) -> list[list[int]]:
    runs: list[list[int]] = [[]]
    for token_id in ids:
        if token_id == separator:
            runs.append([])
        else:
            runs[-1].append(token_id)
    return runs


def test_a_window_gives_each_character_of_byte_tokens_at_once() -> None:
    tokenizer = TOKENIZERS["byte-fallback, keeps"]
    factory = WindowFactory(window_decode(lambda ids, skip: tokenizer.decode(ids, skip_special_tokens=skip), set()))
    text = "ሰላም" * 4
    pieces = pieces_of(factory, [3 + byte for byte in text.encode()])
    assert [piece for piece in pieces if piece] == list(text)


def test_the_window_gives_up_on_characters_that_never_complete() -> None:
    factory = WindowFactory(lambda ids, skip: "\ufffd" * len(ids))
    pieces = pieces_of(factory, [7] * 100)
    assert "".join(pieces) == "\ufffd" * 100
    assert max(map(len, pieces)) <= 8
