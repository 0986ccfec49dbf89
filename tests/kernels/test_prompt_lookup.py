"""Prompt lookup against the definition, spelled out place by place."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.kernels.prompt_lookup import NO_DRAFT, look_up, look_up_reference


def oracle(tokens: Sequence[int], least: int, most: int, num_drafts: int) -> list[int] | None:
    """The latest of the longest matches of the last tokens, by brute force."""
    best = None
    for end in range(len(tokens) - 1):
        length = 0
        while length < most and length <= end and tokens[end - length] == tokens[len(tokens) - 1 - length]:
            length += 1
        if length >= least and (best is None or length >= best[0]):
            best = length, end
    if best is None:
        return None
    text = list(tokens)
    period = len(tokens) - 1 - best[1]
    for _ in range(num_drafts):
        text.append(text[-period])
    return text[len(tokens) :]


TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=24)


@given(TEXTS, st.integers(1, 4), st.integers(0, 3), st.integers(1, 6))
def test_drafts_follow_the_longest_and_last_place_that_agrees(
    tokens: list[int], least: int, more: int, num_drafts: int
) -> None:
    found = look_up(np.array(tokens, dtype=np.int32), least, least + more, num_drafts)
    assert (None if found is None else found.tolist()) == oracle(tokens, least, least + more, num_drafts)


@given(st.lists(TEXTS, min_size=1, max_size=4), st.integers(1, 4), st.integers(0, 3), st.integers(1, 6))
def test_the_device_finds_the_same_in_many_texts_at_once(
    texts: list[list[int]], least: int, more: int, num_drafts: int
) -> None:
    table = torch.full((len(texts), 30), 1, dtype=torch.int32)
    for row, text in zip(table, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts])
    found = look_up_reference(table, lengths, least, least + more, num_drafts)
    assert found.dtype == torch.int32
    nothing = [NO_DRAFT] * num_drafts
    assert found.tolist() == [oracle(text, least, least + more, num_drafts) or nothing for text in texts]
