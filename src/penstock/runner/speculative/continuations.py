"""Continuations of a token sequence from the positions where it matches the last tokens of a request."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np


class Continuation(NamedTuple):
    """Draft tokens. score: expected number of accepted ones, by how often each followed."""

    drafts: list[int]
    score: float


def agreeing(
    text_L: np.ndarray, ends: np.ndarray, last: np.ndarray, length: int = 1
) -> Iterator[tuple[int, np.ndarray]]:
    """Yield (match length, positions) for one match length after another, in a text matched with `last`.

    ends: positions, ascending, of a match's last token, where `length` tokens match.
    """
    while len(ends):
        yield length, ends
        if length >= len(last):
            return
        ends = ends[ends >= length]
        ends = ends[text_L[ends - length] == last[-1 - length]]
        length += 1


def follow(text_L: np.ndarray, ends: np.ndarray, num_drafts: int, min_prob: float) -> Continuation:
    """Follow the most frequent next token from these positions; ties go to the latest.

    The path ends before a token whose cumulative probability is below `min_prob`, and at the end of a text: the end of
    the array, or a negative token.
    """
    drafts: list[int] = []
    prob, score = 1.0, 0.0
    positions = ends + 1
    while len(drafts) < num_drafts:
        if len(positions) == 1:
            return _follow_one(text_L, int(positions[0]), drafts, num_drafts, prob, score)
        num_places = len(positions)
        positions = positions[positions < len(text_L)]
        tokens = text_L[positions]
        counts = Counter(token for token in reversed(tokens.tolist()) if token >= 0)
        if not counts:
            break
        token = max(counts, key=counts.__getitem__)
        prob *= counts[token] / num_places
        if prob < min_prob:
            break
        drafts.append(token)
        score += prob
        positions = positions[tokens == token] + 1
    return Continuation(drafts, score)


def _follow_one(
    text_L: np.ndarray, start: int, drafts: list[int], num_drafts: int, prob: float, score: float
) -> Continuation:
    """Follow the rest of the path from a single position."""
    for token in text_L[start : start + num_drafts - len(drafts)].tolist():
        if token < 0:
            break
        drafts.append(token)
        score += prob
    return Continuation(drafts, score)
