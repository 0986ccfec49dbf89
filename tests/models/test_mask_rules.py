"""The window that a mask function describes is found by asking it, and any other rule is refused."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import masking_utils

from penstock.models.transformers_fallback.interface import CannotRun
from penstock.models.transformers_fallback.trial import read_window


@pytest.mark.parametrize("longest_context", [1, 2, 40, 4096])
def test_a_causal_mask_has_no_window(longest_context: int) -> None:
    assert read_window(masking_utils.causal_mask_function, longest_context) is None


@given(window=st.integers(1, 200), longest_context=st.integers(1, 200))
def test_a_sliding_window_is_found_if_it_is_shorter_than_the_context(window: int, longest_context: int) -> None:
    mask_function = masking_utils.sliding_window_causal_mask_function(window)
    assert read_window(mask_function, longest_context) == (window if window < longest_context else None)


@pytest.mark.parametrize(
    "mask_function",
    [
        masking_utils.bidirectional_mask_function,
        masking_utils.sliding_window_bidirectional_mask_function(8),
        masking_utils.chunked_causal_mask_function(8, torch.zeros(1, dtype=torch.int64)),
        masking_utils.or_masks(masking_utils.causal_mask_function, lambda batch, head, query, key: key == query + 1),
        masking_utils.and_masks(masking_utils.causal_mask_function, lambda batch, head, query, key: key != 3),
        lambda batch, head, query, key: (key <= query) & (key % 2 == query % 2),
        lambda batch, head, query, key: key < query,
    ],
)
def test_another_rule_is_refused(mask_function: object) -> None:
    with pytest.raises(CannotRun, match="neither causal nor causal with a sliding window"):
        read_window(mask_function, 64)


def test_a_rule_about_the_batchs_content_is_refused() -> None:
    sequence_ids = torch.zeros(1, 3, dtype=torch.int64)
    with pytest.raises(CannotRun, match="depends on more than the positions"):
        read_window(masking_utils.packed_sequence_mask_function(sequence_ids), 64)
