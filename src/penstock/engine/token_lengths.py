"""The longest text that one token can stand for, so that a text is known to be too long before it is tokenised."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from penstock.engine.tokenizer_files import component

# Characters that a normalizer makes one of, at most: a letter with three marks has a form of one character.
_SHRINKING = {
    "NFC": 4,
    "NFD": 1,
    "NFKC": 4,
    "NFKD": 1,
    "Lowercase": 1,
    "Prepend": 1,
    "ByteLevel": 1,
}
# Pre-tokenizers that leave all of a text in some word.
_KEEPS_ALL = {"ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "FixedLength"}
_NUM_BYTES = 256


def longest_token(fast: FastTokenizer) -> int | None:
    """Characters of a text that one token stands for, at most; None where there is no such limit.

    There is none where a tokenizer drops text, or takes what it does not know for a single token.
    """
    added = fast.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None
    vocabulary = fast.get_vocab(with_added_tokens=True)
    if not _keeps_unknown(fast, vocabulary) or not _keeps_all(component(fast.pre_tokenizer)):
        return None
    shrinking = _shrinking(component(fast.normalizer))
    return None if shrinking is None else shrinking * max(map(len, vocabulary))


def _keeps_unknown(fast: FastTokenizer, vocabulary: Mapping[str, int]) -> bool:
    """Whether every character becomes tokens, each of one byte at least."""
    model = fast.model
    if type(model).__name__ != "BPE":
        return False
    if _is_byte_level(component(fast.pre_tokenizer)) or _is_byte_level(component(fast.normalizer)):
        # How `tokenizers` writes a byte: printable ones of Latin-1 as themselves, the others from U+0100 on.
        printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
        others = range(0x100, 0x100 + _NUM_BYTES - len(printable))
        return all(chr(character) in vocabulary for character in [*printable, *others])
    return bool(model.byte_fallback) and all(f"<0x{byte:02X}>" in vocabulary for byte in range(_NUM_BYTES))


def _is_byte_level(part: Any) -> bool:
    return part is not None and any(each["type"] == "ByteLevel" for each in _parts(part))


def _keeps_all(pre_tokenizer: Any) -> bool:
    return pre_tokenizer is None or all(
        part["type"] in _KEEPS_ALL or (part["type"] == "Split" and part["behavior"] != "Removed")
        for part in _parts(pre_tokenizer)
    )


def _shrinking(normalizer: Any) -> int | None:
    """Characters that become one, at most; None where that is not known."""
    factors = [] if normalizer is None else [_shrinking_of_part(part) for part in _parts(normalizer)]
    return None if None in factors else math.prod(filter(None, factors))


def _shrinking_of_part(part: Mapping[str, Any]) -> int | None:
    if part["type"] == "Replace":
        replaced = part["pattern"].get("String")
        return 1 if replaced is not None and 0 < len(replaced) <= len(part["content"]) else None
    return _SHRINKING.get(part["type"])


def _parts(part: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The parts of a sequence, or the only one."""
    inner = part.get("pretokenizers", part.get("normalizers")) if part["type"] == "Sequence" else None
    return [part] if inner is None else [each for nested in inner for each in _parts(nested)]
