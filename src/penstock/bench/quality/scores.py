"""Scores of a text's tokens, and how far those of one weight format are from another's."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# Least probability of all tokens that are not among the most likely ones.
_LEAST = 1e-9


@dataclass(frozen=True, slots=True)
class TokenScore:
    """Log-probabilities, in nats, at one position. target: of the text's token. likeliest: by token id, best first."""

    target: float
    likeliest: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class Closeness:
    """Difference of two formats' scores.

    loss_change: relative. mean_change: mean absolute change of a target's log-probability, in nats. kl: mean
    divergence of the format's distributions from the reference's, in nats (`divergence`). same_top: share of positions
    where both have the same most likely token.
    """

    loss_change: float
    mean_change: float
    kl: float
    same_top: float


def loss(scores: Sequence[TokenScore]) -> float:
    """Mean negative log-likelihood, in nats per token."""
    return -math.fsum(score.target for score in scores) / len(scores)


def compare(scores: Sequence[TokenScore], reference: Sequence[TokenScore]) -> Closeness:
    """Compare the scores of a text's tokens, position by position."""
    pairs = list(zip(scores, reference, strict=True))
    return Closeness(
        loss_change=loss(scores) / loss(reference) - 1,
        mean_change=math.fsum(abs(score.target - other.target) for score, other in pairs) / len(pairs),
        kl=math.fsum(divergence(other.likeliest, score.likeliest) for score, other in pairs) / len(pairs),
        same_top=sum(next(iter(score.likeliest)) == next(iter(other.likeliest)) for score, other in pairs) / len(pairs),
    )


def divergence(reference: Mapping[int, float], other: Mapping[int, float]) -> float:
    """KL divergence of two distributions, given the log-probabilities of their most likely tokens, in nats.

    Tokens that are listed in only one of them count as one outcome, together with all that are listed in none. So the
    result is a lower bound of the whole distributions' divergence, and equal to it if all tokens are listed.
    """
    common = [(reference[token], other[token]) for token in reference.keys() & other.keys()]
    found = math.fsum(math.exp(before) * (before - after) for before, after in common)
    rest = max(_LEAST, 1 - math.fsum(math.exp(before) for before, _ in common))
    rest_of_other = max(_LEAST, 1 - math.fsum(math.exp(after) for _, after in common))
    return max(0.0, found + rest * math.log(rest / rest_of_other))
