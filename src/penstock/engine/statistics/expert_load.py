"""Tokens per expert and layer over all workers of an engine."""

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
