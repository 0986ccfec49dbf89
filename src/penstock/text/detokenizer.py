"""Incremental detokenisation.

A piece of text is never retracted and never ends within a character, whose bytes are held back. All pieces together
equal decoding all ids at once, with or without special tokens; where the output continues a prompt, what decoding
prompt and output together adds to the prompt. One case differs: see byte-fallback.

Three implementations, by the tokenizer's decoder:

- byte-level (GPT-2, Llama 3, Qwen): each token is bytes; characters are complete by UTF-8.
- byte-fallback (Llama 2, Mistral, Gemma): tokens are text, and characters outside the vocabulary are runs of byte
  tokens. Each character is given with its last byte, as in vLLM. Bytes that are no character are one replacement
  character each; decoding all ids at once would replace the characters beside them, too.
- any other: a window of tokens is decoded with and without the new one, as in TGI and vLLM.

The first two are table look-ups of well under a microsecond per token, however long the text.

`DecodeStream` of `tokenizers` (0.23) replaces none of them. It has no end, so bytes that it holds back there are lost,
and after a prompt that ends within a character it repeats text of the prompt. On random tokens it raises for most
byte-fallback outputs, and takes two to four times as long for the first two kinds. Of any other decoder it gives the
same text four times as fast, but only for tokenizers of that library; Transformers' own in Python need the window.
"""

from __future__ import annotations

import codecs
import re
from collections import deque
from collections.abc import Callable, Collection, Sequence
from itertools import groupby
from typing import Any, NamedTuple, Protocol, TypeAlias

from tokenizers import Tokenizer as FastTokenizer

from penstock.text.tokenizer_files import component

_REPLACEMENT = "\ufffd"
_LONGEST_INCOMPLETE = 3  # bytes of a UTF-8 character that lacks its last one
_LONGEST_HELD = 8  # tokens that the window holds back in the hope of a complete character
_WINDOW = 5  # tokens before the new one that can change how it is written
_BYTE_TOKEN = re.compile("<0x([0-9A-Fa-f]{2})>")
_WRONG_BYTE = re.compile("[\udc80-\udcff]")


class SpecialTokens(NamedTuple):
    """Detokenisation of special tokens.

    are_shown: written as their text, or skipped. are_spaced: with the spaces that the tokenizer's decoder puts between
    two tokens, or without; byte-level and byte-fallback decoders put none.
    """

    are_shown: bool
    are_spaced: bool


SKIPPED = SpecialTokens(are_shown=False, are_spaced=True)


class Detokenizer(Protocol):
    """Incremental detokeniser of one request's output."""

    def push(self, token_id: int) -> str:
        """Add a token. Returns the text that became certain; often the token's own, sometimes empty."""
        ...

    def flush(self) -> str:
        """Return the text held back, after the last token."""
        ...


class DetokenizerFactory(Protocol):
    """Creates the detokenisers of one tokenizer, with shared tables."""

    def start(self, prompt_token_ids: Sequence[int] = (), special: SpecialTokens = SKIPPED) -> Detokenizer:
        """Create a detokeniser for output that continues the prompt."""
        ...

    def token_text(self, token_id: int) -> str:
        """Text of a single token, special tokens included."""
        ...

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of a single token, which may be part of a character."""
        ...


def detokenizer_factory(tokenizer: FastTokenizer) -> DetokenizerFactory:
    """Return the fastest exact implementation for this tokenizer's decoder."""
    decoder = component(tokenizer.decoder) or {}
    if decoder.get("type") == "ByteLevel":
        return ByteLevelFactory(tokenizer)
    strip = _byte_fallback_strip(decoder)
    if strip is not None:
        return ByteFallbackFactory(tokenizer, num_stripped_spaces=strip)
    return WindowFactory(
        window_decode(lambda ids, skip: tokenizer.decode(ids, skip_special_tokens=skip), _special_ids(tokenizer))
    )


def _byte_fallback_strip(decoder: dict[str, Any]) -> int | None:
    """Spaces that a byte-fallback decoder strips from the text's start; None for any other decoder."""
    parts = decoder.get("decoders", [])
    if [part["type"] for part in parts[:3]] != ["Replace", "ByteFallback", "Fuse"]:
        return None
    if parts[0]["pattern"] != {"String": "▁"} or parts[0]["content"] != " ":
        return None
    if len(parts) == 3:
        return 0
    strip = parts[3]
    is_leading_strip = strip["type"] == "Strip" and strip["content"] == " " and strip["stop"] == 0
    return strip["start"] if len(parts) == 4 and is_leading_strip else None


class _TokenTable(dict[int, tuple[str, bytes]]):
    """Table of (text, bytes) by token id, filled by `entry` when a token first occurs.

    The bytes are empty for a token with text; unknown and hidden tokens have neither.
    """

    def __init__(
        self, tokenizer: FastTokenizer, entry: Callable[[str], tuple[str, bytes]], hidden: Collection[int]
    ) -> None:
        self._tokenizer = tokenizer
        self._entry = entry
        self._hidden = hidden

    def __missing__(self, token_id: int) -> tuple[str, bytes]:
        token = None if token_id in self._hidden else self._tokenizer.id_to_token(token_id)
        value = ("", b"") if token is None else self._entry(token)
        self[token_id] = value
        return value


class _TableFactory:
    """Base of the factories with token tables. entry: (text, bytes) of a token; bytes only if they are no text."""

    def __init__(self, tokenizer: FastTokenizer, entry: Callable[[str], tuple[str, bytes]]) -> None:
        self._tokenizer = tokenizer
        self._special = _special_ids(tokenizer)
        self._hiding = _TokenTable(tokenizer, entry, self._special)
        self._showing = _TokenTable(tokenizer, entry, ())

    def table(self, special: SpecialTokens) -> _TokenTable:
        return self._showing if special.are_shown else self._hiding

    def token_text(self, token_id: int) -> str:
        """Text of a single token, special tokens included; incomplete characters as replacement characters."""
        if token_id in self._special:
            return self._tokenizer.id_to_token(token_id) or ""
        text, raw = self._hiding[token_id]
        return text or raw.decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """UTF-8 bytes of a single token, which may be part of a character."""
        text, raw = self._showing[token_id]
        return bytes(raw or text.encode())


class NoDetokenizer:
    """Detokeniser of requests with `detokenize=False`: no text."""

    def push(self, token_id: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _special_ids(tokenizer: FastTokenizer) -> set[int]:
    return {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}


class _Continuation:
    """Removes from the output the text that the prompt's unfinished end has already.

    A prompt may end within a character or a run of bytes, which the output's first tokens complete or break.
    """

    def __init__(self, written: str) -> None:
        self.written = written

    def new_part(self, text: str) -> str:
        if self.written and text:
            text = text.removeprefix(self.written)
            self.written = ""
        return text


class ByteLevelFactory(_TableFactory):
    """Factory for byte-level decoders, where every character of a token stands for one byte."""

    def __init__(self, tokenizer: FastTokenizer) -> None:
        super().__init__(tokenizer, _byte_level_entry)

    def start(self, prompt_token_ids: Sequence[int] = (), special: SpecialTokens = SKIPPED) -> ByteLevelDetokenizer:
        return ByteLevelDetokenizer(self.table(special), prompt_token_ids)


class ByteLevelDetokenizer:
    """Byte-level detokeniser; holds back the bytes of an incomplete character, at most three."""

    __slots__ = ("_continuation", "_pending", "_table")

    def __init__(self, table: _TokenTable, prompt_token_ids: Sequence[int]) -> None:
        self._table = table
        _, self._pending = _decode_complete(_last_bytes(table, prompt_token_ids))
        self._continuation = _Continuation(self._pending.decode("utf-8", "replace"))

    def push(self, token_id: int) -> str:
        text, raw = self._table[token_id]
        if not self._pending and not raw:
            return text
        text, self._pending = _decode_complete(self._pending + (raw or text.encode()))
        return self._continuation.new_part(text)

    def flush(self) -> str:
        text, self._pending = self._pending.decode("utf-8", "replace"), b""
        return self._continuation.new_part(text)


def _byte_level_alphabet() -> dict[str, int]:
    """GPT-2's table (Radford et al. 2019): printable bytes stand for themselves, the others for U+0100 and above."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_BYTE_OF_CHARACTER = _byte_level_alphabet()


def _byte_level_entry(token: str) -> tuple[str, bytes]:
    try:
        raw = bytes(_BYTE_OF_CHARACTER[character] for character in token)
    except KeyError:  # an added token, written as it is
        return token, b""
    try:
        return raw.decode("utf-8"), b""
    except UnicodeDecodeError:
        return "", raw


def _decode_complete(raw: bytes) -> tuple[str, bytes]:
    """Text of the complete (or hopeless) characters, and the bytes of an incomplete last one."""
    text, num_decoded = codecs.utf_8_decode(raw, "replace", False)
    return text, raw[num_decoded:]


def _last_bytes(table: _TokenTable, token_ids: Sequence[int]) -> bytes:
    raw = b""
    for token_id in reversed(token_ids):
        text, token_bytes = table[token_id]
        raw = (token_bytes or text.encode()) + raw
        if len(raw) >= _LONGEST_INCOMPLETE:
            break
    return raw[-_LONGEST_INCOMPLETE:]


class ByteFallbackFactory(_TableFactory):
    """Factory for byte-fallback decoders.

    num_stripped_spaces: spaces that decoding strips from the start of a text.
    """

    def __init__(self, tokenizer: FastTokenizer, num_stripped_spaces: int) -> None:
        super().__init__(tokenizer, _byte_fallback_entry)
        self.num_stripped_spaces = num_stripped_spaces

    def start(self, prompt_token_ids: Sequence[int] = (), special: SpecialTokens = SKIPPED) -> ByteFallbackDetokenizer:
        return ByteFallbackDetokenizer(self.table(special), prompt_token_ids, self.num_stripped_spaces)


class ByteFallbackDetokenizer:
    """Byte-fallback detokeniser; holds back the bytes of an incomplete character, at most three."""

    __slots__ = ("_continuation", "_num_to_strip", "_pending", "_table")

    def __init__(self, table: _TokenTable, prompt_token_ids: Sequence[int], num_stripped_spaces: int) -> None:
        self._table = table
        self._num_to_strip = num_stripped_spaces
        self._pending = b""
        self._continuation = _Continuation("")
        if prompt_token_ids:
            self._continue_from(prompt_token_ids)

    def _continue_from(self, prompt_token_ids: Sequence[int]) -> None:
        _, self._pending = _decode_bytes(_last_run(self._table, prompt_token_ids))
        self._continuation = _Continuation(_REPLACEMENT * len(self._pending))
        if self._num_to_strip and any(self._table[token_id] != ("", b"") for token_id in prompt_token_ids):
            self._num_to_strip = 0

    def push(self, token_id: int) -> str:
        text, raw = self._table[token_id]
        if raw:
            text, self._pending = _decode_bytes(self._pending + raw)
            text = self._continuation.new_part(text)
        elif text and self._pending:
            text = self._end_run() + text
        return self._strip(text) if self._num_to_strip else text

    def flush(self) -> str:
        return self._strip(self._end_run())

    def _end_run(self) -> str:
        text, self._pending = _REPLACEMENT * len(self._pending), b""
        return self._continuation.new_part(text)

    def _strip(self, text: str) -> str:
        while text and self._num_to_strip:
            if not text.startswith(" "):
                self._num_to_strip = 0
                break
            text = text[1:]
            self._num_to_strip -= 1
        return text


def _byte_fallback_entry(token: str) -> tuple[str, bytes]:
    byte = _BYTE_TOKEN.fullmatch(token)
    return ("", bytes.fromhex(byte[1])) if byte else (token.replace("▁", " "), b"")


def _last_run(table: _TokenTable, token_ids: Sequence[int]) -> bytes:
    """The last bytes of a prompt, if byte tokens are its end."""
    run = b""
    for token_id in reversed(token_ids):
        text, raw = table[token_id]
        run = raw + run
        if text or len(run) >= _LONGEST_INCOMPLETE:
            break
    return run


def _decode_bytes(raw: bytes) -> tuple[str, bytes]:
    """Text of complete characters and, by a replacement character each, of wrong bytes; bytes of an incomplete one."""
    text, num_decoded = codecs.utf_8_decode(raw, "surrogateescape", False)
    return _WRONG_BYTE.sub(_REPLACEMENT, text), raw[num_decoded:]


WindowDecode: TypeAlias = Callable[[list[int], SpecialTokens], str]
_SHOWN = SpecialTokens(are_shown=True, are_spaced=True)


def window_decode(decode: Callable[[list[int], bool], str], special_ids: Collection[int]) -> WindowDecode:
    """Return a decode function with options for special tokens.

    decode: text of token ids, given the ids and whether to skip special tokens.
    """

    def decode_window(ids: list[int], special: SpecialTokens) -> str:
        if special.are_spaced or not special.are_shown:
            return decode(ids, not special.are_shown)
        text = ""
        for is_special, run in groupby(ids, key=special_ids.__contains__):
            token_ids = list(run)
            parts = [[token_id] for token_id in token_ids] if is_special else [token_ids]
            text += "".join(decode(part, False) for part in parts)
        return text

    return decode_window


class WindowFactory:
    """Factory for any other decoder. decode: text of token ids."""

    def __init__(self, decode: WindowDecode) -> None:
        self.decode = decode
        self.texts: dict[int, str] = {}

    def start(self, prompt_token_ids: Sequence[int] = (), special: SpecialTokens = SKIPPED) -> WindowDetokenizer:
        return WindowDetokenizer(lambda ids: self.decode(ids, special), prompt_token_ids)

    def token_text(self, token_id: int) -> str:
        text = self.texts.get(token_id)
        if text is None:
            text = self.texts[token_id] = self.decode([token_id], _SHOWN)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        return self.token_text(token_id).encode()


class WindowDetokenizer:
    """Window detokeniser: decodes a few earlier tokens with and without the new ones; the difference is new text.

    The earlier tokens begin where a piece does, so that they do not begin within a character.
    """

    def __init__(self, decode: Callable[[list[int]], str], prompt_token_ids: Sequence[int]) -> None:
        self._decode = decode
        self._context = list(prompt_token_ids[-_WINDOW:])
        # Number of tokens of each piece in the context.
        self._lengths = deque([len(self._context)])
        self._context_text = decode(self._context) if self._context else ""
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        self._held.append(token_id)
        text = self._decode(self._context + self._held)
        grew = len(text) > len(self._context_text)
        is_certain = grew and not text.endswith(_REPLACEMENT)
        if not is_certain and len(self._held) < _LONGEST_HELD:
            return ""
        return self._give(text)

    def flush(self) -> str:
        return self._give(self._decode(self._context + self._held)) if self._held else ""

    def _give(self, text: str) -> str:
        piece = text[len(self._context_text) :]
        self._context += self._held
        self._lengths.append(len(self._held))
        while len(self._context) - self._lengths[0] >= _WINDOW:
            del self._context[: self._lengths.popleft()]
        self._context_text = self._decode(self._context)
        self._held = []
        return piece
