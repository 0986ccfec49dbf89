"""Tokens per expert and layer over all workers of an engine, and their imbalance."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence


def sum_of_workers(answers: Iterable[Mapping[int, Sequence[int]]]) -> dict[int, list[int]]:
    """Tokens of each expert, by ascending layer, from the answers of all ranks and replicas."""
    total: dict[int, list[int]] = {}
    for answer in answers:
        for layer, tokens in answer.items():
            before = total.get(layer) or [0] * len(tokens)
            total[layer] = [count + more for count, more in zip(before, tokens, strict=True)]
    return dict(sorted(total.items()))


def imbalance(tokens: Sequence[int]) -> float:
    """Tokens of a layer's busiest expert relative to the mean of its experts: 1 at best, and without tokens."""
    mean = sum(tokens) / len(tokens)
    return max(tokens) / mean if mean else 1.0
