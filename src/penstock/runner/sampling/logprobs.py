"""Log-probabilities of sampled and most likely tokens."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from penstock.contract import SamplingParams
from penstock.contract.sampling_params import ALL_LOGPROBS
from penstock.kernels.sampling import LogprobsTensors, top_logprobs
from penstock.step.logits_rows import LogitsRows

_NONE = -1


class Logprobs:
    """Computed for the whole step if any request asks; the host cuts out each request's part later.

    mode: `SamplingConfig.logprobs_mode`. is_raw: of the logits before all transforms.
    """

    def __init__(self, num_slots: int, vocab_size: int, mode: str) -> None:
        self._vocab_size = vocab_size
        self.is_raw = mode.startswith("raw")
        self._normalizes = mode.endswith("logprobs")
        self._num_logprobs = np.full(num_slots, _NONE, dtype=np.int64)
        # Slots of requests with logprobs; empty in most steps.
        self._asking_slots: set[int] = set()

    def add_request(self, slot: int, params: SamplingParams) -> None:
        self.remove_request(slot)
        if params.logprobs is not None:
            self._num_logprobs[slot] = count(params.logprobs, self._vocab_size)
            self._asking_slots.add(slot)

    def remove_request(self, slot: int) -> None:
        self._num_logprobs[slot] = _NONE
        self._asking_slots.discard(slot)

    def most(self, rows: LogitsRows) -> int | None:
        """Maximum number of log-probabilities that these requests ask for; None where none asks."""
        if not self._asking_slots:
            return None
        most = int(self._num_logprobs[rows.slots_np].max(initial=_NONE))
        return None if most == _NONE else most

    def compute(
        self, raw: Tensor, processed: Tensor, sampled: Tensor, num_logprobs: int | None
    ) -> LogprobsTensors | None:
        """Compute log-probabilities. raw, processed: float32 [rows, vocabulary], before and after all transforms.

        sampled: int64 [rows]. num_logprobs: `most` of the step.
        """
        if num_logprobs is None:
            return None
        return top_logprobs(raw if self.is_raw else processed, sampled, num_logprobs, normalize=self._normalizes)


def count(asked: int, vocab_size: int) -> int:
    """Number of most likely tokens that a request asks for."""
    return vocab_size if asked == ALL_LOGPROBS else min(asked, vocab_size)
