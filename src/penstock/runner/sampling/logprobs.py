"""Log-probabilities of sampled and most likely tokens, from the logits as the model gave them."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from penstock.contract import SamplingParams
from penstock.kernels.sampling import LogprobsTensors, top_logprobs
from penstock.runner.sampling.stage import LogitsRows

_NONE = -1


class Logprobs:
    """Computed for the whole step when one request asks; each request's share is cut out later."""

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._num_logprobs = np.full(num_slots, _NONE, dtype=np.int64)

    def add_request(self, slot: int, params: SamplingParams) -> None:
        self._num_logprobs[slot] = _NONE if params.logprobs is None else min(params.logprobs, self._vocab_size)

    def compute(self, raw_logits: Tensor, sampled: Tensor, rows: LogitsRows) -> LogprobsTensors | None:
        most = int(self._num_logprobs[rows.slots_np].max(initial=_NONE))
        return None if most == _NONE else top_logprobs(raw_logits, sampled, most)
