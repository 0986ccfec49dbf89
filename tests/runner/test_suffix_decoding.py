"""Suffix decoding against an explicit suffix tree, and the cache of outputs against a list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import SpeculativeConfig
from penstock.runner.speculative import suffix
from penstock.runner.speculative.suffix import EarlierOutputs, SuffixSpeculator

DEPTH = 7
TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=16)


def speculator(**options: object) -> SuffixSpeculator:
    config = {"method": "suffix", "num_speculative_tokens": 5, "suffix_decoding_max_tree_depth": DEPTH, **options}
    return SuffixSpeculator(SpeculativeConfig.from_option(config))


def behind(texts: Sequence[list[int]], pattern: list[int]) -> list[list[int]]:
    """Continuations of all matches of the pattern."""
    return [
        text[start + len(pattern) :]
        for text in texts
        for start in range(len(text) - len(pattern) + 1)
        if text[start : start + len(pattern)] == pattern
    ]


def follow_by_definition(places: list[list[int]], num_drafts: int, prob: float) -> tuple[float, list[int]]:
    """Score and drafts of the path that goes, from a node of a suffix tree, to the child with the greatest count."""
    drafts: list[int] = []
    chance, score = 1.0, 0.0
    for step in range(num_drafts):
        children = Counter(rest[step] for rest in reversed(places) if len(rest) > step)
        if not children:
            break
        # Of equal counts, what came last.
        token, count = children.most_common(1)[0]
        chance *= count / len(places)
        if chance < prob:
            break
        drafts.append(token)
        score += chance
        places = [rest for rest in places if len(rest) > step and rest[step] == token]
    return score, drafts


def draft_by_definition(own: list[int], earlier: list[list[int]], most: int, factor: float, prob: float) -> list[int]:
    """The best continuation over all match lengths; ties go to the longest, and to the request's own tokens."""
    best: tuple[float, list[int]] = (0.0, [])
    for texts in (earlier, [own]):
        of_source: tuple[float, list[int]] = (0.0, [])
        for length in range(1, min(len(own), DEPTH) + 1):
            # The last tokens themselves are no place: nothing has followed them.
            places = behind(texts, own[-length:])[: -1 if texts is not earlier else None]
            allowed = min(most, int(length * factor), DEPTH - length)
            found = follow_by_definition(places, allowed, prob)
            if found[0] >= of_source[0]:
                of_source = found
        if of_source[0] >= best[0]:
            best = of_source
    return best[1]


@given(st.lists(TEXTS, max_size=3), TEXTS, st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([0.0, 0.1, 0.5]))
def test_drafts_are_the_best_path_of_the_suffix_trees(
    earlier: list[list[int]], own: list[int], factor: float, prob: float
) -> None:
    subject = speculator(suffix_decoding_max_spec_factor=factor, suffix_decoding_min_token_prob=prob)
    for text in earlier:
        subject.earlier.add(np.array(text, dtype=np.int32))
    found = subject.draft(0, np.array(own, dtype=np.int32), 5)
    assert (None if found is None else found.tolist()) == (draft_by_definition(own, earlier, 5, factor, prob) or None)


def test_what_followed_most_often_is_drafted() -> None:
    subject = speculator(suffix_decoding_max_spec_factor=4.0)
    for text in ([1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4], [9, 2, 6, 6]):
        subject.earlier.add(np.array(text, dtype=np.int32))
    assert subject.draft(0, np.array([8, 1, 2], dtype=np.int32), 5).tolist() == [3, 4]
    assert subject.draft(0, np.array([8, 9, 2], dtype=np.int32), 5).tolist() == [6, 6]
    assert subject.draft(0, np.array([8, 7], dtype=np.int32), 5) is None


def test_a_request_goes_by_itself_where_it_repeats_itself() -> None:
    subject = speculator(suffix_decoding_max_cached_requests=0)
    assert subject.draft(0, np.array([1, 2, 3, 4, 5, 1, 2, 3], dtype=np.int32), 5).tolist() == [4, 5, 1]
    subject.earlier.add(np.array([1, 2, 3, 9], dtype=np.int32))
    assert subject.earlier.num_outputs == 0


def test_a_longer_agreement_allows_more_drafts() -> None:
    text = np.array([*range(20), 50, *range(6)], dtype=np.int32)
    # The tree is as deep as the agreement and the drafts together.
    assert speculator().draft(0, text, 5).tolist() == [6, 7, 8]
    wide = speculator(suffix_decoding_max_tree_depth=24, num_speculative_tokens=24)
    assert wide.draft(0, text, 24).tolist() == [6, 7, 8, 9, 10, 11]


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=9), max_size=30), st.integers(1, 6))
def test_only_the_last_outputs_are_remembered(outputs: list[list[int]], max_outputs: int) -> None:
    subject = EarlierOutputs(max_outputs, max_tokens=24)
    kept: list[list[int]] = []
    for output in outputs:
        subject.add(np.array(output, dtype=np.int32))
        kept.append(output)
        while len(kept) > max_outputs or sum(len(text) + 1 for text in kept) > 24:
            kept.pop(0)
        assert subject.num_outputs == len(kept)
        for last in ([0], [1, 2], [3, 3, 3, 3], output[-6:]):
            found = {length: len(ends) for length, ends in subject.matches(np.array(last, dtype=np.int32))}
            for length in range(1, len(last) + 1):
                pattern = last[-length:]
                num = sum(text[end - length : end] == pattern for text in kept for end in range(length, len(text) + 1))
                assert found.get(length, 0) == num


def test_an_output_that_is_too_long_is_remembered_by_its_end() -> None:
    subject = EarlierOutputs(4, max_tokens=10)
    subject.add(np.arange(50, dtype=np.int32))
    assert subject.text.tolist() == [*range(41, 50), -1]


def test_only_so_many_places_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(suffix, "MAX_PLACES", 3)
    subject = EarlierOutputs(100)
    for token in range(10, 20):
        subject.add(np.array([1, token], dtype=np.int32))
    ((_, ends),) = subject.matches(np.array([1], dtype=np.int32))
    assert [subject.text[end + 1] for end in ends] == [17, 18, 19]
