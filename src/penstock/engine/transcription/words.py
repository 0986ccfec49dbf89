"""Times of words, from how much each token attends to each position of the sound.

Suffixes: N tokens, S positions of the encoder's output.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

# Languages whose words have no spaces between them: each character is one.
_WITHOUT_SPACES = frozenset({"zh", "ja", "th", "lo", "my", "yue"})
_PUNCTUATION = "!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~"
# Punctuation that belongs to the next word, and to the last one.
_OPENING, _CLOSING = "\"'“¡¿([{-", "\"'.。,，!！?？:：”)]}、"
_DIAGONAL, _NEXT_TOKEN, _NEXT_POSITION = range(3)


def positions_of_tokens(attention_NS: NDArray[np.float32]) -> list[int]:
    """Position at which each token begins: the path of most attention that goes back in neither tokens nor positions.

    Dynamic time warping (https://en.wikipedia.org/wiki/Dynamic_time_warping), a diagonal of the table at a time.
    """
    num_tokens, num_positions = attention_NS.shape
    steps_NS = np.empty((num_tokens + 1, num_positions + 1), dtype=np.int8)
    steps_NS[0], steps_NS[:, 0] = _NEXT_POSITION, _NEXT_TOKEN
    # Costs of the last two diagonals, by token.
    before_N, last_N = (np.full(num_tokens + 1, np.inf, dtype=np.float32) for _ in range(2))
    before_N[0] = 0.0
    for diagonal in range(2, num_tokens + num_positions + 1):
        token_N = np.arange(max(1, diagonal - num_positions), min(num_tokens, diagonal - 1) + 1)
        both_N, token_alone_N, position_alone_N = before_N[token_N - 1], last_N[token_N - 1], last_N[token_N]
        is_both_N = (both_N < token_alone_N) & (both_N < position_alone_N)
        is_token_N = (token_alone_N < both_N) & (token_alone_N < position_alone_N)
        steps_NS[token_N, diagonal - token_N] = np.select(
            [is_both_N, is_token_N], [_DIAGONAL, _NEXT_TOKEN], _NEXT_POSITION
        )
        cost_N = np.select([is_both_N, is_token_N], [both_N, token_alone_N], position_alone_N)
        next_N = np.full(num_tokens + 1, np.inf, dtype=np.float32)
        next_N[token_N] = cost_N - attention_NS[token_N - 1, diagonal - token_N - 1].astype(np.float64)
        before_N, last_N = last_N, next_N
    first = [0] * num_tokens
    token, position = num_tokens, num_positions
    while token > 0 and position > 0:
        first[token - 1] = position - 1
        step = int(steps_NS[token, position])
        token, position = token - (step != _NEXT_POSITION), position - (step != _NEXT_TOKEN)
    return first


def words_of(
    decode: Callable[[list[int]], str], token_ids: Sequence[int], language: str | None
) -> list[tuple[str, int, int]]:
    """Words of tokens: text, number of the first token, and of the one after the last."""
    words: list[tuple[str, int, int]] = []
    for text, begin, end in _whole_characters(decode, token_ids):
        begins = language in _WITHOUT_SPACES or text.startswith(" ") or text.strip() in _PUNCTUATION
        if begins or not words:
            words.append((text, begin, end))
        else:
            words[-1] = (words[-1][0] + text, words[-1][1], end)
    return _with_punctuation(words)


def _whole_characters(decode: Callable[[list[int]], str], token_ids: Sequence[int]) -> list[tuple[str, int, int]]:
    """Least numbers of tokens that are whole characters together."""
    whole, found = decode(list(token_ids)), list[tuple[str, int, int]]()
    begin, length = 0, 0
    for end in range(1, len(token_ids) + 1):
        text = decode(list(token_ids[begin:end]))
        if whole.startswith(text, length) or end == len(token_ids):
            found.append((text, begin, end))
            begin, length = end, length + len(text)
    return found


def _with_punctuation(words: Sequence[tuple[str, int, int]]) -> list[tuple[str, int, int]]:
    """The words, with punctuation as part of those that it belongs to."""
    found: list[tuple[str, int, int]] = []
    opening: tuple[str, int] | None = None
    for number, (word, begin, end) in enumerate(words):
        text, first = (word, begin) if opening is None else (opening[0] + word, opening[1])
        is_last = number == len(words) - 1
        opening = (text, first) if word.startswith(" ") and word.strip() in _OPENING and not is_last else None
        if opening is not None:
            continue
        if found and text in _CLOSING and not found[-1][0].endswith(" "):
            found[-1] = (found[-1][0] + text, found[-1][1], end)
        else:
            found.append((text, first, end))
    return found
