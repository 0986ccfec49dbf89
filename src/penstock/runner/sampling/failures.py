"""Rows from which no token can be chosen: each ends its own request, and says why."""

from __future__ import annotations

from enum import IntEnum

import torch
from torch import Tensor


class Failure(IntEnum):
    """NOT_FINITE: the model's logits have NaN or infinity. NOTHING_LEFT: the request's parameters leave no token."""

    NONE = 0
    NOT_FINITE = 1
    NOTHING_LEFT = 2


_MESSAGES = {
    Failure.NOT_FINITE: (
        "The model's logits for this request's next token have NaN or infinite values, so no token can be chosen. "
        "Other requests go on. Look at the weights, or try dtype='float32'."
    ),
    Failure.NOTHING_LEFT: (
        "The request's parameters (allowed_token_ids, bad_words, min_tokens, logit_bias, custom logits processors) "
        "leave no token that could come next. Loosen them."
    ),
}


def find_failures(has_failed: Tensor, raw_logits: Tensor | None) -> Tensor:
    """[rows], a `Failure` each, as an integer or a bool.

    has_failed: bool [rows]. raw_logits: float32 [rows, vocabulary] as the model gave them, if stages changed them and
    may be to blame; else None.
    """
    if raw_logits is None:
        return has_failed
    # The largest logit is NaN where any is.
    is_stages_fault = raw_logits.amax(dim=-1).isfinite()
    return has_failed * (1 + is_stages_fault.to(torch.int64))


def describe_failure(failure: int) -> str:
    """What to tell the request's owner."""
    return _MESSAGES[Failure(failure)]
