"""Rows from which no token can be chosen: each ends its own request, and says why."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch
from torch import Tensor


class Failure(IntEnum):
    """NOT_FINITE: the model's logits have NaN or infinity. NOTHING_LEFT: the request's parameters leave no token.

    Larger ones say which custom logits processor leaves none: its number, from 1 on, is added to NOTHING_LEFT.
    """

    NONE = 0
    NOT_FINITE = 1
    NOTHING_LEFT = 2


_MESSAGES = {
    Failure.NOT_FINITE: (
        "The model's logits for this request's next token have NaN or infinite values, so no token can be chosen. "
        "Other requests go on. Look at the weights, or try dtype='float32'."
    ),
    Failure.NOTHING_LEFT: (
        "The request's parameters (allowed_token_ids, bad_words, min_tokens, logit_bias, structured_outputs) leave no "
        "token that could come next. Loosen them."
    ),
}


def can_be_drawn(logits: Tensor) -> Tensor:
    """bool [rows]: whether a token can be chosen from float32 logits [rows, vocabulary]."""
    # The largest logit is NaN where any is.
    return logits.amax(dim=-1).isfinite()


def find_failures(has_failed: Tensor, raw_logits: Tensor | None, spoilt_by: Tensor | None = None) -> Tensor:
    """[rows], a `Failure` each, as an integer or a bool.

    has_failed: bool [rows]. raw_logits: float32 [rows, vocabulary] as the model gave them, if stages changed them and
    may be to blame; else None. spoilt_by: int64 [rows], the number of the custom processor that is, or 0; None where
    there was none.
    """
    if raw_logits is None or (has_failed.device.type == "cpu" and not has_failed.any()):
        return has_failed
    is_stages_fault = can_be_drawn(raw_logits).to(torch.int64)
    whose = is_stages_fault if spoilt_by is None else is_stages_fault * (1 + spoilt_by)
    return has_failed * (1 + whose)


def describe_failure(failure: int, processor_names: Sequence[str] = ()) -> str:
    """What to tell the request's owner. processor_names: of custom logits processors, in the order of their numbers."""
    if failure > Failure.NOTHING_LEFT:
        return (
            f"Logits processor {processor_names[failure - Failure.NOTHING_LEFT - 1]} left no token that could come "
            "next: it returned NaN or +inf, or -inf for all tokens. Other requests go on. Repair it, or ask less of it."
        )
    return _MESSAGES[Failure(failure)]
