"""Classification of attention masks: causal, sliding window, or unsupported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from penstock.models.transformers_fallback.refusal import CannotRun

# (batch, head, query position, key position) -> whether the key is visible.
MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def read_window(mask_function: Any, longest_context: int) -> int | None:
    """Return the sliding window of a mask function, the current position included; None for a causal mask.

    Found by evaluating the function. Raises CannotRun for any other mask.
    """
    last = longest_context - 1
    try:
        seen = _seen_keys(mask_function, last, longest_context).nonzero().flatten()
        first_seen = int(seen[0]) if len(seen) else last
        window = None if first_seen == 0 else longest_context - first_seen
        for query in _telling_positions(window, longest_context):
            num_keys = min(query + 8, longest_context)
            keys = torch.arange(num_keys, device="cpu")
            expected = keys <= query if window is None else (keys <= query) & (keys > query - window)
            if not torch.equal(_seen_keys(mask_function, query, num_keys), expected):
                raise CannotRun(
                    "a layer's mask is neither causal nor causal with a sliding window "
                    f"(at position {query} it sees other positions)"
                )
    except CannotRun:
        raise
    except Exception as error:
        raise CannotRun(f"a layer's mask depends on more than the positions ({error})") from error
    return window


def _telling_positions(window: int | None, longest_context: int) -> list[int]:
    around = [0, 1, 2, 5, 33, longest_context // 2, longest_context - 1]
    if window is not None:
        around += [window - 1, window, window + 1, 2 * window + 1]
    return sorted({position for position in around if position < longest_context})


def _seen_keys(mask_function: MaskFunction, query: int, num_keys: int) -> Tensor:
    """Visible keys of a query, bool [num_keys]."""
    zero = torch.zeros((), dtype=torch.int64, device="cpu")
    keys = torch.arange(num_keys, device="cpu")
    seen = mask_function(zero, zero, torch.full_like(keys, query), keys)
    return torch.as_tensor(seen, dtype=torch.bool, device="cpu").expand(num_keys)
