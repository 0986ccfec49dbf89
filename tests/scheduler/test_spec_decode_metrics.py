"""Counting what became of drafts."""

from __future__ import annotations

from penstock.scheduler.acceptance import SpecDecodeMetrics


def counted(*parts: tuple[int, int]) -> SpecDecodeMetrics:
    metrics = SpecDecodeMetrics()
    for num_drafts, num_accepted in parts:
        metrics.note(num_drafts, num_accepted)
    return metrics


def test_drafts_are_counted_by_position() -> None:
    metrics = counted((3, 2), (1, 1), (4, 0))
    assert (metrics.num_drafts, metrics.num_draft_tokens, metrics.num_accepted_tokens) == (3, 8, 3)
    assert metrics.num_accepted_tokens_per_pos == [2, 1, 0, 0]
    assert metrics.acceptance_rate == 3 / 8
    assert metrics.mean_acceptance_length == 2.0
    assert metrics.acceptance_rate_per_pos == [2 / 3, 1 / 3, 0.0, 0.0]


def test_counts_add_up_and_are_told_apart() -> None:
    first, second = [(2, 1), (1, 0)], [(4, 3)]
    total = counted(*first)
    total.add(counted(*second))
    assert total == counted(*first, *second)
    assert total.since(counted(*first)) == counted(*second)
    total.note(5, 5)
    assert counted(*first) == counted((2, 1), (1, 0))


def test_without_drafts_there_are_no_rates() -> None:
    metrics = SpecDecodeMetrics()
    assert metrics.acceptance_rate is None
    assert metrics.mean_acceptance_length is None
    assert metrics.describe() == "no drafts"
