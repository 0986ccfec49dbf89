"""Sampling failures: rows without a drawable token, each of which ends its own request with an error."""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

from torch import Tensor

from penstock.kernels.sampling import failure_codes


class Failure(IntEnum):
    """NOT_FINITE: the model's logits have NaN or infinity. NOTHING_LEFT: the request's parameters mask all tokens.

    NOTHING_LEFT + n: the n-th custom logits processor, from 1 on, left no token.
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


def find_failures(has_failed: Tensor, raw_logits: Tensor | None, spoilt_by: Tensor | None = None) -> Tensor:
    """Return a `Failure` per row, as an integer or a bool.

    has_failed: bool [rows]. raw_logits: float32 [rows, vocabulary], the model's logits, where a transform has changed
    them and may be the cause; else None. spoilt_by: int64 [rows], number of the custom processor that is the cause, or
    0; None without custom processors.
    """
    if raw_logits is None or (has_failed.device.type == "cpu" and not has_failed.any()):
        return has_failed
    return failure_codes(has_failed, raw_logits, spoilt_by)


def describe_failure(failure: int, processor_names: Sequence[str] = ()) -> str:
    """Error text of a failure. processor_names: names of the custom logits processors, in their order."""
    if failure > Failure.NOTHING_LEFT:
        return (
            f"Logits processor {processor_names[failure - Failure.NOTHING_LEFT - 1]} left no token that could come "
            "next: it returned NaN or +inf, or -inf for all tokens. Other requests go on. Repair it, or ask less of it."
        )
    return _MESSAGES[Failure(failure)]
